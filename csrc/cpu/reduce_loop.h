// Part of loops.cpp: reduce_slices_, tile by tile.

// Elements that are added at a time: their sum stays in the first-level cache while the slices pass by.
constexpr int64_t kReduceBlockNumel = 256;
static_assert(kReduceBlockNumel == kBlockNumel, "no block of the wire is cut");

// The elements of one slice from `begin` on, up to the end of a block.
template <class Slice>
struct SliceReader {
  const Raw<Slice>* values;
  SliceReader(const ReduceArgs& args, int64_t rank, int64_t begin)
      : values(slice_of<Raw<Slice>>(args, rank, args.numel) + begin) {}
  auto operator()(int64_t i) const { return widen(from_raw<Slice>(values[i])); }
};
template <>
struct SliceReader<Quantized> {
  const int8_t* values;
  float scale;
  SliceReader(const ReduceArgs& args, int64_t rank, int64_t begin) {
    const uint8_t* slice = slice_of<uint8_t>(args, rank, args.numel / kBlockNumel * kWireBlockNbytes);
    const uint8_t* wire = slice + begin / kBlockNumel * kWireBlockNbytes;
    memcpy(&scale, wire, sizeof scale);
    values = reinterpret_cast<const int8_t*>(wire + kScaleNbytes) + begin % kBlockNumel;
  }
  float operator()(int64_t i) const { return dequantize(values[i], scale); }
};

template <class T, class Slice>
void reduce_run(const ReduceArgs& args, int64_t begin, int64_t end) {
  T* __restrict__ out = static_cast<T*>(args.out);
  const T divisor = static_cast<T>(args.divisor);
  T sum[kReduceBlockNumel];
  for (int64_t block = begin, next; block < end; block = next) {
    next = smaller(end, block - block % kReduceBlockNumel + kReduceBlockNumel);
    const int64_t numel = next - block;
    const SliceReader<Slice> first(args, 0, block);
    prefetch<kReduceBlockNumel>(first.values, kAheadNumel);
    for (int64_t i = 0; i < numel; ++i) {
      sum[i] = first(i);
    }
    for (int64_t rank = 1; rank < args.world_size; ++rank) {
      const SliceReader<Slice> slice(args, rank, block);
      prefetch<kReduceBlockNumel>(slice.values, kAheadNumel);
      for (int64_t i = 0; i < numel; ++i) {
        sum[i] = sum[i] + slice(i);
      }
    }
    T* __restrict__ target = out + block;
    prefetch<kReduceBlockNumel>(target, kAheadNumel);
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

// The part of one segment that lies in a tile: a block is reduced, and summed while it is in the cache.
template <class T, class Slice>
PairSum reduce_segment(const ReduceArgs& args, const Segment& segment, int64_t first, int64_t last) {
  LaneSums sums{};
  while (first < last) {
    const int64_t index = first - segment.start + segment.param_start;
    const int64_t next = smaller(last, first + kReduceBlockNumel - index % kChunkNumel<T>);
    reduce_run<T, Slice>(args, first, next);
    add_values<T>(sums, static_cast<const T*>(args.out) + first, index, next - first);
    first = next;
  }
  return total_of(sums);
}

template <class T, class Slice>
void reduce_tiles(const ReduceArgs& args, int64_t first_tile, int64_t end_tile) {
  const SumArgs& sum = args.sum;
  for (int64_t tile = first_tile; tile < end_tile; ++tile) {
    int64_t done = tile_start(sum, tile, kTileNumel, kChunkNumel<T>);
    const int64_t end = tile_start(sum, tile + 1, kTileNumel, kChunkNumel<T>);
    for (int64_t s = first_range_after(sum.segments, sum.num_segments, done); s < sum.num_segments; ++s) {
      const Segment& segment = sum.segments[s];
      if (segment.start >= end) {
        break;
      }
      const int64_t first = larger(segment.start, done);
      const int64_t last = smaller(segment.start + segment.numel, end);
      reduce_run<T, Slice>(args, done, first);  // between segments
      write_pair(sum.partials, tile + s, reduce_segment<T, Slice>(args, segment, first, last));
      done = last;
    }
    reduce_run<T, Slice>(args, done, end);
  }
}

void reduce_slices(const ReduceArgs& args, int64_t first_tile, int64_t end_tile) {
  switch (args.slice_dtype) {
    case DType::kFloat64:
      return reduce_tiles<double, double>(args, first_tile, end_tile);
    case DType::kBFloat16:
      return reduce_tiles<float, BFloat16>(args, first_tile, end_tile);
    case DType::kFloat16:
      return reduce_tiles<float, Float16>(args, first_tile, end_tile);
    case DType::kInt8:
      return reduce_tiles<float, Quantized>(args, first_tile, end_tile);
    default:
      return reduce_tiles<float, float>(args, first_tile, end_tile);
  }
}
