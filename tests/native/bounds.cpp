// Runs every loop and kernel over sizes that are awkward, in buffers of exactly the right size, and compares them with
// one another. Built with the address and undefined-behaviour sanitizers, which end the program at a wrong access.
//
//   bounds small     sizes up to some tiles
//   bounds large     more than 2^32 elements, of which only the last few get memory; exit status 77: no address space
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <cstdio>
#include <map>
#include <string>

#include "../../csrc/block_codec.h"
#include "../../csrc/cpu/loops.h"
#include "../../csrc/cuda/launch.h"

namespace zero_shard {
namespace {

constexpr int kNoAddressSpace = 77;

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(1);
}

int64_t nbytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kInt8:
      return 1;
    default:
      return 2;
  }
}

// --- memory -----------------------------------------------------------------------------------------------

// Numbers that a fixed seed repeats.
uint32_t next_random() {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

// A typed array. On the heap it ends where its allocation ends; a sparse one has memory only where it is touched.
class Array {
 public:
  Array() = default;
  Array(DType dtype, int64_t numel, int64_t num_misaligned = 0) : dtype_(dtype), numel_(numel) {
    heap_.reset(new char[static_cast<size_t>((numel + num_misaligned) * nbytes_of(dtype))]);
    data_ = heap_.get() + num_misaligned * nbytes_of(dtype);
  }

  static Array sparse(DType dtype, int64_t numel) {
    Array array;
    array.dtype_ = dtype;
    array.numel_ = numel;
    array.mapped_nbytes_ = static_cast<size_t>(numel * nbytes_of(dtype));
    void* memory =
        mmap(nullptr, array.mapped_nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      std::fprintf(stderr, "no address space for %lld elements\n", static_cast<long long>(numel));
      std::exit(kNoAddressSpace);
    }
    array.data_ = static_cast<char*>(memory);
    return array;
  }

  Array(Array&& other) noexcept { *this = std::move(other); }
  Array& operator=(Array&& other) noexcept {
    std::swap(dtype_, other.dtype_);
    std::swap(numel_, other.numel_);
    std::swap(heap_, other.heap_);
    std::swap(data_, other.data_);
    std::swap(mapped_nbytes_, other.mapped_nbytes_);
    return *this;
  }
  ~Array() {
    if (mapped_nbytes_ != 0) {
      munmap(data_, mapped_nbytes_);
    }
  }

  // Random values, and every 8-bit code; none is NaN or inf.
  void fill(int64_t begin, int64_t end, bool is_positive = false) {
    for (int64_t i = begin; i < end; ++i) {
      const float value = static_cast<float>(next_random() % 4001) / 1000.0f - (is_positive ? 0.0f : 2.0f);
      char* to = data_ + i * nbytes_of(dtype_);
      const float as_float = value;
      const double as_double = value;
      const uint16_t as_bfloat16 = round_to_bfloat16(value).bits;
      const uint16_t as_float16 = round_to_float16(value).bits;
      const uint8_t as_code = static_cast<uint8_t>(next_random());
      switch (dtype_) {
        case DType::kFloat32:
          std::memcpy(to, &as_float, sizeof as_float);
          break;
        case DType::kFloat64:
          std::memcpy(to, &as_double, sizeof as_double);
          break;
        case DType::kBFloat16:
          std::memcpy(to, &as_bfloat16, sizeof as_bfloat16);
          break;
        case DType::kFloat16:
          std::memcpy(to, &as_float16, sizeof as_float16);
          break;
        case DType::kInt8:
          std::memcpy(to, &as_code, sizeof as_code);
          break;
      }
    }
  }
  void fill() { fill(0, numel_); }

  // Elements begin to end of this from those of another array.
  void copy(int64_t begin, int64_t end, const Array& other, int64_t other_begin) {
    const int64_t nbytes = nbytes_of(dtype_);
    std::memcpy(
        data_ + begin * nbytes, other.data_ + other_begin * nbytes, static_cast<size_t>((end - begin) * nbytes));
  }

  std::string bytes(int64_t begin, int64_t end) const {
    return std::string(data_ + begin * nbytes_of(dtype_), data_ + end * nbytes_of(dtype_));
  }
  std::string bytes() const { return bytes(0, numel_); }

  DType dtype() const { return dtype_; }
  int64_t numel() const { return numel_; }
  void* at(int64_t i = 0) const { return data_ + i * nbytes_of(dtype_); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  DType dtype_ = DType::kFloat32;
  int64_t numel_ = 0;
  std::unique_ptr<char[]> heap_;
  char* data_ = nullptr;
  size_t mapped_nbytes_ = 0;
};

// --- implementations --------------------------------------------------------------------------------------

// "cuda" or an instruction set, which is then in force.
std::vector<std::string> implementations() {
  std::vector<std::string> names = {"scalar"};
  for (const char* name : {"avx2", "avx512"}) {
    if (force_cpu_loops(name)) {
      names.push_back(name);
    }
  }
  names.push_back("cuda");
  return names;
}

void check_launch(const char* error) {
  if (error != nullptr) {
    fail(std::string("launch: ") + error);
  }
}

// Calls body(tile) for the tiles of the CPU loops that touch elements begin <= i < end.
template <class Body>
void for_tiles(int64_t begin, int64_t end, const Body& body) {
  for (int64_t tile = begin / kTileNumel; tile * kTileNumel < end; ++tile) {
    body(tile);
  }
}

// Each runs the elements from `begin` on, in an implementation that `name` has put in force; on "cuda" all, or so many
// blocks as shim::options allow.
void run_adamw(const std::string& name, const AdamwArgs& args, int64_t begin = 0) {
  if (name == "cuda") {
    return check_launch(launch_adamw(args, nullptr));
  }
  for_tiles(begin, args.numel, [&](int64_t tile) {
    const int64_t end = (tile + 1) * kTileNumel;
    cpu_loops().adamw(args, tile * kTileNumel, end < args.numel ? end : args.numel);
  });
}

void run_copy(const std::string& name, const FlattenArgs& args, bool is_to_flat, int64_t begin = 0) {
  if (name == "cuda") {
    return check_launch(is_to_flat ? launch_flatten(args, nullptr) : launch_unflatten(args, nullptr));
  }
  for_tiles(begin, args.numel, [&](int64_t tile) {
    const int64_t end = (tile + 1) * kTileNumel;
    const auto loop = is_to_flat ? cpu_loops().flatten : cpu_loops().unflatten;
    loop(args, tile * kTileNumel, end < args.numel ? end : args.numel);
  });
}

std::vector<double> make_partials(const std::string& name, SumArgs& sum) {
  const int64_t tiles = (sum.numel + kTileNumel - 1) / kTileNumel;
  const int64_t numel =
      name == "cuda" ? sum_partials_numel(sum.numel, sum.num_segments) : 2 * (tiles + sum.num_segments);
  std::vector<double> partials(static_cast<size_t>(numel));
  sum.partials = partials.data();
  return partials;
}

void run_reduce(const std::string& name, ReduceArgs args, int64_t begin = 0) {
  const std::vector<double> partials = make_partials(name, args.sum);
  if (name == "cuda") {
    return check_launch(launch_reduce_slices(args, nullptr));
  }
  for_tiles(begin, args.numel, [&](int64_t tile) { cpu_loops().reduce_slices(args, tile, tile + 1); });
  if (args.sum.sums != nullptr) {
    cpu_loops().finish_sums(args.sum, args.slice_dtype);
  }
}

void run_sum_squares(const std::string& name, SumSquaresArgs args, int64_t begin = 0) {
  const std::vector<double> partials = make_partials(name, args.sum);
  if (name == "cuda") {
    return check_launch(launch_sum_squares(args, nullptr));
  }
  for_tiles(begin, args.sum.numel, [&](int64_t tile) { cpu_loops().sum_squares(args, tile, tile + 1); });
  cpu_loops().finish_sums(args.sum, args.dtype);
}

// Results of the first implementation, with which the others are compared.
class Comparison {
 public:
  explicit Comparison(std::string what) : what_(std::move(what)) {}
  void add(const std::string& name, const std::string& tensor, const std::string& bytes) {
    const auto [place, is_new] = first_.emplace(tensor, bytes);
    if (!is_new && place->second != bytes) {
      fail(what_ + ": " + tensor + " by " + name + " differs");
    }
  }
  // Of each pair the sum, without what is missing in it.
  void add_sums(const std::string& name, const std::vector<double>& sums) {
    std::string bytes;
    for (size_t i = 0; i < sums.size(); i += 2) {
      bytes.append(reinterpret_cast<const char*>(&sums[i]), sizeof(double));
    }
    add(name, "sums", bytes);
  }

 private:
  std::string what_;
  std::map<std::string, std::string> first_;
};

// --- cases ------------------------------------------------------------------------------------------------

// How a weight, its gradient and its moments are stored; low: kInt8 means none.
struct Scheme {
  DType param, low, grad, moment;
  bool is_stochastic;
};

std::vector<Scheme> schemes() {
  constexpr DType kNone = DType::kInt8;
  std::vector<Scheme> all = {{DType::kFloat64, kNone, DType::kFloat64, DType::kFloat64, false}};
  for (const DType moment : {DType::kFloat32, DType::kBFloat16, DType::kInt8}) {
    all.push_back({DType::kFloat32, kNone, DType::kFloat32, moment, false});
    for (const DType grad : {DType::kFloat32, DType::kBFloat16}) {
      all.push_back({DType::kBFloat16, DType::kBFloat16, grad, moment, false});  // 2 bytes: the remainder
      all.push_back({DType::kBFloat16, kNone, grad, moment, false});
      all.push_back({DType::kBFloat16, kNone, grad, moment, true});
    }
    for (const DType grad : {DType::kFloat32, DType::kFloat16}) {
      all.push_back({DType::kFloat16, DType::kFloat32, grad, moment, false});
      all.push_back({DType::kFloat16, kNone, grad, moment, false});
    }
  }
  return all;
}

// A shard and its tables; the elements from `begin` on are filled.
struct Shard {
  Scheme scheme;
  int64_t numel;
  Array param, low, exp_avg, exp_avg_sq, max_exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
  std::vector<Array> grads;
  std::vector<Run> runs;
  std::vector<Segment> segments;
  std::vector<float> slot_steps;
  std::vector<uint8_t> slot_is_active;
  std::vector<int32_t> slot_groups;
  std::vector<int64_t> slot_numbers;
  std::vector<double> hyper = {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 0, 3e-3, 0.4, 0.95, 1e-6, 0.0, 1, 1};
  float grad_scale = 0.5f;
  float found_inf = 0.0f;

  bool has_low() const { return scheme.low != DType::kInt8; }
  bool has_codes() const { return scheme.moment == DType::kInt8; }

  void add_slot(bool is_active) {
    const int64_t slot = static_cast<int64_t>(slot_steps.size());
    slot_steps.push_back(static_cast<float>(1 + 10 * slot));
    slot_is_active.push_back(is_active ? 1 : 0);
    slot_groups.push_back(static_cast<int32_t>(has_codes() ? 0 : slot % 2));
    slot_numbers.push_back(slot * 1000003);
  }

  AdamwArgs args() const {
    AdamwArgs args{};
    args.numel = numel;
    args.param_dtype = scheme.param;
    args.grad_dtype = scheme.grad;
    args.moment_dtype = scheme.moment;
    args.is_stochastic = scheme.is_stochastic;
    args.param = param.at();
    args.low = has_low() ? low.at() : nullptr;
    args.runs = runs.data();
    args.num_runs = static_cast<int64_t>(runs.size());
    args.exp_avg = exp_avg.at();
    args.exp_avg_sq = exp_avg_sq.at();
    args.max_exp_avg_sq = has_codes() ? nullptr : max_exp_avg_sq.at();
    args.exp_avg_scale = has_codes() ? exp_avg_scale.as<float>() : nullptr;
    args.exp_avg_sq_scale = has_codes() ? exp_avg_sq_scale.as<float>() : nullptr;
    args.segments = segments.data();
    args.num_segments = static_cast<int64_t>(segments.size());
    args.slot_steps = slot_steps.data();
    args.slot_is_active = slot_is_active.data();
    args.slot_groups = slot_groups.data();
    args.slot_numbers = slot_numbers.data();
    args.group_hyper = hyper.data();
    args.grad_scale = &grad_scale;
    args.found_inf = &found_inf;
    return args;
  }

  // The mutable tensors by name; null where there is none.
  std::vector<std::pair<std::string, Array*>> tensors() {
    return {
        {"param", &param},
        {"low", has_low() ? &low : nullptr},
        {"exp_avg", &exp_avg},
        {"exp_avg_sq", &exp_avg_sq},
        {"max_exp_avg_sq", has_codes() ? nullptr : &max_exp_avg_sq},
        {"exp_avg_scale", has_codes() ? &exp_avg_scale : nullptr},
        {"exp_avg_sq_scale", has_codes() ? &exp_avg_sq_scale : nullptr}};
  }
};

// Segments of many lengths with gaps between, every fifth of them inactive, each active one with a gradient of its own.
void cut(Shard& shard, int64_t num_misaligned) {
  const int64_t unit = shard.has_codes() ? kBlockNumel : 1;
  int64_t start = 0;
  for (int64_t s = 0; start <= shard.numel; ++s) {
    const int64_t room = shard.numel - start;
    const int64_t wanted = s % 7 == 6 ? 9000 : static_cast<int64_t>(next_random() % 600);
    const int64_t length = s % 4 == 3 ? 0 : wanted < room ? wanted : room;
    const bool is_active = s % 5 != 4;
    shard.segments.push_back({start, length, s, (s % 3) * ((int64_t{1} << 32) - unit)});
    shard.add_slot(is_active);
    if (is_active && length > 0) {
      shard.grads.emplace_back(shard.scheme.grad, length, s % 2 == 0 ? 0 : num_misaligned);
      shard.grads.back().fill();
      shard.runs.push_back({shard.grads.back().at(), start, length});
    }
    start = (start + length + static_cast<int64_t>(next_random() % 3) + unit - 1) / unit * unit;
    if (length == room) {
      break;
    }
  }
}

Shard make_shard(const Scheme& scheme, int64_t numel, int64_t num_misaligned) {
  Shard shard{};
  shard.scheme = scheme;
  shard.numel = numel;
  const int64_t num_blocks = (numel + kBlockNumel - 1) / kBlockNumel;
  shard.param = Array(scheme.param, numel, num_misaligned);
  shard.exp_avg = Array(scheme.moment, numel, num_misaligned);
  shard.exp_avg_sq = Array(scheme.moment, numel, num_misaligned);
  shard.exp_avg_scale = Array(DType::kFloat32, num_blocks);
  shard.exp_avg_sq_scale = Array(DType::kFloat32, num_blocks);
  if (shard.has_low()) {
    shard.low = Array(scheme.low, numel, num_misaligned);
    shard.low.fill();
  }
  if (!shard.has_codes()) {
    shard.max_exp_avg_sq = Array(scheme.moment, numel, num_misaligned);
    shard.max_exp_avg_sq.fill(0, numel, true);
  }
  shard.param.fill();
  shard.exp_avg.fill();
  shard.exp_avg_sq.fill(0, numel, true);
  shard.exp_avg_scale.fill(0, num_blocks, true);
  shard.exp_avg_sq_scale.fill(0, num_blocks, true);
  cut(shard, num_misaligned);
  return shard;
}

void check_adamw(const Scheme& scheme, int64_t numel, int64_t num_misaligned) {
  Shard shard = make_shard(scheme, numel, num_misaligned);
  std::map<std::string, std::string> before;
  for (const auto& [tensor, array] : shard.tensors()) {
    if (array != nullptr) {
      before[tensor] = array->bytes();
    }
  }
  Comparison comparison("adamw of " + std::to_string(numel));
  for (const std::string& name : implementations()) {
    force_cpu_loops(name.c_str());
    for (const auto& [tensor, array] : shard.tensors()) {
      if (array != nullptr) {
        std::memcpy(array->at(), before[tensor].data(), before[tensor].size());
      }
    }
    run_adamw(name, shard.args());
    for (const auto& [tensor, array] : shard.tensors()) {
      if (array != nullptr) {
        comparison.add(name, tensor, array->bytes());
      }
    }
  }
}

// Segments for sums: gaps, empty ones, and starts anywhere in their parameters.
std::vector<Segment> sum_segments(int64_t numel) {
  std::vector<Segment> segments;
  int64_t start = 0;
  for (int64_t s = 0; start < numel; ++s) {
    const int64_t room = numel - start;
    const int64_t wanted = s % 5 == 4 ? 7000 : static_cast<int64_t>(next_random() % 700);
    const int64_t length = s % 4 == 3 ? 0 : wanted < room ? wanted : room;
    segments.push_back({start, length, s, (s % 3) * 80 + (s % 2) * (int64_t{1} << 33)});
    start += length + static_cast<int64_t>(next_random() % 3);
  }
  return segments;
}

SumArgs sum_args(int64_t numel, const std::vector<Segment>& segments, std::vector<double>& sums) {
  SumArgs args{};
  args.numel = numel;
  args.segments = segments.data();
  args.num_segments = static_cast<int64_t>(segments.size());
  sums.assign(2 * segments.size() + 1, 0.0);  // the last is never touched, and there is a pointer without segments, too
  sums.pop_back();
  args.sums = sums.data();
  return args;
}

void check_reduce(DType dtype, int64_t numel, int64_t num_misaligned, bool has_sums) {
  Array slices(dtype, 3 * numel, num_misaligned), own(dtype, numel, num_misaligned);
  slices.fill();
  own.fill();
  const std::vector<Segment> segments = sum_segments(numel);
  Comparison comparison("reduce of " + std::to_string(numel));
  for (const std::string& name : implementations()) {
    force_cpu_loops(name.c_str());
    Array out(dtype == DType::kFloat64 ? dtype : DType::kFloat32, numel, num_misaligned);
    std::memset(out.at(), 0, out.bytes().size());
    std::vector<double> sums;
    ReduceArgs args{};
    args.out = out.at();
    args.slices = slices.at();
    args.own = has_sums ? own.at() : nullptr;
    args.own_rank = 2;
    args.world_size = 3;
    args.numel = numel;
    args.slice_dtype = dtype;
    args.divisor = 3;
    args.is_accumulate = numel % 2 != 0;
    args.sum.numel = numel;
    if (has_sums) {
      args.sum = sum_args(numel, segments, sums);
    }
    run_reduce(name, args);
    comparison.add(name, "out", out.bytes());
    comparison.add_sums(name, sums);
  }
}

// Values to blocks of the wire, and three slices of those to their sum.
void check_wire(DType dtype, int64_t numel, int64_t num_misaligned) {
  numel = numel / 256 * 256;
  Array values(dtype, 3 * numel, num_misaligned);
  values.fill();
  Comparison comparison("wire of " + std::to_string(numel));
  for (const std::string& name : implementations()) {
    force_cpu_loops(name.c_str());
    Array wire(DType::kInt8, 3 * numel / 256 * 260, num_misaligned);
    const QuantizeArgs quantize{wire.at(), values.at(), 3 * numel, dtype};
    if (name == "cuda") {
      check_launch(launch_quantize(quantize, nullptr));
    } else {
      cpu_loops().quantize(quantize, 0, 3 * numel);
    }
    comparison.add(name, "wire", wire.bytes());
    Array out(DType::kFloat32, numel, num_misaligned);
    std::memset(out.at(), 0, out.bytes().size());
    ReduceArgs args{};
    args.out = out.at();
    args.slices = wire.at();
    args.world_size = 3;
    args.numel = numel;
    args.slice_dtype = DType::kInt8;
    args.divisor = 3;
    args.sum.numel = numel;
    run_reduce(name, args);
    comparison.add(name, "out", out.bytes());
  }
}

// num_runs > 1: the values lie in so many tensors, with gaps between.
void check_sum_squares(DType dtype, int64_t numel, int64_t num_misaligned, int64_t num_runs) {
  std::vector<Array> arrays;
  std::vector<Run> runs;
  for (int64_t r = 0; r < num_runs; ++r) {
    const int64_t start = numel * r / num_runs + (r % 3 == 1 ? 1 : 0);
    const int64_t length = numel * (r + 1) / num_runs - start;
    if (length > 0) {
      arrays.emplace_back(dtype, length, num_misaligned);
      arrays.back().fill();
      runs.push_back({arrays.back().at(), start, length});
    }
  }
  const std::vector<Segment> segments = sum_segments(numel);
  Comparison comparison("sum_squares of " + std::to_string(numel));
  for (const std::string& name : implementations()) {
    force_cpu_loops(name.c_str());
    std::vector<double> sums;
    SumSquaresArgs args{};
    args.dtype = dtype;
    args.runs = runs.data();
    args.num_runs = static_cast<int64_t>(runs.size());
    args.sum = sum_args(numel, segments, sums);
    run_sum_squares(name, args);
    comparison.add_sums(name, sums);
    double total[2];
    if (name == "cuda") {
      check_launch(launch_sum_pairs(total, sums.data(), args.sum.num_segments, nullptr));
    } else {
      cpu_loops().sum_pairs(total, sums.data(), args.sum.num_segments);
    }
    comparison.add(name, "total", std::string(reinterpret_cast<const char*>(total), sizeof(double)));
  }
}

// Tensors of all dtypes, every third one strided.
void check_copies(DType dtype, int64_t numel, int64_t num_misaligned, bool is_to_flat, bool has_scale) {
  std::vector<Array> arrays;
  std::vector<FlattenEntry> entries;
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
  int64_t start = 0;
  for (int64_t e = 0; start < numel; ++e) {
    const int64_t room = numel - start;
    const int64_t wanted = e % 5 == 4 ? 5000 : static_cast<int64_t>(1 + next_random() % 300);
    FlattenEntry entry{};
    entry.start = start;
    entry.numel = wanted < room ? wanted : room;
    entry.dtype = static_cast<int64_t>(kTypes[next_random() % 4]);
    int64_t memory_numel = entry.numel;
    if (e % 3 == 2 && entry.numel >= 3) {
      // Three columns, in column-major order, each with a hole behind it.
      entry.numel = entry.numel / 3 * 3;
      entry.num_dims = 2;
      entry.lengths[0] = entry.numel / 3;
      entry.lengths[1] = 3;
      entry.strides[0] = 1;
      entry.strides[1] = entry.numel / 3 + 1;
      memory_numel = entry.numel + 2;
    }
    arrays.emplace_back(static_cast<DType>(entry.dtype), memory_numel, num_misaligned);
    arrays.back().fill();
    entry.data = arrays.back().at();
    entries.push_back(entry);
    start += entry.numel + static_cast<int64_t>(next_random() % 3);
  }
  const float scale = 0.3f;
  Array flat(dtype, numel, num_misaligned);
  flat.fill();
  FlattenArgs args{};
  args.flat = flat.at();
  args.flat_dtype = dtype;
  args.numel = numel;
  args.entries = entries.data();
  args.num_entries = static_cast<int64_t>(entries.size());
  args.scale = has_scale ? &scale : nullptr;
  Comparison comparison((is_to_flat ? "flatten of " : "unflatten of ") + std::to_string(numel));
  for (const std::string& name : implementations()) {
    force_cpu_loops(name.c_str());
    run_copy(name, args, is_to_flat);
    comparison.add(name, "flat", flat.bytes());
    for (size_t i = 0; i < arrays.size(); ++i) {
      comparison.add(name, "tensor " + std::to_string(i), arrays[i].bytes());
    }
  }
}

void check_small() {
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
  for (const int64_t numel : {0, 1, 3, 17, 255, 256, 257, 4099, 20011}) {
    for (const int64_t num_misaligned : {0, 1}) {
      for (const Scheme& scheme : schemes()) {
        check_adamw(scheme, numel, num_misaligned);
      }
      for (const DType dtype : kTypes) {
        check_reduce(dtype, numel, num_misaligned, false);
        check_reduce(dtype, numel, num_misaligned, true);
        if (dtype != DType::kFloat64) {
          check_wire(dtype, numel, num_misaligned);
        }
        check_sum_squares(dtype, numel, num_misaligned, 1);
        check_sum_squares(dtype, numel, num_misaligned, 1 + numel / 200);
        for (const bool is_to_flat : {false, true}) {
          check_copies(dtype, numel, num_misaligned, is_to_flat, false);
          check_copies(dtype, numel, num_misaligned, is_to_flat, true);
        }
      }
    }
  }
}

// --- more than 2^32 elements ------------------------------------------------------------------------------

// Where the part begins that has memory; also beyond what 32 bits without a sign count.
constexpr int64_t kFar = (int64_t{1} << 32) + 256;
constexpr int64_t kPartNumel = 5003;
constexpr int64_t kFarNumel = kFar + kPartNumel;

// The last kPartNumel elements of an array, filled from a short one.
Array sparse_like(const Array& near) {
  Array array = Array::sparse(near.dtype(), kFarNumel);
  array.copy(kFar, kFarNumel, near, 0);
  return array;
}

// On "cuda" the last blocks of a grid that has one tile for each warp.
void use_last_blocks(bool is_far) {
  shim::options = {};
  if (is_far) {
    shim::options.num_processors = 1 << 24;
    shim::options.num_last_blocks = 2;
  }
}

void check_far_adamw(const Scheme& scheme) {
  Shard near = make_shard(scheme, kPartNumel, 0);
  Comparison comparison("adamw beyond 2^32");
  Shard far{};
  far.scheme = scheme;
  far.numel = kFarNumel;
  const auto near_tensors = near.tensors();
  const auto far_tensors = far.tensors();
  for (const std::string& name : implementations()) {
    force_cpu_loops(name.c_str());
    for (size_t i = 0; i < near_tensors.size(); ++i) {
      if (near_tensors[i].second == nullptr) {
        continue;
      }
      const Array& from = *near_tensors[i].second;
      if (i < 5) {
        *far_tensors[i].second = sparse_like(from);
      } else {
        const int64_t num_blocks = from.numel();
        Array scales(DType::kFloat32, kFar / kBlockNumel + num_blocks);
        scales.copy(kFar / kBlockNumel, scales.numel(), from, 0);
        *far_tensors[i].second = std::move(scales);
      }
    }
    far.segments = near.segments;
    for (Segment& segment : far.segments) {
      segment.start += kFar;
    }
    far.slot_steps = near.slot_steps;
    far.slot_is_active = near.slot_is_active;
    far.slot_groups = near.slot_groups;
    far.slot_numbers = near.slot_numbers;
    far.grads.clear();
    far.grads.push_back(Array::sparse(scheme.grad, kFarNumel));
    for (const Run& run : near.runs) {
      std::memcpy(far.grads[0].at(kFar + run.start), run.data, static_cast<size_t>(run.numel * nbytes_of(scheme.grad)));
    }
    far.runs = {{far.grads[0].at(), 0, kFarNumel}};
    use_last_blocks(true);
    run_adamw(name, far.args(), kFar);
    for (size_t i = 0; i < far_tensors.size(); ++i) {
      if (near_tensors[i].second != nullptr) {
        const Array& array = *far_tensors[i].second;
        comparison.add(name, far_tensors[i].first, array.bytes(i < 5 ? kFar : kFar / kBlockNumel, array.numel()));
      }
    }
  }
  use_last_blocks(false);
  run_adamw("cuda", near.args());
  for (const auto& [tensor, array] : near_tensors) {
    if (array != nullptr) {
      comparison.add("the same shard nearby", tensor, array->bytes());
    }
  }
}

void check_far_sums(DType dtype) {
  Array near(dtype, kPartNumel);
  near.fill();
  const DType out_dtype = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
  const std::vector<Segment> segments = sum_segments(kPartNumel);
  for (const bool is_reduce : {false, true}) {
    Comparison comparison(is_reduce ? "reduce beyond 2^32" : "sum_squares beyond 2^32");
    std::vector<std::string> names = implementations();
    names.push_back("nearby");
    for (const std::string& name : names) {
      const bool is_far = name != "nearby";
      const int64_t start = is_far ? kFar : 0;
      const int64_t numel = start + kPartNumel;
      const auto make = [&](DType type, int64_t count) {
        return is_far ? Array::sparse(type, count) : Array(type, count);
      };
      Array slices = make(dtype, 2 * numel);
      slices.copy(start, numel, near, 0);
      slices.copy(numel + start, 2 * numel, near, 0);
      const Array out = make(out_dtype, numel);
      std::vector<Segment> moved = segments;
      for (Segment& segment : moved) {
        segment.start += start;
      }
      std::vector<double> sums;
      const SumArgs sum = sum_args(numel, moved, sums);
      const std::vector<Run> runs = {{slices.at(), 0, numel}};
      const std::string run_name = is_far ? name : "cuda";
      force_cpu_loops(run_name.c_str());
      use_last_blocks(is_far);
      if (is_reduce) {
        run_reduce(run_name, {out.at(), slices.at(), nullptr, 0, 2, numel, dtype, 3, false, sum}, start);
        comparison.add(name, "out", out.bytes(start, numel));
      } else {
        run_sum_squares(run_name, {dtype, runs.data(), 1, sum}, start);
      }
      comparison.add_sums(name, sums);
    }
  }
}

void check_far_copies(DType dtype, DType flat_dtype, bool is_strided) {
  Array near(dtype, kPartNumel);
  near.fill();
  for (const bool is_to_flat : {true, false}) {
    Comparison comparison("copies beyond 2^32");
    for (const std::string& name : implementations()) {
      force_cpu_loops(name.c_str());
      // One tensor that fills the flat buffer. As a matrix of two rows in column-major order each row is far apart.
      Array tensor = Array::sparse(dtype, kFarNumel + 1);
      Array flat = Array::sparse(flat_dtype, kFarNumel);
      FlattenEntry entry{};
      entry.data = tensor.at();
      entry.numel = kFarNumel;
      entry.dtype = static_cast<int64_t>(dtype);
      if (is_strided) {
        entry.numel = kFarNumel / 2 * 2;
        entry.num_dims = 2;
        entry.lengths[0] = entry.numel / 2;
        entry.lengths[1] = 2;
        entry.strides[0] = 1;
        entry.strides[1] = entry.numel / 2 + 1;
      }
      for (int64_t i = kFar; i < entry.numel; ++i) {
        const int64_t at = is_strided ? i / 2 + i % 2 * entry.strides[1] : i;
        tensor.copy(at, at + 1, near, i - kFar);
      }
      const float scale = 0.5f;
      use_last_blocks(true);
      FlattenArgs args{flat.at(), flat_dtype, kFarNumel, &entry, 1, &scale};
      run_copy(name, args, true, kFar);
      if (!is_to_flat) {
        run_copy(name, args, false, kFar);
      }
      comparison.add(name, "flat", flat.bytes(kFar, kFarNumel));
      std::string bytes;
      for (int64_t i = kFar; i < entry.numel; ++i) {
        const int64_t at = is_strided ? i / 2 + i % 2 * entry.strides[1] : i;
        bytes += tensor.bytes(at, at + 1);
      }
      comparison.add(name, "tensor", bytes);
    }
  }
}

void check_large() {
  constexpr DType kNone = DType::kInt8;
  check_far_adamw({DType::kFloat32, kNone, DType::kFloat32, DType::kFloat32, false});
  check_far_adamw({DType::kFloat32, kNone, DType::kFloat32, DType::kInt8, false});
  check_far_adamw({DType::kBFloat16, kNone, DType::kBFloat16, DType::kBFloat16, true});
  check_far_sums(DType::kFloat32);
  check_far_sums(DType::kBFloat16);
  check_far_sums(DType::kFloat64);
  check_far_copies(DType::kFloat32, DType::kFloat32, false);
  check_far_copies(DType::kFloat32, DType::kBFloat16, true);
}

}  // namespace
}  // namespace zero_shard

int main(int argc, char** argv) {
  const std::string what = argc == 2 ? argv[1] : "";
  if (what == "small") {
    zero_shard::check_small();
  } else if (what == "large") {
    zero_shard::check_large();
  } else {
    std::fprintf(stderr, "usage: %s small|large\n", argv[0]);
    return 2;
  }
  std::puts("ok");
  return 0;
}
