// Pinned host memory: one mapping near the GPU, registered with CUDA as a whole. The driver's own allocator makes the
// same at a tenth of the speed, and torch's on top of it rounds every block up to a power of two.
#pragma once

#include <cstddef>
#include <vector>

#include "cpu/host_memory.h"

namespace megasetup::transfer {

class PinnedMemory : public cpu::HostMemory {
 public:
  // Maps the memory, to be touched by worker threads on the NUMA node of `device`. Not pinned yet.
  PinnedMemory(size_t bytes, int device);
  // Waits for the device, so that no copy is under way, then unpins. A forked child must not touch CUDA, and does not.
  ~PinnedMemory() override;

  // Registers all of it, for every device; forked children do not have it from then on. Throws std::runtime_error
  // with CUDA's reason.
  void pin();
  bool pinned() const { return pinned_; }

 private:
  int device_;
  bool pinned_ = false;
};

// The cores of the NUMA node that the device hangs on; empty when the system does not say.
std::vector<int> cores_near(int device);

}  // namespace megasetup::transfer
