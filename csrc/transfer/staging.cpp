#include "transfer/staging.h"

#include <unistd.h>

#include "gpu/cuda.h"

namespace megasetup::transfer {
namespace {

int current_device() {
  int device = 0;
  gpu::check(cudaGetDevice(&device), "reading the current device");
  return device;
}

}  // namespace

PinnedBuffer::PinnedBuffer(size_t bytes) : memory_(bytes, current_device()) {
  (void)memory_.touch(0, memory_.size(), [] { return false; });
  memory_.pin();
}

DeviceBuffer::DeviceBuffer(size_t bytes, const char* what) : owner_(getpid()) {
  gpu::check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes == 0 ? 1 : bytes), what);
}

DeviceBuffer::~DeviceBuffer() {
  if (getpid() == owner_) (void)cudaFree(data_);
}

Stream::Stream(Priority priority) : owner_(getpid()) {
  int least = 0, greatest = 0;
  gpu::check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading stream priorities");
  gpu::check(
      cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority == Priority::kHigh ? greatest : least),
      "making a stream");
}

Stream::~Stream() {
  if (getpid() == owner_) (void)cudaStreamDestroy(stream_);
}

Event::Event(bool timed) : owner_(getpid()) {
  gpu::check(cudaEventCreateWithFlags(&event_, timed ? cudaEventDefault : cudaEventDisableTiming), "making an event");
}

Event::~Event() {
  if (getpid() == owner_) (void)cudaEventDestroy(event_);
}

bool Event::reached(const char* what) const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady) return false;
  gpu::check(status, what);
  return true;
}

}  // namespace megasetup::transfer
