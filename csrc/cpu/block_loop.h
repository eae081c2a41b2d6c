// Part of loops.cpp: adamw_ with 8-bit moments, block by block. See Note [Block codec].

// Moments of one block as float32.
struct Block {
  float exp_avg[kBlockNumel];
  float exp_avg_sq[kBlockNumel];
};

void decode_block(
    Block& block, const int8_t* __restrict__ codes, const uint8_t* __restrict__ codes_sq, float scale, float scale_sq,
    int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) {
    block.exp_avg[i] = decode_signed(codes[i], scale);
  }
  for (int64_t i = 0; i < numel; ++i) {
    block.exp_avg_sq[i] = decode_unsigned(codes_sq[i], scale_sq);
  }
}

// Magnitudes order as their bits do, and NaN is above inf; so larger_magnitude over a block is an integer maximum.
float largest_magnitude(const float* values, int64_t numel) {
  int32_t largest = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const int32_t bits = static_cast<int32_t>(bits_of(values[i]) & kFloat32Magnitude);
    largest = bits > largest ? bits : largest;
  }
  return float_of(static_cast<uint32_t>(largest));
}

// key: of the upper half of index.
void encode_block(
    const Block& block, int8_t* __restrict__ codes, uint8_t* __restrict__ codes_sq, float scale, float scale_sq,
    int64_t numel, RandomKey key, uint32_t index, int32_t nearest_from) {
  const float inverse = inverse_of(scale);
  const float inverse_sq = inverse_of(scale_sq);
  uint32_t random[kBlockNumel];
  for (int64_t i = 0; i < numel; ++i) {
    random[i] = random_bits(key, index + static_cast<uint32_t>(i));
  }
  // Two loops: in one, too much is alive at a time.
  for (int64_t i = 0; i < numel; ++i) {
    codes[i] = encode_signed(block.exp_avg[i], scale, inverse, random[i] & 0xffffu, nearest_from);
  }
  for (int64_t i = 0; i < numel; ++i) {
    codes_sq[i] = encode_unsigned(block.exp_avg_sq[i], scale_sq, inverse_sq, random[i] >> 16);
  }
}

// part.begin is a multiple of kBlockNumel, in the shard and in the parameter.
template <class Weight, class Grad>
void adamw_blocks(const AdamwArgs& args, const AdamwConstants<float>& constants, const Part& part) {
  const RandomKey key = key_of_upper(moment_key(part.key), static_cast<uint32_t>(part.index >> 32));
  Block block;
  for (int64_t done = 0; done < part.numel; done += kBlockNumel) {
    const int64_t begin = part.begin + done;
    const int64_t numel = smaller(kBlockNumel, part.numel - done);
    const void* grad = static_cast<const Raw<Grad>*>(part.grad) + done;
    const Arrays<Weight, float, Grad> arrays(
        args, Part{begin, numel, grad, part.key, part.index + done}, block.exp_avg, block.exp_avg_sq, nullptr);
    int8_t* codes = static_cast<int8_t*>(args.exp_avg) + begin;
    uint8_t* codes_sq = static_cast<uint8_t*>(args.exp_avg_sq) + begin;
    float& scale = args.exp_avg_scale[begin / kBlockNumel];
    float& scale_sq = args.exp_avg_sq_scale[begin / kBlockNumel];

    prefetch<kBlockNumel>(arrays.param, kAheadNumel);
    arrays.low.template prefetch_from<kBlockNumel>(kAheadNumel, kIsPrefetching);
    prefetch<kBlockNumel>(arrays.grad, kAheadNumel);
    prefetch<kBlockNumel>(codes, kAheadNumel);
    prefetch<kBlockNumel>(codes_sq, kAheadNumel);
    decode_block(block, codes, codes_sq, scale, scale_sq, numel);
#pragma GCC ivdep
    for (int64_t i = 0; i < numel; ++i) {
      update_element<false>(arrays, constants, i);
    }
    scale = scale_of(largest_magnitude(block.exp_avg, numel));
    scale_sq = scale_of(largest_magnitude(block.exp_avg_sq, numel));
    encode_block(block, codes, codes_sq, scale, scale_sq, numel, key, arrays.index, constants.nearest_from);
  }
}
