#include "cpu/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/pool.h"

namespace megasetup::cpu {
namespace {

constexpr size_t kBlockBytes = 2 << 20;  // a huge page

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

HostMemory::HostMemory(size_t bytes) : owner_(getpid()) {
  const size_t page = page_bytes();
  size_ = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
  void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error("cannot map " + std::to_string(size_) + " bytes of host memory: " + std::strerror(errno));
  }
  data_ = static_cast<char*>(memory);
  (void)madvise(data_, size_, MADV_HUGEPAGE);
}

HostMemory::~HostMemory() {
  // In a child that was not given it, something else may lie at this address by now.
  if (kept_from_children_ && !mine()) return;
  (void)munmap(data_, size_);
}

void HostMemory::keep_from_children() { kept_from_children_ = madvise(data_, size_, MADV_DONTFORK) == 0; }

void HostMemory::give_to_children() {
  if (madvise(data_, size_, MADV_DOFORK) == 0) kept_from_children_ = false;
}

bool HostMemory::mine() const { return getpid() == owner_; }

bool HostMemory::touch(size_t begin, size_t end, const std::function<bool()>& interrupted) {
  end = std::min(end, size_);
  if (begin >= end) return true;
  const size_t page = page_bytes();
  const auto touch_block = [&](int64_t block) {
    const size_t start = begin + static_cast<size_t>(block) * kBlockBytes;
    // Volatile, so that the stores are made although what they write is there already.
    volatile char* memory = data_;
    for (size_t at = start; at < end && at < start + kBlockBytes; at += page) memory[at] = 0;
  };
  // By more workers than converting has: each spends its time in the kernel, clearing a page.
  return Pool::instance().run(static_cast<int64_t>((end - begin + kBlockBytes - 1) / kBlockBytes), touch_block,
                              interrupted, Use::kReading);
}

}  // namespace megasetup::cpu
