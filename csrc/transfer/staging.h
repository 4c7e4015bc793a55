// The memory that chunks pass through on their way: slots on the GPU and slots in pinned host memory, and the streams
// and events that order their use.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/types.h>

#include <cstddef>

#include "transfer/arena.h"

namespace megasetup::transfer {

// Pinned host memory whose pages are there, near the current device. The worker threads touch it.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(size_t bytes);

  char* data() const { return memory_.data(); }

 private:
  PinnedMemory memory_;
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
  // Whether all work before it is done. Throws what that work failed of; `what` says what it was.
  bool reached(const char* what) const;

 private:
  cudaEvent_t event_ = nullptr;
  pid_t owner_ = 0;
};

}  // namespace megasetup::transfer
