#include "transfer/staging.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "cpu/pool.h"
#include "gpu/cuda.h"

namespace megasetup::transfer {
namespace {

constexpr size_t kTouchBytes = 2 << 20;  // a huge page

}  // namespace

PinnedBuffer::PinnedBuffer(size_t bytes) : owner_(getpid()) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes_ = (bytes + page - 1) / page * page;
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error("cannot map " + std::to_string(bytes_) +
                             " bytes of host memory for staging: " + std::strerror(errno));
  }
  data_ = static_cast<char*>(memory);
  (void)madvise(data_, bytes_, MADV_HUGEPAGE);
  const auto touches = static_cast<int64_t>((bytes_ + kTouchBytes - 1) / kTouchBytes);
  const auto touch = [&](int64_t block) {
    const size_t start = static_cast<size_t>(block) * kTouchBytes;
    for (size_t at = start; at < bytes_ && at < start + kTouchBytes; at += page) data_[at] = 0;
  };
  (void)cpu::Pool::instance().run(touches, touch, [] { return false; });
  const cudaError_t status = cudaHostRegister(data_, bytes_, cudaHostRegisterPortable);
  if (status != cudaSuccess) (void)munmap(data_, bytes_);
  gpu::check(status, ("pinning " + std::to_string(bytes_) +
                      " bytes of host memory for staging (see `ulimit -l` and the container's memory limit)")
                         .c_str());
}

PinnedBuffer::~PinnedBuffer() {
  if (getpid() == owner_) (void)cudaHostUnregister(data_);
  (void)munmap(data_, bytes_);
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

std::vector<int> cores_near(int device) {
  char bus[32] = {};
  if (cudaDeviceGetPCIBusId(bus, sizeof(bus), device) != cudaSuccess) return {};
  for (char& c : bus) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::ifstream file("/sys/bus/pci/devices/" + std::string(bus) + "/local_cpulist");
  std::vector<int> cores;
  // The form is "0-7,16-23".
  for (std::string range; std::getline(file, range, ',');) {
    std::istringstream text(range);
    int first = 0, last = 0;
    char dash = 0;
    if (!(text >> first)) continue;
    if (!(text >> dash >> last)) last = first;
    for (int core = first; core <= last; ++core) cores.push_back(core);
  }
  return cores;
}

}  // namespace megasetup::transfer
