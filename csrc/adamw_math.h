// AdamW for ONE element, the constants it needs, and how a weight is stored. No Torch, no loop over elements.
//
// Note [One arithmetic]: IEEE basic operations in one fixed order, no fused multiply-add (-ffp-contract=off,
// -fmad=false), constants formed in double and rounded once. Every instruction set, thread count and device, vector
// body and tail, and the PyTorch twins in zero_shard/twins.py therefore give equal bits (the payload of a NaN
// excepted).
#pragma once

#include <math.h>

#include "number_formats.h"
#include "random_bits.h"

namespace zero_shard {

// Columns of group_hyper.
enum HyperColumn { kLr, kBeta1, kBeta2, kEps, kWeightDecay, kIsAmsgrad, kIsMaximize, kNumHyper };

template <class T>
struct BitsOf {
  using Type = uint32_t;
};
template <>
struct BitsOf<double> {
  using Type = uint64_t;
};
template <class T>
using Bits = typename BitsOf<T>::Type;

// a where the mask is all ones, b where it is zero. As a ternary with a loop-invariant bool this keeps GCC from
// vectorising some of the loops.
template <class T>
ZERO_SHARD_INLINE T choose(Bits<T> mask, T a, T b) {
  Bits<T> bits_a;
  Bits<T> bits_b;
  memcpy(&bits_a, &a, sizeof a);
  memcpy(&bits_b, &b, sizeof b);
  const Bits<T> bits = (bits_a & mask) | (bits_b & ~mask);
  T result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

// What the elements of one segment share. T is the compute type: float, or double for float64 weights.
template <class T>
struct AdamwConstants {
  T grad_scale;           // negative when maximizing: -(g * s) and g * -s are the same number
  T decay;                // 1 - lr * weight_decay
  T signed_first_weight;  // 1 - beta1; where that is at least one half, -beta1
  T beta2;
  T one_minus_beta2;
  T bias_correction2_sqrt;
  T eps;
  T minus_step_size;              // -(lr / (1 - beta1^t))
  Bits<T> is_first_weight_small;  // all ones or zero; see choose
  int32_t nearest_from;           // see nearest_level_from
  bool is_amsgrad;
};

ZERO_SHARD_INLINE float square_root(float value) { return sqrtf(value); }
ZERO_SHARD_INLINE double square_root(double value) { return sqrt(value); }

// By squaring, because pow of different libraries and devices differs in the last bit. The error of 1 - beta^t stays
// below 1e-13 for betas up to 0.9995.
ZERO_SHARD_INLINE double whole_power(double base, float exponent) {
  // Step counts are float32 and exact up to 2^24; the upper clamp only keeps the conversion defined.
  constexpr float kLargestStep = 0x1p62f;
  int64_t remaining = exponent > 0.0f ? static_cast<int64_t>(exponent < kLargestStep ? exponent : kLargestStep) : 0;
  double result = 1.0;
  for (; remaining != 0; remaining >>= 1) {
    if (remaining & 1) {
      result *= base;
    }
    base *= base;
  }
  return result;
}

// From which level below it on a first moment in 8 bits takes the nearest level: 1.5 / (1 - beta1), rounded to a whole
// number from 2 (above level 0) to 129 (above all). See Note [Stuck moments] in block_codec.h.
ZERO_SHARD_INLINE int32_t nearest_level_from(double beta1) {
  const double level = 1.5 / (1.0 - beta1) + 0.5;
  return level < 129.0 ? static_cast<int32_t>(level > 2.0 ? level : 2.0) : 129;
}

template <class T>
ZERO_SHARD_INLINE AdamwConstants<T> make_constants(const double* hyper, float step, double grad_scale) {
  const double first_weight = 1.0 - hyper[kBeta1];
  const T scale = static_cast<T>(grad_scale);
  AdamwConstants<T> constants;
  const bool is_small = first_weight < 0.5;
  constants.is_first_weight_small = is_small ? ~Bits<T>{0} : Bits<T>{0};
  constants.grad_scale = hyper[kIsMaximize] != 0.0 ? -scale : scale;
  constants.decay = static_cast<T>(1.0 - hyper[kLr] * hyper[kWeightDecay]);
  constants.signed_first_weight = is_small ? static_cast<T>(first_weight) : -static_cast<T>(1.0 - first_weight);
  constants.beta2 = static_cast<T>(hyper[kBeta2]);
  constants.one_minus_beta2 = static_cast<T>(1.0 - hyper[kBeta2]);
  constants.bias_correction2_sqrt = static_cast<T>(square_root(1.0 - whole_power(hyper[kBeta2], step)));
  constants.eps = static_cast<T>(hyper[kEps]);
  constants.minus_step_size = static_cast<T>(-(hyper[kLr] / (1.0 - whole_power(hyper[kBeta1], step))));
  constants.nearest_from = nearest_level_from(hyper[kBeta1]);
  constants.is_amsgrad = hyper[kIsAmsgrad] != 0.0;
  return constants;
}

// Source: arXiv:1711.05101, algorithm 2, in the operation order of torch.optim.AdamW.
// max_exp_avg_sq is read and written only if kIsAmsgrad.
template <bool kIsAmsgrad, class T>
ZERO_SHARD_INLINE void adamw_element(
    const AdamwConstants<T>& constants, T grad, T& param, T& exp_avg, T& exp_avg_sq, T& max_exp_avg_sq) {
  grad = grad * constants.grad_scale;
  param = param * constants.decay;
  // torch's lerp, which starts from the nearer end: m + w * (g - m), or g - (g - m) * (1 - w).
  const T base = choose(constants.is_first_weight_small, exp_avg, grad);
  exp_avg = base + constants.signed_first_weight * (grad - exp_avg);
  exp_avg_sq = exp_avg_sq * constants.beta2 + (constants.one_minus_beta2 * grad) * grad;
  T square = exp_avg_sq;
  if (kIsAmsgrad) {
    // Keeps a NaN on either side, as torch.maximum does.
    const bool is_old = (max_exp_avg_sq > exp_avg_sq) | (max_exp_avg_sq != max_exp_avg_sq);
    square = is_old ? max_exp_avg_sq : exp_avg_sq;
    max_exp_avg_sq = square;
  }
  const T denom = square_root(square) / constants.bias_correction2_sqrt + constants.eps;
  param = param + (constants.minus_step_size * exp_avg) / denom;
}

// --- how a weight is stored: Storage in the model, Low beside it, Compute in between --------------------------

struct Nothing {};

// random: 32 bits, looked at only where kIsStochastic.

template <class T>
struct PlainWeight {
  static constexpr bool kIsStochastic = false;
  using Storage = T;
  using Low = Nothing;
  using Compute = T;
  ZERO_SHARD_INLINE T join(T storage, Nothing) { return storage; }
  ZERO_SHARD_INLINE void split(T master, T& storage, Nothing&, uint32_t) { storage = master; }
};

// 16-bit weight without a master.
template <class T>
struct RoundedWeight {
  static constexpr bool kIsStochastic = false;
  using Storage = T;
  using Low = Nothing;
  using Compute = float;
  ZERO_SHARD_INLINE float join(T storage, Nothing) { return widen(storage); }
  ZERO_SHARD_INLINE void split(float master, T& storage, Nothing&, uint32_t) { storage = convert<T>(master); }
};

// See Note [Keyed rounding].
struct StochasticWeight {
  static constexpr bool kIsStochastic = true;
  using Storage = BFloat16;
  using Low = Nothing;
  using Compute = float;
  ZERO_SHARD_INLINE float join(BFloat16 storage, Nothing) { return widen(storage); }
  ZERO_SHARD_INLINE void split(float master, BFloat16& storage, Nothing&, uint32_t random) {
    storage = round_to_bfloat16_by(master, random);
  }
};

// See Note [Remainder].
struct RemainderWeight {
  static constexpr bool kIsStochastic = false;
  using Storage = BFloat16;
  using Low = int16_t;
  using Compute = float;
  ZERO_SHARD_INLINE float join(BFloat16 storage, int16_t low) { return join_remainder(storage, low); }
  ZERO_SHARD_INLINE void split(float master, BFloat16& storage, int16_t& low, uint32_t) {
    split_remainder(master, storage, low);
  }
};

// float16 with a whole float32 master, which is made again where the weight was edited or loaded.
struct MasterWeight {
  static constexpr bool kIsStochastic = false;
  using Storage = Float16;
  using Low = float;
  using Compute = float;
  ZERO_SHARD_INLINE float join(Float16 storage, float low) {
    return round_to_float16(low).bits == storage.bits ? low : widen(storage);
  }
  ZERO_SHARD_INLINE void split(float master, Float16& storage, float& low, uint32_t) {
    storage = round_to_float16(master);
    low = master;
  }
};

}  // namespace zero_shard
