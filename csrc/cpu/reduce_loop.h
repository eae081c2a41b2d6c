// Part of loops.cpp: reduce_slices_, tile by tile.

// Elements that are added at a time: their sum stays in the first-level cache while the slices pass by.
constexpr int64_t kReduceBlockNumel = 256;

template <class T, class Slice>
void reduce_run(const ReduceArgs& args, int64_t begin, int64_t end) {
  T* __restrict__ out = static_cast<T*>(args.out);
  const Raw<Slice>* first = slice_of<Raw<Slice>>(args, 0);
  const T divisor = static_cast<T>(args.divisor);
  T sum[kReduceBlockNumel];
  for (int64_t block = begin; block < end; block += kReduceBlockNumel) {
    const int64_t numel = smaller(kReduceBlockNumel, end - block);
    prefetch<kReduceBlockNumel>(first + block, kAheadNumel);
    for (int64_t i = 0; i < numel; ++i) {
      sum[i] = widen(from_raw<Slice>(first[block + i]));
    }
    for (int64_t rank = 1; rank < args.world_size; ++rank) {
      const Raw<Slice>* __restrict__ slice = slice_of<Raw<Slice>>(args, rank) + block;
      prefetch<kReduceBlockNumel>(slice, kAheadNumel);
      for (int64_t i = 0; i < numel; ++i) {
        sum[i] = sum[i] + widen(from_raw<Slice>(slice[i]));
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
    default:
      return reduce_tiles<float, float>(args, first_tile, end_tile);
  }
}
