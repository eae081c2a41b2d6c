// C entries for tests/test_native_sources.py.
#include <cuda_runtime.h>

#include "../../csrc/cuda/launch.h"

using namespace zero_shard;

extern "C" {

// num_processors, whether fibers run in descending order.
void shim_configure(int num_processors, int is_descending) {
  shim::options = {};
  shim::options.num_processors = num_processors;
  shim::options.is_descending = is_descending != 0;
}
int64_t shim_num_launches() { return shim::num_launches; }

// The tests mirror these structs.
int64_t sizeof_adamw() { return sizeof(AdamwArgs); }
int64_t sizeof_quantize() { return sizeof(QuantizeArgs); }
int64_t sizeof_reduce() { return sizeof(ReduceArgs); }
int64_t sizeof_sum_squares() { return sizeof(SumSquaresArgs); }
int64_t sizeof_flatten() { return sizeof(FlattenArgs); }
int64_t sizeof_entry() { return sizeof(FlattenEntry); }

int64_t partials_numel(int64_t numel, int64_t num_segments) { return sum_partials_numel(numel, num_segments); }
const char* run_adamw(const AdamwArgs* args) { return launch_adamw(*args, nullptr); }
const char* run_quantize(const QuantizeArgs* args) { return launch_quantize(*args, nullptr); }
const char* run_reduce_slices(const ReduceArgs* args) { return launch_reduce_slices(*args, nullptr); }
const char* run_sum_squares(const SumSquaresArgs* args) { return launch_sum_squares(*args, nullptr); }
const char* run_sum_pairs(double* total, const double* pairs, int64_t num_pairs) {
  return launch_sum_pairs(total, pairs, num_pairs, nullptr);
}
const char* run_flatten(const FlattenArgs* args) { return launch_flatten(*args, nullptr); }
const char* run_unflatten(const FlattenArgs* args) { return launch_unflatten(*args, nullptr); }

}  // extern "C"
