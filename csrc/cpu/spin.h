// Waiting without sleeping: for waits shorter than the fifty microseconds that a sleeping thread takes to come back.
#pragma once

#include <sched.h>

namespace megasetup::cpu {

class Spin {
 public:
  // Rests the core for a moment, and now and then offers it to others.
  void once() {
    if (++spins_ % kSpinsBeforeYield == 0) sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  static constexpr unsigned kSpinsBeforeYield = 256;
  unsigned spins_ = 0;
};

}  // namespace megasetup::cpu
