// Gradients in 8 bits on the wire: one code for each element, one float32 scale for each block of 256.
//
// Note [Wire blocks]: a block is 260 bytes, its scale and then its codes, and a message is a row of blocks, so that it
// can be cut between any two of them. The scale is the largest magnitude divided by 127, a code the nearest multiple of
// it (to even): an element is off by half a scale at most, one in 254 of the largest. All by IEEE basic operations.
//
// A block with a NaN or inf has NaN for its scale and decodes to NaN as a whole. Where the largest magnitude is below
// 2^-100 it counts as that, so that neither the scale nor its inverse leaves the normal numbers.
#pragma once

#include "block_codec.h"

namespace zero_shard {

// Stands for the type of the elements of slices that are rows of such blocks.
struct Quantized {};

constexpr int64_t kScaleNbytes = sizeof(float);
constexpr int64_t kWireBlockNbytes = kScaleNbytes + kBlockNumel;
constexpr float kTopCode = 127.0f;

ZERO_SHARD_INLINE bool is_finite(float magnitude) { return magnitude < float_of(kFloat32Inf); }

// largest: the largest magnitude of the block.
ZERO_SHARD_INLINE float wire_scale_of(float largest) {
  return is_finite(largest) ? scale_of(largest) / kTopCode : float_of(kFloat32Inf | 0x400000u);
}

ZERO_SHARD_INLINE float wire_inverse_of(float largest) {
  return is_finite(largest) && largest > 0.0f ? kTopCode / scale_of(largest) : 0.0f;
}

// The sum has units in its last place, so the hardware rounds to nearest even, and its lower bits are the integer.
ZERO_SHARD_INLINE int8_t quantize(float value, float inverse) {
  return static_cast<int8_t>(bits_of(value * inverse + 0x1.8p23f) & 0xffu);
}

ZERO_SHARD_INLINE float dequantize(int8_t code, float scale) { return static_cast<float>(code) * scale; }

}  // namespace zero_shard
