// An audit without moving anything: the GPU digests its weights, 8 bytes a tile come over the wire, and the CPU reads
// each host copy once and holds its digests against them (common/digest.h says what they can and cannot tell). A chunk
// whose digests agree is consistent, and how many of its elements are not exact was counted by the way. A chunk with a
// tile that disagrees is doubtful: stale, or with NaNs of other payloads, which a comparison takes for equal. Its
// reading ends there, and the caller compares it element by element.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/digest.h"
#include "common/rows.h"
#include "transfer/staging.h"

namespace megasetup::transfer {

class Digests {
 public:
  // A weight on the GPU, its copy on the host, and how many elements.
  struct Piece {
    Kind kind;
    const void* weight;
    const void* copy;
    int64_t count;
  };

  // On the current device. Chunk i begins at piece first_pieces[i] and ends where the next one begins; the last entry
  // is the number of pieces. Takes 8 bytes of pinned host memory and of GPU memory for every 4,096 patterns.
  Digests(std::vector<Piece> pieces, std::vector<size_t> first_pieces);

  // Begins an audit: the GPU makes all digests on `work`, and they come over on `wire`.
  void start(cudaStream_t work, cudaStream_t wire);
  // Whether the digests of a chunk are here. Asked by one thread.
  bool ready(size_t chunk);
  // The blocks that reading a chunk is cut into.
  int64_t blocks(size_t chunk) const;
  // Reads one block of a chunk that is ready; any number of threads may.
  void read(size_t chunk, int64_t block);

  // After all blocks of a chunk have been read:
  bool doubtful(size_t chunk) const { return doubtful_[chunk].load(std::memory_order_relaxed); }
  // The exact differences of one piece of a chunk that is not doubtful.
  const Comparison& found(size_t piece) const { return found_[piece]; }

 private:
  // What is digested by one launch and crosses the wire as one: the CPU begins when the first is here.
  struct Part {
    size_t first_piece;
    size_t end_piece;
    std::unique_ptr<Event> made, arrived;
  };

  int64_t tiles_before(size_t piece) const { return tile_starts_[piece]; }
  const uint64_t* digests() const { return reinterpret_cast<const uint64_t*>(host_.data()); }

  const std::vector<Piece> pieces_;
  const std::vector<size_t> first_pieces_;
  const std::vector<int64_t> tile_starts_;  // of each piece, and the end
  const DeviceBuffer keys_, segments_, device_;
  const PinnedBuffer host_;
  std::vector<Part> parts_;
  size_t arrived_ = 0;  // parts
  const std::unique_ptr<std::atomic<bool>[]> doubtful_;
  std::mutex merging_;
  std::vector<Comparison> found_;  // guarded by merging_ while blocks are read
};

}  // namespace megasetup::transfer
