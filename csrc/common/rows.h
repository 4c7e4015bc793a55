// Rows: the form in which tensors cross from Python. A row names what the bytes are and where they lie; this code never
// sees a tensor. megasetup/kernels/rows.py holds the same list of kinds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/qualifiers.h"

namespace megasetup {

// What a weight holds, and what its copy holds.
enum class Kind : int64_t {
  kWidenBf16 = 0,   // BF16 weight, FP32 copy
  kWidenFp16 = 1,   // FP16 weight, FP32 copy
  kCopy4Bytes = 2,  // FP32 weight, FP32 copy
  kCopy2Bytes = 3,  // 16-bit weight, copy of the same dtype
};

constexpr int64_t kKinds = 4;

// Bytes an element of the weight takes.
MEGASETUP_BOTH constexpr int64_t weight_bytes(Kind kind) { return kind == Kind::kCopy4Bytes ? 4 : 2; }
// Bytes an element of the copy takes.
MEGASETUP_BOTH constexpr int64_t copy_bytes(Kind kind) { return kind == Kind::kCopy2Bytes ? 2 : 4; }

// How a master differs from its weight. A NaN on both sides counts as equal; an index of -1 means there is none.
struct Comparison {
  int64_t exact_differences = 0;    // elements whose master is not the widened weight, bit for bit
  int64_t rounded_differences = 0;  // elements whose master, rounded to the weight's dtype, is not the weight
  int64_t first_exact = -1;
  int64_t first_rounded = -1;
};

}  // namespace megasetup
