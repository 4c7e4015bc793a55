#include "transfer/pipeline.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <deque>
#include <numeric>
#include <stdexcept>

#include "cpu/feed.h"
#include "cpu/parallel.h"
#include "cpu/pool.h"
#include "gpu/cuda.h"

namespace megasetup::transfer {
namespace {

using Clock = std::chrono::steady_clock;

// Together they must outgrow the second-level caches of the threads that read them: a line that a core still holds must
// be fetched from it before the wire may write the slot again. 8 slots of 1 MiB under 8 cores of 2 MiB each halved the
// rate; 32 of them did not.
constexpr int kHostSlots = 8;
constexpr int kDeviceSlots = 6;
// Of the GPU's slots, how many bring masters back for comparing.
constexpr int kReturnSlots = 3;
// Chunks given to the wire at a time: enough that it never waits for this thread.
constexpr size_t kDepth = 4;
// At or below this many chunks on the wire, waiting for a slot would let it run dry.
constexpr size_t kStarving = 1;
// Chunks given to the CPU's reading at a time: enough that no worker waits, few enough that both ends meet.
constexpr size_t kReadDepth = 3;
// A direct chunk is a copy command a piece; below this size the command costs more than the wire.
constexpr int64_t kDirectPieceElements = 64 * 1024;
// Pieces start where vectors may.
constexpr int64_t kPieceAlignment = 8;
// A slot holds half as many FP32 weights, and those too in whole pieces.
constexpr int64_t kChunkAlignment = 2 * kPieceAlignment;
constexpr auto kInterruptPeriod = std::chrono::milliseconds(20);

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool is_pinned(const void* memory, int64_t bytes) {
  for (const char* at : {static_cast<const char*>(memory), static_cast<const char*>(memory) + bytes - 1}) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, at) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    if (attributes.type != cudaMemoryTypeHost) return false;
  }
  return true;
}

bool widens(Kind kind) { return kind == Kind::kWidenBf16 || kind == Kind::kWidenFp16; }

double seconds_between(cudaEvent_t start, cudaEvent_t end) {
  float milliseconds = 0;
  gpu::check(cudaEventElapsedTime(&milliseconds, start, end), "timing");
  return milliseconds / 1e3;
}

}  // namespace

struct Pipeline::Resources {
  Resources(int64_t host_slot_bytes, int64_t device_slot_bytes, bool with_wire)
      : host_slot_bytes(host_slot_bytes),
        device_slot_bytes(device_slot_bytes),
        host(with_wire ? std::make_unique<PinnedBuffer>(static_cast<size_t>(kHostSlots * host_slot_bytes)) : nullptr),
        device(with_wire ? static_cast<size_t>(kDeviceSlots * device_slot_bytes) : 0, "allocating GPU staging") {
    for (int i = 0; i < kDeviceSlots; ++i) {
      packed.push_back(std::make_unique<Event>(false));
      moved.push_back(std::make_unique<Event>(false));
    }
  }

  char* host_slot(int index) const { return host->data() + index * host_slot_bytes; }
  char* device_slot(int index) const { return device.data() + index * device_slot_bytes; }

  std::array<const Stream*, 7> streams() const {
    return {&pack, &wires[0], &wires[1], &aside, &backs[0], &backs[1], &judge};
  }

  const int64_t host_slot_bytes;
  const int64_t device_slot_bytes;
  Stream pack{Priority::kHigh};  // fills device slots
  // Empty them, in turn: while one ends a copy and begins the next, the other's copy keeps the wire busy.
  std::array<Stream, 2> wires{Stream(Priority::kHigh), Stream(Priority::kHigh)};
  Stream aside{Priority::kLow};  // copies that never leave the GPU
  // Bring masters to the GPU, likewise: the wire's other direction.
  std::array<Stream, 2> backs{Stream(Priority::kHigh), Stream(Priority::kHigh)};
  Stream judge{Priority::kHigh};  // compares them there
  Event begun{true}, pack_done{true}, aside_done{true};
  std::unique_ptr<PinnedBuffer> host;
  DeviceBuffer device;
  std::vector<std::unique_ptr<Event>> packed, moved;  // a device slot each
  gpu::DeviceSegments device_only;                    // rows whose only work is on the GPU
  gpu::DeviceSegments device_copies;                  // every row with a device copy, for comparing
  std::unique_ptr<DeviceBuffer> piece_memory;
  std::unique_ptr<DeviceBuffer> results;  // of a comparison: device_copies first, then every piece
};

Pipeline::Pipeline(int device, std::vector<Row> rows, int64_t chunk_elements)
    : device_(device), rows_(std::move(rows)), chunk_elements_(round_up(chunk_elements, kChunkAlignment)) {
  if (chunk_elements < 1) throw std::invalid_argument("chunk_elements is " + std::to_string(chunk_elements));
  const gpu::DeviceGuard guard(device_);
  cpu::Pool::instance().set_cores(cores_near(device_));

  std::vector<gpu::Segment> device_only, device_copies;
  std::vector<int64_t> by_kind[2][kKinds];  // [it may go direct]: those come last, where a comparison takes them
  for (size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    if (row.count == 0) continue;
    const gpu::Segment near{row.weight, row.device_copy, 0, row.count, row.kind};
    if (row.device_copy != nullptr) device_copies.push_back(near);
    // A copy that widens nothing is no part of packing, so it is made aside.
    if (row.device_copy != nullptr && (row.host_copy == nullptr || !widens(row.kind))) device_only.push_back(near);
    if (row.host_copy != nullptr) {
      const bool may_go_direct = row.count >= std::min(kDirectPieceElements, chunk_elements_) &&
                                 is_pinned(row.host_copy, row.count * copy_bytes(row.kind));
      by_kind[may_go_direct][static_cast<int>(row.kind)].push_back(static_cast<int64_t>(i));
    }
  }
  for (const bool may_go_direct : {false, true}) {
    for (const auto& rows_of_kind : by_kind[may_go_direct]) cut_into_chunks(rows_of_kind, may_go_direct);
  }

  resources_ = std::make_unique<Resources>(chunk_elements_ * 2, chunk_elements_ * 4, !chunks_.empty());
  std::vector<gpu::Segment> segments;
  segments.reserve(pieces_.size());
  for (const Piece& piece : pieces_) {
    const Row& row = rows_[static_cast<size_t>(piece.row)];
    void* copy = row.device_copy == nullptr || !widens(row.kind)
                     ? nullptr
                     : static_cast<char*>(row.device_copy) + piece.offset * copy_bytes(row.kind);
    segments.push_back({static_cast<const char*>(row.weight) + piece.offset * weight_bytes(row.kind), copy, piece.place,
                        piece.count, row.kind});
  }
  const size_t bytes = segments.size() * sizeof(gpu::Segment);
  resources_->piece_memory = std::make_unique<DeviceBuffer>(bytes, "allocating the list of pieces");
  gpu::check(cudaMemcpy(resources_->piece_memory->data(), segments.data(), bytes, cudaMemcpyHostToDevice),
             "sending the list of pieces");
  resources_->device_only = gpu::DeviceSegments(std::move(device_only), resources_->aside);
  resources_->device_copies = gpu::DeviceSegments(std::move(device_copies), resources_->aside);
  resources_->results = std::make_unique<DeviceBuffer>(
      (static_cast<size_t>(resources_->device_copies.size()) + pieces_.size()) * sizeof(Comparison),
      "allocating the results");
  preload_pack_kernels();
  if (!chunks_.empty()) measure_wire();
}

Pipeline::~Pipeline() = default;

void Pipeline::cut_into_chunks(const std::vector<int64_t>& rows, bool pinned) {
  Chunk chunk{};
  const auto close = [&] {
    if (chunk.pieces == 0) return;
    chunks_.push_back(chunk);
    chunk = {};
  };
  for (const int64_t index : rows) {
    const Row& row = rows_[static_cast<size_t>(index)];
    const int64_t capacity = row.kind == Kind::kCopy4Bytes ? chunk_elements_ / 2 : chunk_elements_;
    for (int64_t offset = 0; offset < row.count;) {
      if (chunk.extent >= capacity) close();
      if (chunk.pieces == 0) chunk = {row.kind, pieces_.size(), 0, 0, 0, pinned};
      const int64_t count = std::min(row.count - offset, capacity - chunk.extent);
      pieces_.push_back({index, offset, count, chunk.extent});
      ++chunk.pieces;
      chunk.elements += count;
      chunk.extent += round_up(count, kPieceAlignment);
      offset += count;
    }
  }
  close();
}

void Pipeline::measure_wire() {
  Resources& r = *resources_;
  const Event start(true), end(true);
  const auto bytes = static_cast<size_t>(std::min(kHostSlots * r.host_slot_bytes, kDeviceSlots * r.device_slot_bytes));
  constexpr int kPasses = 4;
  for (int pass = -1; pass < kPasses; ++pass) {  // the first wakes the link up
    if (pass == 0) gpu::check(cudaEventRecord(start, r.wires[0]), "timing the wire");
    gpu::check(cudaMemcpyAsync(r.host_slot(0), r.device_slot(0), bytes, cudaMemcpyDeviceToHost, r.wires[0]),
               "timing the wire");
  }
  gpu::check(cudaEventRecord(end, r.wires[0]), "timing the wire");
  gpu::check(cudaStreamSynchronize(r.wires[0]), "timing the wire");
  wire_bandwidth_ = kPasses * static_cast<double>(bytes) / seconds_between(start, end);
}

void Pipeline::begin(cudaStream_t stream) {
  const Resources& r = *resources_;
  gpu::check(cudaEventRecord(r.begun, stream), "starting");
  for (const Stream* each : r.streams()) {
    gpu::check(cudaStreamWaitEvent(*each, r.begun, 0), "starting");
  }
}

PackedChunk Pipeline::packed(const Chunk& chunk, const gpu::Segment* pieces) const {
  return {pieces + chunk.first_piece, static_cast<int64_t>(chunk.pieces), chunk.extent, chunk.kind};
}

Pipeline::ChunkList Pipeline::all_chunks() const {
  ChunkList all(chunks_.size());
  std::iota(all.begin(), all.end(), size_t{0});
  return all;
}

void Pipeline::make_digests() {
  std::vector<Digests::Piece> pieces;
  pieces.reserve(pieces_.size());
  for (const Piece& piece : pieces_) {
    const Row& row = rows_[static_cast<size_t>(piece.row)];
    pieces.push_back({row.kind, static_cast<const char*>(row.weight) + piece.offset * weight_bytes(row.kind),
                      static_cast<const char*>(row.host_copy) + piece.offset * copy_bytes(row.kind), piece.count});
  }
  std::vector<size_t> first_pieces;
  first_pieces.reserve(chunks_.size() + 1);
  for (const Chunk& chunk : chunks_) first_pieces.push_back(chunk.first_piece);
  first_pieces.push_back(pieces_.size());
  digests_ = std::make_unique<Digests>(std::move(pieces), std::move(first_pieces));
}

// One passage of chunks. Whatever way it ends, its destructor leaves nothing in flight.
class Pipeline::Flight {
 public:
  // `arrive(segments)` is the CPU's work on one block of an arrived chunk.
  using Arrive = std::function<void(size_t piece, int64_t offset, const cpu::Segment&)>;

  // Writes all chunks.
  Flight(Pipeline& pipeline, Arrive arrive)
      : Flight(pipeline, pipeline.all_chunks(), nullptr, nullptr, std::move(arrive)) {}

  // Compares chunks and writes nothing. They also travel the other way, from the back of the list, as FP32 to the GPU,
  // where `judged` has a result for each piece. Both directions of the wire work at once, and neither waits for the CPU
  // alone.
  Flight(Pipeline& pipeline, ChunkList chunks, Comparison* judged, Arrive arrive)
      : Flight(pipeline, std::move(chunks), judged, nullptr, std::move(arrive)) {}

  // Compares all chunks by their digests, which have been started; the GPU judges those that travel to it, likewise.
  Flight(Pipeline& pipeline, Comparison* judged, Digests& digests)
      : Flight(pipeline, pipeline.all_chunks(), judged, &digests, nullptr) {}

  ~Flight() {
    feed_.reset();  // the CPU lets go of the slots before the streams are asked
    for (const Stream* each : r_.streams()) (void)cudaStreamSynchronize(*each);
  }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  bool fly(const std::function<bool()>& interrupted, Stats& stats) {
    auto asked = Clock::now();
    // The chunks not yet taken: the CPU's are taken from the front, the GPU's from the back.
    size_t next = 0, end = chunks_.size();
    while (next < end || !moving_.empty() || !widenings_.empty() || !returning_.empty()) {
      bool progress = land();
      progress |= collect();
      if (next < end && (digests_ == nullptr ? send(chunk_at(next), stats) : read(chunks_[next]))) {
        ++next;
        progress = true;
      }
      if (next < end && bring_back(chunk_at(end - 1), stats)) {
        --end;
        progress = true;
      }
      const auto now = Clock::now();
      if (now - asked > kInterruptPeriod) {
        asked = now;
        if (interrupted()) return false;
      }
      if (!progress) sched_yield();
    }
    return true;
  }

 private:
  Flight(Pipeline& pipeline, ChunkList chunks, Comparison* judged, Digests* digests, Arrive arrive)
      : pipeline_(pipeline),
        r_(*pipeline.resources_),
        chunks_(std::move(chunks)),
        judged_(judged),
        digests_(digests),
        arrive_(std::move(arrive)) {
    if (!chunks_.empty()) {
      const cpu::Use use = digests_ == nullptr ? cpu::Use::kConverting : cpu::Use::kReading;
      feed_ = std::make_unique<cpu::Feed>(chunks_.size(), use);
    }
    const int returning = judged_ == nullptr ? 0 : kReturnSlots;
    for (int i = 0; i < kHostSlots; ++i) free_host_.push_back(i);
    for (int i = 0; i < kDeviceSlots - returning; ++i) free_device_.push_back(i);
    for (int i = kDeviceSlots - returning; i < kDeviceSlots; ++i) free_return_.push_back(i);
  }

  struct Moving {
    const Chunk* chunk;
    int device_slot;
    int host_slot;  // -1: direct
  };
  // The CPU's work on a chunk: widening, comparing or reading.
  struct Widening {
    const cpu::Feed::Job* job;
    int host_slot;  // -1: it reads copies alone
  };

  const Chunk& chunk_at(size_t place) const { return pipeline_.chunks_[chunks_[place]]; }

  bool has_moved(int device_slot) const {
    return r_.moved[static_cast<size_t>(device_slot)]->reached("moving a chunk");
  }

  // Chunks that have crossed the wire go to the CPU.
  bool land() {
    bool any = false;
    while (!moving_.empty() && has_moved(moving_.front().device_slot)) {
      const Moving moved = moving_.front();
      moving_.pop_front();
      free_device_.push_back(moved.device_slot);
      if (moved.host_slot >= 0) widen(*moved.chunk, moved.host_slot);
      any = true;
    }
    return any;
  }

  // Slots that the CPU or the comparison on the GPU is done with are free again.
  bool collect() {
    bool any = false;
    while (!returning_.empty() && has_moved(returning_.front())) {
      free_return_.push_back(returning_.front());
      returning_.pop_front();
      any = true;
    }
    for (size_t i = 0; i < widenings_.size();) {
      if (!widenings_[i].job->done()) {
        ++i;
        continue;
      }
      if (widenings_[i].host_slot >= 0) free_host_.push_back(widenings_[i].host_slot);
      widenings_.erase(widenings_.begin() + static_cast<std::ptrdiff_t>(i));
      any = true;
    }
    return any;
  }

  bool send(const Chunk& chunk, Stats& stats) {
    if (moving_.size() >= kDepth || free_device_.empty()) return false;
    const bool can_go_direct = judged_ == nullptr && chunk.pinned;
    // FP32 takes four bytes either way, so staging it would only cost the CPU.
    const bool rather_direct = can_go_direct && !widens(chunk.kind);
    if (!rather_direct && !free_host_.empty()) {
      send_staged(chunk, stats);
    } else if (can_go_direct && (rather_direct || moving_.size() <= kStarving)) {
      send_direct(chunk, stats);
    } else {
      return false;
    }
    return true;
  }

  bool read(size_t chunk) {
    if (widenings_.size() >= kReadDepth || !digests_->ready(chunk)) return false;
    const cpu::Feed::Job& job = feed_->publish(
        digests_->blocks(chunk), [digests = digests_, chunk](int64_t block) { digests->read(chunk, block); });
    widenings_.push_back({&job, -1});
    return true;
  }

  bool bring_back(const Chunk& chunk, Stats& stats) {
    if (judged_ == nullptr || !chunk.pinned || free_return_.empty()) return false;
    const int slot = free_return_.front();
    free_return_.pop_front();
    const int64_t size = copy_bytes(chunk.kind);
    const Stream& back = next_of(r_.backs);
    for (size_t i = 0; i < chunk.pieces; ++i) {
      const Piece& piece = pipeline_.pieces_[chunk.first_piece + i];
      const Row& row = pipeline_.rows_[static_cast<size_t>(piece.row)];
      gpu::check(cudaMemcpyAsync(r_.device_slot(slot) + piece.place * size,
                                 static_cast<const char*>(row.host_copy) + piece.offset * size,
                                 static_cast<size_t>(piece.count * size), cudaMemcpyHostToDevice, back),
                 "bringing a chunk back");
    }
    const Event& arrived = *r_.packed[static_cast<size_t>(slot)];
    gpu::check(cudaEventRecord(arrived, back), "ordering a chunk");
    gpu::check(cudaStreamWaitEvent(r_.judge, arrived, 0), "ordering a chunk");
    compare_slot(pipeline_.packed(chunk, device_pieces()), r_.device_slot(slot), judged_ + chunk.first_piece, r_.judge);
    gpu::check(cudaEventRecord(*r_.moved[static_cast<size_t>(slot)], r_.judge), "comparing a chunk");
    returning_.push_back(slot);
    stats.returned_elements += chunk.elements;
    return true;
  }

  int take_device_slot() {
    const int slot = free_device_.front();
    free_device_.pop_front();
    return slot;
  }

  const gpu::Segment* device_pieces() const { return reinterpret_cast<const gpu::Segment*>(r_.piece_memory->data()); }

  void wait_for_packing(int slot, const Stream& wire) {
    const Event& event = *r_.packed[static_cast<size_t>(slot)];
    gpu::check(cudaEventRecord(event, r_.pack), "ordering a chunk");
    gpu::check(cudaStreamWaitEvent(wire, event, 0), "ordering a chunk");
  }

  const Stream& next_of(const std::array<Stream, 2>& pair) { return pair[turn_++ % 2]; }

  void send_staged(const Chunk& chunk, Stats& stats) {
    const int slot = take_device_slot();
    const int host_slot = free_host_.front();
    free_host_.pop_front();
    const Stream& wire = next_of(r_.wires);
    pack_staged(pipeline_.packed(chunk, device_pieces()), r_.device_slot(slot), judged_ == nullptr, r_.pack);
    wait_for_packing(slot, wire);
    const int64_t bytes = chunk.extent * weight_bytes(chunk.kind);
    gpu::check(cudaMemcpyAsync(r_.host_slot(host_slot), r_.device_slot(slot), static_cast<size_t>(bytes),
                               cudaMemcpyDeviceToHost, wire),
               "sending a chunk");
    gpu::check(cudaEventRecord(*r_.moved[static_cast<size_t>(slot)], wire), "sending a chunk");
    moving_.push_back({&chunk, slot, host_slot});
    stats.staged_elements += chunk.elements;
    stats.staged_wire_bytes += bytes;
  }

  void send_direct(const Chunk& chunk, Stats& stats) {
    const int slot = take_device_slot();
    const Stream& wire = next_of(r_.wires);
    if (widens(chunk.kind)) {
      pack_direct(pipeline_.packed(chunk, device_pieces()), r_.device_slot(slot), r_.pack);
      wait_for_packing(slot, wire);
    }
    for (size_t i = 0; i < chunk.pieces; ++i) {
      const Piece& piece = pipeline_.pieces_[chunk.first_piece + i];
      const Row& row = pipeline_.rows_[static_cast<size_t>(piece.row)];
      const int64_t size = copy_bytes(chunk.kind);
      const void* source = static_cast<const char*>(row.weight) + piece.offset * size;
      if (widens(chunk.kind)) {
        source = row.device_copy != nullptr ? static_cast<const char*>(row.device_copy) + piece.offset * size
                                            : r_.device_slot(slot) + piece.place * size;
      }
      gpu::check(cudaMemcpyAsync(static_cast<char*>(row.host_copy) + piece.offset * size, source,
                                 static_cast<size_t>(piece.count * size), cudaMemcpyDeviceToHost, wire),
                 "sending a chunk");
    }
    gpu::check(cudaEventRecord(*r_.moved[static_cast<size_t>(slot)], wire), "sending a chunk");
    moving_.push_back({&chunk, slot, -1});
    stats.direct_elements += chunk.elements;
    stats.direct_wire_bytes += chunk.elements * copy_bytes(chunk.kind);
  }

  void widen(const Chunk& chunk, int host_slot) {
    std::vector<cpu::Segment> segments;
    segments.reserve(chunk.pieces);
    for (size_t i = 0; i < chunk.pieces; ++i) {
      const Piece& piece = pipeline_.pieces_[chunk.first_piece + i];
      const Row& row = pipeline_.rows_[static_cast<size_t>(piece.row)];
      segments.push_back({chunk.kind, r_.host_slot(host_slot) + piece.place * weight_bytes(chunk.kind),
                          static_cast<char*>(row.host_copy) + piece.offset * copy_bytes(chunk.kind), piece.count});
    }
    const auto shared = std::make_shared<const cpu::Segments>(std::move(segments));
    const size_t first = chunk.first_piece;
    const cpu::Feed::Job& job = feed_->publish(shared->blocks(), [this, shared, first](int64_t block) {
      shared->visit_block(block, [this, first](size_t index, int64_t offset, const cpu::Segment& run) {
        arrive_(first + index, offset, run);
      });
    });
    widenings_.push_back({&job, host_slot});
  }

  Pipeline& pipeline_;
  Resources& r_;
  const ChunkList chunks_;
  Comparison* const judged_;  // null: chunks are written
  Digests* const digests_;    // null: chunks cross the wire
  const Arrive arrive_;
  std::unique_ptr<cpu::Feed> feed_;
  std::deque<int> free_host_, free_device_, free_return_;
  size_t turn_ = 0;
  std::deque<Moving> moving_;
  std::deque<int> returning_;  // slots, in the order they were sent for
  std::vector<Widening> widenings_;
};

bool Pipeline::run(cudaStream_t stream, const std::function<bool()>& interrupted, Stats& stats) {
  const std::lock_guard lock(mutex_);
  const gpu::DeviceGuard guard(device_);
  Resources& r = *resources_;
  const auto start = Clock::now();
  begin(stream);
  {
    constexpr int64_t kStreamedElements = 4096;
    Flight flight(
        *this, [](size_t, int64_t, const cpu::Segment& run) { cpu::widen_piece(run, run.count >= kStreamedElements); });
    gpu::widen(r.device_only, r.aside);
    if (!flight.fly(interrupted, stats)) return false;
    gpu::check(cudaEventRecord(r.pack_done, r.pack), "finishing");
    gpu::check(cudaEventRecord(r.aside_done, r.aside), "finishing");
    gpu::check(cudaStreamSynchronize(r.pack), "writing copies on the GPU");
    gpu::check(cudaStreamSynchronize(r.aside), "writing copies on the GPU");
  }
  stats.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (r.device_copies.size() > 0) {
    stats.device_seconds = std::max(seconds_between(r.begun, r.pack_done), seconds_between(r.begun, r.aside_done));
  }
  return true;
}

bool Pipeline::compare(cudaStream_t stream, const std::function<bool()>& interrupted,
                       std::vector<RowComparison>& results, ComparisonStats& stats) {
  const std::lock_guard lock(mutex_);
  const gpu::DeviceGuard guard(device_);
  Resources& r = *resources_;
  results.assign(rows_.size(), {});
  const auto near_count = static_cast<size_t>(r.device_copies.size());
  std::vector<Comparison> found(near_count + pieces_.size());
  auto* device_results = reinterpret_cast<Comparison*>(r.results->data());
  gpu::clear_results(device_results, static_cast<int64_t>(found.size()), r.aside);
  gpu::check(cudaStreamSynchronize(r.aside), "clearing the results");
  if (digests_ == nullptr) make_digests();
  begin(stream);
  Stats moved;
  {
    Flight flight(*this, device_results + near_count, *digests_);
    digests_->start(r.pack, r.wires[0]);
    // The digests come first: the CPU waits for them.
    gpu::check(cudaEventRecord(r.pack_done, r.pack), "ordering the comparison");
    gpu::check(cudaStreamWaitEvent(r.aside, r.pack_done, 0), "ordering the comparison");
    gpu::compare(r.device_copies, device_results, r.aside, chunks_.empty() ? gpu::Room::kAll : gpu::Room::kBackground);
    if (!flight.fly(interrupted, moved)) return false;
    gpu::check(cudaStreamSynchronize(r.judge), "comparing");
    gpu::check(cudaStreamSynchronize(r.aside), "comparing");
  }
  const auto add = [&](size_t piece, const Comparison& part, int64_t offset) {
    cpu::merge(results[static_cast<size_t>(pieces_[piece].row)].host, part, pieces_[piece].offset + offset);
  };
  ChunkList doubtful;
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    if (digests_->doubtful(i)) {
      doubtful.push_back(i);
    } else {
      for (size_t k = 0; k < chunk.pieces; ++k) add(chunk.first_piece + k, digests_->found(chunk.first_piece + k), 0);
    }
  }
  if (!doubtful.empty()) {
    std::mutex merging;
    Flight flight(*this, std::move(doubtful), device_results + near_count,
                  [&](size_t piece, int64_t offset, const cpu::Segment& run) {
                    const Comparison part = cpu::compare_piece(run);
                    if (part.exact_differences == 0) return;
                    const std::lock_guard merge_lock(merging);
                    add(piece, part, offset);
                  });
    if (!flight.fly(interrupted, moved)) return false;
    gpu::check(cudaStreamSynchronize(r.judge), "comparing");
  }
  gpu::check(cudaMemcpy(found.data(), device_results, found.size() * sizeof(Comparison), cudaMemcpyDeviceToHost),
             "fetching the results");
  size_t next = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].device_copy != nullptr && rows_[i].count != 0) results[i].device = found[next++];
  }
  for (size_t i = 0; i < pieces_.size(); ++i) add(i, found[near_count + i], 0);
  stats.returned_elements = moved.returned_elements;
  stats.staged_elements = moved.staged_elements;
  stats.digested_elements = -moved.returned_elements - moved.staged_elements;
  for (const Chunk& chunk : chunks_) stats.digested_elements += chunk.elements;
  return true;
}

}  // namespace megasetup::transfer
