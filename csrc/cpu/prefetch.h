// Part of loops.cpp: asking memory for what will be needed.

// Note [Prefetch]: square roots and divisions keep so many instructions in flight that a core does not look far enough
// ahead for memory to stream. With prefetching the float32 update is as fast as a loop of the same traffic with hardly
// any arithmetic (benchmarks/bench_step.py).
constexpr int64_t kAheadNumel = 512;  // elements; half to twice that make no difference
constexpr int64_t kLineNbytes = 64;

// The lines of the kNumel elements that begin `ahead` of a pointer; these need not exist.
template <int64_t kNumel, class T>
ZERO_SHARD_INLINE void prefetch(const T* pointer, int64_t ahead) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) + static_cast<uintptr_t>(ahead) * sizeof(T);
  for (uintptr_t offset = 0; offset < kNumel * sizeof(T); offset += kLineNbytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + offset));
  }
}
