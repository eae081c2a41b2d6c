// Part of loops.cpp: adamw_ over a range of the shard.

// Elements between two rounds of prefetching: whole lines of the narrowest type.
constexpr int64_t kStepNumel = 64;

template <bool kIsAmsgrad, class Weight, class Moment, class Grad>
void adamw_run(
    const Arrays<Weight, Moment, Grad> arrays, const AdamwConstants<typename Weight::Compute> constants,
    int64_t numel) {
  const bool is_wanted = kIsPrefetching || sizeof(typename Weight::Storage) == 2;
  int64_t i = 0;
  for (; i + kStepNumel <= numel; i += kStepNumel) {
    const int64_t ahead = i + kAheadNumel;
    prefetch<kStepNumel>(arrays.param, ahead, is_wanted);
    arrays.low.template prefetch_from<kStepNumel>(ahead, is_wanted);
    prefetch<kStepNumel>(arrays.grad, ahead, is_wanted);
    prefetch<kStepNumel>(arrays.exp_avg, ahead, is_wanted);
    prefetch<kStepNumel>(arrays.exp_avg_sq, ahead, is_wanted);
    if (kIsAmsgrad) {
      prefetch<kStepNumel>(arrays.max_exp_avg_sq, ahead, is_wanted);
    }
#pragma GCC ivdep
    for (int64_t k = i; k < i + kStepNumel; ++k) {
      update_element<kIsAmsgrad>(arrays, constants, k);
    }
  }
#pragma GCC ivdep
  for (; i < numel; ++i) {
    update_element<kIsAmsgrad>(arrays, constants, i);
  }
}

template <class Weight, class Moment, class Grad>
void adamw_part(const AdamwArgs& args, const AdamwConstants<typename Weight::Compute>& constants, const Part& part) {
  if constexpr (is_same<Moment, int8_t>) {
    adamw_blocks<Weight, Grad>(args, constants, part);
  } else {
    Raw<Moment>* exp_avg = static_cast<Raw<Moment>*>(args.exp_avg) + part.begin;
    Raw<Moment>* exp_avg_sq = static_cast<Raw<Moment>*>(args.exp_avg_sq) + part.begin;
    if (constants.is_amsgrad) {
      Raw<Moment>* max_exp_avg_sq = static_cast<Raw<Moment>*>(args.max_exp_avg_sq) + part.begin;
      const Arrays<Weight, Moment, Grad> arrays(args, part, exp_avg, exp_avg_sq, max_exp_avg_sq);
      adamw_run<true>(arrays, constants, part.numel);
    } else {
      const Arrays<Weight, Moment, Grad> arrays(args, part, exp_avg, exp_avg_sq, nullptr);
      adamw_run<false>(arrays, constants, part.numel);
    }
  }
}

template <class Weight, class Moment, class Grad>
void adamw_segments(const AdamwArgs& args, int64_t begin, int64_t end) {
  using T = typename Weight::Compute;
  constexpr int64_t kLowerIndices = int64_t{1} << 32;
  const double grad_scale = read_grad_scale(args);
  // Neighbours mostly share group and step: with 20,000 small tensors the constants would cost more than the update.
  int64_t known_group = -1;
  float known_step = 0.0f;
  AdamwConstants<T> constants{};
  const Run* run = args.runs + first_range_after(args.runs, args.num_runs, begin);
  for (int64_t s = first_range_after(args.segments, args.num_segments, begin); s < args.num_segments; ++s) {
    const Segment segment = args.segments[s];
    if (segment.start >= end) {
      break;
    }
    if (segment.numel == 0 || !args.slot_is_active[segment.slot]) {
      continue;
    }
    const int64_t group = args.slot_groups[segment.slot];
    const float step = args.slot_steps[segment.slot];
    if (group != known_group || step != known_step) {
      constants = make_constants<T>(args.group_hyper + group * kNumHyper, step, grad_scale);
      known_group = group;
      known_step = step;
    }
    const RandomKey key = make_random_key(args.slot_numbers[segment.slot], static_cast<int64_t>(step));
    int64_t first = larger(segment.start, begin);
    const int64_t last = smaller(segment.start + segment.numel, end);
    while (run->start + run->numel <= first) {
      ++run;
    }
    while (first < last) {
      const int64_t index = first - segment.start + segment.param_start;
      const int64_t numel = smaller(last - first, kLowerIndices - index % kLowerIndices);
      const void* grad = static_cast<const Raw<Grad>*>(run->data) + (first - run->start);
      adamw_part<Weight, Moment, Grad>(args, constants, Part{first, numel, grad, key, index});
      first += numel;
    }
  }
}

template <class Weight, class Grad>
void adamw_moments(const AdamwArgs& args, int64_t begin, int64_t end) {
  switch (args.moment_dtype) {
    case DType::kBFloat16:
      return adamw_segments<Weight, BFloat16, Grad>(args, begin, end);
    case DType::kInt8:
      return adamw_segments<Weight, int8_t, Grad>(args, begin, end);
    default:
      return adamw_segments<Weight, float, Grad>(args, begin, end);
  }
}

template <class Weight>
void adamw_grads(const AdamwArgs& args, int64_t begin, int64_t end) {
  if (args.grad_dtype == args.param_dtype) {
    adamw_moments<Weight, typename Weight::Storage>(args, begin, end);
  } else {
    adamw_moments<Weight, float>(args, begin, end);
  }
}

void adamw(const AdamwArgs& args, int64_t begin, int64_t end) {
  switch (args.param_dtype) {
    case DType::kFloat64:
      return adamw_segments<PlainWeight<double>, double, double>(args, begin, end);
    case DType::kBFloat16:
      if (args.is_stochastic) {
        return adamw_grads<StochasticWeight>(args, begin, end);
      }
      return args.low != nullptr ? adamw_grads<RemainderWeight>(args, begin, end)
                                 : adamw_grads<RoundedWeight<BFloat16>>(args, begin, end);
    case DType::kFloat16:
      return args.low != nullptr ? adamw_grads<MasterWeight>(args, begin, end)
                                 : adamw_grads<RoundedWeight<Float16>>(args, begin, end);
    default:
      return adamw_moments<PlainWeight<float>, float>(args, begin, end);
  }
}
