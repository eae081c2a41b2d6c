// Part of loops.cpp: from one dtype to another, contiguous on both sides.

// What a factor is applied in: the wider of float32 and both dtypes.
template <class Out, class In>
struct Wider {
  using Type = float;
};
template <class In>
struct Wider<double, In> {
  using Type = double;
};
template <class Out>
struct Wider<Out, double> {
  using Type = double;
};
template <>
struct Wider<double, double> {
  using Type = double;
};

template <class Out, class In>
void copy_run(void* to, const void* from, int64_t numel, const float* scale) {
  using T = typename Wider<Out, In>::Type;
  Raw<Out>* __restrict__ out = static_cast<Raw<Out>*>(to);
  const Raw<In>* __restrict__ in = static_cast<const Raw<In>*>(from);
  if (scale != nullptr) {
    const T factor = static_cast<T>(*scale);
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = to_raw(convert<Out>(static_cast<T>(widen(from_raw<In>(in[i]))) * factor));
    }
  } else if constexpr (is_same<Out, In>) {
    memcpy(out, in, static_cast<size_t>(numel) * sizeof(Out));  // keeps the bits of a NaN too
  } else {
    for (int64_t i = 0; i < numel; ++i) {
      out[i] = to_raw(convert<Out>(widen(from_raw<In>(in[i]))));
    }
  }
}

template <class Out>
void copy_to(void* to, const void* from, DType from_dtype, int64_t numel, const float* scale) {
  switch (from_dtype) {
    case DType::kFloat64:
      return copy_run<Out, double>(to, from, numel, scale);
    case DType::kBFloat16:
      return copy_run<Out, BFloat16>(to, from, numel, scale);
    case DType::kFloat16:
      return copy_run<Out, Float16>(to, from, numel, scale);
    default:
      return copy_run<Out, float>(to, from, numel, scale);
  }
}

void copy_values(void* to, DType to_dtype, const void* from, DType from_dtype, int64_t numel, const float* scale) {
  switch (to_dtype) {
    case DType::kFloat64:
      return copy_to<double>(to, from, from_dtype, numel, scale);
    case DType::kBFloat16:
      return copy_to<BFloat16>(to, from, from_dtype, numel, scale);
    case DType::kFloat16:
      return copy_to<Float16>(to, from, from_dtype, numel, scale);
    default:
      return copy_to<float>(to, from, from_dtype, numel, scale);
  }
}

int64_t nbytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
    case DType::kFloat16:
      return 2;
    default:
      return 4;
  }
}
