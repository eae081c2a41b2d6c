// Part of loops.cpp: sums of squares by segment. See Note [Canonical chunks].

// A pair for each lane, over the chunks of one tile and segment.
struct LaneSums {
  double high[kLanes];
  double low[kLanes];
};

// A lane of one chunk, its squares folded by halves: values points at the lane's first, the next one of a half that is
// folded kStep times lies kStep * kLanes further. Recursive, because GCC vectorises the loop over lanes only if its
// body has no loop.
template <int64_t kStep = 1>
ZERO_SHARD_INLINE double folded_squares(const float* values) {
  if constexpr (kStep * kLanes == kChunkNumel<float>) {
    const double value = *values;
    return value * value;
  } else {
    return folded_squares<2 * kStep>(values) + folded_squares<2 * kStep>(values + kStep * kLanes);
  }
}

void add_chunk(LaneSums& sums, const float* __restrict__ values) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    PairSum sum{sums.high[lane], sums.low[lane]};
    add_to(sum, folded_squares(values + lane));
    sums.high[lane] = sum.high;
    sums.low[lane] = sum.low;
  }
}

void add_chunk(LaneSums& sums, const double* __restrict__ values) {
  static_assert(kChunkNumel<double> == kLanes, "one square per lane");
#pragma GCC unroll 1  // unrolled it would not be vectorised
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    PairSum sum{sums.high[lane], sums.low[lane]};
    add_to(sum, values[lane] * values[lane]);
    sums.high[lane] = sum.high;
    sums.low[lane] = sum.low;
  }
}

PairSum total_of(LaneSums sums) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      PairSum sum{sums.high[lane], sums.low[lane]};
      add_to(sum, PairSum{sums.high[lane + half], sums.low[lane + half]});
      sums.high[lane] = sum.high;
      sums.low[lane] = sum.low;
    }
  }
  return PairSum{sums.high[0], sums.low[0]};
}

void write_pair(double* pairs, int64_t i, PairSum sum) {
  pairs[2 * i] = sum.high;
  pairs[2 * i + 1] = sum.low;
}

// The values T is summed in, of elements that are stored as In.
template <class In>
struct SummedAs {
  using Type = float;
};
template <>
struct SummedAs<double> {
  using Type = double;
};

// Puts numel values where they belong in a chunk.
template <class In, class T>
void fill_chunk(T* __restrict__ chunk, const Raw<In>* __restrict__ values, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    chunk[i] = widen(from_raw<In>(values[i]));
  }
}

// Elements of one parameter that begin at index; the chunks that they touch are all theirs, or the rest counts as zero.
template <class In>
void add_values(LaneSums& sums, const Raw<In>* values, int64_t index, int64_t numel) {
  using T = typename SummedAs<In>::Type;
  constexpr int64_t kNumel = kChunkNumel<T>;
  T chunk[kNumel];
  for (int64_t done = 0; done < numel;) {
    const int64_t offset = (index + done) % kNumel;
    const int64_t count = smaller(kNumel - offset, numel - done);
    prefetch<kNumel>(values + done, 2 * kAheadNumel);  // one array only: further ahead
    if constexpr (is_same<In, T>) {
      if (count == kNumel) {
        add_chunk(sums, values + done);
        done += count;
        continue;
      }
    }
    if (count < kNumel) {
      memset(chunk, 0, sizeof chunk);
    }
    fill_chunk<In>(chunk + offset, values + done, count);
    add_chunk(sums, chunk);
    done += count;
  }
}

// Elements first to last of the segment, which begin and end with a chunk or with the segment; from the runs that hold
// some of them, the first of which is run.
template <class In>
PairSum sum_of_runs(const SumSquaresArgs& args, const Segment& segment, int64_t first, int64_t last, int64_t run) {
  using T = typename SummedAs<In>::Type;
  constexpr int64_t kNumel = kChunkNumel<T>;
  LaneSums sums{};
  for (int64_t done = first; done < last;) {
    const int64_t index = done - segment.start + segment.param_start;
    const int64_t chunk_end = smaller(last, done + kNumel - index % kNumel);
    while (run < args.num_runs && args.runs[run].start + args.runs[run].numel <= done) {
      ++run;
    }
    if (run == args.num_runs || args.runs[run].start >= last) {
      break;
    }
    const Run& now = args.runs[run];
    const int64_t run_end = smaller(last, now.start + now.numel);
    if (now.start <= done && chunk_end <= run_end) {
      // Whole chunks, and the last one of the segment.
      const int64_t numel = run_end == last ? last - done : run_end - done - (index + run_end - done) % kNumel;
      add_values<In>(sums, static_cast<const Raw<In>*>(now.data) + (done - now.start), index, numel);
      done += numel;
      continue;
    }
    // A chunk that a run's end cuts, put together from all runs in it.
    T chunk[kNumel] = {};
    for (int64_t r = run; r < args.num_runs && args.runs[r].start < chunk_end; ++r) {
      const Run& part = args.runs[r];
      const int64_t begin = larger(part.start, done);
      const int64_t end = smaller(part.start + part.numel, chunk_end);
      fill_chunk<In>(
          chunk + (index % kNumel + begin - done), static_cast<const Raw<In>*>(part.data) + (begin - part.start),
          end - begin);
    }
    add_chunk(sums, chunk);
    done = chunk_end;
  }
  return total_of(sums);
}

template <class In>
void sum_tiles(const SumSquaresArgs& args, int64_t first_tile, int64_t end_tile) {
  constexpr int64_t kNumel = kChunkNumel<typename SummedAs<In>::Type>;
  const SumArgs& sum = args.sum;
  for (int64_t tile = first_tile; tile < end_tile; ++tile) {
    const int64_t begin = tile_start(sum, tile, kTileNumel, kNumel);
    const int64_t end = tile_start(sum, tile + 1, kTileNumel, kNumel);
    int64_t run = first_range_after(args.runs, args.num_runs, begin);
    for (int64_t s = first_range_after(sum.segments, sum.num_segments, begin); s < sum.num_segments; ++s) {
      const Segment& segment = sum.segments[s];
      if (segment.start >= end) {
        break;
      }
      const int64_t first = larger(segment.start, begin);
      const int64_t last = smaller(segment.start + segment.numel, end);
      while (run < args.num_runs && args.runs[run].start + args.runs[run].numel <= first) {
        ++run;
      }
      write_pair(sum.partials, tile + s, sum_of_runs<In>(args, segment, first, last, run));
    }
  }
}

void sum_squares(const SumSquaresArgs& args, int64_t first_tile, int64_t end_tile) {
  switch (args.dtype) {
    case DType::kFloat64:
      return sum_tiles<double>(args, first_tile, end_tile);
    case DType::kBFloat16:
      return sum_tiles<BFloat16>(args, first_tile, end_tile);
    case DType::kFloat16:
      return sum_tiles<Float16>(args, first_tile, end_tile);
    default:
      return sum_tiles<float>(args, first_tile, end_tile);
  }
}

void sum_pairs(double* total, const double* pairs, int64_t num_pairs) {
  PairSum sum{0.0, 0.0};
  for (int64_t i = 0; i < num_pairs; ++i) {
    add_to(sum, PairSum{pairs[2 * i], pairs[2 * i + 1]});
  }
  write_pair(total, 0, normalized(sum));
}

void finish_sums(const SumArgs& args, DType dtype) {
  const int64_t chunk_numel = dtype == DType::kFloat64 ? kChunkNumel<double> : kChunkNumel<float>;
  for (int64_t s = 0; s < args.num_segments; ++s) {
    const Segment& segment = args.segments[s];
    if (segment.numel == 0) {
      write_pair(args.sums, s, PairSum{0.0, 0.0});
      continue;
    }
    const int64_t first = first_tile(segment, kTileNumel);
    const int64_t last = last_tile(segment, kTileNumel, chunk_numel);
    sum_pairs(args.sums + 2 * s, args.partials + 2 * (first + s), last - first + 1);
  }
}
