// 8-bit moments: one code for each element and one float32 scale for each block of 256 elements of a parameter.
//
// Note [Block codec]: the scale is the largest magnitude of the block. A level L of 128 stands for scale * (L / 128)^2
// (first moment, with a sign) and a level of 256 for scale * (L / 256)^4 (second moment), so that a square root or two
// find the level: arithmetic instead of a table. Level 1 does not exist, code k > 0 is level k + 1: the top level is
// then a power of two, decodes to the scale exactly, and encoding what was decoded gives the same codes and scale
// (but for a block of zeros under a raised scale, and one that is not finite).
// Between two levels the random bits decide, with the odds that keep the expected value; but large first moments take
// the nearest, see Note [Stuck moments]. A positive second moment never becomes zero.
//
// A block with a NaN or inf has it in its scale, and decodes to it as a whole.
//
// Note [Stuck moments]: the nearest level has the smaller error, but an average that moves by less than half the
// distance to the next level stays where it is. A second moment moves by 0.1 % a step at beta2 = 0.999, less than that
// on every level: all of them take the random bits. A first moment whose gradient becomes zero falls by the share
// 1 - beta1 a step, and the level below L is lower by 2 / L of it: where L * (1 - beta1) < 1 it would never fall, while
// its second moment fades and their quotient, the update, grows. So first moments take the nearest level where the
// level below them is at least 1.5 / (1 - beta1) (15 for 0.9, 30 for 0.95, none from 0.989 on), and the random bits
// below that.
#pragma once

#include "adamw_math.h"

namespace zero_shard {

constexpr int64_t kBlockNumel = 256;
// A smaller scale is raised to this one, so that its lowest level is no zero in float32.
constexpr float kSmallestScale = 0x1p-100f;
// Random bits with which the nearest of two levels is taken: half of their range.
constexpr uint32_t kNearestLevel = 0x8000u;

// |value| where that is larger, or no number; so NaN and inf stay.
ZERO_SHARD_INLINE float larger_magnitude(float largest, float value) {
  const float magnitude = float_of(bits_of(value) & kFloat32Magnitude);
  return magnitude <= largest || largest != largest ? largest : magnitude;
}

ZERO_SHARD_INLINE float scale_of(float largest) {
  return largest > 0.0f && largest < kSmallestScale ? kSmallestScale : largest;
}

// For the encoders: 1 / scale, 0 for a block of zeros.
ZERO_SHARD_INLINE float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

ZERO_SHARD_INLINE float signed_level(float level, float scale) { return (level * level * 0x1p-14f) * scale; }
ZERO_SHARD_INLINE float unsigned_level(float level, float scale) {
  const float square = level * level * 0x1p-16f;
  return (square * square) * scale;
}

// Which level a code stands for, as a number; and so the next level is code + 2.
ZERO_SHARD_INLINE float level_of(int32_t code) {
  const float level = static_cast<float>(code + 1);
  return code == 0 ? 0.0f : level;
}

ZERO_SHARD_INLINE float decode_signed(int8_t code, float scale) {
  const int32_t wide = code;
  const float value = signed_level(level_of(wide < 0 ? -wide : wide), scale);
  return wide < 0 ? -value : value;
}

ZERO_SHARD_INLINE float decode_unsigned(uint8_t code, float scale) { return unsigned_level(level_of(code), scale); }

// The code of the level at or below position, which is counted in levels: 0 .. top. Anything else counts as top.
ZERO_SHARD_INLINE int32_t code_below(float position, float top) {
  const float clamped = position < top ? position : top;
  const int32_t code = static_cast<int32_t>(clamped) - 1;
  return code > 0 ? code : 0;
}

// Below, conditions are added as numbers where they can be: GCC vectorises no choice between results of other choices.

// random: 16 bits. nearest_from: of AdamwConstants.
ZERO_SHARD_INLINE int8_t encode_signed(float value, float scale, float inverse, uint32_t random, int32_t nearest_from) {
  const float magnitude = float_of(bits_of(value) & kFloat32Magnitude);
  const int32_t below = code_below(square_root(magnitude * inverse) * 128.0f, 128.0f);
  const float low = signed_level(level_of(below), scale);
  const float high = signed_level(static_cast<float>(below + 2), scale);
  // below + 1 is the level below, or 1 for level 0; nearest_from is 2 or more. As a ?: the loop is 3 times slower.
  const uint32_t is_nearest = static_cast<uint32_t>(below + 1 >= nearest_from);
  const uint32_t decisive = ((is_nearest - 1u) & random & 0xffffu) + is_nearest * kNearestLevel;
  const float chance = static_cast<float>(static_cast<int32_t>(decisive)) * 0x1p-16f;
  const bool is_up = (below < 127) & (chance * (high - low) < magnitude - low);
  const int32_t code = below + static_cast<int32_t>(is_up);
  return static_cast<int8_t>(value < 0.0f ? -code : code);
}

ZERO_SHARD_INLINE uint8_t encode_unsigned(float value, float scale, float inverse, uint32_t random) {
  const int32_t below = code_below(square_root(square_root(value * inverse)) * 256.0f, 256.0f);
  const float low = unsigned_level(level_of(below), scale);
  const float high = unsigned_level(static_cast<float>(below + 2), scale);
  const float chance = static_cast<float>(static_cast<int32_t>(random & 0xffffu)) * 0x1p-16f;
  const bool is_up = (below < 255) & (chance * (high - low) < value - low);
  const int32_t code = below + static_cast<int32_t>(is_up);
  const int32_t least = static_cast<int32_t>(value > 0.0f);
  return static_cast<uint8_t>(code > least ? code : least);
}

}  // namespace zero_shard
