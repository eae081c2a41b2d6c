// Random bits for stochastic rounding, from a counter: the parameter's number, its step and the element's index.
//
// Note [Keyed rounding]: the same element of the same parameter at the same step gets the same bits, whatever the world
// size, bucket, thread or device. The index counts the whole parameter's elements in memory order, not the shard's.
#pragma once

#include <cstdint>

#include "portable.h"

namespace zero_shard {

// What the elements of one parameter share at one step.
struct RandomKey {
  uint32_t first;
  uint32_t second;
};

// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
ZERO_SHARD_INLINE uint64_t mix_bits(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

ZERO_SHARD_INLINE RandomKey make_random_key(int64_t param_number, int64_t step) {
  const uint64_t bits =
      mix_bits(mix_bits(static_cast<uint64_t>(param_number) + 0x9e3779b97f4a7c15u) + static_cast<uint64_t>(step));
  return RandomKey{static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
}

// The key of the elements whose index has these upper 32 bits, so that the loops count in 32 bits.
ZERO_SHARD_INLINE RandomKey key_of_upper(RandomKey key, uint32_t upper_index) {
  return RandomKey{key.first + upper_index * 0x9e3779b9u, key.second ^ upper_index};
}

// A second stream of bits for the same elements: 8-bit moments take the lower 16 bits of each word for the first
// moment, the upper 16 for the second; 16-bit weights take the lower 16 bits of the first stream.
ZERO_SHARD_INLINE RandomKey moment_key(RandomKey key) { return RandomKey{key.second, key.first}; }

// 32 bits for the element with this lower half of the index. The multipliers are those of the hash "lowbias32".
ZERO_SHARD_INLINE uint32_t random_bits(RandomKey key, uint32_t lower_index) {
  uint32_t bits = lower_index ^ key.first;
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits += key.second;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  return bits ^ (bits >> 16);
}

}  // namespace zero_shard
