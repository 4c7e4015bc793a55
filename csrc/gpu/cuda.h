// CUDA calls that throw: every return code is looked at, and the message says what was being done.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace megasetup::gpu {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // so that the next call does not report this one again
  throw std::runtime_error(std::string("CUDA: ") + what + " failed: " + cudaGetErrorName(status) + " (" +
                           cudaGetErrorString(status) + ")");
}

// Makes a device current on this thread and the previous one again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "reading the current device");
    check(cudaSetDevice(device), "choosing the device");
  }
  ~DeviceGuard() { (void)cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

inline cudaStream_t stream_of(uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

}  // namespace megasetup::gpu
