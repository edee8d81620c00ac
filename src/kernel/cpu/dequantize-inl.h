// SPDX-License-Identifier: Apache-2.0
// Dequantizing, once for each instruction set: a Widen turns kStep codes that share a scale into
// values; sweeps over groups and ragged ends are the same for all formats.
#pragma once
#include <cstdint>

#include "kernel/dequantize.h"
#include "kernel/tables.h"

namespace stowage {
namespace {

constexpr int bits_of(Codes c) {
  return c == Codes::f32                       ? 32
         : c == Codes::bf16 || c == Codes::f16 ? 16
         : c == Codes::nf4 || c == Codes::fp4  ? 4
                                               : 8;
}
constexpr bool is_four_bit(Codes c) { return bits_of(c) == 4; }
constexpr bool is_own_type(Codes c, Dtype d) {
  return (c == Codes::f32 && d == Dtype::f32) || (c == Codes::bf16 && d == Dtype::bf16) ||
         (c == Codes::f16 && d == Dtype::f16);
}
constexpr int bytes_of(Dtype d) { return d == Dtype::f64 ? 8 : d == Dtype::f32 ? 4 : 2; }

template <Dtype kOut>
void store(void* to, F x) {
  if constexpr (kOut == Dtype::bf16) {
    Lanes::store_bf16(to, x);
  } else if constexpr (kOut == Dtype::f16) {
    Lanes::store_f16(to, x);
  } else {
    const I quiet = is_nan(magnitude(x)) ? splat(static_cast<std::int32_t>(kQuietNan)) : as_int(x);
    if constexpr (kOut == Dtype::f32) Lanes::store_f32(to, as_float(quiet));
    if constexpr (kOut == Dtype::f64) Lanes::store_f64(to, as_float(quiet));
  }
}

//   e4m3  s eeee mmm   bias 7; 0x7F is NaN, no infinity
//   e5m2  s eeeee mm   bias 15; 0x7C is infinity, above it NaN
template <int kMantissa>
F float8_value(I code) {
  constexpr int kBias = kMantissa == 3 ? 7 : 15, kShift = 23 - kMantissa;
  const I a = code & 0x7F, normal = (a << kShift) + ((127 - kBias) << 23);
  const F subnormal =
      __builtin_convertvector(a, F) * (kMantissa == 3 ? 0x1p-9f : 0x1p-16f);
  I value = a < (1 << kMantissa) ? as_int(subnormal) : normal;
  if constexpr (kMantissa == 3) {
    value = a == 0x7F ? splat(static_cast<std::int32_t>(kQuietNan)) : value;
  } else {  // the exponent of infinity and NaN is all ones here too
    value = a >= 0x7C ? normal + ((127 - kBias) << 23) : value;
  }
  return as_float(value | ((code & 0x80) << 24));
}

template <Codes kCodes>
F decode(const void* codes) {
  if constexpr (kCodes == Codes::f32) return Lanes::load_f32(codes);
  if constexpr (kCodes == Codes::bf16) return Lanes::load_bf16(codes);
  if constexpr (kCodes == Codes::f16) return Lanes::load_f16(codes);
  if constexpr (kCodes == Codes::f8_e4m3) return float8_value<3>(Lanes::load_u8(codes));
  if constexpr (kCodes == Codes::f8_e5m2) return float8_value<2>(Lanes::load_u8(codes));
  if constexpr (kCodes == Codes::int8) return __builtin_convertvector(Lanes::load_i8(codes), F);
}

/// Codes of 8 bits and more: decode, multiply, round.
template <Codes kCodes, Dtype kOut>
struct Widen {
  static constexpr int kStep = kWidth;
  explicit Widen(float scale) : scale_(splat(scale)) {}
  void operator()(const std::uint8_t* codes, void* out) const {
    const F value = decode<kCodes>(codes);
    if constexpr (bits_of(kCodes) > 8)
      store<kOut>(out, value);  // plain casts have no scale
    else
      store<kOut>(out, value * scale_);
  }

 private:
  F scale_;
};

/// Codes of 4 bits: multiply and round the sixteen values, then look up.
template <Codes kCodes, Dtype kOut>
  requires(is_four_bit(kCodes))
struct Widen<kCodes, kOut> {
  static constexpr int kStep = kWidth;
  explicit Widen(float scale) {
    const float* values = four_bit_tables(kCodes).values;
    I scaled[16 / kWidth];
    for (int i = 0; i < 16 / kWidth; ++i) {
      const F value = Lanes::load_f32(values + i * kWidth) * splat(scale);
      if constexpr (kOut == Dtype::bf16)
        scaled[i] = bf16_bits(value);
      else if constexpr (kOut == Dtype::f16)
        scaled[i] = f16_bits(value);
      else
        scaled[i] = as_int(value);
    }
    table_ = Lanes::load_table(scaled);
  }
  void operator()(const std::uint8_t* codes, void* out) const {
    const I found = Lanes::look_up(table_, Lanes::load_nibbles(codes));
    if constexpr (bytes_of(kOut) == 2)
      Lanes::store_u16(out, found);
    else
      store<kOut>(out, as_float(found));
  }

 private:
  Lanes::Table16 table_;
};

/// Fewer than kStep elements, or 4-bit ones that begin in the middle of a byte: through a copy, so
/// that nothing outside the run is read or written.
template <Codes kCodes, Dtype kOut, class Step>
void ragged(const Step& step, const std::uint8_t* codes, std::int64_t first, std::int64_t n,
            char* out) {
  std::uint8_t padded[Step::kStep * bits_of(kCodes) / 8 + 1] = {};
  char values[Step::kStep * bytes_of(kOut)];
  const std::int64_t begin = first * bits_of(kCodes) / 8, end = ((first + n) * bits_of(kCodes) + 7) / 8;
  __builtin_memcpy(padded, codes + begin, static_cast<std::size_t>(end - begin));
  step(padded, values);
  const bool odd = is_four_bit(kCodes) && first % 2 != 0;
  __builtin_memcpy(out, values + (odd ? bytes_of(kOut) : 0),
                   static_cast<std::size_t>(n) * bytes_of(kOut));
}

/// n elements of one group.
template <Codes kCodes, Dtype kOut, class Step>
void sweep(const Step& step, const std::uint8_t* codes, std::int64_t first, std::int64_t n,
           char* out) {
  if (is_four_bit(kCodes) && first % 2 != 0) {
    ragged<kCodes, kOut>(step, codes, first, 1, out);
    ++first, --n, out += bytes_of(kOut);
  }
  const std::uint8_t* from = codes + first * bits_of(kCodes) / 8;
  const std::int64_t whole = n - n % Step::kStep;
  for (std::int64_t i = 0; i < whole; i += Step::kStep)
    step(from + i * bits_of(kCodes) / 8, out + i * bytes_of(kOut));
  if (whole < n)
    ragged<kCodes, kOut>(step, codes, first + whole, n - whole, out + whole * bytes_of(kOut));
}

template <Codes kCodes, Dtype kOut>
void dequantize(const Run& run, void* to) noexcept {
  const auto* codes = static_cast<const std::uint8_t*>(run.codes);
  auto* out = static_cast<char*>(to);
  if constexpr (is_own_type(kCodes, kOut)) {
    __builtin_memcpy(out, codes + run.first * bytes_of(kOut),
                     static_cast<std::size_t>(run.n) * bytes_of(kOut));
    return;
  }
  std::int64_t group = run.scales == nullptr ? 0 : run.first / run.group;
  for (std::int64_t done = 0; done < run.n; ++group) {
    const std::int64_t first = run.first + done;
    std::int64_t n = run.n - done;
    if (run.scales != nullptr && (group + 1) * run.group - first < n)
      n = (group + 1) * run.group - first;
    const Widen<kCodes, kOut> step(run.scales == nullptr ? 1.0f : run.scales[group]);
    sweep<kCodes, kOut>(step, codes, first, n, out + done * bytes_of(kOut));
    done += n;
  }
}

template <Codes kCodes>
constexpr void fill(DequantizeKernels& kernels) {
  auto& row = kernels.to[static_cast<int>(kCodes)];
  row[0] = &dequantize<kCodes, Dtype::f64>;
  row[1] = &dequantize<kCodes, Dtype::f32>;
  row[2] = &dequantize<kCodes, Dtype::bf16>;
  row[3] = &dequantize<kCodes, Dtype::f16>;
}
constexpr DequantizeKernels dequantize_kernels() {
  DequantizeKernels kernels{};
  fill<Codes::f32>(kernels);
  fill<Codes::bf16>(kernels);
  fill<Codes::f16>(kernels);
  fill<Codes::f8_e4m3>(kernels);
  fill<Codes::f8_e5m2>(kernels);
  fill<Codes::int8>(kernels);
  fill<Codes::nf4>(kernels);
  fill<Codes::fp4>(kernels);
  return kernels;
}

}  // namespace
}  // namespace stowage
