// adamw_ with moments in the formats of weights.
//
//   shard   |----- tile 0 -----|----- tile 1 -----|----- tile 2 -----|--- ...
//   segments|-- s0 --|-s1-| gap |------------- s2 -------------|-s3-| ...
//
// A warp takes whole tiles. For each segment that meets its tile it forms the constants (kept while group and step stay
// the same), and all lanes update the overlap. Tiles start at multiples of the vector length, so vectors sit at the
// same place in every tensor, and only those that a segment's edge cuts are done element by element. See
// Note [Warp tiles] and Note [Whole sectors].
#include "weights.cuh"

namespace zero_shard {
namespace {

constexpr int64_t kTileNumel = 1024;
// Elements of a lane at a time.
template <class Weight, class Moment>
constexpr int kVectorNumel = kAccessNbytes / static_cast<int>(larger(Stored<Weight>::kWidest, sizeof(Moment)));

// Per multiprocessor: 3 leave a thread 80 registers, 2 leave it 128.
template <class Weight, bool kHasMax>
constexpr int kMinBlocks = sizeof(typename Weight::Compute) == sizeof(double) || kHasMax ? 2 : 3;

// Elements i to i + kNumel of the shard, by one lane; the only use of the mathematics, for vectors and single elements
// alike.
template <int kNumel, bool kIsAmsgrad, class Weight, class Moment>
__device__ __forceinline__ void update(const AdamwArgs& args, const Part<Weight>& part, int64_t i) {
  using T = typename Weight::Compute;
  using S = Stored<Weight>;
  typename S::Storage* param_at = static_cast<typename S::Storage*>(args.param) + i;
  typename S::Low* low_at = static_cast<typename S::Low*>(args.low) + (S::kHasLow ? i : 0);
  Moment* exp_avg_at = static_cast<Moment*>(args.exp_avg) + i;
  Moment* exp_avg_sq_at = static_cast<Moment*>(args.exp_avg_sq) + i;
  Moment* max_exp_avg_sq_at = static_cast<Moment*>(args.max_exp_avg_sq) + (kIsAmsgrad ? i : 0);

  auto param = load_vector<kNumel>(param_at);
  auto exp_avg = load_vector<kNumel>(exp_avg_at);
  auto exp_avg_sq = load_vector<kNumel>(exp_avg_sq_at);
  Vector<typename S::Low, kNumel> low{};
  if constexpr (S::kHasLow) {
    low = load_vector<kNumel>(low_at);
  }
  Vector<Moment, kNumel> max_exp_avg_sq{};
  if constexpr (kIsAmsgrad) {
    max_exp_avg_sq = load_vector<kNumel>(max_exp_avg_sq_at);
  }
  T grad[kNumel];
  part.gradient.template read<true>(i, kNumel, grad);
#pragma unroll
  for (int k = 0; k < kNumel; ++k) {
    T master = join<Weight>(param.values[k], low.values[k]);
    T mean = widen(exp_avg.values[k]);
    T square = widen(exp_avg_sq.values[k]);
    T max_square = T(0);
    if constexpr (kIsAmsgrad) {
      max_square = widen(max_exp_avg_sq.values[k]);
    }
    adamw_element<kIsAmsgrad>(part.constants, grad[k], master, mean, square, max_square);
    exp_avg.values[k] = convert<Moment>(mean);
    exp_avg_sq.values[k] = convert<Moment>(square);
    if constexpr (kIsAmsgrad) {
      max_exp_avg_sq.values[k] = convert<Moment>(max_square);
    }
    const uint32_t random = Weight::kIsStochastic ? part.random(part.key, i + k) : 0;
    split<Weight>(master, random, param.values[k], low.values[k]);
  }
  store_vector(param_at, param);
  store_vector(exp_avg_at, exp_avg);
  store_vector(exp_avg_sq_at, exp_avg_sq);
  if constexpr (S::kHasLow) {
    store_vector(low_at, low);
  }
  if constexpr (kIsAmsgrad) {
    store_vector(max_exp_avg_sq_at, max_exp_avg_sq);
  }
}

template <bool kIsAmsgrad, class Weight, class Moment>
__device__ __forceinline__ void update_part(const AdamwArgs& args, const Part<Weight>& part, bool has_vectors) {
  constexpr int kNumel = kVectorNumel<Weight, Moment>;
  has_vectors = has_vectors && part.gradient.has_vectors;
  for (int64_t i = part.begin - part.begin % kNumel + lane_number() * kNumel; i < part.end;
       i += kLanesPerWarp * kNumel) {
    if (has_vectors && i >= part.begin && i + kNumel <= part.end) {
      update<kNumel, kIsAmsgrad, Weight, Moment>(args, part, i);
    } else {
      for (int64_t k = larger(i, part.begin); k < smaller(i + kNumel, part.end); ++k) {
        update<1, kIsAmsgrad, Weight, Moment>(args, part, k);
      }
    }
  }
}

// kHasMax: there is a max_exp_avg_sq, which the groups with amsgrad use. Without one fewer registers are needed.
template <class Weight, class Moment, bool kHasMax>
__global__ void __launch_bounds__(kThreads, (kMinBlocks<Weight, kHasMax>)) adamw_kernel(
    const __grid_constant__ AdamwArgs args, const __grid_constant__ GradTable table, const bool has_vectors) {
  for_parts<Weight, Weight::kIsStochastic>(args, table, kTileNumel, [&](const Part<Weight>& part) {
    if (kHasMax && part.constants.is_amsgrad) {
      update_part<kHasMax, Weight, Moment>(args, part, has_vectors);
    } else {
      update_part<false, Weight, Moment>(args, part, has_vectors);
    }
  });
}

template <class Weight, class Moment>
const char* launch(const AdamwArgs& args, void* stream) {
  const bool has_vectors = is_aligned(args.param) && is_aligned(args.low) && is_aligned(args.exp_avg) &&
                           is_aligned(args.exp_avg_sq) && is_aligned(args.max_exp_avg_sq);
  const auto kernel =
      args.max_exp_avg_sq != nullptr ? adamw_kernel<Weight, Moment, true> : adamw_kernel<Weight, Moment, false>;
  return launch_parts(kernel, args, kTileNumel, has_vectors, stream);
}

template <class Weight>
const char* launch_moments(const AdamwArgs& args, void* stream) {
  return args.moment_dtype == DType::kBFloat16 ? launch<Weight, BFloat16>(args, stream)
                                               : launch<Weight, float>(args, stream);
}

}  // namespace

const char* launch_adamw(const AdamwArgs& args, void* stream) {
  if (args.moment_dtype == DType::kInt8) {
    return launch_adamw_blocks(args, stream);
  }
  switch (args.param_dtype) {
    case DType::kFloat32:
      return launch_moments<PlainWeight<float>>(args, stream);
    case DType::kFloat64:
      return launch<PlainWeight<double>, double>(args, stream);
    case DType::kBFloat16:
      if (args.is_stochastic) {
        return launch_moments<StochasticWeight>(args, stream);
      }
      return args.low != nullptr ? launch_moments<RemainderWeight>(args, stream)
                                 : launch_moments<RoundedWeight<BFloat16>>(args, stream);
    case DType::kFloat16:
      return args.low != nullptr ? launch_moments<MasterWeight>(args, stream)
                                 : launch_moments<RoundedWeight<Float16>>(args, stream);
    case DType::kInt8:
      break;
  }
  return "no kernel for this dtype of param";
}

}  // namespace zero_shard
