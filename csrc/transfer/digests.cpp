#include "transfer/digests.h"

#include <algorithm>
#include <utility>

#include "cpu/parallel.h"
#include "gpu/cuda.h"
#include "gpu/digest.h"

namespace megasetup::transfer {
namespace {

// 256 Mi elements: digested in 150 microseconds on a Hopper GPU, so the CPU begins soon and the launches are few.
constexpr int64_t kPartTiles = 64 * 1024;
// 64 Ki elements, what a thread takes at a time.
constexpr int64_t kBlockTiles = 16;

int64_t tiles_of(const Digests::Piece& piece) {
  return (patterns_of(piece.kind, piece.count) + kDigestTile - 1) / kDigestTile;
}

std::vector<int64_t> starts_of(const std::vector<Digests::Piece>& pieces) {
  std::vector<int64_t> starts{0};
  starts.reserve(pieces.size() + 1);
  for (const Digests::Piece& piece : pieces) starts.push_back(starts.back() + tiles_of(piece));
  return starts;
}

// Bytes of a copy that one pattern stands for.
int64_t bytes_of_pattern(Kind kind) { return kind == Kind::kWidenBf16 || kind == Kind::kWidenFp16 ? 4 : 2; }

}  // namespace

Digests::Digests(std::vector<Piece> pieces, std::vector<size_t> first_pieces)
    : pieces_(std::move(pieces)),
      first_pieces_(std::move(first_pieces)),
      tile_starts_(starts_of(pieces_)),
      keys_(kDigestTile * sizeof(uint32_t), "allocating the keys of the digests"),
      segments_(pieces_.size() * sizeof(gpu::Segment), "allocating the list of tiles"),
      device_(static_cast<size_t>(tile_starts_.back()) * sizeof(uint64_t), "allocating the digests"),
      host_(static_cast<size_t>(tile_starts_.back()) * sizeof(uint64_t)),
      doubtful_(std::make_unique<std::atomic<bool>[]>(first_pieces_.size())) {
  size_t first = 0;
  for (size_t chunk = 0; chunk + 1 < first_pieces_.size(); ++chunk) {
    const size_t end = first_pieces_[chunk + 1];
    const bool last = chunk + 2 == first_pieces_.size();
    if (!last && tiles_before(end) - tiles_before(first) < kPartTiles) continue;
    parts_.push_back({first, end, std::make_unique<Event>(false), std::make_unique<Event>(false)});
    first = end;
  }
  std::vector<gpu::Segment> segments;
  segments.reserve(pieces_.size());
  for (const Part& part : parts_) {
    for (size_t i = part.first_piece; i < part.end_piece; ++i) {
      const int64_t start = (tiles_before(i) - tiles_before(part.first_piece)) * kDigestTile;
      segments.push_back(
          {pieces_[i].weight, nullptr, start, patterns_of(pieces_[i].kind, pieces_[i].count), Kind::kCopy2Bytes});
    }
  }
  gpu::check(
      cudaMemcpy(segments_.data(), segments.data(), segments.size() * sizeof(gpu::Segment), cudaMemcpyHostToDevice),
      "sending the list of tiles");
  gpu::check(cudaMemcpy(keys_.data(), digest_keys(), kDigestTile * sizeof(uint32_t), cudaMemcpyHostToDevice),
             "sending the keys of the digests");
  gpu::preload_digest_kernel();
}

void Digests::start(cudaStream_t work, cudaStream_t wire) {
  arrived_ = 0;
  for (size_t chunk = 0; chunk < first_pieces_.size(); ++chunk) doubtful_[chunk].store(false);
  found_.assign(pieces_.size(), {});
  const auto* segments = reinterpret_cast<const gpu::Segment*>(segments_.data());
  const auto* keys = reinterpret_cast<const uint32_t*>(keys_.data());
  for (const Part& part : parts_) {
    const int64_t first = tiles_before(part.first_piece);
    const Piece& last = pieces_[part.end_piece - 1];
    const int64_t patterns =
        (tiles_before(part.end_piece - 1) - first) * kDigestTile + patterns_of(last.kind, last.count);
    const auto offset = static_cast<size_t>(first) * sizeof(uint64_t);
    const auto bytes = static_cast<size_t>(tiles_before(part.end_piece) - first) * sizeof(uint64_t);
    gpu::digest(segments + part.first_piece, static_cast<int64_t>(part.end_piece - part.first_piece), patterns, keys,
                reinterpret_cast<uint64_t*>(device_.data() + offset), work);
    gpu::check(cudaEventRecord(*part.made, work), "ordering the digests");
    gpu::check(cudaStreamWaitEvent(wire, *part.made, 0), "ordering the digests");
    gpu::check(cudaMemcpyAsync(host_.data() + offset, device_.data() + offset, bytes, cudaMemcpyDeviceToHost, wire),
               "fetching the digests");
    gpu::check(cudaEventRecord(*part.arrived, wire), "fetching the digests");
  }
}

bool Digests::ready(size_t chunk) {
  while (arrived_ < parts_.size() && parts_[arrived_].arrived->reached("fetching the digests")) ++arrived_;
  return arrived_ > 0 && first_pieces_[chunk + 1] <= parts_[arrived_ - 1].end_piece;
}

int64_t Digests::blocks(size_t chunk) const {
  const int64_t tiles = tiles_before(first_pieces_[chunk + 1]) - tiles_before(first_pieces_[chunk]);
  return (tiles + kBlockTiles - 1) / kBlockTiles;
}

void Digests::read(size_t chunk, int64_t block) {
  const auto at = [this](size_t piece) { return tile_starts_.begin() + static_cast<std::ptrdiff_t>(piece); };
  const size_t first_piece = first_pieces_[chunk], end_piece = first_pieces_[chunk + 1];
  int64_t tile = tiles_before(first_piece) + block * kBlockTiles;
  const int64_t end = std::min(tile + kBlockTiles, tiles_before(end_piece));
  auto index = static_cast<size_t>(std::upper_bound(at(first_piece), at(end_piece), tile) - tile_starts_.begin()) - 1;
  for (; tile < end; ++index) {
    const Piece& piece = pieces_[index];
    const int64_t patterns = patterns_of(piece.kind, piece.count);
    Comparison found;
    for (const int64_t piece_end = std::min(end, tiles_before(index + 1)); tile < piece_end; ++tile) {
      if (doubtful(chunk)) return;
      const int64_t start = (tile - tiles_before(index)) * kDigestTile;
      const Digest digest =
          cpu::digest_tile(piece.kind, static_cast<const char*>(piece.copy) + start * bytes_of_pattern(piece.kind),
                           std::min(kDigestTile, patterns - start));
      if (digest.sum != digests()[tile]) {
        doubtful_[chunk].store(true, std::memory_order_relaxed);
        return;
      }
      cpu::merge(found, {digest.inexact, 0, digest.first_inexact, -1}, start);
    }
    if (found.exact_differences == 0) continue;
    const std::lock_guard lock(merging_);
    cpu::merge(found_[index], found, 0);
  }
}

}  // namespace megasetup::transfer
