// flatten_ and unflatten_: between any number of tensors, of any strides, and one flat buffer.
//
// A warp takes a tile of the flat buffer and goes through the tensors in it. See Note [Warp tiles]. Strided tensors are
// read and written element by element; where neighbouring lanes touch one sector, the cache joins them.
#include <type_traits>

#include "common.cuh"
#include "launch.h"

namespace zero_shard {
namespace {

constexpr int64_t kTileNumel = 2048;
constexpr int kMinBlocks = 4;  // per multiprocessor: leaves a thread 64 registers

constexpr int64_t kEntriesPerLaunch = 100;
constexpr int64_t kDimsPerLaunch = 80;

struct Dim {
  int64_t length;
  int64_t stride;
};

// Elements begin <= i < end of the flat buffer and the tensors in them, without the dimensions that most do not have.
struct CopyTable {
  void* flat;
  const float* scale;
  int64_t begin;
  int64_t end;
  int64_t num_entries;
  Run entries[kEntriesPerLaunch];
  Dim dims[kDimsPerLaunch];
  uint8_t first_dims[kEntriesPerLaunch];
  uint8_t num_dims[kEntriesPerLaunch];
  uint8_t dtypes[kEntriesPerLaunch];
};
static_assert(sizeof(CopyTable) <= kArgumentsNbytes, "arguments fit");

// The factor, if there is one.
struct Scale {
  bool is_given;
  float factor;
};

template <class Out, class In>
__device__ __forceinline__ Out cast(In value, Scale scale) {
  if constexpr (std::is_same<Out, In>::value) {
    if (!scale.is_given) {
      return value;  // keeps the bits of a NaN too
    }
  }
  using Wide = std::conditional_t<sizeof(Out) == sizeof(double) || sizeof(In) == sizeof(double), double, float>;
  return convert<Out>(static_cast<Wide>(widen(value)) * static_cast<Wide>(scale.factor));
}

// Copies numel elements by the lanes of a warp: vectors where both sides are aligned, after a short head.
template <class Out, class In>
__device__ __forceinline__ void copy_range(Out* out, const In* in, int numel, Scale scale) {
  constexpr int kNumel = kAccessNbytes / static_cast<int>(sizeof(Out) > sizeof(In) ? sizeof(Out) : sizeof(In));
  constexpr int kWarpNumel = kLanesPerWarp * kNumel;
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(out) / sizeof(Out) % kNumel);
  const int head = past == 0 ? 0 : kNumel - past < numel ? kNumel - past : numel;
  const bool has_vectors = reinterpret_cast<uintptr_t>(in + head) % (sizeof(In) * kNumel) == 0;
  const int vectors_end = has_vectors ? head + (numel - head) / kNumel * kNumel : head;
#pragma unroll 1
  for (int i = lane_number(); i < head; i += kLanesPerWarp) {
    out[i] = cast<Out>(in[i], scale);
  }
  // The next vector is on its way while this one is cast.
  int i = head + lane_number() * kNumel;
  Vector<In, kNumel> next{};
  if (i < vectors_end) {
    next = load_vector<kNumel>(in + i);
  }
#pragma unroll 1
  for (; i < vectors_end; i += kWarpNumel) {
    const Vector<In, kNumel> from = next;
    if (i + kWarpNumel < vectors_end) {
      next = load_vector<kNumel>(in + i + kWarpNumel);
    }
    Vector<Out, kNumel> to;
#pragma unroll
    for (int k = 0; k < kNumel; ++k) {
      to.values[k] = cast<Out>(from.values[k], scale);
    }
    store_vector(out + i, to);
  }
#pragma unroll 1
  for (i = vectors_end + lane_number(); i < numel; i += kLanesPerWarp) {
    out[i] = cast<Out>(in[i], scale);
  }
}

// In 32 bits where that is enough: several times faster.
__device__ __forceinline__ int64_t divide(int64_t dividend, int64_t divisor) {
  if (((dividend | divisor) >> 32) == 0) {
    return static_cast<uint32_t>(dividend) / static_cast<uint32_t>(divisor);
  }
  return dividend / divisor;
}

// Where the element with this number in row-major order lies.
__device__ __forceinline__ int64_t offset_of(const Dim* dims, int num_dims, int64_t number) {
  int64_t offset = 0;
  for (int dim = num_dims - 1; dim > 0; --dim) {
    const int64_t rest = divide(number, dims[dim].length);
    offset += (number - rest * dims[dim].length) * dims[dim].stride;
    number = rest;
  }
  return offset + number * dims[0].stride;
}

template <bool kIsToFlat, class Flat, class Value>
__device__ __forceinline__ void copy_strided(
    Flat* flat, Value* data, const Dim* dims, int num_dims, int64_t skip, int numel, Scale scale) {
#pragma unroll 1
  for (int i = lane_number(); i < numel; i += kLanesPerWarp) {
    Value* element = data + offset_of(dims, num_dims, skip + i);
    if constexpr (kIsToFlat) {
      flat[i] = cast<Flat>(*element, scale);
    } else {
      *element = cast<Value>(flat[i], scale);
    }
  }
}

// Between numel elements of the flat buffer and those of entry e from number `skip` on.
template <bool kIsToFlat, class Value, class Flat>
__device__ __forceinline__ void copy_entry(
    Flat* flat, const CopyTable& table, int64_t e, int64_t skip, int numel, Scale scale) {
  Value* data = static_cast<Value*>(const_cast<void*>(table.entries[e].data));
  if (table.num_dims[e] != 0) {
    copy_strided<kIsToFlat>(flat, data, table.dims + table.first_dims[e], table.num_dims[e], skip, numel, scale);
  } else if constexpr (kIsToFlat) {
    copy_range<Flat, Value>(flat, data + skip, numel, scale);
  } else {
    copy_range<Value, Flat>(data + skip, flat, numel, scale);
  }
}

template <class Flat>
__device__ __forceinline__ void zero_range(Flat* flat, int numel) {
#pragma unroll 1
  for (int i = lane_number(); i < numel; i += kLanesPerWarp) {
    flat[i] = Flat{};
  }
}

template <bool kIsToFlat, class Flat>
__global__ void __launch_bounds__(kThreads, kMinBlocks) copy_kernel(const __grid_constant__ CopyTable table) {
  Flat* flat = static_cast<Flat*>(table.flat);
  const Scale scale{table.scale != nullptr, table.scale != nullptr ? *table.scale : 1.0f};
  for (int64_t tile = table.begin / kTileNumel + warp_number(); tile * kTileNumel < table.end; tile += num_warps()) {
    const int64_t begin = larger(tile * kTileNumel, table.begin);
    const int64_t end = smaller((tile + 1) * kTileNumel, table.end);
    int64_t done = begin;
    for (int64_t e = first_range_after(table.entries, table.num_entries, begin); e < table.num_entries; ++e) {
      const Run& entry = table.entries[e];
      if (entry.start >= end) {
        break;
      }
      const int64_t first = larger(entry.start, begin);
      const int64_t last = smaller(entry.start + entry.numel, end);
      if constexpr (kIsToFlat) {
        zero_range(flat + done, static_cast<int>(first - done));
      }
      const int numel = static_cast<int>(last - first);
      done = last;
      switch (static_cast<DType>(table.dtypes[e])) {
        case DType::kFloat32:
          copy_entry<kIsToFlat, float>(flat + first, table, e, first - entry.start, numel, scale);
          break;
        case DType::kFloat64:
          copy_entry<kIsToFlat, double>(flat + first, table, e, first - entry.start, numel, scale);
          break;
        case DType::kBFloat16:
          copy_entry<kIsToFlat, BFloat16>(flat + first, table, e, first - entry.start, numel, scale);
          break;
        case DType::kFloat16:
          copy_entry<kIsToFlat, Float16>(flat + first, table, e, first - entry.start, numel, scale);
          break;
        case DType::kInt8:
          break;
      }
    }
    if constexpr (kIsToFlat) {
      zero_range(flat + done, static_cast<int>(end - done));
    }
  }
}

// Fills the table with entries from number `first` on; returns the number of the first that does not fit.
int64_t fill_table(const FlattenArgs& args, int64_t first, CopyTable& table) {
  int64_t num_dims = 0;
  int64_t e = first;
  for (; e < args.num_entries && e - first < kEntriesPerLaunch; ++e) {
    const FlattenEntry& entry = args.entries[e];
    if (num_dims + entry.num_dims > kDimsPerLaunch) {
      break;
    }
    table.entries[e - first] = Run{entry.data, entry.start, entry.numel};
    table.first_dims[e - first] = static_cast<uint8_t>(num_dims);
    table.num_dims[e - first] = static_cast<uint8_t>(entry.num_dims);
    table.dtypes[e - first] = static_cast<uint8_t>(entry.dtype);
    for (int64_t dim = 0; dim < entry.num_dims; ++dim) {
      table.dims[num_dims + dim] = Dim{entry.lengths[dim], entry.strides[dim]};
    }
    num_dims += entry.num_dims;
  }
  table.num_entries = e - first;
  return e;
}

template <bool kIsToFlat, class Flat>
const char* launch(const FlattenArgs& args, void* stream) {
  CopyTable table{};
  table.flat = args.flat;
  table.scale = args.scale;
  int64_t first = 0;
  do {
    first = fill_table(args, first, table);
    table.begin = table.end;
    table.end = first < args.num_entries ? args.entries[first].start : args.numel;
    const int64_t num_tiles = tiles_of(table.end, kTileNumel) - table.begin / kTileNumel;
    const char* error = launch_warps(copy_kernel<kIsToFlat, Flat>, num_tiles, stream, table);
    if (error != nullptr) {
      return error;
    }
  } while (first < args.num_entries);
  return nullptr;
}

template <bool kIsToFlat>
const char* launch_copies(const FlattenArgs& args, void* stream) {
  switch (args.flat_dtype) {
    case DType::kFloat32:
      return launch<kIsToFlat, float>(args, stream);
    case DType::kFloat64:
      return launch<kIsToFlat, double>(args, stream);
    case DType::kBFloat16:
      return launch<kIsToFlat, BFloat16>(args, stream);
    case DType::kFloat16:
      return launch<kIsToFlat, Float16>(args, stream);
    case DType::kInt8:
      break;
  }
  return "no kernel for this dtype of flat";
}

}  // namespace

const char* launch_flatten(const FlattenArgs& args, void* stream) { return launch_copies<true>(args, stream); }

const char* launch_unflatten(const FlattenArgs& args, void* stream) { return launch_copies<false>(args, stream); }

}  // namespace zero_shard
