#include "cpu/parallel.h"

#include <algorithm>
#include <mutex>

#include "cpu/kernels.h"

namespace megasetup::cpu {
namespace {

// Work below this is done by the caller: waking threads would take longer.
constexpr int64_t kInlineElements = kBlockElements;

bool for_blocks(const Segments& segments, const std::function<void(int64_t)>& run,
                const std::function<bool()>& interrupted) {
  (void)kernels();  // a wrong MEGASETUP_CPU_ISA is the caller's error, not a worker's
  if (segments.elements() <= kInlineElements) {
    for (int64_t block = 0; block < segments.blocks(); ++block) run(block);
    return true;
  }
  return Pool::instance().run(segments.blocks(), run, interrupted);
}

}  // namespace

Segments::Segments(std::vector<Segment> segments) : segments_(std::move(segments)) {
  starts_.reserve(segments_.size() + 1);
  starts_.push_back(0);
  for (const Segment& segment : segments_) starts_.push_back(starts_.back() + segment.count);
}

void Segments::visit_block(int64_t block, const std::function<void(size_t, int64_t, const Segment&)>& visit) const {
  int64_t position = block * kBlockElements;
  const int64_t end = std::min(position + kBlockElements, elements());
  auto index = static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), position) - starts_.begin()) - 1;
  for (; position < end; ++index) {
    const Segment& segment = segments_[index];
    const int64_t offset = position - starts_[index];
    const int64_t count = std::min(segment.count - offset, end - position);
    if (count == 0) continue;
    visit(index, offset,
          {segment.kind, static_cast<const char*>(segment.weight) + offset * weight_bytes(segment.kind),
           static_cast<char*>(segment.copy) + offset * copy_bytes(segment.kind), count});
    position += count;
  }
}

void widen_piece(const Segment& piece, bool stream) {
  const auto count = static_cast<size_t>(piece.count);
  const auto* weight = static_cast<const uint16_t*>(piece.weight);
  switch (piece.kind) {
    case Kind::kWidenBf16:
      return kernels().widen_bf16(weight, static_cast<float*>(piece.copy), count, stream);
    case Kind::kWidenFp16:
      return kernels().widen_fp16(weight, static_cast<float*>(piece.copy), count, stream);
    case Kind::kCopy4Bytes:
    case Kind::kCopy2Bytes:
      return kernels().copy(piece.weight, piece.copy, count * static_cast<size_t>(copy_bytes(piece.kind)), stream);
  }
}

void narrow_piece(const Segment& piece) {
  const auto count = static_cast<size_t>(piece.count);
  auto* weight = static_cast<uint16_t*>(const_cast<void*>(piece.weight));
  switch (piece.kind) {
    case Kind::kWidenBf16:
      return kernels().narrow_bf16(static_cast<const float*>(piece.copy), weight, count);
    case Kind::kWidenFp16:
      return kernels().narrow_fp16(static_cast<const float*>(piece.copy), weight, count);
    case Kind::kCopy4Bytes:
    case Kind::kCopy2Bytes:
      return kernels().copy(piece.copy, weight, count * static_cast<size_t>(copy_bytes(piece.kind)), false);
  }
}

Comparison compare_piece(const Segment& piece) {
  const auto count = static_cast<size_t>(piece.count);
  const auto* weight = static_cast<const uint16_t*>(piece.weight);
  switch (piece.kind) {
    case Kind::kWidenBf16:
      return kernels().compare_bf16(weight, static_cast<const float*>(piece.copy), count);
    case Kind::kWidenFp16:
      return kernels().compare_fp16(weight, static_cast<const float*>(piece.copy), count);
    case Kind::kCopy4Bytes:
      return compare_fp32(static_cast<const float*>(piece.weight), static_cast<const float*>(piece.copy), count);
    case Kind::kCopy2Bytes:
      return compare_16_bit(weight, static_cast<const uint16_t*>(piece.copy), count);
  }
  return {};
}

Digest digest_tile(Kind kind, const void* copy, int64_t patterns) {
  const auto count = static_cast<size_t>(patterns);
  switch (kind) {
    case Kind::kWidenBf16:
      return kernels().digest_bf16(static_cast<const float*>(copy), digest_keys(), count);
    case Kind::kWidenFp16:
      return kernels().digest_fp16(static_cast<const float*>(copy), digest_keys(), count);
    case Kind::kCopy4Bytes:
    case Kind::kCopy2Bytes:
      return {kernels().digest_16_bit(static_cast<const uint16_t*>(copy), digest_keys(), count), 0, -1};
  }
  return {};
}

void merge(Comparison& whole, const Comparison& part, int64_t offset) {
  const auto earlier = [offset](int64_t first, int64_t in_part) {
    if (in_part < 0) return first;
    return first < 0 ? offset + in_part : std::min(first, offset + in_part);
  };
  whole.exact_differences += part.exact_differences;
  whole.rounded_differences += part.rounded_differences;
  whole.first_exact = earlier(whole.first_exact, part.first_exact);
  whole.first_rounded = earlier(whole.first_rounded, part.first_rounded);
}

bool widen(const Segments& segments, const std::function<bool()>& interrupted) {
  const bool stream = segments.elements() * copy_bytes(Kind::kWidenBf16) >= kStreamingBytes;
  return for_blocks(
      segments,
      [&](int64_t block) {
        segments.visit_block(block, [stream](size_t, int64_t, const Segment& piece) { widen_piece(piece, stream); });
      },
      interrupted);
}

bool narrow(const Segments& segments, const std::function<bool()>& interrupted) {
  return for_blocks(
      segments,
      [&](int64_t block) {
        segments.visit_block(block, [](size_t, int64_t, const Segment& piece) { narrow_piece(piece); });
      },
      interrupted);
}

bool compare(const Segments& segments, std::vector<Comparison>& results, const std::function<bool()>& interrupted) {
  results.assign(segments.size(), {});
  std::mutex mutex;
  return for_blocks(
      segments,
      [&](int64_t block) {
        segments.visit_block(block, [&](size_t index, int64_t offset, const Segment& piece) {
          const Comparison part = compare_piece(piece);
          if (part.exact_differences == 0) return;
          const std::lock_guard lock(mutex);
          merge(results[index], part, offset);
        });
      },
      interrupted);
}

}  // namespace megasetup::cpu
