// adamw_: one grid-stride launch per call, whatever the number of segments.
//
//   shard   |----------- tile 0 -----------|----------- tile 1 -----------|--- ...
//   segments|-- s0 --|-s1-|  gap |------------ s2 ------------|-s3-| ...
//
// A block takes whole tiles. For each segment that meets its tile, one thread forms the constants (kept while group and
// step stay the same), then all threads update the overlap. Tiles start at multiples of the vector length, so vectors
// sit at the same place in every tensor, and only those that a segment's edge cuts are done element by element.
#include "../adamw_math.h"
#include "common.cuh"
#include "launch.h"

namespace zero_shard {
namespace {

constexpr int64_t kTileNumel = 8192;

template <class Weight>
struct LowOf {
  using Type = typename Weight::Low;
  static constexpr bool kIsPresent = true;
};
template <class T>
struct LowOf<PlainWeight<T>> {
  using Type = T;  // never touched
  static constexpr bool kIsPresent = false;
};
template <class T>
struct LowOf<RoundedWeight<T>> {
  using Type = T;  // never touched
  static constexpr bool kIsPresent = false;
};

// The shard's tensors by their types.
template <class Weight, class Moment>
struct Shard {
  using T = typename Weight::Compute;
  using Storage = typename Weight::Storage;
  using Low = typename LowOf<Weight>::Type;
  static constexpr bool kHasLow = LowOf<Weight>::kIsPresent;
  // As many elements per thread as fill a 16-byte access of the narrowest tensor.
  static constexpr int64_t kNarrowest = sizeof(Storage) < sizeof(Moment) ? sizeof(Storage) : sizeof(Moment);
  static constexpr int kVectorNumel = kAccessNbytes / kNarrowest;

  Storage* param;
  Low* low;
  const T* grad;
  Moment* exp_avg;
  Moment* exp_avg_sq;
  Moment* max_exp_avg_sq;

  explicit Shard(const AdamwArgs& args)
      : param(static_cast<Storage*>(args.param)),
        low(static_cast<Low*>(args.low)),
        grad(static_cast<const T*>(args.grad)),
        exp_avg(static_cast<Moment*>(args.exp_avg)),
        exp_avg_sq(static_cast<Moment*>(args.exp_avg_sq)),
        max_exp_avg_sq(static_cast<Moment*>(args.max_exp_avg_sq)) {}

  bool is_aligned() const {
    return zero_shard::is_aligned(param) && zero_shard::is_aligned(low) && zero_shard::is_aligned(grad) &&
           zero_shard::is_aligned(exp_avg) && zero_shard::is_aligned(exp_avg_sq) &&
           zero_shard::is_aligned(max_exp_avg_sq);
  }
};

// One element from stored to stored form; the only use of the mathematics, for vectors and single elements alike.
template <bool kIsAmsgrad, class S, class Weight, class Moment>
__device__ __forceinline__ void update(
    const AdamwConstants<typename S::T>& constants, typename S::Storage& param, typename S::Low& low,
    typename S::T grad, Moment& exp_avg, Moment& exp_avg_sq, Moment& max_exp_avg_sq) {
  using T = typename S::T;
  Nothing nothing;
  T master;
  if constexpr (S::kHasLow) {
    master = Weight::join(param, low);
  } else {
    master = Weight::join(param, nothing);
  }
  T mean = widen(exp_avg);
  T square = widen(exp_avg_sq);
  T max_square = T(0);
  if constexpr (kIsAmsgrad) {
    max_square = widen(max_exp_avg_sq);
  }
  adamw_element<kIsAmsgrad>(constants, grad, master, mean, square, max_square);
  exp_avg = convert<Moment>(mean);
  exp_avg_sq = convert<Moment>(square);
  if constexpr (kIsAmsgrad) {
    max_exp_avg_sq = convert<Moment>(max_square);
  }
  if constexpr (S::kHasLow) {
    Weight::split(master, param, low);
  } else {
    Weight::split(master, param, nothing);
  }
}

template <bool kIsAmsgrad, class Weight, class Moment>
__device__ __forceinline__ void update_one(
    const Shard<Weight, Moment>& shard, const AdamwConstants<typename Weight::Compute>& constants, int64_t i) {
  using S = Shard<Weight, Moment>;
  typename S::Low low{};
  if constexpr (S::kHasLow) {
    low = shard.low[i];
  }
  Moment max_square{};
  if constexpr (kIsAmsgrad) {
    max_square = shard.max_exp_avg_sq[i];
  }
  update<kIsAmsgrad, S, Weight>(
      constants, shard.param[i], low, shard.grad[i], shard.exp_avg[i], shard.exp_avg_sq[i], max_square);
  if constexpr (S::kHasLow) {
    shard.low[i] = low;
  }
  if constexpr (kIsAmsgrad) {
    shard.max_exp_avg_sq[i] = max_square;
  }
}

template <bool kIsAmsgrad, class Weight, class Moment>
__device__ __forceinline__ void update_vector(
    const Shard<Weight, Moment>& shard, const AdamwConstants<typename Weight::Compute>& constants, int64_t i) {
  using S = Shard<Weight, Moment>;
  constexpr int kNumel = S::kVectorNumel;
  Vector<typename S::Storage, kNumel> param = load_vector<kNumel>(shard.param + i);
  const Vector<typename S::T, kNumel> grad = load_vector<kNumel>(shard.grad + i);
  Vector<Moment, kNumel> exp_avg = load_vector<kNumel>(shard.exp_avg + i);
  Vector<Moment, kNumel> exp_avg_sq = load_vector<kNumel>(shard.exp_avg_sq + i);
  Vector<typename S::Low, kNumel> low{};
  if constexpr (S::kHasLow) {
    low = load_vector<kNumel>(shard.low + i);
  }
  Vector<Moment, kNumel> max_exp_avg_sq{};
  if constexpr (kIsAmsgrad) {
    max_exp_avg_sq = load_vector<kNumel>(shard.max_exp_avg_sq + i);
  }
#pragma unroll
  for (int k = 0; k < kNumel; ++k) {
    update<kIsAmsgrad, S, Weight>(
        constants, param.values[k], low.values[k], grad.values[k], exp_avg.values[k], exp_avg_sq.values[k],
        max_exp_avg_sq.values[k]);
  }
  store_vector(shard.param + i, param);
  store_vector(shard.exp_avg + i, exp_avg);
  store_vector(shard.exp_avg_sq + i, exp_avg_sq);
  if constexpr (S::kHasLow) {
    store_vector(shard.low + i, low);
  }
  if constexpr (kIsAmsgrad) {
    store_vector(shard.max_exp_avg_sq + i, max_exp_avg_sq);
  }
}

// Elements begin <= i < end of one tile by the threads of one block.
template <bool kIsAmsgrad, class Weight, class Moment>
__device__ __forceinline__ void update_range(
    const Shard<Weight, Moment>& shard, const AdamwConstants<typename Weight::Compute>& constants, int64_t begin,
    int64_t end, bool has_vectors) {
  constexpr int64_t kNumel = Shard<Weight, Moment>::kVectorNumel;
  if (!has_vectors) {
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      update_one<kIsAmsgrad>(shard, constants, i);
    }
    return;
  }
  const int64_t first = begin - begin % kNumel;
  for (int64_t i = first + threadIdx.x * kNumel; i < end; i += kThreads * kNumel) {
    if (i >= begin && i + kNumel <= end) {
      update_vector<kIsAmsgrad>(shard, constants, i);
    } else {
      for (int64_t k = i < begin ? begin : i; k < end && k < i + kNumel; ++k) {
        update_one<kIsAmsgrad>(shard, constants, k);
      }
    }
  }
}

template <class Weight, class Moment>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    adamw_kernel(const AdamwArgs args, const Shard<Weight, Moment> shard, const bool has_vectors) {
  using T = typename Weight::Compute;
  __shared__ AdamwConstants<T> shared_constants;
  AdamwConstants<T> constants{};
  int32_t known_group = -1;
  float known_step = 0.0f;
  // Every branch down to update_range is the same for all threads of the block: they read the same tables.
  for (int64_t tile = blockIdx.x; tile * kTileNumel < args.numel; tile += gridDim.x) {
    const int64_t tile_begin = tile * kTileNumel;
    const int64_t tile_end = tile_begin + kTileNumel < args.numel ? tile_begin + kTileNumel : args.numel;
    for (int64_t s = first_range_after(args.segments, args.num_segments, tile_begin); s < args.num_segments; ++s) {
      const Segment segment = args.segments[s];
      if (segment.start >= tile_end) {
        break;
      }
      if (!args.slot_is_active[segment.slot]) {
        continue;
      }
      const int32_t group = args.slot_groups[segment.slot];
      const float step = args.slot_steps[segment.slot];
      if (group != known_group || step != known_step) {
        __syncthreads();  // all have read the old ones
        if (threadIdx.x == 0) {
          shared_constants =
              make_constants<T>(args.group_hyper + int64_t{group} * kNumHyper, step, read_grad_scale(args));
        }
        __syncthreads();
        constants = shared_constants;
        known_group = group;
        known_step = step;
      }
      const int64_t segment_end = segment.start + segment.numel;
      const int64_t begin = segment.start > tile_begin ? segment.start : tile_begin;
      const int64_t end = segment_end < tile_end ? segment_end : tile_end;
      if (!constants.is_amsgrad) {
        update_range<false>(shard, constants, begin, end, has_vectors);
      } else if (args.max_exp_avg_sq != nullptr) {
        update_range<true>(shard, constants, begin, end, has_vectors);
      } else {
        // The host cannot see the table without waiting for the device, and must not update by another rule.
        __trap();
      }
    }
  }
}

template <class Weight, class Moment>
const char* launch(const AdamwArgs& args, void* stream) {
  const Shard<Weight, Moment> shard(args);
  return launch_tiles(
      adamw_kernel<Weight, Moment>, tiles_of(args.numel, kTileNumel), stream, args, shard, shard.is_aligned());
}

template <class Weight>
const char* launch_moments(const AdamwArgs& args, void* stream) {
  return args.moment_dtype == DType::kBFloat16 ? launch<Weight, BFloat16>(args, stream)
                                               : launch<Weight, float>(args, stream);
}

}  // namespace

const char* launch_adamw(const AdamwArgs& args, void* stream) {
  switch (args.param_dtype) {
    case DType::kFloat32:
      return launch_moments<PlainWeight<float>>(args, stream);
    case DType::kFloat64:
      return launch<PlainWeight<double>, double>(args, stream);
    case DType::kBFloat16:
      return args.low != nullptr ? launch_moments<RemainderWeight>(args, stream)
                                 : launch_moments<RoundedWeight<BFloat16>>(args, stream);
    case DType::kFloat16:
      return args.low != nullptr ? launch_moments<MasterWeight>(args, stream)
                                 : launch_moments<RoundedWeight<Float16>>(args, stream);
  }
  return "unknown dtype";
}

}  // namespace zero_shard
