// The kernels over many runs of memory and many threads: thousands of small tensors next to one huge one are cut into
// blocks of equal work.
#pragma once

#include <functional>
#include <vector>

#include "common/digest.h"
#include "common/rows.h"
#include "cpu/pool.h"

namespace megasetup::cpu {

// One run of memory: a weight, its copy and how many elements.
struct Segment {
  Kind kind;
  const void* weight;
  void* copy;
  int64_t count;
};

// Bytes of target from which streaming stores pay: a target that fits the second-level cache is better kept there.
constexpr int64_t kStreamingBytes = 1 << 20;

// Elements one thread takes at a time: long enough to hide the taking, short enough to balance.
constexpr int64_t kBlockElements = 64 * 1024;

// Segments laid end to end, so that work can be cut anywhere.
class Segments {
 public:
  explicit Segments(std::vector<Segment> segments);

  int64_t elements() const { return starts_.back(); }
  int64_t blocks() const { return (elements() + kBlockElements - 1) / kBlockElements; }
  size_t size() const { return segments_.size(); }
  // Calls visit(index of the segment, first element within it, the run of memory) for each piece of a block.
  void visit_block(int64_t block, const std::function<void(size_t, int64_t, const Segment&)>& visit) const;

 private:
  std::vector<Segment> segments_;
  std::vector<int64_t> starts_;  // one more than segments_
};

// One piece, on the calling thread.
void widen_piece(const Segment& piece, bool stream);
void narrow_piece(const Segment& piece);  // reads piece.copy, writes piece.weight
Comparison compare_piece(const Segment& piece);

// At most a tile of a copy: its patterns (those of its elements rounded to the weight's dtype).
Digest digest_tile(Kind kind, const void* copy, int64_t patterns);

// Adds `part`, found at `offset` of a longer run, to that run's result.
void merge(Comparison& whole, const Comparison& part, int64_t offset);

// All of it, on the pool. `interrupted` is asked now and then. False when it said yes; the work is then half done.
bool widen(const Segments& segments, const std::function<bool()>& interrupted);
bool narrow(const Segments& segments, const std::function<bool()>& interrupted);
bool compare(const Segments& segments, std::vector<Comparison>& results, const std::function<bool()>& interrupted);

}  // namespace megasetup::cpu
