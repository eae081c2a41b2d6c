// Part of loops.cpp: between a strided tensor and contiguous memory of the same dtype. Raw has the element's width;
// bits are moved as they are.

// The position of row-major element `at` in each dimension; returns its offset in memory.
int64_t find_element(const FlattenEntry& entry, int64_t at, int64_t* position) {
  int64_t offset = 0;
  for (int64_t dim = entry.num_dims - 1; dim >= 0; --dim) {
    position[dim] = at % entry.lengths[dim];
    at /= entry.lengths[dim];
    offset += position[dim] * entry.strides[dim];
  }
  return offset;
}

template <bool kIsGather, class Raw>
ZERO_SHARD_INLINE void move_one(Raw& values, Raw& data) {
  if (kIsGather) {
    values = data;
  } else {
    data = values;
  }
}

// The numel elements from `at` on, row by row along the last dimension.
template <bool kIsGather, class Raw>
void move_run(void* values, const FlattenEntry& entry, int64_t at, int64_t numel) {
  Raw* __restrict__ to = static_cast<Raw*>(values);
  Raw* __restrict__ data = static_cast<Raw*>(entry.data);
  const int64_t inner = entry.num_dims - 1;
  const int64_t stride = entry.strides[inner];
  int64_t position[kMaxDims];
  int64_t offset = find_element(entry, at, position);
  for (int64_t done = 0; done < numel;) {
    const int64_t count = smaller(entry.lengths[inner] - position[inner], numel - done);
    for (int64_t i = 0; i < count; ++i) {
      move_one<kIsGather>(to[done + i], data[offset + i * stride]);
    }
    done += count;
    offset += count * stride;
    position[inner] += count;
    // On to the next row.
    for (int64_t dim = inner; dim > 0 && position[dim] == entry.lengths[dim]; --dim) {
      offset += entry.strides[dim - 1] - position[dim] * entry.strides[dim];
      position[dim] = 0;
      ++position[dim - 1];
    }
  }
}

// A part of some rows: num_rows x num_columns elements, from `at` on.
template <bool kIsGather, class Raw>
void move_patch(void* values, const FlattenEntry& entry, int64_t at, int64_t num_rows, int64_t num_columns) {
  Raw* __restrict__ to = static_cast<Raw*>(values);
  Raw* __restrict__ data = static_cast<Raw*>(entry.data);
  const int64_t row_stride = entry.strides[entry.num_dims - 2];
  const int64_t column_stride = entry.strides[entry.num_dims - 1];
  int64_t position[kMaxDims];
  const int64_t offset = find_element(entry, at, position);
  // Neighbouring accesses to the tensor miss the caches at a time, or fill one line.
  if (kIsGather) {
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t column = 0; column < num_columns; ++column) {
        to[row * num_columns + column] = data[offset + row * row_stride + column * column_stride];
      }
    }
  } else {
    for (int64_t column = 0; column < num_columns; ++column) {
      for (int64_t row = 0; row < num_rows; ++row) {
        data[offset + row * row_stride + column * column_stride] = to[row * num_columns + column];
      }
    }
  }
}

template <bool kIsGather>
void move_values(void* values, const FlattenEntry& entry, int64_t at, int64_t numel) {
  switch (nbytes_of(static_cast<DType>(entry.dtype))) {
    case 2:
      return move_run<kIsGather, uint16_t>(values, entry, at, numel);
    case 8:
      return move_run<kIsGather, uint64_t>(values, entry, at, numel);
    default:
      return move_run<kIsGather, uint32_t>(values, entry, at, numel);
  }
}

template <bool kIsGather>
void move_matrix(void* values, const FlattenEntry& entry, int64_t at, int64_t num_rows, int64_t num_columns) {
  switch (nbytes_of(static_cast<DType>(entry.dtype))) {
    case 2:
      return move_patch<kIsGather, uint16_t>(values, entry, at, num_rows, num_columns);
    case 8:
      return move_patch<kIsGather, uint64_t>(values, entry, at, num_rows, num_columns);
    default:
      return move_patch<kIsGather, uint32_t>(values, entry, at, num_rows, num_columns);
  }
}
