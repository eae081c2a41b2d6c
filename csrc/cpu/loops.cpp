// The CPU loops. Compiled once per instruction set with ZERO_SHARD_ISA = scalar, avx2, avx512; the compiler vectorises.
//
// Nothing here has external linkage but the table at the end, and nothing comes from the C++ library: a template
// instance shared between the three objects would be linked once, possibly as the one with the widest instructions.
#include "loops.h"

#include <string.h>

#include "../adamw_math.h"
#include "../block_codec.h"
#include "../pair_sum.h"
#include "../wire_codec.h"

#define ZERO_SHARD_JOIN2(a, b) a##b
#define ZERO_SHARD_JOIN(a, b) ZERO_SHARD_JOIN2(a, b)
#define ZERO_SHARD_TEXT2(a) #a
#define ZERO_SHARD_TEXT(a) ZERO_SHARD_TEXT2(a)

namespace zero_shard {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

// Parts of this file, in this namespace; each may use those above it.
#include "prefetch.h"
#include "adamw_arrays.h"
#include "block_loop.h"
#include "adamw_loop.h"
#include "sum_loop.h"
#include "quantize_loop.h"
#include "reduce_loop.h"
#include "cast_loop.h"
#include "stride_loop.h"
#include "copy_loop.h"

}  // namespace

extern const CpuLoops ZERO_SHARD_JOIN(kCpuLoops_, ZERO_SHARD_ISA);
const CpuLoops ZERO_SHARD_JOIN(kCpuLoops_, ZERO_SHARD_ISA) = {
    ZERO_SHARD_TEXT(ZERO_SHARD_ISA), adamw, quantize_range, reduce_slices, sum_squares, finish_sums, sum_pairs, flatten,
    unflatten};

}  // namespace zero_shard
