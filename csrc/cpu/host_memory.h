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

 protected:
  // Children forked from now on have no such memory at all. Pages that a device may write are not shared with a child
  // but copied at the fork, every one, which takes as much memory again and many seconds.
  void keep_from_children();
  void give_to_children();
  // False in a forked child.
  bool mine() const;

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
  pid_t owner_;
  bool kept_from_children_ = false;
};

}  // namespace megasetup::cpu
