// The CPU kernels, one table of functions for each instruction set. A kernel takes one run of memory: any length, any
// alignment. Splitting work over threads is parallel.h's concern.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/digest.h"
#include "common/rows.h"

namespace megasetup::cpu {

struct Kernels {
  const char* name;
  // `stream` asks for stores that bypass the cache, which pay when the target is larger than the cache: without them
  // every line written is first read (10 bytes of traffic an element instead of 6).
  void (*widen_bf16)(const uint16_t* source, float* target, size_t count, bool stream);
  void (*widen_fp16)(const uint16_t* source, float* target, size_t count, bool stream);
  void (*narrow_bf16)(const float* source, uint16_t* target, size_t count);
  void (*narrow_fp16)(const float* source, uint16_t* target, size_t count);
  void (*copy)(const void* source, void* target, size_t bytes, bool stream);
  Comparison (*compare_bf16)(const uint16_t* weight, const float* master, size_t count);
  Comparison (*compare_fp16)(const uint16_t* weight, const float* master, size_t count);
  // At most a tile: `keys` has a key for every element.
  Digest (*digest_bf16)(const float* master, const uint32_t* keys, size_t count);
  Digest (*digest_fp16)(const float* master, const uint32_t* keys, size_t count);
  uint64_t (*digest_16_bit)(const uint16_t* patterns, const uint32_t* keys, size_t count);
};

const Kernels& scalar_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#elif defined(__aarch64__)
const Kernels& neon_kernels();
#endif

// Comparisons of copies in the weight's own dtype: there is nothing to round, so both counts are the same.
Comparison compare_fp32(const float* weight, const float* master, size_t count);
Comparison compare_16_bit(const uint16_t* weight, const uint16_t* master, size_t count);

// The kernels in use: the best that this processor runs, unless MEGASETUP_CPU_ISA or set_kernels names others.
const Kernels& kernels();
// Throws std::invalid_argument, naming what there is, for a name that this processor cannot run.
void set_kernels(const std::string& name);
std::vector<std::string> kernel_names();

}  // namespace megasetup::cpu
