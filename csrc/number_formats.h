// Conversions between floating-point formats, by integer arithmetic and selects only: no branch (so that loops over
// them vectorise), no dependence on F16C or on CUDA's types, equal bits everywhere. All round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "portable.h"

namespace zero_shard {

// 16-bit values; distinct types, so that overloads choose the conversion.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// The type behind a pointer to T. GCC does not vectorise a loop that stores a struct.
template <class T>
struct Memory {
  using Raw = T;
};
template <>
struct Memory<BFloat16> {
  using Raw = uint16_t;
};
template <>
struct Memory<Float16> {
  using Raw = uint16_t;
};
template <class T>
using Raw = typename Memory<T>::Raw;

template <class T>
ZERO_SHARD_INLINE T from_raw(Raw<T> raw) {
  return T{raw};
}
template <class T>
ZERO_SHARD_INLINE T to_raw(T value) {
  return value;
}
ZERO_SHARD_INLINE uint16_t to_raw(BFloat16 value) { return value.bits; }
ZERO_SHARD_INLINE uint16_t to_raw(Float16 value) { return value.bits; }

constexpr uint32_t kFloat32Magnitude = 0x7fffffffu;
constexpr uint32_t kFloat32Inf = 0x7f800000u;
constexpr uint32_t kBFloat16QuietBit = 0x40u;
// Rebiases an exponent between float32 (127) and float16 (15), in float32's exponent field.
constexpr uint32_t kFloat16Rebias = (127u - 15u) << 23;
constexpr uint32_t kFloat16Overflow = 0x47800000u;        // 65536.0f: from here on only inf or NaN
constexpr uint32_t kFloat16SmallestNormal = 0x38800000u;  // 2^-14
constexpr uint32_t kFloat16MantissaShift = 23 - 10;

ZERO_SHARD_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ZERO_SHARD_INLINE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

ZERO_SHARD_INLINE float widen(BFloat16 value) { return float_of(uint32_t{value.bits} << 16); }

ZERO_SHARD_INLINE BFloat16 round_to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const bool is_nan = (bits & kFloat32Magnitude) > kFloat32Inf;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | kBFloat16QuietBit;
  return BFloat16{static_cast<uint16_t>(is_nan ? quiet : rounded)};
}

// Up or down with the odds that keep the expected value; random: 16 bits. A finite value stays finite.
ZERO_SHARD_INLINE BFloat16 round_to_bfloat16_by(float value, uint32_t random) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & kFloat32Magnitude;
  const uint32_t rounded = bits + (random & 0xffffu);
  const bool is_over = magnitude + (random & 0xffffu) >= kFloat32Inf;  // also keeps a NaN from carrying into its sign
  const uint32_t quiet = magnitude > kFloat32Inf ? uint32_t{kBFloat16QuietBit} << 16 : 0u;
  return BFloat16{static_cast<uint16_t>(((is_over ? bits : rounded) | quiet) >> 16)};
}

ZERO_SHARD_INLINE float widen(Float16 value) {
  const uint32_t sign = (uint32_t{value.bits} & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t{value.bits} & 0x7fffu;
  const uint32_t shifted = (magnitude << kFloat16MantissaShift) + kFloat16Rebias;
  const uint32_t special = shifted + kFloat16Rebias;  // inf and NaN: the exponent becomes all ones
  // Subnormal: the mantissa counts units of 2^-24. By an exact product, as float32 subnormals may be flushed.
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t finite = magnitude < 0x400u ? subnormal : shifted;
  return float_of(sign | (magnitude >= 0x7c00u ? special : finite));
}

ZERO_SHARD_INLINE Float16 round_to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & kFloat32Magnitude;
  // Adding 0.5 puts the unit of 2^-24 in the last place of the sum, so the hardware does the rounding.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t is_odd = (magnitude >> kFloat16MantissaShift) & 1u;
  // Rounding up past 65504 carries into the exponent and gives the code of inf, as it should.
  const uint32_t normal = (magnitude + 0xfffu + is_odd - kFloat16Rebias) >> kFloat16MantissaShift;
  const uint32_t nan = 0x7e00u | ((magnitude >> kFloat16MantissaShift) & 0x3ffu);
  const uint32_t special = magnitude > kFloat32Inf ? nan : 0x7c00u;
  const uint32_t finite = magnitude < kFloat16SmallestNormal ? subnormal : normal;
  return Float16{static_cast<uint16_t>(sign | (magnitude >= kFloat16Overflow ? special : finite))};
}

ZERO_SHARD_INLINE float widen(float value) { return value; }
ZERO_SHARD_INLINE double widen(double value) { return value; }

// convert<To>(from) rounds one value to another format. From float64 to 16 bits the way leads through float32, as in
// Tensor.to, which therefore gives the same bits.
template <class To>
struct Converter {
  template <class From>
  ZERO_SHARD_INLINE To call(From value) {
    return static_cast<To>(value);
  }
};
template <>
struct Converter<BFloat16> {
  ZERO_SHARD_INLINE BFloat16 call(float value) { return round_to_bfloat16(value); }
  ZERO_SHARD_INLINE BFloat16 call(double value) { return round_to_bfloat16(static_cast<float>(value)); }
};
template <>
struct Converter<Float16> {
  ZERO_SHARD_INLINE Float16 call(float value) { return round_to_float16(value); }
  ZERO_SHARD_INLINE Float16 call(double value) { return round_to_float16(static_cast<float>(value)); }
};
template <class To, class From>
ZERO_SHARD_INLINE To convert(From value) {
  return Converter<To>::call(value);
}

// Note [Remainder]: a float32 master weight is kept as its bfloat16 weight, rounded half up, and what is missing to the
// 32 bits, which fits 16 bits with a sign. Lossless. With all-ones exponents the weight alone holds inf or NaN:
// rounding could carry a NaN into the sign bit and make it -0.0.
ZERO_SHARD_INLINE void split_remainder(float master, BFloat16& high, int16_t& remainder) {
  const uint32_t bits = bits_of(master);
  const uint32_t magnitude = bits & kFloat32Magnitude;
  const bool is_special = magnitude >= kFloat32Inf;
  const uint32_t special = (bits >> 16) | (magnitude > kFloat32Inf ? kBFloat16QuietBit : 0u);
  const uint32_t rounded = (bits + 0x8000u) >> 16;
  const uint32_t missing = bits - (rounded << 16);
  high = BFloat16{static_cast<uint16_t>(is_special ? special : rounded)};
  remainder = static_cast<int16_t>(is_special ? 0u : missing);
}

// A remainder that no split leaves beside this weight is stale (somebody wrote zero, inf or NaN into the weight) and
// counts as 0; adding it would turn a zero into a NaN.
ZERO_SHARD_INLINE float join_remainder(BFloat16 high, int16_t remainder) {
  const uint32_t bits = uint32_t{high.bits} << 16;
  const uint32_t magnitude = bits & kFloat32Magnitude;
  const bool is_stale = ((magnitude == 0u) & (remainder < 0)) | ((magnitude == kFloat32Inf) & (remainder > 0)) |
                        (magnitude > kFloat32Inf);
  return float_of(bits + (is_stale ? 0u : static_cast<uint32_t>(static_cast<int32_t>(remainder))));
}

}  // namespace zero_shard
