// adamw_ with 8-bit moments, by blocks of 256 elements. See Note [Block codec].
//
// A warp takes one block at a time, 8 elements to a lane: decode, update, find the new scales, encode. The segments of
// a shard begin at multiples of a block, so each block belongs to one segment at most; what it does not fill is left
// out.
#include "../block_codec.h"
#include "weights.cuh"

namespace zero_shard {
namespace {

constexpr int64_t kTileNumel = 4 * kBlockNumel;
constexpr int kMinBlocks = 2;  // per multiprocessor: leaves a thread 80 registers
constexpr int kPerLane = static_cast<int>(kBlockNumel) / kLanesPerWarp;

// What one lane holds of a block: kVectors vectors of kNumel elements, those of a warp side by side.
template <class Weight>
struct LaneOfBlock {
  using S = Stored<Weight>;
  static constexpr int kNumel = smaller(kAccessNbytes / S::kWidest, kPerLane);
  static constexpr int kVectors = kPerLane / kNumel;
  Vector<typename S::Storage, kNumel> param[kVectors];
  Vector<typename S::Low, kNumel> low[kVectors];
  Vector<int8_t, kNumel> exp_avg[kVectors];
  Vector<uint8_t, kNumel> exp_avg_sq[kVectors];
  float grad[kVectors][kNumel];

  // Where vector v begins in the block.
  __device__ __forceinline__ static int offset_of(int v) { return (v * kLanesPerWarp + lane_number()) * kNumel; }

  // The first num elements of the block, which begins at element `begin` of the shard.
  template <bool kIsWhole>
  __device__ __forceinline__ void load(const AdamwArgs& args, const Part<Weight>& part, int64_t begin, int num) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = begin + offset_of(v);
      const int left = num - offset_of(v);
      param[v] = load_first<kIsWhole, kNumel>(static_cast<const typename S::Storage*>(args.param) + i, left);
      exp_avg[v] = load_first<kIsWhole, kNumel>(static_cast<const int8_t*>(args.exp_avg) + i, left);
      exp_avg_sq[v] = load_first<kIsWhole, kNumel>(static_cast<const uint8_t*>(args.exp_avg_sq) + i, left);
      low[v] = {};
      if constexpr (S::kHasLow) {
        low[v] = load_first<kIsWhole, kNumel>(static_cast<const typename S::Low*>(args.low) + i, left);
      }
      part.gradient.template read<kIsWhole>(i, left, grad[v]);
    }
  }

  template <bool kIsWhole>
  __device__ __forceinline__ void store(const AdamwArgs& args, int64_t begin, int num) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t i = begin + offset_of(v);
      const int left = num - offset_of(v);
      store_first<kIsWhole>(static_cast<typename S::Storage*>(args.param) + i, param[v], left);
      store_first<kIsWhole>(static_cast<int8_t*>(args.exp_avg) + i, exp_avg[v], left);
      store_first<kIsWhole>(static_cast<uint8_t*>(args.exp_avg_sq) + i, exp_avg_sq[v], left);
      if constexpr (S::kHasLow) {
        store_first<kIsWhole>(static_cast<typename S::Low*>(args.low) + i, low[v], left);
      }
    }
  }
};

__device__ __forceinline__ float scale_by_warp(float largest) {
#pragma unroll
  for (int distance = kLanesPerWarp / 2; distance > 0; distance /= 2) {
    largest = larger_magnitude(largest, __shfl_xor_sync(kAllLanes, largest, distance));
  }
  return scale_of(largest);
}

// The first num elements of the block that begins at element `begin` of the shard.
template <class Weight>
__device__ __forceinline__ void update_block(
    const AdamwArgs& args, const Part<Weight>& part, int64_t begin, int num, bool is_whole) {
  using Lane = LaneOfBlock<Weight>;
  const int64_t block = begin / kBlockNumel;
  const float old_scale = args.exp_avg_scale[block];
  const float old_scale_sq = args.exp_avg_sq_scale[block];
  Lane lane;
  if (is_whole) {
    lane.template load<true>(args, part, begin, num);
  } else {
    lane.template load<false>(args, part, begin, num);
  }
  float mean[Lane::kVectors][Lane::kNumel];
  float square[Lane::kVectors][Lane::kNumel];
  float largest = 0.0f;
  float largest_sq = 0.0f;
#pragma unroll
  for (int v = 0; v < Lane::kVectors; ++v) {
#pragma unroll
    for (int k = 0; k < Lane::kNumel; ++k) {
      float master = join<Weight>(lane.param[v].values[k], lane.low[v].values[k]);
      float unused = 0.0f;
      mean[v][k] = decode_signed(lane.exp_avg[v].values[k], old_scale);
      square[v][k] = decode_unsigned(lane.exp_avg_sq[v].values[k], old_scale_sq);
      adamw_element<false>(part.constants, lane.grad[v][k], master, mean[v][k], square[v][k], unused);
      const int i = Lane::offset_of(v) + k;
      largest = i < num ? larger_magnitude(largest, mean[v][k]) : largest;
      largest_sq = i < num ? larger_magnitude(largest_sq, square[v][k]) : largest_sq;
      const uint32_t random = Weight::kIsStochastic ? part.random(part.key, begin + i) : 0;
      split<Weight>(master, random, lane.param[v].values[k], lane.low[v].values[k]);
    }
  }
  const float scale = scale_by_warp(largest);
  const float scale_sq = scale_by_warp(largest_sq);
  const float inverse = inverse_of(scale);
  const float inverse_sq = inverse_of(scale_sq);
  const RandomKey stream = moment_key(part.key);
#pragma unroll
  for (int v = 0; v < Lane::kVectors; ++v) {
#pragma unroll
    for (int k = 0; k < Lane::kNumel; ++k) {
      const uint32_t random = part.random(stream, begin + Lane::offset_of(v) + k);
      lane.exp_avg[v].values[k] =
          encode_signed(mean[v][k], scale, inverse, random & 0xffffu, part.constants.nearest_from);
      lane.exp_avg_sq[v].values[k] = encode_unsigned(square[v][k], scale_sq, inverse_sq, random >> 16);
    }
  }
  if (is_whole) {
    lane.template store<true>(args, begin, num);
  } else {
    lane.template store<false>(args, begin, num);
  }
  if (lane_number() == 0) {
    args.exp_avg_scale[block] = scale;
    args.exp_avg_sq_scale[block] = scale_sq;
  }
}

template <class Weight>
__global__ void __launch_bounds__(kThreads, kMinBlocks) adamw_blocks_kernel(
    const __grid_constant__ AdamwArgs args, const __grid_constant__ GradTable table, const bool has_vectors) {
  for_parts<Weight, true>(args, table, kTileNumel, [&](const Part<Weight>& part) {
    for (int64_t begin = part.begin; begin < part.end; begin += kBlockNumel) {
      const int num = static_cast<int>(smaller(kBlockNumel, part.end - begin));
      const bool is_whole = has_vectors && part.gradient.has_vectors && num == kBlockNumel;
      update_block(args, part, begin, num, is_whole);
    }
  });
}

template <class Weight>
const char* launch(const AdamwArgs& args, void* stream) {
  const bool has_vectors =
      is_aligned(args.param) && is_aligned(args.low) && is_aligned(args.exp_avg) && is_aligned(args.exp_avg_sq);
  return launch_parts(adamw_blocks_kernel<Weight>, args, kTileNumel, has_vectors, stream);
}

}  // namespace

const char* launch_adamw_blocks(const AdamwArgs& args, void* stream) {
  switch (args.param_dtype) {
    case DType::kFloat32:
      return launch<PlainWeight<float>>(args, stream);
    case DType::kBFloat16:
      if (args.is_stochastic) {
        return launch<StochasticWeight>(args, stream);
      }
      return args.low != nullptr ? launch<RemainderWeight>(args, stream)
                                 : launch<RoundedWeight<BFloat16>>(args, stream);
    case DType::kFloat16:
      return args.low != nullptr ? launch<MasterWeight>(args, stream) : launch<RoundedWeight<Float16>>(args, stream);
    default:
      return "no kernel for this dtype of param with 8-bit moments";
  }
}

}  // namespace zero_shard
