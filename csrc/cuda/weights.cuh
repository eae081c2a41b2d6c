// What the two kinds of AdamW kernels share: how a weight and its gradient are read, and which elements get which
// constants.
#pragma once

#include <type_traits>

#include "../adamw_math.h"
#include "common.cuh"
#include "launch.h"

namespace zero_shard {

// How the tensors of a shard hold weights of one kind.
template <class Weight>
struct Stored {
  using T = typename Weight::Compute;
  using Storage = typename Weight::Storage;
  static constexpr bool kHasLow = !std::is_same<typename Weight::Low, Nothing>::value;
  using Low = std::conditional_t<kHasLow, typename Weight::Low, Storage>;  // without one: never touched
  static constexpr int kWidest = static_cast<int>(sizeof(Storage) > sizeof(Low) ? sizeof(Storage) : sizeof(Low));
};

template <class Weight>
__device__ __forceinline__ typename Weight::Compute join(
    typename Stored<Weight>::Storage param, typename Stored<Weight>::Low low) {
  if constexpr (Stored<Weight>::kHasLow) {
    return Weight::join(param, low);
  } else {
    return Weight::join(param, Nothing{});
  }
}

template <class Weight>
__device__ __forceinline__ void split(
    typename Weight::Compute master, uint32_t random, typename Stored<Weight>::Storage& param,
    typename Stored<Weight>::Low& low) {
  if constexpr (Stored<Weight>::kHasLow) {
    Weight::split(master, param, low, random);
  } else {
    Nothing nothing;
    Weight::split(master, param, nothing, random);
  }
}

// Elements begin <= i < end of the shard, and the gradient's runs in them.
constexpr int64_t kRunsPerLaunch = 150;
struct GradTable {
  int64_t begin;
  int64_t end;
  int64_t num_runs;
  Run runs[kRunsPerLaunch];
};

// The gradient of one segment.
template <class Weight>
struct Gradient {
  using T = typename Weight::Compute;
  using Storage = typename Weight::Storage;
  uintptr_t address;  // where element 0 of the shard would be
  bool is_narrow;
  bool has_vectors;

  // run: the one that holds the segment.
  __device__ __forceinline__ Gradient(const Run& run, bool is_as_weight) {
    is_narrow = !std::is_same<T, Storage>::value && is_as_weight;
    const uint64_t nbytes = is_narrow ? sizeof(Storage) : sizeof(T);
    address = reinterpret_cast<uintptr_t>(run.data) - static_cast<uint64_t>(run.start) * nbytes;
    has_vectors = address % kAccessNbytes == 0;
  }

  // Whole vectors, where has_vectors; of others the first num elements.
  template <bool kIsWhole, int kNumel>
  __device__ __forceinline__ void read(int64_t i, int num, T (&values)[kNumel]) const {
    if (is_narrow) {
      read_as<kIsWhole, Storage>(i, num, values);
    } else {
      read_as<kIsWhole, T>(i, num, values);
    }
  }

  template <bool kIsWhole, class Grad, int kNumel>
  __device__ __forceinline__ void read_as(int64_t i, int num, T (&values)[kNumel]) const {
    const Grad* data = reinterpret_cast<const Grad*>(address + static_cast<uint64_t>(i) * sizeof(Grad));
    const Vector<Grad, kNumel> vector = load_first<kIsWhole, kNumel>(data, num);
#pragma unroll
    for (int k = 0; k < kNumel; ++k) {
      values[k] = widen(vector.values[k]);
    }
  }
};

// Elements begin <= i < end of one segment and tile, for one warp.
template <class Weight>
struct Part {
  AdamwConstants<typename Weight::Compute> constants;
  Gradient<Weight> gradient;
  RandomKey key;     // of the parameter at this step; formed only if wanted
  int64_t to_param;  // add an element's position in the shard: its index in the parameter
  int64_t begin;
  int64_t end;

  // See Note [Keyed rounding].
  __device__ __forceinline__ uint32_t random(RandomKey stream, int64_t i) const {
    const uint64_t index = static_cast<uint64_t>(i + to_param);
    return random_bits(key_of_upper(stream, static_cast<uint32_t>(index >> 32)), static_cast<uint32_t>(index));
  }
};

// Calls work(part) for what this warp is to update.
template <class Weight, bool kIsKeyed, class Work>
__device__ __forceinline__ void for_parts(
    const AdamwArgs& args, const GradTable& table, int64_t tile_numel, const Work& work) {
  using T = typename Weight::Compute;
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) {
    return;
  }
  AdamwConstants<T> constants{};
  int32_t known_group = -1;
  float known_step = 0.0f;
  for (int64_t tile = table.begin / tile_numel + warp_number(); tile * tile_numel < table.end; tile += num_warps()) {
    const int64_t tile_begin = larger(tile * tile_numel, table.begin);
    const int64_t tile_end = smaller((tile + 1) * tile_numel, table.end);
    int64_t s = first_range_after_by_warp(args.segments, args.num_segments, tile_begin);
    for (; s < args.num_segments; ++s) {
      const Segment segment = args.segments[s];
      const int64_t segment_end = segment.start + segment.numel;
      if (segment.start >= tile_end) {
        break;
      }
      if (segment.numel == 0 || !args.slot_is_active[segment.slot]) {
        continue;
      }
      const int32_t group = args.slot_groups[segment.slot];
      const float step = args.slot_steps[segment.slot];
      if (group != known_group || step != known_step) {
        constants = make_constants<T>(args.group_hyper + int64_t{group} * kNumHyper, step, read_grad_scale(args));
        known_group = group;
        known_step = step;
      }
      const int64_t r = first_range_after(table.runs, table.num_runs, segment.start);
      const bool is_held = r < table.num_runs && table.runs[r].start <= segment.start &&
                           segment_end <= table.runs[r].start + table.runs[r].numel;
      // The host cannot see the tables without waiting for the device, and must not update by another rule.
      if (!is_held || (constants.is_amsgrad && args.max_exp_avg_sq == nullptr)) {
        __trap();
      }
      RandomKey key{};
      if constexpr (kIsKeyed) {
        key = make_random_key(args.slot_numbers[segment.slot], static_cast<int64_t>(step));
      }
      work(
          Part<Weight>{
              constants, Gradient<Weight>(table.runs[r], args.grad_dtype == args.param_dtype), key,
              segment.param_start - segment.start, larger(segment.start, tile_begin), smaller(segment_end, tile_end)});
    }
  }
}

// For 8-bit moments.
const char* launch_adamw_blocks(const AdamwArgs& args, void* stream);

// Launches the kernel for the whole shard: once, or once for so many runs of the gradient as fit a table.
template <class Kernel>
const char* launch_parts(Kernel kernel, const AdamwArgs& args, int64_t tile_numel, bool has_vectors, void* stream) {
  static_assert(sizeof(AdamwArgs) + sizeof(GradTable) + 2 * sizeof(void*) <= kArgumentsNbytes, "arguments fit");
  int64_t first = 0;
  int64_t begin = 0;
  do {
    GradTable table{};
    table.num_runs = smaller(kRunsPerLaunch, args.num_runs - first);
    for (int64_t r = 0; r < table.num_runs; ++r) {
      table.runs[r] = args.runs[first + r];
    }
    first += table.num_runs;
    table.begin = begin;
    table.end = first < args.num_runs ? args.runs[first].start : args.numel;
    const int64_t num_tiles = tiles_of(table.end, tile_numel) - table.begin / tile_numel;
    const char* error = launch_warps(kernel, num_tiles, stream, args, table, has_vectors);
    if (error != nullptr) {
      return error;
    }
    begin = table.end;
  } while (first < args.num_runs);
  return nullptr;
}

}  // namespace zero_shard
