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

template <Codes kCodes>
F decode(const void* codes) {
  if constexpr (kCodes == Codes::f32) return Lanes::load_f32(codes);
  if constexpr (kCodes == Codes::bf16) return Lanes::load_bf16(codes);
  if constexpr (kCodes == Codes::f16) return Lanes::load_f16(codes);
  if constexpr (kCodes == Codes::f8_e4m3) return Lanes::load_e4m3(codes);
  if constexpr (kCodes == Codes::f8_e5m2) return Lanes::load_e5m2(codes);
  if constexpr (kCodes == Codes::int8) return __builtin_convertvector(Lanes::load_i8(codes), F);
}

inline void scale_values(Codes codes, float scale, F (&scaled)[16 / kWidth]) {
  const float* values = four_bit_tables(codes).values;
  for (int i = 0; i < 16 / kWidth; ++i)
    scaled[i] = Lanes::load_f32(values + i * kWidth) * splat(scale);
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
requires(is_four_bit(kCodes) && bytes_of(kOut) > 2) struct Widen<kCodes, kOut> {
  static constexpr int kStep = kWidth;
  explicit Widen(float scale) {
    F scaled[16 / kWidth];
    scale_values(kCodes, scale, scaled);
    table_ = Lanes::load_table(scaled);
  }
  void operator()(const std::uint8_t* codes, void* out) const {
    store<kOut>(out, as_float(Lanes::look_up(table_, Lanes::load_nibbles(codes))));
  }

 private:
  Lanes::Table16 table_;
};
template <Codes kCodes, Dtype kOut>
requires(is_four_bit(kCodes) && bytes_of(kOut) == 2) struct Widen<kCodes, kOut> {
  static constexpr int kStep = Lanes::kNibbleStep;
  explicit Widen(float scale) {
    F scaled[16 / kWidth];
    scale_values(kCodes, scale, scaled);
    std::uint16_t rounded[16];
    for (int i = 0; i < 16 / kWidth; ++i) store<kOut>(rounded + i * kWidth, scaled[i]);
    table_ = Lanes::load_words(rounded);
  }
  void operator()(const std::uint8_t* codes, void* out) const {
    Lanes::store_looked_up(out, table_, codes);
  }

 private:
  Lanes::WordTable table_;
};

#if defined(__AVX512VBMI__)
/// Codes of 8 bits to 16: multiply and round all 256 values, then look up.
template <Codes kCodes, Dtype kOut>
struct WidenByTable {
  static constexpr int kStep = 64;
  static constexpr std::int64_t kWorthwhile = 1024;  // elements that pay for the table
  explicit WidenByTable(float scale) {
    std::uint8_t codes[256];
    for (int i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
    std::uint16_t rounded[256];
    const Widen<kCodes, kOut> widen(scale);
    for (int i = 0; i < 256; i += kWidth) widen(codes + i, rounded + i);
    table_ = Lanes::load_byte_table(rounded);
  }
  void operator()(const std::uint8_t* codes, void* out) const {
    Lanes::store_looked_up(out, table_, codes);
  }

 private:
  Lanes::ByteTable table_;
};
#endif

/// Fewer than kStep elements, or 4-bit ones that begin in the middle of a byte: through a copy, so
/// that nothing outside the run is read or written.
template <Codes kCodes, Dtype kOut, class Step>
void ragged(const Step& step, const std::uint8_t* codes, std::int64_t first, std::int64_t n,
            char* out) {
  std::uint8_t padded[Step::kStep * bits_of(kCodes) / 8 + 1] = {};
  char values[Step::kStep * bytes_of(kOut)];
  const std::int64_t begin = first * bits_of(kCodes) / 8,
                     end = ((first + n) * bits_of(kCodes) + 7) / 8;
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
void group(float scale, const std::uint8_t* codes, std::int64_t first, std::int64_t n, char* out) {
#if defined(__AVX512VBMI__)
  if constexpr (bits_of(kCodes) == 8 && bytes_of(kOut) == 2) {
    using Table = WidenByTable<kCodes, kOut>;
    if (n >= Table::kWorthwhile) return sweep<kCodes, kOut>(Table(scale), codes, first, n, out);
  }
#endif
  sweep<kCodes, kOut>(Widen<kCodes, kOut>(scale), codes, first, n, out);
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
  if (run.scales == nullptr) return group<kCodes, kOut>(1.0f, codes, run.first, run.n, out);
  std::int64_t g = run.first / run.group;
  for (std::int64_t done = 0; done < run.n; ++g) {
    const std::int64_t first = run.first + done;
    const std::int64_t left = run.n - done, in_group = (g + 1) * run.group - first;
    const std::int64_t n = left < in_group ? left : in_group;
    group<kCodes, kOut>(run.scales[g], codes, first, n, out + done * bytes_of(kOut));
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
