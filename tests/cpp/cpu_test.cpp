// The CPU half on its own, with no Python and no framework, so that it can run under the sanitizers and, through an
// emulator, on other processors. Prints "N passed, N failed" and exits 1 if anything failed.
// With --no-fork it leaves the test of fork out: neither user-mode emulators nor
// ThreadSanitizer support threads in a forked child.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/digest.h"
#include "common/floats.h"
#include "cpu/feed.h"
#include "cpu/host_memory.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/pool.h"

namespace {

using namespace megasetup;
using namespace megasetup::cpu;
using namespace std::chrono_literals;

int passed = 0;
int failed = 0;

void check(bool holds, const std::string& what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("FAILED: %s\n", what.c_str());
}

bool never() { return false; }

std::mt19937& random_bits() {
  static std::mt19937 generator(20240607);
  return generator;
}

// Memory at a chosen misalignment between two guards; the whole lies on the heap, where AddressSanitizer also watches.
class Guarded {
 public:
  Guarded(size_t bytes, size_t offset) : bytes_(bytes), start_(kGuard + offset), memory_(bytes + offset + 2 * kGuard) {
    const size_t misaligned = reinterpret_cast<uintptr_t>(memory_.data()) % 64;
    start_ -= misaligned;  // kGuard is 64, so at least `offset` bytes of guard remain
    std::fill(memory_.begin(), memory_.end(), kPattern);
  }

  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(memory_.data() + start_);
  }
  void fill_random() {
    for (size_t i = 0; i < bytes_; ++i) memory_[start_ + i] = static_cast<unsigned char>(random_bits()());
  }
  bool guards_intact() const {
    const auto intact = [](unsigned char byte) { return byte == kPattern; };
    const auto first = memory_.begin() + static_cast<std::ptrdiff_t>(start_);
    return std::all_of(memory_.begin(), first, intact) &&
           std::all_of(first + static_cast<std::ptrdiff_t>(bytes_), memory_.end(), intact);
  }
  bool same_bytes(Guarded& other) { return std::memcmp(as<char>(), other.as<char>(), bytes_) == 0; }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kPattern = 0xa5;
  size_t bytes_;
  size_t start_;
  std::vector<unsigned char> memory_;
};

bool same(const Comparison& a, const Comparison& b) {
  return a.exact_differences == b.exact_differences && a.rounded_differences == b.rounded_differences &&
         a.first_exact == b.first_exact && a.first_rounded == b.first_rounded;
}

// The scalar functions against values worked out by hand.
void test_scalar_values() {
  check(bf16_to_fp32_bits(0x3f80) == 0x3f800000u, "BF16 1.0");
  check(fp16_to_fp32_bits(0x3c00) == 0x3f800000u, "FP16 1.0");
  check(fp16_to_fp32_bits(0x0001) == 0x33800000u, "FP16 smallest subnormal is 2^-24");
  check(fp16_to_fp32_bits(0x03ff) == 0x387fc000u, "FP16 largest subnormal");
  check(fp16_to_fp32_bits(0x7bff) == 0x477fe000u, "FP16 65504");
  check(fp16_to_fp32_bits(0xfc00) == 0xff800000u, "FP16 -infinity");
  check(fp16_to_fp32_bits(0x7c01) == 0x7fc02000u, "FP16 signalling NaN becomes quiet");
  check(fp32_to_bf16_bits(0x3f808000u) == 0x3f80, "BF16 tie goes to even, down");
  check(fp32_to_bf16_bits(0x3f818000u) == 0x3f82, "BF16 tie goes to even, up");
  check(fp32_to_bf16_bits(0x3f808001u) == 0x3f81, "BF16 just past the tie");
  check(fp32_to_bf16_bits(0x7f7fffffu) == 0x7f80, "BF16 overflow to infinity");
  check(fp32_to_bf16_bits(0x7f800001u) == 0x7fc0, "BF16 NaN whose payload would be cut off stays a NaN");
  check(fp32_to_bf16_bits(0xffffffffu) == 0xffff, "BF16 NaN with a full payload does not wrap round");
  check(fp32_to_fp16_bits(0x477fefffu) == 0x7bff, "FP16 just below the overflow tie");
  check(fp32_to_fp16_bits(0x477ff000u) == 0x7c00, "FP16 overflow tie goes to infinity");
  check(fp32_to_fp16_bits(0x33000000u) == 0x0000, "FP16 half the smallest subnormal goes to zero");
  check(fp32_to_fp16_bits(0x33000001u) == 0x0001, "FP16 just past half the smallest subnormal");
  check(fp32_to_fp16_bits(0xb3c00000u) == 0x8002, "FP16 subnormal tie goes to even");
  check(fp32_to_fp16_bits(0x7f800001u) == 0x7e00, "FP16 NaN stays a NaN");
}

void test_all_patterns(const Kernels& under_test) {
  const Kernels& reference = scalar_kernels();
  std::vector<uint16_t> low(65536);
  for (size_t i = 0; i < low.size(); ++i) low[i] = static_cast<uint16_t>(i);
  std::vector<float> expected(low.size());
  std::vector<float> wide(low.size());
  std::vector<uint16_t> back(low.size());
  const auto equal = [&] { return std::memcmp(expected.data(), wide.data(), wide.size() * 4) == 0; };
  for (const bool stream : {false, true}) {
    reference.widen_bf16(low.data(), expected.data(), low.size(), false);
    under_test.widen_bf16(low.data(), wide.data(), low.size(), stream);
    check(equal(), std::string(under_test.name) + " widens every BF16 pattern");
    reference.widen_fp16(low.data(), expected.data(), low.size(), false);
    under_test.widen_fp16(low.data(), wide.data(), low.size(), stream);
    check(equal(), std::string(under_test.name) + " widens every FP16 pattern");
  }
  // Each pattern survives the way there and back; a NaN comes back quiet.
  under_test.widen_bf16(low.data(), wide.data(), low.size(), false);
  under_test.narrow_bf16(wide.data(), back.data(), low.size());
  bool round_trip = true;
  for (size_t i = 0; i < low.size(); ++i) {
    round_trip &= back[i] == (is_nan_bits(bf16_to_fp32_bits(low[i])) ? (low[i] | 0x40u) : low[i]);
  }
  check(round_trip, std::string(under_test.name) + " BF16 there and back");
  under_test.widen_fp16(low.data(), wide.data(), low.size(), false);
  under_test.narrow_fp16(wide.data(), back.data(), low.size());
  round_trip = true;
  for (size_t i = 0; i < low.size(); ++i) {
    round_trip &= back[i] == ((low[i] & 0x7fffu) > 0x7c00u ? (low[i] | 0x200u) : low[i]);
  }
  check(round_trip, std::string(under_test.name) + " FP16 there and back");
}

// Bits around every rounding boundary, and at random.
std::vector<uint32_t> bits_to_narrow() {
  std::vector<uint32_t> bits;
  for (uint32_t high = 0; high < 65536; ++high) {
    for (const uint32_t low :
         {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xf000u, 0xffffu}) {
      bits.push_back(high << 16 | low);
    }
  }
  for (int i = 0; i < 100000; ++i) bits.push_back(random_bits()());
  return bits;
}

void test_narrow(const Kernels& under_test) {
  const std::vector<uint32_t> bits = bits_to_narrow();
  std::vector<float> wide(bits.size());
  std::memcpy(wide.data(), bits.data(), bits.size() * 4);
  std::vector<uint16_t> low(bits.size());
  bool right = true;
  under_test.narrow_bf16(wide.data(), low.data(), bits.size());
  for (size_t i = 0; i < bits.size(); ++i) right &= low[i] == fp32_to_bf16_bits(bits[i]);
  check(right, std::string(under_test.name) + " narrows to BF16");
  right = true;
  under_test.narrow_fp16(wide.data(), low.data(), bits.size());
  for (size_t i = 0; i < bits.size(); ++i) right &= low[i] == fp32_to_fp16_bits(bits[i]);
  check(right, std::string(under_test.name) + " narrows to FP16");
}

std::vector<size_t> awkward_lengths() {
  std::vector<size_t> lengths;
  for (size_t length = 0; length <= 70; ++length) lengths.push_back(length);
  for (const size_t length : {127u, 128u, 129u, 1023u, 1024u, 1025u}) lengths.push_back(length);
  return lengths;
}

void test_lengths_and_alignments(const Kernels& under_test) {
  const Kernels& reference = scalar_kernels();
  const std::string name = under_test.name;
  bool widened = true, narrowed = true, copied = true, guarded = true;
  for (const size_t count : awkward_lengths()) {
    for (size_t offset = 0; offset < 64; ++offset) {
      Guarded low(count * 2, (offset * 7) % 64);
      Guarded wide(count * 4, offset);
      Guarded expected(count * 4, 0);
      low.fill_random();
      for (const bool stream : {false, true}) {
        reference.widen_bf16(low.as<uint16_t>(), expected.as<float>(), count, false);
        under_test.widen_bf16(low.as<uint16_t>(), wide.as<float>(), count, stream);
        widened &= wide.same_bytes(expected);
        reference.widen_fp16(low.as<uint16_t>(), expected.as<float>(), count, false);
        under_test.widen_fp16(low.as<uint16_t>(), wide.as<float>(), count, stream);
        widened &= wide.same_bytes(expected);
        guarded &= wide.guards_intact();

        Guarded copy(count * 4, offset);
        under_test.copy(wide.as<float>(), copy.as<float>(), count * 4, stream);
        copied &= copy.same_bytes(wide);
        guarded &= copy.guards_intact();
      }
      wide.fill_random();
      Guarded target(count * 2, offset);
      Guarded low_expected(count * 2, 0);
      reference.narrow_bf16(wide.as<float>(), low_expected.as<uint16_t>(), count);
      under_test.narrow_bf16(wide.as<float>(), target.as<uint16_t>(), count);
      narrowed &= target.same_bytes(low_expected);
      reference.narrow_fp16(wide.as<float>(), low_expected.as<uint16_t>(), count);
      under_test.narrow_fp16(wide.as<float>(), target.as<uint16_t>(), count);
      narrowed &= target.same_bytes(low_expected);
      guarded &= target.guards_intact();
    }
  }
  check(widened, name + " widens any length at any alignment");
  check(narrowed, name + " narrows any length at any alignment");
  check(copied, name + " copies any length at any alignment");
  check(guarded, name + " writes nothing outside its target");
}

void test_compare(const Kernels& under_test) {
  const Kernels& reference = scalar_kernels();
  bool right = true;
  std::vector<size_t> lengths = awkward_lengths();
  for (int round = 0; round < 3; ++round) {
    for (const size_t count : lengths) {
      Guarded low(count * 2, random_bits()() % 64);
      Guarded wide(count * 4, random_bits()() % 64);
      low.fill_random();
      for (const bool fp16 : {false, true}) {
        const auto widen = fp16 ? reference.widen_fp16 : reference.widen_bf16;
        const auto expected = fp16 ? reference.compare_fp16 : reference.compare_bf16;
        const auto compare = fp16 ? under_test.compare_fp16 : under_test.compare_bf16;
        widen(low.as<uint16_t>(), wide.as<float>(), count, false);
        Comparison result = compare(low.as<uint16_t>(), wide.as<float>(), count);
        right &= same(result, {});
        // Flip a few bits: low ones round away, high ones do not, and some make or break a NaN.
        for (size_t flips = 0; count > 0 && flips < 1 + count / 8; ++flips) {
          const size_t at = (random_bits()() % count) * 4 + random_bits()() % 4;
          wide.as<unsigned char>()[at] ^= static_cast<unsigned char>(1u << random_bits()() % 8);
        }
        result = compare(low.as<uint16_t>(), wide.as<float>(), count);
        right &= same(result, expected(low.as<uint16_t>(), wide.as<float>(), count));
      }
    }
  }
  check(right, std::string(under_test.name) + " compares as scalar does");

  const std::array<uint16_t, 5> weight{0x7fc0, 0x7f81, 0x8000, 0x3f80, 0x3f80};
  const std::array<uint32_t, 5> bits{0xffc12345u, 0x7fc00000u, 0x00000000u, 0x3f800001u, 0x3f810000u};
  std::array<float, 5> master;
  std::memcpy(master.data(), bits.data(), sizeof(bits));
  const Comparison result = under_test.compare_bf16(weight.data(), master.data(), weight.size());
  check(same(result, {3, 2, 2, 2}), std::string(under_test.name) + ": NaN equals NaN, zeros differ by sign");
}

bool same(const Digest& a, const Digest& b) {
  return a.sum == b.sum && a.inexact == b.inexact && a.first_inexact == b.first_inexact;
}

void test_digest_keys() {
  const uint32_t* keys = digest_keys();
  check(reinterpret_cast<uintptr_t>(keys) % 64 == 0, "keys start where a cache line does");
  std::vector<uint32_t> sorted(keys, keys + kDigestTile);
  std::sort(sorted.begin(), sorted.end());
  check(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "no key comes twice");
  check(sorted.front() > 1u << 31, "no 16-bit number is a multiple of a key");
  // By trial division, with every 32nd key: all of them would take seconds under the sanitizers.
  bool prime = true;
  for (int64_t i = 0; i < kDigestTile; i += 32) {
    for (uint64_t divisor = 2; divisor * divisor <= keys[i]; ++divisor) prime &= keys[i] % divisor != 0;
  }
  check(prime, "keys are prime");
}

// Elements of all sorts: exact ones, ones that rounding changes, NaN and infinities.
void fill_masters(Guarded& wide, size_t count, bool fp16, int inexact_in_16) {
  for (size_t i = 0; i < count; ++i) {
    const auto low = static_cast<uint16_t>(random_bits()());
    uint32_t bits = fp16 ? fp16_to_fp32_bits(low) : bf16_to_fp32_bits(low);
    if (static_cast<int>(random_bits()() % 16) < inexact_in_16) bits ^= random_bits()() & 0xfffu;
    std::memcpy(wide.as<char>() + i * 4, &bits, 4);
  }
}

void test_digest(const Kernels& under_test) {
  const std::string name = under_test.name;
  const Kernels& reference = scalar_kernels();
  bool right = true, right_16 = true;
  std::vector<size_t> lengths = awkward_lengths();
  lengths.insert(lengths.end(), {4095, 4096});
  for (const size_t count : lengths) {
    for (size_t offset = 0; offset < 64; ++offset) {
      Guarded wide(count * 4, offset);
      for (const bool fp16 : {false, true}) {
        const auto digest = fp16 ? under_test.digest_fp16 : under_test.digest_bf16;
        const auto expected = fp16 ? reference.digest_fp16 : reference.digest_bf16;
        for (const int inexact_in_16 : {0, 1, 16}) {
          if (inexact_in_16 == 1 && offset % 8 != 3) continue;
          fill_masters(wide, count, fp16, inexact_in_16);
          right &=
              same(digest(wide.as<float>(), digest_keys(), count), expected(wide.as<float>(), digest_keys(), count));
        }
      }
      right_16 &= under_test.digest_16_bit(wide.as<uint16_t>(), digest_keys(), 2 * count < 4096 ? 2 * count : count) ==
                  reference.digest_16_bit(wide.as<uint16_t>(), digest_keys(), 2 * count < 4096 ? 2 * count : count);
    }
  }
  check(right, name + " digests as scalar does, any length at any alignment");
  check(right_16, name + " digests 16-bit patterns as scalar does");

  // A master that rounds to its weight has its digest, and the count of what rounding changed is compare's; a NaN of
  // another payload may or may not.
  bool consistent = true;
  for (const bool fp16 : {false, true}) {
    const auto narrow = fp16 ? reference.narrow_fp16 : reference.narrow_bf16;
    const auto compare = fp16 ? reference.compare_fp16 : reference.compare_bf16;
    const auto digest = fp16 ? under_test.digest_fp16 : under_test.digest_bf16;
    const auto widen = fp16 ? reference.widen_fp16 : reference.widen_bf16;
    for (const size_t count : {1u, 33u, 4095u, 4096u}) {
      Guarded wide(count * 4, 0), low(count * 2, 2);
      wide.fill_random();
      narrow(wide.as<float>(), low.as<uint16_t>(), count);
      for (size_t i = 0; i < count; ++i) {
        if (low.as<uint16_t>()[i] % 3 == 0) widen(low.as<uint16_t>() + i, wide.as<float>() + i, 1, false);
      }
      const Digest found = digest(wide.as<float>(), digest_keys(), count);
      const Comparison compared = compare(low.as<uint16_t>(), wide.as<float>(), count);
      consistent &= compared.rounded_differences == 0 && found.inexact == compared.exact_differences &&
                    found.first_inexact == compared.first_exact &&
                    found.sum == under_test.digest_16_bit(low.as<uint16_t>(), digest_keys(), count);
    }
  }
  check(consistent, name + ": a consistent master has its weight's digest, and compare's count and first index");

  // Infinity, and NaNs whose payload rounding would cut off or keep; a signalling one that is exact stays as it is.
  const std::array<uint32_t, 5> bits{0x7f800000u, 0x7f800001u, 0x7f810000u, 0xffc00001u, 0x3f800001u};
  const std::array<uint16_t, 5> patterns{0x7f80, 0x7fc0, 0x7f81, 0xffc0, 0x3f80};
  std::array<float, 80> master{};
  std::array<uint16_t, 80> expected{};
  for (size_t i = 0; i < bits.size(); ++i) {
    std::memcpy(&master[3 + 7 * i], &bits[i], 4);
    expected[3 + 7 * i] = patterns[i];
  }
  const Digest found = under_test.digest_bf16(master.data(), digest_keys(), master.size());
  uint64_t sum = 0;
  for (size_t i = 0; i < expected.size(); ++i) sum += static_cast<uint64_t>(digest_keys()[i]) * expected[i];
  check(same(found, {sum, 1, 31}), name + ": the patterns of NaNs, which are not inexact");
}

// Thousands of small segments, empty ones between, next to a large one.
struct Workload {
  explicit Workload(Kind kind, int64_t large = 300'001) {
    std::vector<int64_t> counts;
    for (int i = 0; i < 3000; ++i) counts.push_back(i % 7 == 0 ? 0 : i % 53);
    counts.insert(counts.begin() + 1000, large);
    for (const int64_t count : counts) elements += count;
    weights.resize(static_cast<size_t>(elements * weight_bytes(kind)));
    copies.resize(static_cast<size_t>(elements * copy_bytes(kind)));
    for (auto& byte : weights) byte = static_cast<unsigned char>(random_bits()());
    int64_t at = 0;
    for (const int64_t count : counts) {
      list.push_back({kind, weights.data() + at * weight_bytes(kind), copies.data() + at * copy_bytes(kind), count});
      at += count;
    }
  }
  std::vector<unsigned char> weights;
  std::vector<unsigned char> copies;
  std::vector<Segment> list;
  int64_t elements = 0;
};

void test_parallel() {
  for (const int threads : {1, 2, 3, 8}) {
    Pool::instance().set_num_threads(threads);
    for (const Kind kind : {Kind::kWidenBf16, Kind::kWidenFp16, Kind::kCopy4Bytes, Kind::kCopy2Bytes}) {
      const std::string name =
          "kind " + std::to_string(static_cast<int64_t>(kind)) + ", " + std::to_string(threads) + " threads: ";
      Workload work(kind);
      const Segments segments(work.list);
      check(widen(segments, never), name + "widen finishes");
      std::vector<Comparison> results;
      check(compare(segments, results, never), name + "compare finishes");
      check(std::all_of(results.begin(), results.end(), [](const Comparison& r) { return same(r, {}); }),
            name + "every copy equals its weight");

      // One difference in a small segment; several, far apart, in the large one.
      const auto flip = [&](size_t index, int64_t element) {
        auto* copy = static_cast<unsigned char*>(work.list[index].copy);
        copy[(element + 1) * copy_bytes(kind) - 1] ^= 0x80u;  // the sign: never rounds away
      };
      const auto is_number = [&](size_t index, int64_t element) {
        const unsigned char* at =
            static_cast<const unsigned char*>(work.list[index].weight) + element * weight_bytes(kind);
        return (at[weight_bytes(kind) - 1] & 0x7cu) != 0x7cu;  // not near the largest exponent of either dtype
      };
      std::vector<int64_t> planted;
      for (int64_t at = 299'000; at > 70'000; at -= 50'000) {
        while (!is_number(1000, at)) --at;
        planted.push_back(at);
        flip(1000, at);
      }
      int64_t small = 0;
      while (!is_number(45, small)) ++small;
      flip(45, small);
      check(compare(segments, results, never), name + "compare finishes");
      const auto count = static_cast<int64_t>(planted.size());
      check(same(results[1000], {count, count, planted.back(), planted.back()}),
            name + "differences in a large segment");
      check(same(results[45], {1, 1, small, small}), name + "a difference in a small segment");

      const std::vector<unsigned char> before = work.weights;
      check(widen(segments, never) && narrow(segments, never), name + "narrow finishes");
      bool back = true;
      const auto step = static_cast<size_t>(weight_bytes(kind));
      for (size_t i = 0; i < before.size(); i += step) {
        const bool unchanged = std::memcmp(&before[i], &work.weights[i], step) == 0;
        back &= unchanged || (before[i + 1] & 0x7cu) == 0x7cu;  // a NaN comes back quiet
      }
      check(back, name + "there and back");
    }
  }
}

void sleep_a_little(int64_t) { std::this_thread::sleep_for(200us); }

void test_pool_resized_while_busy() {
  Pool& pool = Pool::instance();
  std::atomic<bool> stop{false};
  std::atomic<int64_t> blocks{0};
  std::atomic<int64_t> expected{0};
  std::vector<std::thread> submitters;
  for (int i = 0; i < 2; ++i) {
    submitters.emplace_back([&] {
      while (!stop) {
        expected += 50;
        pool.run(50, [&](int64_t) { ++blocks; }, never);
      }
    });
  }
  // Two threads that resize at once, so that growing meets shrinking half-way.
  std::vector<std::thread> resizers;
  for (int i = 0; i < 2; ++i) {
    resizers.emplace_back([&pool, i] {
      for (int round = 0; round < 100; ++round) pool.set_num_threads(1 + (round * 5 + i) % 7);
    });
  }
  for (auto& thread : resizers) thread.join();
  stop = true;
  for (auto& thread : submitters) thread.join();
  check(blocks == expected, "every block runs once while the pool is resized");
  bool refused = false;
  try {
    pool.set_num_threads(0);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  check(refused, "no threads at all are refused");
  pool.set_num_threads(3);
  check(pool.num_threads() == 3, "num_threads gives what was set");
  check(pool.num_threads(Use::kReading) == 3, "to reading too");
  pool.use_default_threads();
  check(pool.num_threads(Use::kReading) >= pool.num_threads(), "by default reading has no fewer threads");
  check(pool.num_threads(Use::kReading) <= 2 * pool.num_threads(), "and at most twice as many");
  pool.set_num_threads(3);
}

void test_pool_cancel() {
  Pool& pool = Pool::instance();
  std::atomic<int64_t> ran{0};
  std::atomic<int> running{0};
  int asked = 0;
  const bool finished = pool.run(
      100'000,
      [&](int64_t block) {
        ++running;
        sleep_a_little(block);
        ++ran;
        --running;
      },
      [&] { return ++asked == 2; });
  check(!finished, "run says that it was interrupted");
  check(running == 0, "no block runs after an interrupted run returns");
  check(asked == 2, "nothing is asked after the first yes");
  check(ran > 0 && ran < 100'000, "the rest of the blocks is given up");

  const auto batch = std::make_shared<Batch>(1000, [&](int64_t block) { sleep_a_little(block); });
  pool.submit(batch);
  Pool::cancel(*batch);
  while (!batch->done()) std::this_thread::sleep_for(100us);
  check(pool.run(10, sleep_a_little, never), "the pool works after a cancelled batch");
}

void test_feed() {
  Pool& pool = Pool::instance();
  constexpr int kJobs = 300;
  constexpr int64_t kBlocks = 7;
  std::vector<std::atomic<int>> seen(kJobs * kBlocks);
  {
    Feed feed(kJobs);
    std::vector<const Feed::Job*> jobs;
    for (int job = 0; job < kJobs; ++job) {
      jobs.push_back(&feed.publish(kBlocks, [&seen, job](int64_t block) { ++seen[job * kBlocks + block]; }));
      if (job % 10 == 0) std::this_thread::sleep_for(200us);  // the workers also find the feed empty
    }
    for (const Feed::Job* job : jobs) {
      while (!job->done()) sched_yield();
    }
  }
  bool once = true;
  for (const auto& count : seen) once = once && count == 1;
  check(once, "a feed runs every block of every job once");

  std::atomic<int> running{0};
  {
    Feed feed(1);
    feed.publish(100'000, [&](int64_t block) {
      ++running;
      sleep_a_little(block);
      --running;
    });
    std::this_thread::sleep_for(2ms);
  }
  check(running == 0, "no block runs after a feed that was left early");
  {
    const Feed empty(0);
  }
  std::atomic<int> read{0};
  {
    Feed feed(1, Use::kReading);
    const Feed::Job& job = feed.publish(50, [&](int64_t) { ++read; });
    while (!job.done()) sched_yield();
  }
  check(read == 50, "a feed for reading runs every block");

  // Two feeds at once: the second gets its workers when the first lets them go.
  std::atomic<int> done{0};
  const auto use = [&] {
    Feed feed(1);
    const Feed::Job& job = feed.publish(50, sleep_a_little);
    while (!job.done()) sched_yield();
    ++done;
  };
  std::thread first(use), second(use);
  first.join();
  second.join();
  check(done == 2, "two feeds at once both end");
  check(pool.run(10, sleep_a_little, never), "the pool works after a feed");
}

void test_pool_cores() {
  Pool& pool = Pool::instance();
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof(allowed), &allowed);
  int core = 0;
  while (!CPU_ISSET(core, &allowed)) ++core;
  pool.set_cores({core, CPU_SETSIZE + 5, -1});
  std::atomic<bool> right{true};
  pool.run(8, [&](int64_t) { right = right && sched_getcpu() == core; }, never);
  pool.shutdown();
  pool.run(8, [&](int64_t) { sleep_a_little(0); }, never);
  pool.run(8, [&](int64_t) { right = right && sched_getcpu() == core; }, never);
  check(right, "workers keep to the cores given, new ones too");
  std::vector<int> all;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &allowed)) all.push_back(i);
  }
  pool.set_cores(all);
}

void test_pool_shutdown() {
  Pool& pool = Pool::instance();
  pool.shutdown();
  pool.shutdown();
  check(pool.run(10, sleep_a_little, never), "the pool works after a shutdown");
}

void test_pool_fork() {
  Workload work(Kind::kWidenBf16);
  const Segments segments(work.list);
  Pool::instance().set_num_threads(3);
  widen(segments, never);
  const pid_t child = fork();
  if (child == 0) {
    std::vector<Comparison> results;
    bool right = Pool::instance().num_threads() == 3;
    std::fill(work.copies.begin(), work.copies.end(), static_cast<unsigned char>(0));
    right = right && widen(segments, never) && compare(segments, results, never);
    for (const Comparison& result : results) right = right && same(result, {});
    Pool::instance().shutdown();
    _exit(right ? 0 : 1);
  }
  int status = -1;
  check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
        "a child widens by itself");
  check(widen(segments, never), "the parent goes on");
}

size_t resident(const HostMemory& memory) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> there(memory.size() / page);
  if (mincore(memory.data(), memory.size(), there.data()) != 0) return 0;
  return page * static_cast<size_t>(std::count_if(there.begin(), there.end(), [](unsigned char c) { return c & 1; }));
}

void test_host_memory() {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = (5 << 20) + 1;
  HostMemory memory(bytes);
  check(memory.size() == (bytes + page - 1) / page * page, "host memory is rounded up to a page");
  check(reinterpret_cast<uintptr_t>(memory.data()) % page == 0, "host memory begins with a page");
  check(resident(memory) == 0, "host memory takes nothing before it is touched");
  check(memory.touch(0, bytes, never) && resident(memory) == memory.size(),
        "touched memory is there, to the last page");
  check(memory.touch(bytes, bytes, never) && memory.touch(0, 100 * bytes, never),
        "touching nothing, or beyond the end");
  check(std::all_of(memory.data(), memory.data() + bytes, [](char c) { return c == 0; }), "host memory reads as zeros");
  bool refused = false;
  try {
    const HostMemory too_much(size_t{1} << 60);
  } catch (const std::runtime_error& error) {
    refused = std::string(error.what()).find("cannot map 1152921504606846976 bytes") != std::string::npos;
  }
  check(refused, "memory that cannot be mapped is an error that says how much it was");
}

class KeptMemory : public HostMemory {
 public:
  using HostMemory::HostMemory;
  using HostMemory::keep_from_children;
};

void test_host_memory_fork() {
  auto memory = std::make_unique<KeptMemory>(1 << 20);
  memory->data()[0] = 7;
  memory->keep_from_children();
  const pid_t child = fork();
  if (child == 0) {
    // What comes to lie at the address that is free in the child must outlive the object.
    void* other = mmap(memory->data(), memory->size(), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    const bool absent = other == memory->data();
    memory.reset();
    if (absent) static_cast<volatile char*>(other)[0] = 1;
    _exit(absent ? 0 : 1);
  }
  int status = -1;
  check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
        "a child has no memory that is kept from it, and unmaps nothing");
  check(memory->data()[0] == 7, "the parent keeps it");
}

}  // namespace

int main(int argc, char** argv) {
  test_scalar_values();
  test_digest_keys();
  for (const std::string& name : kernel_names()) {
    set_kernels(name);
    check(kernels().name == name, "kernels " + name + " are in use");
    test_all_patterns(kernels());
    test_narrow(kernels());
    test_lengths_and_alignments(kernels());
    test_compare(kernels());
    test_digest(kernels());
    test_parallel();
  }
  set_kernels(kernel_names().front());
  bool refused = false;
  try {
    set_kernels("abacus");
  } catch (const std::invalid_argument& error) {
    refused = std::string(error.what()).find("scalar") != std::string::npos;
  }
  check(refused, "unknown kernels are refused, and the message names what there is");
  test_pool_resized_while_busy();
  test_pool_cancel();
  test_feed();
  test_pool_cores();
  test_pool_shutdown();
  test_host_memory();
  if (argc < 2 || std::string(argv[1]) != "--no-fork") {
    test_pool_fork();
    test_host_memory_fork();
  }
  Pool::instance().shutdown();
  std::string names;
  for (const std::string& name : kernel_names()) names += " " + name;
  std::printf("kernels:%s\n%d passed, %d failed\n", names.c_str(), passed, failed);
  return failed == 0 ? 0 : 1;
}
