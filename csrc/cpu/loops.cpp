// The CPU loops. Compiled once per instruction set with ZERO_SHARD_ISA = scalar, avx2, avx512; the compiler vectorises.
//
// Nothing here has external linkage but the table at the end, and nothing comes from the C++ library: a template
// instance shared between the three objects would be linked once, possibly as the one with the widest instructions.
#include "loops.h"

#include <string.h>

#include "../adamw_math.h"

#define ZERO_SHARD_JOIN2(a, b) a##b
#define ZERO_SHARD_JOIN(a, b) ZERO_SHARD_JOIN2(a, b)
#define ZERO_SHARD_TEXT2(a) #a
#define ZERO_SHARD_TEXT(a) ZERO_SHARD_TEXT2(a)

namespace zero_shard {
namespace {

// Elements of the running sum that stay in the first-level cache while the slices pass by.
constexpr int64_t kReduceBlockNumel = 1024;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// A pointer to Low that costs nothing where the weight has none.
template <class Low>
struct LowPointer {
  Low* __restrict__ pointer;
  explicit LowPointer(void* raw) : pointer(static_cast<Low*>(raw)) {}
  Low read(int64_t i) const { return pointer[i]; }
  void write(int64_t i, Low value) const { pointer[i] = value; }
};
template <>
struct LowPointer<Nothing> {
  explicit LowPointer(void*) {}
  Nothing read(int64_t) const { return {}; }
  void write(int64_t, Nothing) const {}
};

template <class Weight, class Moment, bool kIsAmsgrad>
void adamw_run(
    const AdamwArgs& args, const AdamwConstants<typename Weight::Compute> constants, int64_t begin, int64_t end) {
  using T = typename Weight::Compute;
  using Storage = typename Weight::Storage;
  Raw<Storage>* __restrict__ param = static_cast<Raw<Storage>*>(args.param);
  const LowPointer<typename Weight::Low> low(args.low);
  const T* __restrict__ grad = static_cast<const T*>(args.grad);
  Raw<Moment>* __restrict__ exp_avg = static_cast<Raw<Moment>*>(args.exp_avg);
  Raw<Moment>* __restrict__ exp_avg_sq = static_cast<Raw<Moment>*>(args.exp_avg_sq);
  Raw<Moment>* __restrict__ max_exp_avg_sq = static_cast<Raw<Moment>*>(args.max_exp_avg_sq);
#pragma GCC ivdep
  for (int64_t i = begin; i < end; ++i) {
    T master = Weight::join(from_raw<Storage>(param[i]), low.read(i));
    T mean = widen(from_raw<Moment>(exp_avg[i]));
    T square = widen(from_raw<Moment>(exp_avg_sq[i]));
    T max_square = T(0);
    if (kIsAmsgrad) {
      max_square = widen(from_raw<Moment>(max_exp_avg_sq[i]));
    }
    adamw_element<kIsAmsgrad>(constants, grad[i], master, mean, square, max_square);
    exp_avg[i] = to_raw(convert<Moment>(mean));
    exp_avg_sq[i] = to_raw(convert<Moment>(square));
    if (kIsAmsgrad) {
      max_exp_avg_sq[i] = to_raw(convert<Moment>(max_square));
    }
    Storage new_param;
    typename Weight::Low new_low;
    Weight::split(master, new_param, new_low);
    param[i] = to_raw(new_param);
    low.write(i, new_low);
  }
}

template <class Weight, class Moment>
void adamw_segments(const AdamwArgs& args, int64_t begin, int64_t end) {
  using T = typename Weight::Compute;
  const double grad_scale = read_grad_scale(args);
  // Neighbours mostly share group and step: with 20,000 small tensors the constants would cost more than the update.
  int64_t known_group = -1;
  float known_step = 0.0f;
  AdamwConstants<T> constants{};
  for (int64_t s = first_range_after(args.segments, args.num_segments, begin); s < args.num_segments; ++s) {
    const Segment segment = args.segments[s];
    if (segment.start >= end) {
      break;
    }
    if (!args.slot_is_active[segment.slot]) {
      continue;
    }
    const int64_t group = args.slot_groups[segment.slot];
    const float step = args.slot_steps[segment.slot];
    if (group != known_group || step != known_step) {
      constants = make_constants<T>(args.group_hyper + group * kNumHyper, step, grad_scale);
      known_group = group;
      known_step = step;
    }
    const int64_t first = larger(segment.start, begin);
    const int64_t last = smaller(segment.start + segment.numel, end);
    if (constants.is_amsgrad) {
      adamw_run<Weight, Moment, true>(args, constants, first, last);
    } else {
      adamw_run<Weight, Moment, false>(args, constants, first, last);
    }
  }
}

template <class Weight>
void adamw_moments(const AdamwArgs& args, int64_t begin, int64_t end) {
  if (args.moment_dtype == DType::kBFloat16) {
    adamw_segments<Weight, BFloat16>(args, begin, end);
  } else {
    adamw_segments<Weight, float>(args, begin, end);
  }
}

void adamw(const AdamwArgs& args, int64_t begin, int64_t end) {
  switch (args.param_dtype) {
    case DType::kFloat32:
      return adamw_moments<PlainWeight<float>>(args, begin, end);
    case DType::kFloat64:
      return adamw_segments<PlainWeight<double>, double>(args, begin, end);
    case DType::kBFloat16:
      return args.low != nullptr ? adamw_moments<RemainderWeight>(args, begin, end)
                                 : adamw_moments<RoundedWeight<BFloat16>>(args, begin, end);
    case DType::kFloat16:
      return args.low != nullptr ? adamw_moments<MasterWeight>(args, begin, end)
                                 : adamw_moments<RoundedWeight<Float16>>(args, begin, end);
  }
}

template <class T, class Slice>
void reduce_run(const ReduceArgs& args, int64_t begin, int64_t end) {
  T* __restrict__ out = static_cast<T*>(args.out);
  const Raw<Slice>* slices = static_cast<const Raw<Slice>*>(args.slices);
  const T divisor = static_cast<T>(args.divisor);
  T sum[kReduceBlockNumel];
  for (int64_t block = begin; block < end; block += kReduceBlockNumel) {
    const int64_t numel = smaller(kReduceBlockNumel, end - block);
    for (int64_t i = 0; i < numel; ++i) {
      sum[i] = widen(from_raw<Slice>(slices[block + i]));
    }
    for (int64_t rank = 1; rank < args.world_size; ++rank) {
      const Raw<Slice>* __restrict__ slice = slices + rank * args.numel + block;
      for (int64_t i = 0; i < numel; ++i) {
        sum[i] = sum[i] + widen(from_raw<Slice>(slice[i]));
      }
    }
    T* __restrict__ target = out + block;
    if (args.is_accumulate) {
      for (int64_t i = 0; i < numel; ++i) {
        target[i] = target[i] + sum[i] / divisor;
      }
    } else {
      for (int64_t i = 0; i < numel; ++i) {
        target[i] = sum[i] / divisor;
      }
    }
  }
}

void reduce_slices(const ReduceArgs& args, int64_t begin, int64_t end) {
  switch (args.slice_dtype) {
    case DType::kFloat32:
      return reduce_run<float, float>(args, begin, end);
    case DType::kFloat64:
      return reduce_run<double, double>(args, begin, end);
    case DType::kBFloat16:
      return reduce_run<float, BFloat16>(args, begin, end);
    case DType::kFloat16:
      return reduce_run<float, Float16>(args, begin, end);
  }
}

template <class Out, class In>
void copy_run(Raw<Out>* __restrict__ out, const FlattenEntry& entry, int64_t skip, int64_t numel) {
  const Raw<In>* __restrict__ in = static_cast<const Raw<In>*>(entry.data) + skip;
  if constexpr (is_same<Out, In>) {
    memcpy(out, in, static_cast<size_t>(numel) * sizeof(Out));  // keeps the bits of a NaN too
  } else {
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = to_raw(convert<Out>(widen(from_raw<In>(in[i]))));
    }
  }
}

template <class Out>
void copy_entry(Raw<Out>* out, const FlattenEntry& entry, int64_t skip, int64_t numel) {
  switch (static_cast<DType>(entry.dtype)) {
    case DType::kFloat32:
      return copy_run<Out, float>(out, entry, skip, numel);
    case DType::kFloat64:
      return copy_run<Out, double>(out, entry, skip, numel);
    case DType::kBFloat16:
      return copy_run<Out, BFloat16>(out, entry, skip, numel);
    case DType::kFloat16:
      return copy_run<Out, Float16>(out, entry, skip, numel);
  }
}

template <class Out>
void flatten_run(const FlattenArgs& args, int64_t begin, int64_t end) {
  Raw<Out>* out = static_cast<Raw<Out>*>(args.out);
  int64_t done = begin;
  for (int64_t e = first_range_after(args.entries, args.num_entries, begin); e < args.num_entries; ++e) {
    const FlattenEntry& entry = args.entries[e];
    if (entry.start >= end) {
      break;
    }
    const int64_t first = larger(entry.start, begin);
    const int64_t last = smaller(entry.start + entry.numel, end);
    memset(out + done, 0, static_cast<size_t>(first - done) * sizeof(Out));
    copy_entry<Out>(out + first, entry, first - entry.start, last - first);
    done = last;
  }
  memset(out + done, 0, static_cast<size_t>(end - done) * sizeof(Out));
}

void flatten(const FlattenArgs& args, int64_t begin, int64_t end) {
  switch (args.out_dtype) {
    case DType::kFloat32:
      return flatten_run<float>(args, begin, end);
    case DType::kFloat64:
      return flatten_run<double>(args, begin, end);
    case DType::kBFloat16:
      return flatten_run<BFloat16>(args, begin, end);
    case DType::kFloat16:
      return flatten_run<Float16>(args, begin, end);
  }
}

}  // namespace

extern const CpuLoops ZERO_SHARD_JOIN(kCpuLoops_, ZERO_SHARD_ISA);
const CpuLoops ZERO_SHARD_JOIN(kCpuLoops_, ZERO_SHARD_ISA) = {
    ZERO_SHARD_TEXT(ZERO_SHARD_ISA), adamw, reduce_slices, flatten};

}  // namespace zero_shard
