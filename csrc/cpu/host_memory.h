// One large piece of host memory, mapped for itself: exactly the bytes asked for (rounded up to a page), on huge pages
// where the system gives them, and touched by the worker threads at once, because the kernel clears each page when it
// is first touched and one thread would be at it for many seconds.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>

namespace megasetup::cpu {

class HostMemory {
 public:
  // Maps fresh memory, which reads as zeros and takes none of the machine's until it is touched. Throws
  // std::runtime_error with the system's reason.
  explicit HostMemory(size_t bytes);
  virtual ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  char* data() const { return data_; }
  // Bytes, a multiple of the page.
  size_t size() const { return size_; }

  // Make the pages of [begin, end) be there, on the NUMA node of the worker threads; to be called before anything is
  // written into them. Returns false when `interrupted` said so.
  bool touch(size_t begin, size_t end, const std::function<bool()>& interrupted);

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace megasetup::cpu
