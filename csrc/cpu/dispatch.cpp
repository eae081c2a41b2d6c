// Chooses the instruction set at run time.
#include <cstdlib>
#include <cstring>

#include "loops.h"

namespace zero_shard {

extern const CpuLoops kCpuLoops_scalar;
#if defined(ZERO_SHARD_HAS_X86_LOOPS)
extern const CpuLoops kCpuLoops_avx2;
extern const CpuLoops kCpuLoops_avx512;
#endif

namespace {

// Widest first. A named table must still be one that the machine can run.
const CpuLoops* find_loops(const char* name) {
  const bool is_any = name == nullptr || *name == '\0';
#if defined(ZERO_SHARD_HAS_X86_LOOPS)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (is_any || std::strcmp(name, kCpuLoops_avx512.instruction_set) == 0)) {
    return &kCpuLoops_avx512;
  }
  if (has_avx2 && (is_any || std::strcmp(name, kCpuLoops_avx2.instruction_set) == 0)) {
    return &kCpuLoops_avx2;
  }
#endif
  if (is_any || std::strcmp(name, kCpuLoops_scalar.instruction_set) == 0) {
    return &kCpuLoops_scalar;
  }
  return nullptr;
}

bool is_prefetching() {
#if defined(ZERO_SHARD_HAS_X86_LOOPS)
  __builtin_cpu_init();
  return !__builtin_cpu_is("amd");
#else
  return true;
#endif
}

const CpuLoops* first_choice() {
  const CpuLoops* wanted = find_loops(std::getenv("ZERO_SHARD_CPU_CAPABILITY"));
  return wanted != nullptr ? wanted : find_loops(nullptr);
}

const CpuLoops*& loops_in_force() {
  static const CpuLoops* loops = first_choice();
  return loops;
}

}  // namespace

const bool kIsPrefetching = is_prefetching();

const CpuLoops& cpu_loops() { return *loops_in_force(); }

bool force_cpu_loops(const char* instruction_set) {
  const CpuLoops* wanted = *instruction_set == '\0' ? first_choice() : find_loops(instruction_set);
  if (wanted == nullptr) {
    return false;
  }
  loops_in_force() = wanted;
  return true;
}

}  // namespace zero_shard
