// Digests: how a copy on the host is held against a weight on the GPU while neither crosses the wire.
//
// Memory is taken as 16-bit patterns, cut into tiles of 4,096 of them. A tile's digest is the sum of key[i] *
// pattern[i] over its patterns: below 2^60, so nothing wraps round. The GPU digests the weights; the CPU rounds each
// copy to the weight's dtype and digests what comes out. What equal digests say is a matter of the keys, which are
// 4,096 distinct primes of 32 bits:
//   - A tile that differs in one pattern or in two never has the weight's digest. One: the difference of the sums is a
//     key times a number that is not zero. Two: a key would have to divide the other's difference (it cannot divide the
//     other key), which has 16 bits.
//   - For three or more, whatever they are, the last of them would need one certain key: for primes drawn at random
//     from [2^31, 2^32) that is one of 98 million, so 2^-26 at most. A tile that is stale all over, whose sums spread
//     over 2^50 values, has about that small a chance.
// Permuted elements are three or more differences like any others; whole tiles that change places are seen because each
// tile is held against its own place.
#pragma once

#include <cstdint>

#include "common/rows.h"

namespace megasetup {

constexpr int64_t kDigestTile = 4096;

// Patterns an element makes: an FP32 weight's copy is FP32 too, and counts as two halves.
constexpr int64_t patterns_of(Kind kind, int64_t elements) {
  return kind == Kind::kCopy4Bytes ? 2 * elements : elements;
}

// What one reading of (part of) a tile of a copy finds.
struct Digest {
  uint64_t sum = 0;     // of key times pattern, the copy rounded to the weight's dtype
  int64_t inexact = 0;  // elements that rounding changed; a NaN is not one
  int64_t first_inexact = -1;
};

// kDigestTile keys, the same in every process, at a 64-byte boundary. Made at the first call.
const uint32_t* digest_keys();

}  // namespace megasetup
