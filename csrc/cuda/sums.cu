// sum_squares_ and sum_pairs_, and the second step of every sum of squares: from partial sums to those of segments.
#include <type_traits>

#include "launch.h"
#include "sums.cuh"

namespace zero_shard {
namespace {

constexpr int kMinBlocks = 4;  // per multiprocessor: leaves a thread 64 registers
// A segment with no more partial sums is left to one warp.
constexpr int64_t kFewPartials = 1024;

constexpr int64_t kRunsPerLaunch = 150;
// So many of them may be the next launch's, too: see RunTable.
constexpr int64_t kRunsAhead = 32;

// A launch does the chunks whose part in the segment begins at begin <= i < end, including elements up to `visible`
// that lie in the runs of the next launch, so that chunks are added whole. If that many runs do not hold the whole
// chunk, the next launch adds the rest of it, from what the one before has seen, as a part: right, but no longer the
// canonical bits.
struct RunTable {
  int64_t begin;
  int64_t end;
  int64_t seen;     // by the launch before
  int64_t visible;  // runs up to here are in the table
  int64_t num_runs;
  Run runs[kRunsPerLaunch];
};

// The values in memory, and those that are summed.
template <class In>
using Summed = std::conditional_t<std::is_same<In, double>::value, double, float>;

__device__ __forceinline__ int64_t end_of(const Run& run) { return run.start + run.numel; }

// Adds elements begin <= i < end, which lie in the unit that begins at element `unit`. r: the first run after begin.
template <class In>
__device__ __forceinline__ void add_elements(
    PairSum& sum, const RunTable& table, int64_t r, int64_t unit, int64_t begin, int64_t end) {
  constexpr int kNumel = kAccessNbytes / static_cast<int>(sizeof(In));
  const Run& run = table.runs[r];
  const In* data = static_cast<const In*>(run.data);
  const bool is_one_run = run.start <= begin && end <= end_of(run);
  Summed<In> values[kPerLane];
  if (is_one_run && end - begin == kUnitNumel && is_aligned(data + (unit - run.start))) {
#pragma unroll
    for (int v = 0; v < kPerLane / kNumel; ++v) {
      const Vector<In, kNumel> vector =
          load_vector<kNumel>(data + (unit - run.start) + offset_in_unit<kNumel>(v * kNumel));
#pragma unroll
      for (int k = 0; k < kNumel; ++k) {
        values[v * kNumel + k] = widen(vector.values[k]);
      }
    }
    add_unit<kNumel>(sum, values);
    return;
  }
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int64_t i = unit + offset_in_unit<1>(j);
    values[j] = 0;
    if (i >= begin && i < end) {
      if (is_one_run) {
        values[j] = widen(data[i - run.start]);
      } else {
        const int64_t holder = first_range_after(table.runs, table.num_runs, i);
        if (holder < table.num_runs && table.runs[holder].start <= i) {
          values[j] = widen(static_cast<const In*>(table.runs[holder].data)[i - table.runs[holder].start]);
        }
      }
    }
  }
  add_unit<1>(sum, values);
}

template <class In>
__device__ __forceinline__ void add_part(
    const SumArgs& sum, const RunTable& table, int64_t tile, int64_t s, const Segment& segment, int64_t first,
    int64_t last) {
  if (first >= table.end || last <= table.begin) {
    return;
  }
  const int64_t before_first = (first - segment.start + segment.param_start) % kChunkNumel<Summed<In>>;
  int64_t r = first_range_after(table.runs, table.num_runs, larger(first, table.begin));
  PairSum lane_sum{0.0, 0.0};
  for (int64_t unit = first - before_first; unit < last; unit += kUnitNumel) {
    int64_t begin = larger(unit, first);
    if (begin >= table.end) {
      break;
    }
    begin = begin < table.begin ? larger(begin, table.seen) : begin;
    const int64_t end = smaller(smaller(unit + kUnitNumel, last), table.visible);
    if (begin >= end) {
      continue;
    }
    while (r < table.num_runs && end_of(table.runs[r]) <= begin) {
      ++r;
    }
    if (r < table.num_runs && table.runs[r].start < end) {
      add_elements<In>(lane_sum, table, r, unit, begin, end);
    }
  }
  PairSum warp_sum = sum_over_warp(lane_sum);
  if (lane_number() == 0) {
    if (first < table.begin) {
      add_to(warp_sum, read_pair(sum.partials, tile + s));
    }
    write_pair(sum.partials, tile + s, warp_sum);
  }
}

template <class In>
__global__ void __launch_bounds__(kThreads, kMinBlocks) sum_squares_kernel(
    const __grid_constant__ SumArgs sum, const __grid_constant__ RunTable table, const int64_t tile_numel,
    const int64_t first_tile) {
  for (int64_t tile = first_tile + warp_number(); tile * tile_numel < table.end; tile += num_warps()) {
    for_tile(
        sum, tile, tile_numel, kChunkNumel<Summed<In>>, [](int64_t, int64_t) {},
        [&](int64_t s, const Segment& segment, int64_t begin, int64_t end) {
          add_part<In>(sum, table, tile, s, segment, begin, end);
        });
  }
}

struct PartialRange {
  int64_t begin;
  int64_t end;
};

__device__ __forceinline__ PartialRange
partials_of(const SumArgs& sum, int64_t s, int64_t tile_numel, int64_t chunk_numel) {
  const Segment segment = sum.segments[s];
  if (segment.numel == 0) {
    return PartialRange{0, 0};
  }
  return PartialRange{first_tile(segment, tile_numel) + s, last_tile(segment, tile_numel, chunk_numel) + s + 1};
}

__device__ __forceinline__ PairSum add_pairs(const double* pairs, PartialRange range, int64_t thread, int64_t step) {
  PairSum sum{0.0, 0.0};
  for (int64_t i = range.begin + thread; i < range.end; i += step) {
    add_to(sum, read_pair(pairs, i));
  }
  return sum;
}

// A block takes kWarps segments: those with few partial sums a warp each, then the others one after the other.
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    add_partials_kernel(const __grid_constant__ SumArgs sum, const int64_t tile_numel, const int64_t chunk_numel) {
  for (int64_t first = int64_t{blockIdx.x} * kWarps; first < sum.num_segments; first += num_warps()) {
    const int64_t mine = first + static_cast<int>(threadIdx.x) / kLanesPerWarp;
    if (mine < sum.num_segments) {
      const PartialRange range = partials_of(sum, mine, tile_numel, chunk_numel);
      if (range.end - range.begin <= kFewPartials) {
        const PairSum total = sum_over_warp(add_pairs(sum.partials, range, lane_number(), kLanesPerWarp));
        if (lane_number() == 0) {
          write_pair(sum.sums, mine, normalized(total));
        }
      }
    }
    for (int64_t s = first; s < smaller(first + kWarps, sum.num_segments); ++s) {
      const PartialRange range = partials_of(sum, s, tile_numel, chunk_numel);
      if (range.end - range.begin > kFewPartials) {
        const PairSum total = sum_over_block(add_pairs(sum.partials, range, threadIdx.x, kThreads));
        if (threadIdx.x == 0) {
          write_pair(sum.sums, s, normalized(total));
        }
      }
    }
  }
}

// One block.
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    sum_pairs_kernel(double* const total, const double* const pairs, const int64_t num_pairs) {
  const PairSum sum = sum_over_block(add_pairs(pairs, PartialRange{0, num_pairs}, threadIdx.x, kThreads));
  if (threadIdx.x == 0) {
    write_pair(total, 0, normalized(sum));
  }
}

template <class In>
const char* launch(const SumSquaresArgs& args, void* stream) {
  static_assert(sizeof(SumArgs) + sizeof(RunTable) + 2 * sizeof(int64_t) <= kArgumentsNbytes, "arguments fit");
  const int64_t numel = args.sum.numel;
  const int64_t tile_numel = sum_tile_numel(numel);
  int64_t first = 0;
  RunTable table{};
  do {
    const int64_t left = args.num_runs - first;
    const int64_t next = first + (left <= kRunsPerLaunch ? left : kRunsPerLaunch - kRunsAhead);
    table.num_runs = smaller(left, kRunsPerLaunch);
    for (int64_t r = 0; r < table.num_runs; ++r) {
      table.runs[r] = args.runs[first + r];
    }
    table.seen = table.visible;
    table.begin = table.end;
    table.end = next < args.num_runs ? args.runs[next].start : numel;
    table.visible = table.num_runs < left ? args.runs[first + table.num_runs].start : numel;
    // A chunk may begin before `begin`, and its tile one before the one that it lies in. See tile_start.
    const int64_t first_tile = larger(0, table.begin / tile_numel - 2);
    const char* error = launch_warps(
        sum_squares_kernel<In>, tiles_of(table.end, tile_numel) - first_tile, stream, args.sum, table, tile_numel,
        first_tile);
    if (error != nullptr) {
      return error;
    }
    first = next;
  } while (first < args.num_runs);
  return launch_partials(args.sum, args.dtype, stream);
}

}  // namespace

const char* launch_sum_squares(const SumSquaresArgs& args, void* stream) {
  switch (args.dtype) {
    case DType::kFloat32:
      return launch<float>(args, stream);
    case DType::kFloat64:
      return launch<double>(args, stream);
    case DType::kBFloat16:
      return launch<BFloat16>(args, stream);
    case DType::kFloat16:
      return launch<Float16>(args, stream);
    case DType::kInt8:
      break;
  }
  return "no kernel for this dtype of tensors";
}

const char* launch_partials(const SumArgs& sum, DType dtype, void* stream) {
  const int64_t chunk_numel = dtype == DType::kFloat64 ? kChunkNumel<double> : kChunkNumel<float>;
  return launch_warps(add_partials_kernel, sum.num_segments, stream, sum, sum_tile_numel(sum.numel), chunk_numel);
}

const char* launch_sum_pairs(double* total, const double* pairs, int64_t num_pairs, void* stream) {
  return launch_warps(sum_pairs_kernel, 1, stream, total, pairs, num_pairs);
}

int64_t sum_partials_numel(int64_t numel, int64_t num_segments) {
  return 2 * (tiles_of(numel, sum_tile_numel(numel)) + num_segments);
}

}  // namespace zero_shard
