// flatten_ and reduce_slices_: memory in, memory out.
#include "common.cuh"
#include "launch.h"

namespace zero_shard {
namespace {

constexpr int64_t kTileNumel = 8192;
// Elements per thread: 16 bytes of the 16-bit formats.
constexpr int kVectorNumel = 8;
// The table travels as a kernel argument (limit 4 KiB on every driver): no copy to the device to wait for, and the
// launch can be captured in a graph.
constexpr int64_t kEntriesPerLaunch = 120;

struct EntryTable {
  FlattenEntry entries[kEntriesPerLaunch];
};

template <class Out, class In>
__device__ __forceinline__ Out cast(In value) {
  return convert<Out>(widen(value));
}

// One dtype: bits are kept, those of a NaN too.
template <>
__device__ __forceinline__ BFloat16 cast<BFloat16, BFloat16>(BFloat16 value) {
  return value;
}
template <>
__device__ __forceinline__ Float16 cast<Float16, Float16>(Float16 value) {
  return value;
}

// Copies numel elements by the threads of one block: vectors where both sides are aligned, after a short head.
template <class Out, class In>
__device__ __forceinline__ void copy_range(Out* out, const In* in, int64_t numel) {
  constexpr int64_t kAccessNumel = kAccessNbytes / sizeof(Out);
  const int64_t past = reinterpret_cast<uintptr_t>(out) % kAccessNbytes / sizeof(Out);
  int64_t head = past == 0 ? 0 : kAccessNumel - past;
  head = head < numel ? head : numel;
  const bool has_vectors = reinterpret_cast<uintptr_t>(in + head) % kAccessNbytes == 0;
  const int64_t vectors_end = has_vectors ? head + (numel - head) / kVectorNumel * kVectorNumel : head;
  for (int64_t i = threadIdx.x; i < head; i += kThreads) {
    out[i] = cast<Out>(in[i]);
  }
  for (int64_t i = head + threadIdx.x * kVectorNumel; i < vectors_end; i += kThreads * kVectorNumel) {
    const Vector<In, kVectorNumel> from = load_vector<kVectorNumel>(in + i);
    Vector<Out, kVectorNumel> to;
#pragma unroll
    for (int k = 0; k < kVectorNumel; ++k) {
      to.values[k] = cast<Out>(from.values[k]);
    }
    store_vector(out + i, to);
  }
  for (int64_t i = vectors_end + threadIdx.x; i < numel; i += kThreads) {
    out[i] = cast<Out>(in[i]);
  }
}

template <class Out>
__device__ __forceinline__ void copy_entry(Out* out, const FlattenEntry& entry, int64_t skip, int64_t numel) {
  switch (static_cast<DType>(entry.dtype)) {
    case DType::kFloat32:
      return copy_range(out, static_cast<const float*>(entry.data) + skip, numel);
    case DType::kFloat64:
      return copy_range(out, static_cast<const double*>(entry.data) + skip, numel);
    case DType::kBFloat16:
      return copy_range(out, static_cast<const BFloat16*>(entry.data) + skip, numel);
    case DType::kFloat16:
      return copy_range(out, static_cast<const Float16*>(entry.data) + skip, numel);
  }
}

template <class Out>
__device__ __forceinline__ void zero_range(Out* out, int64_t numel) {
  for (int64_t i = threadIdx.x; i < numel; i += kThreads) {
    out[i] = Out{};
  }
}

// Fills out[begin:end], which holds the given entries and the gaps around them.
template <class Out>
__global__ void __launch_bounds__(kThreads, kMinBlocks) flatten_kernel(
    Out* const out, const int64_t begin, const int64_t end, const __grid_constant__ EntryTable table,
    const int64_t num_entries) {
  for (int64_t tile = blockIdx.x; begin + tile * kTileNumel < end; tile += gridDim.x) {
    const int64_t tile_begin = begin + tile * kTileNumel;
    const int64_t tile_end = tile_begin + kTileNumel < end ? tile_begin + kTileNumel : end;
    int64_t done = tile_begin;
    for (int64_t e = first_range_after(table.entries, num_entries, tile_begin); e < num_entries; ++e) {
      const FlattenEntry& entry = table.entries[e];
      if (entry.start >= tile_end) {
        break;
      }
      const int64_t entry_end = entry.start + entry.numel;
      const int64_t first = entry.start > tile_begin ? entry.start : tile_begin;
      const int64_t last = entry_end < tile_end ? entry_end : tile_end;
      zero_range(out + done, first - done);
      copy_entry(out + first, entry, first - entry.start, last - first);
      done = last;
    }
    zero_range(out + done, tile_end - done);
  }
}

template <class Out>
const char* flatten(const FlattenArgs& args, void* stream) {
  int64_t begin = 0;
  int64_t first = 0;
  do {
    const int64_t left = args.num_entries - first;
    const int64_t count = left < kEntriesPerLaunch ? left : kEntriesPerLaunch;
    EntryTable table{};
    for (int64_t e = 0; e < count; ++e) {
      table.entries[e] = args.entries[first + e];
    }
    first += count;
    const int64_t end = first < args.num_entries ? args.entries[first].start : args.numel;
    const char* error = launch_tiles(
        flatten_kernel<Out>, tiles_of(end - begin, kTileNumel), stream, static_cast<Out*>(args.out), begin, end, table,
        count);
    if (error != nullptr) {
      return error;
    }
    begin = end;
  } while (first < args.num_entries);
  return nullptr;
}

template <class T, class Slice>
__device__ __forceinline__ void reduce_one(const ReduceArgs& args, T divisor, int64_t i) {
  const Slice* slices = static_cast<const Slice*>(args.slices);
  T* out = static_cast<T*>(args.out);
  T sum = widen(slices[i]);
  for (int64_t rank = 1; rank < args.world_size; ++rank) {
    sum = sum + widen(slices[rank * args.numel + i]);
  }
  const T mean = sum / divisor;
  out[i] = args.is_accumulate ? out[i] + mean : mean;
}

template <class T, class Slice>
__device__ __forceinline__ void reduce_vector(const ReduceArgs& args, T divisor, int64_t i) {
  constexpr int kNumel = kAccessNbytes / sizeof(Slice);
  const Slice* slices = static_cast<const Slice*>(args.slices) + i;
  T* out = static_cast<T*>(args.out) + i;
  Vector<T, kNumel> sum;
  const Vector<Slice, kNumel> first = load_vector<kNumel>(slices);
#pragma unroll
  for (int k = 0; k < kNumel; ++k) {
    sum.values[k] = widen(first.values[k]);
  }
  for (int64_t rank = 1; rank < args.world_size; ++rank) {
    const Vector<Slice, kNumel> slice = load_vector<kNumel>(slices + rank * args.numel);
#pragma unroll
    for (int k = 0; k < kNumel; ++k) {
      sum.values[k] = sum.values[k] + widen(slice.values[k]);
    }
  }
  Vector<T, kNumel> old{};
  if (args.is_accumulate) {
    old = load_vector<kNumel>(out);
  }
#pragma unroll
  for (int k = 0; k < kNumel; ++k) {
    const T mean = sum.values[k] / divisor;
    sum.values[k] = args.is_accumulate ? old.values[k] + mean : mean;
  }
  store_vector(out, sum);
}

template <class T, class Slice>
__global__ void __launch_bounds__(kThreads, kMinBlocks) reduce_kernel(const ReduceArgs args, const bool has_vectors) {
  constexpr int64_t kNumel = kAccessNbytes / sizeof(Slice);
  const T divisor = static_cast<T>(args.divisor);
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t num_threads = int64_t{gridDim.x} * kThreads;
  const int64_t vectors_end = has_vectors ? args.numel / kNumel * kNumel : 0;
  for (int64_t i = thread * kNumel; i < vectors_end; i += num_threads * kNumel) {
    reduce_vector<T, Slice>(args, divisor, i);
  }
  for (int64_t i = vectors_end + thread; i < args.numel; i += num_threads) {
    reduce_one<T, Slice>(args, divisor, i);
  }
}

template <class T, class Slice>
const char* reduce(const ReduceArgs& args, void* stream) {
  const bool is_slice_aligned = args.world_size == 1 || args.numel * sizeof(Slice) % kAccessNbytes == 0;
  const bool has_vectors = is_aligned(args.out) && is_aligned(args.slices) && is_slice_aligned;
  constexpr int64_t kTile = kThreads * kAccessNbytes / static_cast<int64_t>(sizeof(Slice));
  return launch_tiles(reduce_kernel<T, Slice>, tiles_of(args.numel, kTile), stream, args, has_vectors);
}

}  // namespace

const char* launch_flatten(const FlattenArgs& args, void* stream) {
  switch (args.out_dtype) {
    case DType::kFloat32:
      return flatten<float>(args, stream);
    case DType::kFloat64:
      return flatten<double>(args, stream);
    case DType::kBFloat16:
      return flatten<BFloat16>(args, stream);
    case DType::kFloat16:
      return flatten<Float16>(args, stream);
  }
  return "unknown dtype";
}

const char* launch_reduce_slices(const ReduceArgs& args, void* stream) {
  switch (args.slice_dtype) {
    case DType::kFloat32:
      return reduce<float, float>(args, stream);
    case DType::kFloat64:
      return reduce<double, double>(args, stream);
    case DType::kBFloat16:
      return reduce<float, BFloat16>(args, stream);
    case DType::kFloat16:
      return reduce<float, Float16>(args, stream);
  }
  return "unknown dtype";
}

}  // namespace zero_shard
