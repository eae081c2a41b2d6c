// Stands in for CUDA's header of this name: with it, csrc/cuda/*.cu compile as C++ and their kernels run on the host.
//
// The threads of a block are fibers on one thread of the host, and the blocks of a grid follow one another. A fiber
// runs until it waits for the others of its warp (__shfl_xor_sync, __ballot_sync) or of its block (__syncthreads).
// Lanes that do not all reach the same call are an error, as is __trap(); the launch then returns it as CUDA would. The
// first warp or the last one is served first, so that a result which depends on the order shows.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks do not overlap in time

struct uint2 {
  alignas(8) uint32_t x;
  uint32_t y;
};
struct uint4 {
  alignas(16) uint32_t x;
  uint32_t y, z, w;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned width) : x(width) {}
};

inline dim3 threadIdx, blockIdx, gridDim;

using cudaError_t = const char*;  // the text itself
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = nullptr;
constexpr int cudaDevAttrMultiProcessorCount = 0;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace shim {

constexpr unsigned kLanes = 32;

// What a test may set.
struct Options {
  int num_processors = 1;
  bool is_descending = false;
  // Only so many blocks at the end of each grid run: one over billions of elements would take too long.
  unsigned num_last_blocks = ~0u;
};
inline Options options;
inline int64_t num_launches = 0;

enum class Wait { kNothing, kWarp, kBlock };

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackNbytes = 512 << 10;
#else
constexpr size_t kStackNbytes = 64 << 10;
#endif

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackNbytes]};
  ucontext_t start;
  jmp_buf place;
  bool has_started = false;
  bool is_done = true;
  Wait wait = Wait::kNothing;
  int64_t generation = 0;  // of the warp or block, when the wait began
  void* fake_stack = nullptr;
};

// What the lanes of a warp tell one another. Two sets, as the first lane may already be at the next exchange.
struct Warp {
  int64_t generation = 0;
  unsigned num_arrived = 0;
  int line = 0;
  uint64_t values[2][kLanes];
};

class Block {
 public:
  // Runs body once for each thread; returns null or what went wrong.
  const char* run(unsigned num_threads, const std::function<void()>& body) {
    if (fibers_.size() != num_threads) {
      fibers_ = std::vector<Fiber>(num_threads);
    }
    warps_ = std::vector<Warp>(num_threads / kLanes);
    generation_ = 0;
    num_arrived_ = 0;
    error_ = nullptr;
    body_ = &body;
    num_running_ = num_threads;
    for (Fiber& fiber : fibers_) {
      fiber.is_done = false;
      fiber.wait = Wait::kNothing;
    }
    // The first warp that can run goes on as far as it can: with either end first, some warp overtakes all others.
    while (num_running_ > 0 && error_ == nullptr) {
      bool has_moved = false;
      for (unsigned i = 0; i < warps_.size() && !has_moved; ++i) {
        const unsigned warp = options.is_descending ? static_cast<unsigned>(warps_.size()) - 1 - i : i;
        while (error_ == nullptr && run_warp(warp)) {
          has_moved = true;
        }
      }
      if (!has_moved && error_ == nullptr) {
        error_ = "deadlock: some threads wait for others that are done or wait elsewhere";
      }
    }
    if (error_ != nullptr) {
      fibers_.clear();  // they have stopped in the middle
    }
    return error_;
  }

  // Gives all lanes of the warp each other's values.
  const uint64_t* exchange(unsigned mask, uint64_t value, int line) {
    Warp& warp = warps_[thread_ / kLanes];
    const int64_t generation = warp.generation;
    if (mask != ~0u || (warp.num_arrived > 0 && warp.line != line)) {
      fail("the lanes of a warp are not at the same call");
    }
    warp.line = line;
    uint64_t* values = warp.values[generation % 2];
    values[thread_ % kLanes] = value;
    if (++warp.num_arrived == kLanes) {
      warp.num_arrived = 0;
      ++warp.generation;
    } else {
      wait_for(Wait::kWarp, generation);
    }
    return values;
  }

  void synchronize() {
    const int64_t generation = generation_;
    if (++num_arrived_ == fibers_.size()) {
      num_arrived_ = 0;
      ++generation_;
    } else {
      wait_for(Wait::kBlock, generation);
    }
  }

  [[noreturn]] void fail(const char* error) {
    error_ = error;
    leave();
    std::abort();  // nobody resumes a fiber after an error
  }

 private:
  // Each lane until it waits; false if all do.
  bool run_warp(unsigned warp) {
    bool has_moved = false;
    for (unsigned i = 0; i < kLanes && error_ == nullptr; ++i) {
      const unsigned thread = warp * kLanes + (options.is_descending ? kLanes - 1 - i : i);
      if (can_run(thread)) {
        has_moved = true;
        resume(thread);
      }
    }
    return has_moved;
  }

  bool can_run(unsigned thread) const {
    const Fiber& fiber = fibers_[thread];
    if (fiber.is_done) {
      return false;
    }
    switch (fiber.wait) {
      case Wait::kWarp:
        return warps_[thread / kLanes].generation != fiber.generation;
      case Wait::kBlock:
        return generation_ != fiber.generation;
      case Wait::kNothing:
        break;
    }
    return true;
  }

  void wait_for(Wait wait, int64_t generation) {
    Fiber& fiber = fibers_[thread_];
    fiber.wait = wait;
    fiber.generation = generation;
    leave();
  }

  // From the scheduler to a fiber.
  void resume(unsigned thread) {
    Fiber& fiber = fibers_[thread];
    thread_ = thread;
    threadIdx = dim3(thread);
    fiber.wait = Wait::kNothing;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, fiber.stack.get(), kStackNbytes);
#endif
    if (_setjmp(scheduler_) == 0) {
      if (fiber.has_started) {
        _longjmp(fiber.place, 1);
      }
      fiber.has_started = true;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = fiber.stack.get();
      fiber.start.uc_stack.ss_size = kStackNbytes;
      makecontext(&fiber.start, &Block::loop, 0);
      setcontext(&fiber.start);
    }
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // From a fiber to the scheduler, and back again later.
  void leave() {
    Fiber& fiber = fibers_[thread_];
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fiber.fake_stack, scheduler_stack_, scheduler_stack_nbytes_);
#endif
    if (_setjmp(fiber.place) == 0) {
      _longjmp(scheduler_, 1);
    }
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
#endif
  }

  static void loop();

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  int64_t generation_ = 0;
  size_t num_arrived_ = 0;
  size_t num_running_ = 0;
  unsigned thread_ = 0;
  const char* error_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  jmp_buf scheduler_;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_nbytes_ = 0;
};

inline Block block;

// A fiber serves the same thread number of all blocks.
inline void Block::loop() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_stack_nbytes_);
#endif
  for (;;) {
    (*block.body_)();
    block.fibers_[block.thread_].is_done = true;
    --block.num_running_;
    block.leave();
  }
}

}  // namespace shim

inline void __syncthreads() { shim::block.synchronize(); }

[[noreturn]] inline void __trap() { shim::block.fail("trap"); }

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "one value per lane");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const unsigned other = (threadIdx.x % shim::kLanes) ^ static_cast<unsigned>(distance);
  bits = shim::block.exchange(mask, bits, line)[other];
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned __ballot_sync(unsigned mask, bool is_set, int line = __builtin_LINE()) {
  const uint64_t* values = shim::block.exchange(mask, is_set ? 1 : 0, line);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < shim::kLanes; ++lane) {
    votes |= static_cast<unsigned>(values[lane]) << lane;
  }
  return votes;
}

template <class T>
T __ldcs(const T* pointer) {
  return *pointer;
}
template <class T>
void __stcs(T* pointer, T value) {
  *pointer = value;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) {
  *value = shim::options.num_processors;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, Kernel, int, size_t) {
  *num_blocks = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) { return error; }

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  ++shim::num_launches;
  gridDim = config->gridDim;
  const unsigned num_last = shim::options.num_last_blocks;
  for (unsigned number = num_last < gridDim.x ? gridDim.x - num_last : 0; number < gridDim.x; ++number) {
    blockIdx = dim3(number);
    const cudaError_t error = shim::block.run(config->blockDim.x, [&] { kernel(args...); });
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}
