// Many tiny tensors read at once: where Python's few microseconds a tensor are the whole cost, each is asked for its
// address, length, type and device by one C call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/dlpack.h"
#include "common/rows.h"

namespace megasetup {

// Tensors of one dimension, all BF16 or all FP16, on one device, and where their FP32 copies go in one flat run.
struct Vectors {
  Kind kind;
  dlpack::Device device;
  const dlpack::ExchangeApi* api;
  std::vector<const void*> sources;
  std::vector<int64_t> counts;
  std::vector<int64_t> places;  // elements that each copy takes, up to the next multiple of the alignment
  int64_t total = 0;            // of the places
  bool padded = false;          // some place is longer than its count

  bool on_gpu() const { return device.type == dlpack::kCuda; }
};

// Reads `tensors` (a list or tuple of objects whose type is one of `types`) through the capsule `exchange_api`. Null
// when they are not alike, not contiguous vectors of 16-bit floats, of another type, or cannot be read this way: the
// caller then looks at them one by one, and finds out which it is.
std::unique_ptr<Vectors> read_vectors(const pybind11::handle& exchange_api, const pybind11::tuple& types,
                                      const pybind11::handle& tensors, int64_t alignment);

// tensor.data = value for each pair of two lists or tuples of one length. Throws std::invalid_argument for anything
// else, and what the framework raises.
void set_data(const pybind11::handle& tensors, const pybind11::handle& values);

}  // namespace megasetup
