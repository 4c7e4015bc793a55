// The keys of the digests: primes drawn by a generator of fixed seed, so that both sides and every run have the same.
#include <array>
#include <unordered_set>

#include "common/digest.h"

namespace megasetup {
namespace {

struct alignas(64) Keys : std::array<uint32_t, kDigestTile> {};

// SplitMix64.
uint64_t next_random(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t power(uint64_t base, uint32_t exponent, uint32_t modulus) {
  uint64_t result = 1;
  for (base %= modulus; exponent != 0; exponent >>= 1) {
    if (exponent & 1u) result = result * base % modulus;
    base = base * base % modulus;
  }
  return result;
}

// Miller-Rabin for an odd number above 61; with these three bases it is never wrong below 4,759,123,141.
bool is_prime(uint32_t candidate) {
  for (const uint32_t small : {3u, 5u, 7u, 11u, 13u, 17u, 19u, 23u, 29u, 31u}) {
    if (candidate % small == 0) return false;
  }
  uint32_t odd = candidate - 1;
  int halvings = 0;
  for (; odd % 2 == 0; odd /= 2) ++halvings;
  for (const uint32_t base : {2u, 7u, 61u}) {
    uint64_t value = power(base, odd, candidate);
    bool passes = value == 1 || value == candidate - 1;
    for (int i = 1; i < halvings && !passes; ++i) {
      value = value * value % candidate;
      passes = value == candidate - 1;
    }
    if (!passes) return false;
  }
  return true;
}

Keys make_keys() {
  Keys keys{};
  std::unordered_set<uint32_t> taken;
  uint64_t state = 4096;
  for (uint32_t& key : keys) {
    do {
      key = static_cast<uint32_t>(next_random(state) >> 32) | 0x80000001u;
    } while (!is_prime(key) || !taken.insert(key).second);
  }
  return keys;
}

}  // namespace

const uint32_t* digest_keys() {
  static const Keys keys = make_keys();
  return keys.data();
}

}  // namespace megasetup
