// Part of loops.cpp: quantize_, block by block. See Note [Wire blocks].

template <class Value>
void quantize_blocks(const QuantizeArgs& args, int64_t begin, int64_t end) {
  const Raw<Value>* values = static_cast<const Raw<Value>*>(args.values);
  uint8_t* wire = static_cast<uint8_t*>(args.wire) + begin / kBlockNumel * kWireBlockNbytes;
  float wide[kBlockNumel];
  for (int64_t block = begin; block < end; block += kBlockNumel, wire += kWireBlockNbytes) {
    prefetch<kBlockNumel>(values + block, kAheadNumel);
    for (int64_t i = 0; i < kBlockNumel; ++i) {
      wide[i] = widen(from_raw<Value>(values[block + i]));
    }
    const float largest = largest_magnitude(wide, kBlockNumel);
    const float scale = wire_scale_of(largest);
    memcpy(wire, &scale, sizeof scale);
    int8_t* __restrict__ codes = reinterpret_cast<int8_t*>(wire + kScaleNbytes);
    if (!is_finite(largest)) {
      memset(codes, 0, kBlockNumel);
      continue;
    }
    const float inverse = wire_inverse_of(largest);
    for (int64_t i = 0; i < kBlockNumel; ++i) {
      codes[i] = quantize(wide[i], inverse);
    }
  }
}

void quantize_range(const QuantizeArgs& args, int64_t begin, int64_t end) {
  switch (args.dtype) {
    case DType::kBFloat16:
      return quantize_blocks<BFloat16>(args, begin, end);
    case DType::kFloat16:
      return quantize_blocks<Float16>(args, begin, end);
    default:
      return quantize_blocks<float>(args, begin, end);
  }
}
