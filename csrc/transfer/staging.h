// The memory that chunks pass through on their way: slots on the GPU and slots in pinned host memory, and the streams
// and events that order their use.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <cstddef>
#include <vector>

namespace megasetup::transfer {

// Host memory of exactly the bytes asked for (rounded up to a page), on huge pages where the system gives them, first
// touched by the worker threads (which sit on the GPU's NUMA node), then registered with CUDA.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
  pid_t owner_ = 0;  // a forked child shares the mapping but must not touch CUDA
};

class DeviceBuffer {
 public:
  DeviceBuffer(size_t bytes, const char* what);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  pid_t owner_ = 0;
};

enum class Priority { kHigh, kLow };

class Stream {
 public:
  explicit Stream(Priority priority);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }  // NOLINT: it is one

 private:
  cudaStream_t stream_ = nullptr;
  pid_t owner_ = 0;
};

class Event {
 public:
  explicit Event(bool timed);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }  // NOLINT: it is one

 private:
  cudaEvent_t event_ = nullptr;
  pid_t owner_ = 0;
};

// The cores of the NUMA node that the device hangs on; empty when the system does not say.
std::vector<int> cores_near(int device);

}  // namespace megasetup::transfer
