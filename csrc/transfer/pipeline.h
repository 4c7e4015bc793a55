// The pipeline between GPU weights and their copies.
//
// The wire is the scarce thing, so it must never wait. A chunk crosses it one of two ways:
//   staged  the weights' own 16 bits go into a pinned slot and CPU threads widen them into the host copy: 2 bytes an
//           element on the wire, up to 8 of host memory traffic;
//   direct  the copy engine writes FP32 straight into a pinned host copy: 4 bytes on the wire and 4 of host memory.
// While the CPU keeps up there is always a free slot and every chunk is staged: the wire's 16-bit limit. When it does
// not (few threads, or eight ranks on one host's memory) the wire is about to run dry with every slot still waiting for
// the CPU; then the next chunk goes direct. So the rate is never below FP32 over the wire, and the mix finds itself.
// Two kinds of chunk are always staged: those with pageable host copies, and those of tensors so small that a copy
// command each would cost more than the wire.
//
// A comparison moves less still. CPU threads read the host copies, from the front of the list, and hold their digests
// against those that the GPU makes of its weights (digests.h); at the same time the copy engine brings pinned copies to
// the GPU, from the back, to be compared there: both until they meet. What the digests leave in doubt is compared
// element by element afterwards, staged or brought back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "common/rows.h"
#include "gpu/convert.h"
#include "transfer/digests.h"
#include "transfer/pack.h"
#include "transfer/staging.h"

namespace megasetup::transfer {

// A weight on the GPU and its copies. Either copy may be null.
struct Row {
  Kind kind;
  const void* weight;
  void* device_copy;
  void* host_copy;
  int64_t count;
};

struct Stats {
  double seconds = 0;         // from the call to the last write
  double device_seconds = 0;  // until the last device copy was written
  int64_t staged_elements = 0;
  int64_t staged_wire_bytes = 0;
  int64_t direct_elements = 0;
  int64_t direct_wire_bytes = 0;
  int64_t returned_elements = 0;  // brought back, by a comparison
};

// Which way a comparison went: each element of a host copy counts once.
struct ComparisonStats {
  int64_t digested_elements = 0;  // read by the CPU, which needed no weight for them
  int64_t returned_elements = 0;  // compared by the GPU
  int64_t staged_elements = 0;    // compared by the CPU with weights that crossed the wire
};

struct RowComparison {
  Comparison device;
  Comparison host;
};

class Pipeline {
 public:
  // With 4 Mi elements a chunk the staging takes 64 MiB of pinned host memory and 96 MiB on the GPU.
  Pipeline(int device, std::vector<Row> rows, int64_t chunk_elements);
  ~Pipeline();

  // Writes every copy, after what `stream` holds now. `interrupted` is asked now and then; when it says yes the run
  // stops with nothing left in flight and the result is false.
  bool run(cudaStream_t stream, const std::function<bool()>& interrupted, Stats& stats);
  // Compares every copy with its weight. The first call makes what digests need.
  bool compare(cudaStream_t stream, const std::function<bool()>& interrupted, std::vector<RowComparison>& results,
               ComparisonStats& stats);
  // Bytes a second from the GPU into a pinned slot, measured when the pipeline was made.
  double wire_bandwidth() const { return wire_bandwidth_; }

 private:
  struct Piece {
    int64_t row;
    int64_t offset;  // first element within the row
    int64_t count;
    int64_t place;  // in the slot, in elements
  };
  struct Chunk {
    Kind kind;
    size_t first_piece;
    size_t pieces;
    int64_t elements;  // of its pieces
    int64_t extent;    // of the slot, gaps included
    bool pinned;       // every host copy is pinned and no tensor too small: it may go direct
  };
  // Indices of chunks.
  using ChunkList = std::vector<size_t>;
  class Flight;

  ChunkList all_chunks() const;
  void make_digests();

  void cut_into_chunks(const std::vector<int64_t>& rows, bool pinned);
  void measure_wire();
  // Every stream of the pipeline waits for what `stream` holds now.
  void begin(cudaStream_t stream);
  PackedChunk packed(const Chunk& chunk, const gpu::Segment* pieces) const;

  const int device_;
  const std::vector<Row> rows_;
  const int64_t chunk_elements_;
  std::vector<Piece> pieces_;
  std::vector<Chunk> chunks_;
  std::mutex mutex_;  // one run at a time

  // In the order of construction: later ones use earlier ones.
  struct Resources;
  std::unique_ptr<Resources> resources_;
  std::unique_ptr<Digests> digests_;  // from the first comparison on
  double wire_bandwidth_ = 0;
};

}  // namespace megasetup::transfer
