// Part of loops.cpp: what adamw_ does with one element in memory.

// A stretch of one segment whose elements have the same upper half of the index.
struct Part {
  int64_t begin;  // in the shard
  int64_t numel;
  const void* grad;  // of the element at begin
  RandomKey key;     // of the parameter at this step
  int64_t index;     // of the element at begin within the parameter
};

// A pointer to Low that costs nothing where the weight has none.
template <class Low>
struct LowPointer {
  Low* pointer;
  LowPointer(void* raw, int64_t begin) : pointer(static_cast<Low*>(raw) + begin) {}
  Low read(int64_t i) const { return pointer[i]; }
  void write(int64_t i, Low value) const { pointer[i] = value; }
  template <int64_t kNumel>
  void prefetch_from(int64_t ahead, bool is_wanted) const {
    prefetch<kNumel>(pointer, ahead, is_wanted);
  }
};
template <>
struct LowPointer<Nothing> {
  LowPointer(void*, int64_t) {}
  Nothing read(int64_t) const { return {}; }
  void write(int64_t, Nothing) const {}
  template <int64_t kNumel>
  void prefetch_from(int64_t, bool) const {}
};

// The elements of one part in all tensors, each counted from 0. The moments may lie elsewhere.
template <class Weight, class Moment, class Grad>
struct Arrays {
  Raw<typename Weight::Storage>* param;
  LowPointer<typename Weight::Low> low;
  const Raw<Grad>* grad;
  Raw<Moment>* exp_avg;
  Raw<Moment>* exp_avg_sq;
  Raw<Moment>* max_exp_avg_sq;
  RandomKey key;
  uint32_t index;

  Arrays(const AdamwArgs& args, const Part& part, void* exp_avg, void* exp_avg_sq, void* max_exp_avg_sq)
      : param(static_cast<Raw<typename Weight::Storage>*>(args.param) + part.begin),
        low(args.low, part.begin),
        grad(static_cast<const Raw<Grad>*>(part.grad)),
        exp_avg(static_cast<Raw<Moment>*>(exp_avg)),
        exp_avg_sq(static_cast<Raw<Moment>*>(exp_avg_sq)),
        max_exp_avg_sq(static_cast<Raw<Moment>*>(max_exp_avg_sq)),
        key(key_of_upper(part.key, static_cast<uint32_t>(part.index >> 32))),
        index(static_cast<uint32_t>(part.index)) {}
};

template <bool kIsAmsgrad, class Weight, class Moment, class Grad>
ZERO_SHARD_INLINE void update_element(
    const Arrays<Weight, Moment, Grad>& arrays, const AdamwConstants<typename Weight::Compute>& constants, int64_t i) {
  using T = typename Weight::Compute;
  using Storage = typename Weight::Storage;
  T master = Weight::join(from_raw<Storage>(arrays.param[i]), arrays.low.read(i));
  T mean = widen(from_raw<Moment>(arrays.exp_avg[i]));
  T square = widen(from_raw<Moment>(arrays.exp_avg_sq[i]));
  T max_square = T(0);
  if (kIsAmsgrad) {
    max_square = widen(from_raw<Moment>(arrays.max_exp_avg_sq[i]));
  }
  const T grad = widen(from_raw<Grad>(arrays.grad[i]));
  adamw_element<kIsAmsgrad>(constants, grad, master, mean, square, max_square);
  arrays.exp_avg[i] = to_raw(convert<Moment>(mean));
  arrays.exp_avg_sq[i] = to_raw(convert<Moment>(square));
  if (kIsAmsgrad) {
    arrays.max_exp_avg_sq[i] = to_raw(convert<Moment>(max_square));
  }
  const uint32_t random = Weight::kIsStochastic ? random_bits(arrays.key, arrays.index + static_cast<uint32_t>(i)) : 0u;
  Storage new_param;
  typename Weight::Low new_low;
  Weight::split(master, new_param, new_low, random);
  arrays.param[i] = to_raw(new_param);
  arrays.low.write(i, new_low);
}
