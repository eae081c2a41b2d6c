// Part of loops.cpp: asking memory for what will be needed.

// Note [Prefetch]: square roots and divisions keep so many instructions in flight that a core does not look far enough
// ahead for memory to stream. On Intel the float32 update is, with prefetching, as fast as a loop of the same traffic
// with hardly any arithmetic (benchmarks/bench_step.py). AMD's cores (Zen 4) fetch better by themselves: prefetching
// costs the float32 update 8 % there, and sums and reductions 20 to 30 %. Only 16-bit weights gain by it there, too.
constexpr int64_t kAheadNumel = 512;  // elements; half to twice that make no difference
constexpr int64_t kLineNbytes = 64;

// The lines of the kNumel elements that begin `ahead` of a pointer; these need not exist.
template <int64_t kNumel, class T>
ZERO_SHARD_INLINE void prefetch(const T* pointer, int64_t ahead, bool is_wanted = kIsPrefetching) {
  if (!is_wanted) {
    return;
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) + static_cast<uintptr_t>(ahead) * sizeof(T);
  for (uintptr_t offset = 0; offset < kNumel * sizeof(T); offset += kLineNbytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + offset));
  }
}
