// widen, narrow and compare on the GPU: any number of tensors in one launch, any alignment, more than 2^31 elements.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "common/rows.h"

namespace megasetup::gpu {

struct Segment {
  const void* weight;
  void* copy;
  int64_t start;  // where it stands, in elements, when all segments are laid end to end; they ascend and may have gaps
  int64_t count;
  Kind kind;
};

// Segments in device memory, for launches that repeat.
class DeviceSegments {
 public:
  // `segments` needs weight, copy, count and kind; empty ones are left out and starts are filled in.
  DeviceSegments() = default;
  DeviceSegments(std::vector<Segment> segments, cudaStream_t stream);
  ~DeviceSegments();
  DeviceSegments(DeviceSegments&& other) noexcept;
  DeviceSegments& operator=(DeviceSegments&& other) noexcept;

  const Segment* data() const { return data_; }
  int64_t size() const { return size_; }
  int64_t elements() const { return elements_; }

 private:
  Segment* data_ = nullptr;
  int64_t size_ = 0;
  int64_t elements_ = 0;
  cudaStream_t stream_ = nullptr;
};

// Launch on the current device. The segments must live until the stream has run the launch.
void widen(const DeviceSegments& segments, cudaStream_t stream);
// One result a segment, in device memory, which the caller has cleared with `clear_results`. In the background it
// leaves most of the GPU to launches that others wait for, and takes little longer.
enum class Room { kAll, kBackground };
void compare(const DeviceSegments& segments, Comparison* results, cudaStream_t stream, Room room = Room::kAll);
void clear_results(Comparison* results, int64_t count, cudaStream_t stream);

// The same from host segments: a short list travels as the launch's own parameter, a long one through device memory.
void widen(const std::vector<Segment>& segments, cudaStream_t stream);
void narrow(const std::vector<Segment>& segments, cudaStream_t stream);
// Waits for the results. One a segment, empty ones included.
std::vector<Comparison> compare(const std::vector<Segment>& segments, cudaStream_t stream);

}  // namespace megasetup::gpu
