// The multi-tensor kernels. Widening reads 2 and writes 4 bytes an element, so memory is the only limit: each thread
// has four independent 8-byte loads in flight before its 16-byte stores.
#include <algorithm>
#include <utility>

#include "gpu/compare.cuh"
#include "gpu/convert.h"
#include "gpu/cuda.h"
#include "gpu/spans.cuh"

namespace megasetup::gpu {
namespace {

// Moves `count` elements from In to Out by `convert`, vectors where both ends are aligned, single elements elsewhere.
template <typename InVector, typename OutVector, typename In, typename Out, typename Convert>
__device__ void convert_piece(const In* in, Out* out, int count, Convert convert) {
  int done = 0;
  if (aligned<InVector>(in) && aligned<OutVector>(out)) {
    const auto* in_vectors = reinterpret_cast<const InVector*>(in);
    auto* out_vectors = reinterpret_cast<OutVector*>(out);
    const int vectors = count / kVector;
    if (vectors == kThreads * kUnroll) {
      InVector values[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) values[k] = __ldcs(in_vectors + threadIdx.x + k * kThreads);
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) __stcs(out_vectors + threadIdx.x + k * kThreads, convert(values[k]));
    } else {
      for (int i = threadIdx.x; i < vectors; i += kThreads) __stcs(out_vectors + i, convert(__ldcs(in_vectors + i)));
    }
    done = vectors * kVector;
  }
  for (int i = done + threadIdx.x; i < count; i += kThreads) out[i] = convert(in[i]);
}

struct Identity {
  template <typename T>
  __device__ T operator()(T value) const {
    return value;
  }
};

template <Kind kKind>
struct Widen {
  __device__ uint32_t operator()(uint16_t v) const { return widen_bits<kKind>(v); }
  __device__ uint4 operator()(ushort4 v) const { return widen_bits<kKind>(v); }
};

template <Kind kKind>
struct Narrow {
  __device__ uint16_t operator()(uint32_t v) const { return narrow_bits<kKind>(v); }
  __device__ ushort4 operator()(uint4 v) const { return narrow_bits<kKind>(v); }
};

struct WidenWork {
  __device__ void operator()(const Segment& segment, int64_t, int64_t offset, int count) {
    const auto* low = static_cast<const uint16_t*>(segment.weight) + offset;
    auto* high = static_cast<uint32_t*>(segment.copy) + offset;
    switch (segment.kind) {
      case Kind::kWidenBf16:
        return convert_piece<ushort4, uint4>(low, high, count, Widen<Kind::kWidenBf16>());
      case Kind::kWidenFp16:
        return convert_piece<ushort4, uint4>(low, high, count, Widen<Kind::kWidenFp16>());
      case Kind::kCopy4Bytes:
        return convert_piece<uint4, uint4>(static_cast<const uint32_t*>(segment.weight) + offset, high, count,
                                           Identity());
      case Kind::kCopy2Bytes:
        return convert_piece<ushort4, ushort4>(low, static_cast<uint16_t*>(segment.copy) + offset, count, Identity());
    }
  }
};

struct NarrowWork {
  __device__ void operator()(const Segment& segment, int64_t, int64_t offset, int count) {
    const auto* high = static_cast<const uint32_t*>(segment.copy) + offset;
    auto* low = static_cast<uint16_t*>(const_cast<void*>(segment.weight)) + offset;
    switch (segment.kind) {
      case Kind::kWidenBf16:
        return convert_piece<uint4, ushort4>(high, low, count, Narrow<Kind::kWidenBf16>());
      case Kind::kWidenFp16:
        return convert_piece<uint4, ushort4>(high, low, count, Narrow<Kind::kWidenFp16>());
      case Kind::kCopy4Bytes:
        return convert_piece<uint4, uint4>(high, static_cast<uint32_t*>(const_cast<void*>(segment.weight)) + offset,
                                           count, Identity());
      case Kind::kCopy2Bytes:
        return convert_piece<ushort4, ushort4>(static_cast<const uint16_t*>(segment.copy) + offset, low, count,
                                               Identity());
    }
  }
};

// A list short enough to be a launch's own parameter needs no device memory and no copy.
constexpr int kInlineSegments = 96;
struct InlineSegments {
  Segment segments[kInlineSegments];
};
static_assert(sizeof(InlineSegments) <= 4000, "a launch's parameters are bounded at 4 KB");

template <typename Work>
__global__ void __launch_bounds__(kThreads) convert_kernel(const Segment* segments, int64_t size, int64_t elements) {
  Work work;
  for_pieces(segments, size, elements, work);
}

template <typename Work>
__global__ void __launch_bounds__(kThreads)
    convert_inline_kernel(const __grid_constant__ InlineSegments list, int64_t size, int64_t elements) {
  Work work;
  for_pieces(list.segments, size, elements, work);
}

__global__ void __launch_bounds__(kThreads)
    compare_kernel(const Segment* segments, int64_t size, int64_t elements, Comparison* results) {
  CompareWork work{results};
  for_pieces(segments, size, elements, work);
  work.flush();
}

__global__ void clear_kernel(Comparison* results, int64_t count) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) results[i] = Comparison{0, 0, -1, -1};
}

std::vector<Segment> laid_end_to_end(std::vector<Segment> segments) {
  std::erase_if(segments, [](const Segment& segment) { return segment.count == 0; });
  int64_t start = 0;
  for (Segment& segment : segments) {
    segment.start = start;
    start += (segment.count + kSegmentAlignment - 1) / kSegmentAlignment * kSegmentAlignment;
  }
  return segments;
}

int64_t elements_of(const std::vector<Segment>& segments) {
  return segments.empty() ? 0 : segments.back().start + segments.back().count;
}

template <typename Work>
void launch(const DeviceSegments& segments, cudaStream_t stream) {
  if (segments.elements() == 0) return;
  convert_kernel<Work><<<grid_of_tiles(segments.elements()), kThreads, 0, stream>>>(segments.data(), segments.size(),
                                                                                    segments.elements());
  check(cudaGetLastError(), "launching a conversion");
}

template <typename Work>
void launch(const std::vector<Segment>& unordered, cudaStream_t stream) {
  const std::vector<Segment> segments = laid_end_to_end(unordered);
  const int64_t elements = elements_of(segments);
  if (elements == 0) return;
  if (segments.size() > kInlineSegments) return launch<Work>(DeviceSegments(segments, stream), stream);
  InlineSegments list;
  std::copy(segments.begin(), segments.end(), list.segments);
  convert_inline_kernel<Work>
      <<<grid_of_tiles(elements), kThreads, 0, stream>>>(list, static_cast<int64_t>(segments.size()), elements);
  check(cudaGetLastError(), "launching a conversion");
}

}  // namespace

DeviceSegments::DeviceSegments(std::vector<Segment> unordered, cudaStream_t stream) : stream_(stream) {
  const std::vector<Segment> segments = laid_end_to_end(std::move(unordered));
  size_ = static_cast<int64_t>(segments.size());
  elements_ = elements_of(segments);
  if (size_ == 0) return;
  const size_t bytes = segments.size() * sizeof(Segment);
  check(cudaMallocAsync(reinterpret_cast<void**>(&data_), bytes, stream), "allocating the list of tensors");
  const cudaError_t copied = cudaMemcpyAsync(data_, segments.data(), bytes, cudaMemcpyHostToDevice, stream);
  // The host list is pageable and goes away with this call.
  const cudaError_t waited = copied == cudaSuccess ? cudaStreamSynchronize(stream) : copied;
  if (waited != cudaSuccess) (void)cudaFreeAsync(data_, stream);
  check(waited, "sending the list of tensors");
}

DeviceSegments::~DeviceSegments() {
  if (data_ != nullptr) (void)cudaFreeAsync(data_, stream_);
}

DeviceSegments::DeviceSegments(DeviceSegments&& other) noexcept { *this = std::move(other); }

DeviceSegments& DeviceSegments::operator=(DeviceSegments&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(elements_, other.elements_);
  std::swap(stream_, other.stream_);
  return *this;
}

void widen(const DeviceSegments& segments, cudaStream_t stream) { launch<WidenWork>(segments, stream); }
void widen(const std::vector<Segment>& segments, cudaStream_t stream) { launch<WidenWork>(segments, stream); }
void narrow(const std::vector<Segment>& segments, cudaStream_t stream) { launch<NarrowWork>(segments, stream); }

void clear_results(Comparison* results, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  clear_kernel<<<static_cast<int>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(results, count);
  check(cudaGetLastError(), "clearing the results");
}

void compare(const DeviceSegments& segments, Comparison* results, cudaStream_t stream, Room room) {
  if (segments.elements() == 0) return;
  const int blocks = room == Room::kAll ? kBlocksPerMultiprocessor : kBlocksInTheBackground;
  compare_kernel<<<grid_that_stays(segments.elements(), blocks), kThreads, 0, stream>>>(
      segments.data(), segments.size(), segments.elements(), results);
  check(cudaGetLastError(), "launching a comparison");
}

std::vector<Comparison> compare(const std::vector<Segment>& segments, cudaStream_t stream) {
  std::vector<Comparison> results(segments.size());
  const DeviceSegments on_device(segments, stream);
  if (on_device.size() == 0) return results;
  std::vector<Comparison> found(static_cast<size_t>(on_device.size()));
  Comparison* device_results = nullptr;
  const size_t bytes = found.size() * sizeof(Comparison);
  check(cudaMallocAsync(reinterpret_cast<void**>(&device_results), bytes, stream), "allocating the results");
  clear_results(device_results, on_device.size(), stream);
  compare(on_device, device_results, stream);
  const cudaError_t copied = cudaMemcpyAsync(found.data(), device_results, bytes, cudaMemcpyDeviceToHost, stream);
  (void)cudaFreeAsync(device_results, stream);
  check(copied, "fetching the results");
  check(cudaStreamSynchronize(stream), "comparing");
  size_t next = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].count != 0) results[i] = found[next++];
  }
  return results;
}

}  // namespace megasetup::gpu
