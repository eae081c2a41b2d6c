// Part of loops.cpp: flatten_ and unflatten_ over a range of the flat buffer.

// Elements of a strided tensor that are gathered or scattered at a time; they stay in the first-level cache.
constexpr int64_t kStridedNumel = 4096;
// Rows of a transposed matrix that are taken together, so that lines of memory are used as a whole, and several of one
// page in a row.
constexpr int64_t kPatchRows = 64;

// Casts between numel elements of the flat buffer and as many values of a tensor.
template <bool kIsToFlat>
void cast_values(const FlattenArgs& args, char* flat, void* values, DType dtype, int64_t numel) {
  if (kIsToFlat) {
    copy_values(flat, args.flat_dtype, values, dtype, numel, args.scale);
  } else {
    copy_values(values, dtype, flat, args.flat_dtype, numel, args.scale);
  }
}

// Between the flat buffer and the entry's elements from `at` on, in row-major order; flat points at the first.
template <bool kIsToFlat>
void copy_strided(const FlattenArgs& args, const FlattenEntry& entry, char* flat, int64_t at, int64_t numel) {
  const DType dtype = static_cast<DType>(entry.dtype);
  const int64_t flat_nbytes = nbytes_of(args.flat_dtype);
  alignas(64) char values[kStridedNumel * sizeof(double)];
  for (int64_t done = 0; done < numel; done += kStridedNumel) {
    const int64_t count = smaller(kStridedNumel, numel - done);
    if (kIsToFlat) {
      move_values<true>(values, entry, at + done, count);
    }
    cast_values<kIsToFlat>(args, flat + done * flat_nbytes, values, dtype, count);
    if (!kIsToFlat) {
      move_values<false>(values, entry, at + done, count);
    }
  }
}

// The same for whole rows from `at` on that lie at one stride from each other, patch by patch.
template <bool kIsToFlat>
void copy_rows(const FlattenArgs& args, const FlattenEntry& entry, char* flat, int64_t at, int64_t num_rows) {
  const DType dtype = static_cast<DType>(entry.dtype);
  const int64_t nbytes = nbytes_of(dtype);
  const int64_t flat_nbytes = nbytes_of(args.flat_dtype);
  const int64_t row_numel = entry.lengths[entry.num_dims - 1];
  const int64_t patch_numel = kStridedNumel / num_rows;
  alignas(64) char values[kStridedNumel * sizeof(double)];
  for (int64_t column = 0; column < row_numel; column += patch_numel) {
    const int64_t num_columns = smaller(patch_numel, row_numel - column);
    if (kIsToFlat) {
      move_matrix<true>(values, entry, at + column, num_rows, num_columns);
    }
    const int64_t num_runs = num_columns == row_numel ? 1 : num_rows;  // in the flat buffer
    const int64_t run_numel = num_rows * num_columns / num_runs;
    for (int64_t run = 0; run < num_runs; ++run) {
      char* flat_run = flat + (run * row_numel + column) * flat_nbytes;
      cast_values<kIsToFlat>(args, flat_run, values + run * run_numel * nbytes, dtype, run_numel);
    }
    if (!kIsToFlat) {
      move_matrix<false>(values, entry, at + column, num_rows, num_columns);
    }
  }
}

template <bool kIsToFlat>
void copy_entry(const FlattenArgs& args, const FlattenEntry& entry, char* flat, int64_t at, int64_t numel) {
  const DType dtype = static_cast<DType>(entry.dtype);
  if (entry.num_dims == 0) {
    char* data = static_cast<char*>(entry.data) + at * nbytes_of(dtype);
    return cast_values<kIsToFlat>(args, flat, data, dtype, numel);
  }
  const int64_t inner = entry.num_dims - 1;
  const bool is_transposed = inner > 0 && entry.strides[inner - 1] < entry.strides[inner];
  if (!is_transposed) {
    return copy_strided<kIsToFlat>(args, entry, flat, at, numel);
  }
  const int64_t flat_nbytes = nbytes_of(args.flat_dtype);
  const int64_t row_numel = entry.lengths[inner];
  for (int64_t done = 0; done < numel;) {
    const int64_t row = (at + done) / row_numel;
    const int64_t past = (at + done) % row_numel;
    const int64_t num_rows =
        smaller((numel - done) / row_numel, entry.lengths[inner - 1] - row % entry.lengths[inner - 1]);
    char* now = flat + done * flat_nbytes;
    if (past == 0 && num_rows > 0) {
      const int64_t count = smaller(kPatchRows, num_rows);
      copy_rows<kIsToFlat>(args, entry, now, at + done, count);
      done += count * row_numel;
    } else {
      const int64_t count = smaller(row_numel - past, numel - done);
      copy_strided<kIsToFlat>(args, entry, now, at + done, count);
      done += count;
    }
  }
}

template <bool kIsToFlat>
void copy_entries(const FlattenArgs& args, int64_t begin, int64_t end) {
  char* flat = static_cast<char*>(args.flat);
  const int64_t nbytes = nbytes_of(args.flat_dtype);
  int64_t done = begin;
  for (int64_t e = first_range_after(args.entries, args.num_entries, begin); e < args.num_entries; ++e) {
    const FlattenEntry& entry = args.entries[e];
    if (entry.start >= end) {
      break;
    }
    const int64_t first = larger(entry.start, begin);
    const int64_t last = smaller(entry.start + entry.numel, end);
    if (kIsToFlat) {
      memset(flat + done * nbytes, 0, static_cast<size_t>((first - done) * nbytes));
    }
    copy_entry<kIsToFlat>(args, entry, flat + first * nbytes, first - entry.start, last - first);
    done = last;
  }
  if (kIsToFlat) {
    memset(flat + done * nbytes, 0, static_cast<size_t>((end - done) * nbytes));
  }
}

void flatten(const FlattenArgs& args, int64_t begin, int64_t end) { copy_entries<true>(args, begin, end); }

void unflatten(const FlattenArgs& args, int64_t begin, int64_t end) { copy_entries<false>(args, begin, end); }
