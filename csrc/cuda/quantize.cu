// quantize_: values to blocks of the wire, a warp for each block. See Note [Wire blocks].
#include "../wire_codec.h"
#include "common.cuh"
#include "launch.h"

namespace zero_shard {
namespace {

constexpr int kMinBlocks = 4;  // per multiprocessor: leaves a thread 64 registers
constexpr int kNumel = kAccessNbytes / static_cast<int>(sizeof(float));
constexpr int kVectors = static_cast<int>(kBlockNumel) / kLanesPerWarp / kNumel;

template <class Value>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    quantize_kernel(const __grid_constant__ QuantizeArgs args, const bool has_vectors) {
  for (int64_t block = warp_number(); block * kBlockNumel < args.numel; block += num_warps()) {
    const Value* values = static_cast<const Value*>(args.values) + block * kBlockNumel;
    uint8_t* wire = static_cast<uint8_t*>(args.wire) + block * kWireBlockNbytes;
    float wide[kVectors][kNumel];
    float largest = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const Value* first = values + (v * kLanesPerWarp + lane_number()) * kNumel;
      const Vector<Value, kNumel> vector =
          has_vectors ? load_first<true, kNumel>(first, kNumel) : load_first<false, kNumel>(first, kNumel);
#pragma unroll
      for (int k = 0; k < kNumel; ++k) {
        wide[v][k] = widen(vector.values[k]);
        largest = larger_magnitude(largest, wide[v][k]);
      }
    }
#pragma unroll
    for (int distance = kLanesPerWarp / 2; distance > 0; distance /= 2) {
      largest = larger_magnitude(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    const float inverse = wire_inverse_of(largest);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Vector<int8_t, kNumel> codes;
#pragma unroll
      for (int k = 0; k < kNumel; ++k) {
        codes.values[k] = is_finite(largest) ? quantize(wide[v][k], inverse) : int8_t{0};
      }
      int8_t* first = reinterpret_cast<int8_t*>(wire + kScaleNbytes) + (v * kLanesPerWarp + lane_number()) * kNumel;
      if (has_vectors) {
        store_first<true>(first, codes, kNumel);
      } else {
        store_first<false>(first, codes, kNumel);
      }
    }
    if (lane_number() == 0) {
      const float scale = wire_scale_of(largest);
      memcpy(wire, &scale, sizeof scale);
    }
  }
}

template <class Value>
const char* launch(const QuantizeArgs& args, void* stream) {
  const bool has_vectors = is_aligned(args.values) && is_aligned(args.wire);
  return launch_warps(quantize_kernel<Value>, args.numel / kBlockNumel, stream, args, has_vectors);
}

}  // namespace

const char* launch_quantize(const QuantizeArgs& args, void* stream) {
  switch (args.dtype) {
    case DType::kFloat32:
      return launch<float>(args, stream);
    case DType::kBFloat16:
      return launch<BFloat16>(args, stream);
    case DType::kFloat16:
      return launch<Float16>(args, stream);
    default:
      return "no kernel for this dtype of values";
  }
}

}  // namespace zero_shard
