// What the register_*.cpp files share: rows out of a Python buffer, and Ctrl-C.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <stdexcept>
#include <string>

#include "common/rows.h"

namespace megasetup {

void register_cpu(pybind11::module_& module);
void register_gpu(pybind11::module_& module);
void register_transfer(pybind11::module_& module);

// The rows of a C-contiguous int64 buffer (an array.array("q")), `columns` numbers each, the first a Kind. Throws
// std::invalid_argument for a buffer of another shape, an unknown kind or a negative count (always the last column).
class Rows {
 public:
  Rows(const pybind11::buffer& buffer, int64_t columns) : info_(buffer.request()), columns_(columns) {
    if (info_.itemsize != 8 || info_.ndim != 1 || info_.shape[0] % columns != 0 || info_.strides[0] != 8) {
      throw std::invalid_argument("rows must be a flat int64 buffer of " + std::to_string(columns) + " numbers a row");
    }
    for (int64_t row = 0; row < size(); ++row) {
      if (at(row, 0) < 0 || at(row, 0) >= kKinds || at(row, columns_ - 1) < 0) {
        throw std::invalid_argument("row " + std::to_string(row) + " has kind " + std::to_string(at(row, 0)) +
                                    " and count " + std::to_string(at(row, columns_ - 1)));
      }
    }
  }

  int64_t size() const { return info_.shape[0] / columns_; }
  int64_t at(int64_t row, int64_t column) const {
    return static_cast<const int64_t*>(info_.ptr)[row * columns_ + column];
  }
  Kind kind(int64_t row) const { return static_cast<Kind>(at(row, 0)); }
  int64_t count(int64_t row) const { return at(row, columns_ - 1); }
  template <typename T>
  T* address(int64_t row, int64_t column) const {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(at(row, column)));
  }

 private:
  pybind11::buffer_info info_;
  int64_t columns_;
};

// True once a signal handler has raised (Ctrl-C). Called with the GIL released; the error stays set for the caller to
// raise. Only the main thread runs handlers, so on other threads the answer is always no.
inline bool signal_raised() {
  const pybind11::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

inline pybind11::tuple to_python(const Comparison& result) {
  return pybind11::make_tuple(result.exact_differences, result.rounded_differences, result.first_exact,
                              result.first_rounded);
}

}  // namespace megasetup
