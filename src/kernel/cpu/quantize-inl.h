// SPDX-License-Identifier: Apache-2.0
// Quantizing, once for each instruction set: the largest magnitude, scaled 8-bit codes, plain casts
// and 4-bit blocks, over the four types of input.
#pragma once
#include <cstdint>

#include "kernel/quantize.h"
#include "kernel/tables.h"

namespace stowage {
namespace {

template <Dtype kIn, bool kOdd = false>
F load(const void* from) {
  if constexpr (kIn == Dtype::f64) return kOdd ? Lanes::load_f64_odd(from) : Lanes::load_f64(from);
  if constexpr (kIn == Dtype::f32) return Lanes::load_f32(from);
  if constexpr (kIn == Dtype::bf16) return Lanes::load_bf16(from);
  if constexpr (kIn == Dtype::f16) return Lanes::load_f16(from);
}

/// How far ahead inputs are asked for: loops that compute this much between loads leave the
/// hardware's own prefetcher behind. Nothing is read past the end.
constexpr int kAhead = 2048;

/// Calls body(input, elements, i) for kWidth elements at a time; the last, short, time the input is
/// a copy padded with zeros.
template <Dtype kIn, class Body>
void for_each_step(const void* x, std::int64_t n, Body&& body, std::int64_t ahead = kAhead) {
  const auto* from = static_cast<const char*>(x);
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    __builtin_prefetch(from + i * bytes_of(kIn) + ahead);
    body(from + i * bytes_of(kIn), kWidth, i);
  }
  if (i == n) return;
  char padded[kWidth * bytes_of(kIn)] = {};
  __builtin_memcpy(padded, from + i * bytes_of(kIn),
                   static_cast<std::size_t>(n - i) * bytes_of(kIn));
  body(padded, static_cast<int>(n - i), i);
}

template <Dtype kIn>
std::uint32_t amax(const void* x, std::int64_t n) noexcept {
  I most{};
  for_each_step<kIn>(x, n, [&](const char* from, int, std::int64_t) {
    most = max(most, magnitude(load<kIn>(from)));
  });
  return Lanes::largest(most);
}

/// RNE of a magnitude to fp8; the caller has cut it to the largest value. kMantissa as in
/// float8_value().
template <int kMantissa>
I float8_magnitude(I a) {
  constexpr int kBias = kMantissa == 3 ? 7 : 15, kShift = 23 - kMantissa;
  constexpr int kLeastNormal = (128 - kBias) << 23;
  // Below the least normal number the grid is that of fp32 numbers next to kGrid. There this is the
  // larger of the two, and from there on, where it stands still, the smaller.
  constexpr float kGrid = kMantissa == 3 ? 0x1p14f : 0x1p7f;
  const I subnormal = as_int(as_float(min(a, splat(kLeastNormal))) + kGrid) - as_int(splat(kGrid));
  return max(subnormal, round_shift(a, kShift) - ((127 - kBias) << kMantissa));
}

inline I cut(I a, float most) { return min(a, splat(__builtin_bit_cast(std::int32_t, most))); }

template <Codes kCodes>
constexpr float largest_value() {
  return kCodes == Codes::f8_e4m3   ? 448.0f
         : kCodes == Codes::f8_e5m2 ? 57344.0f
         : kCodes == Codes::int8    ? 127.0f
         : kCodes == Codes::bf16    ? 0x1.fep127f
         : kCodes == Codes::f16     ? 65504.0f
                                    : 0x1.fffffep127f;
}

/// Clamps a number to the format and rounds it; the code is in the low bits of each lane.
template <Codes kCodes>
I encode_finite(F x) {
  const I a = cut(magnitude(x), largest_value<kCodes>()), s = sign(x);
  if constexpr (kCodes == Codes::f8_e4m3) return float8_magnitude<3>(a) | shift_right(s, 24);
  if constexpr (kCodes == Codes::f8_e5m2) return float8_magnitude<2>(a) | shift_right(s, 24);
  if constexpr (kCodes == Codes::int8)  // 1.5 x 2^23 has a grid of 1
    return as_int(as_float(a | s) + 0x1.8p23f) - as_int(splat(0x1.8p23f));
  if constexpr (kCodes == Codes::bf16) return bf16_bits(as_float(a | s));
  if constexpr (kCodes == Codes::f16) return f16_bits(as_float(a | s));
  if constexpr (kCodes == Codes::f32) return a | s;
}

/// The code of an infinity and of a NaN, without their sign, which stays.
template <Codes kCodes>
constexpr std::int32_t infinity_code() {
  return kCodes == Codes::f8_e4m3   ? 0x7F
         : kCodes == Codes::f8_e5m2 ? 0x7C
         : kCodes == Codes::bf16    ? 0x7F80
         : kCodes == Codes::f16     ? 0x7C00
                                    : static_cast<std::int32_t>(kInfinity);
}
template <Codes kCodes>
constexpr std::int32_t nan_code() {
  return kCodes == Codes::f8_e4m3   ? 0x7F
         : kCodes == Codes::f8_e5m2 ? 0x7F
         : kCodes == Codes::bf16    ? 0x7FC0
         : kCodes == Codes::f16     ? 0x7E00
                                    : static_cast<std::int32_t>(kQuietNan);
}
/// `exact` has the sign and the finiteness of the input, x its value.
template <Codes kCodes>
I encode_any(F x, F exact) {
  const I a = magnitude(exact), s = shift_right(sign(exact), 32 - bits_of(kCodes));
  const I special = is_nan(a) ? splat(nan_code<kCodes>()) : splat(infinity_code<kCodes>());
  return a >= static_cast<std::int32_t>(kInfinity) ? special | s : encode_finite<kCodes>(x);
}

template <Codes kCodes>
void store_codes(void* to, I codes) {
  if constexpr (bits_of(kCodes) == 8) Lanes::store_u8(to, codes);
  if constexpr (bits_of(kCodes) == 16) Lanes::store_u16(to, codes);
  if constexpr (bits_of(kCodes) == 32) Lanes::store_f32(to, as_float(codes));
}
/// The first n of them.
template <Codes kCodes>
void store_codes(void* to, I codes, int n) {
  if (n == kWidth) return store_codes<kCodes>(to, codes);
  char all[kWidth * bits_of(kCodes) / 8];
  store_codes<kCodes>(all, codes);
  __builtin_memcpy(to, all, static_cast<std::size_t>(n * bits_of(kCodes) / 8));
}

template <Codes kCodes, Dtype kIn>
void encode(const void* x, std::int64_t n, float r, void* codes) noexcept {
  // A group that was just read for its amax is near; what comes after it is not.
  constexpr std::int64_t kNear = 16384;
  const std::int64_t bytes = n * bytes_of(kIn);
  for_each_step<kIn>(
      x, n,
      [&](const char* from, int count, std::int64_t i) {
        store_codes<kCodes>(static_cast<char*>(codes) + i * bits_of(kCodes) / 8,
                            encode_finite<kCodes>(load<kIn>(from) * splat(r)), count);
      },
      kAhead < bytes && bytes <= kNear ? bytes : kAhead);
}

/// Some elements of a cast, with or without the code for infinity and NaN; the largest |x|.
template <Codes kCodes, Dtype kIn, bool kFinite>
std::uint32_t cast_some(const void* x, std::int64_t n, void* codes) {
  I most{};
  for_each_step<kIn>(x, n, [&](const char* from, int count, std::int64_t i) {
    const F exact = load<kIn, true>(from);
    // fp64 to fp32 is one rounding; to anything shorter it goes by way of round-to-odd.
    const F value = kCodes == Codes::f32 ? load<kIn>(from) : exact;
    most = max(most, magnitude(exact));
    store_codes<kCodes>(static_cast<char*>(codes) + i * bits_of(kCodes) / 8,
                        kFinite ? encode_finite<kCodes>(value) : encode_any<kCodes>(value, exact),
                        count);
  });
  return Lanes::largest(most);
}

template <Codes kCodes, Dtype kIn>
std::uint32_t cast(const void* x, std::int64_t n, void* codes) noexcept {
  if constexpr (is_own_type(kCodes, kIn)) {  // nothing to round; a NaN keeps its payload
    __builtin_memcpy(codes, x, static_cast<std::size_t>(n) * bytes_of(kIn));
    return amax<kIn>(x, n);
  }
  constexpr std::int64_t kPiece = 1024;
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < n; i += kPiece) {
    const char* from = static_cast<const char*>(x) + i * bytes_of(kIn);
    char* to = static_cast<char*>(codes) + i * bits_of(kCodes) / 8;
    const std::int64_t count = n - i < kPiece ? n - i : kPiece;
    const std::uint32_t here = cast_some<kCodes, kIn, true>(from, count, to);
    if (here >= kInfinityBits) cast_some<kCodes, kIn, false>(from, count, to);  // once more
    most = here > most ? here : most;
  }
  return most;
}

/// The code of each scaled input: its rank among the thresholds, which stands for a code.
template <Codes kCodes>
struct FourBit {
  Lanes::Ranks ranks;
  Lanes::Table16 codes;
  FourBit()
      : ranks(four_bit_tables(kCodes).thresholds),
        codes(Lanes::load_table(four_bit_tables(kCodes).codes)) {}
  /// `finite`: v is a number, at most an ulp outside [-1, 1].
  I operator()(F v, bool finite) const {
    const I rank = kCodes == Codes::nf4 && finite ? ranks.of_spread(v) : ranks.of(v);
    return kCodes == Codes::nf4 ? rank : Lanes::look_up(codes, rank);  // NF4 is in order
  }
};

/// One block: its codes, and its absmax as bits. Full blocks multiply by a reciprocal and the short
/// one at the end divides, as bitsandbytes does.
template <Codes kCodes, Dtype kIn>
std::uint32_t block(const FourBit<kCodes>& four_bit, const char* x, std::int64_t n, bool full,
                    std::uint8_t* codes, float* absmax) {
  constexpr float kLeast = 1e-38f;
  const std::uint32_t most = amax<kIn>(x, n);
  const float found =
      most > kInfinityBits ? __builtin_bit_cast(float, kQuietNan) : __builtin_bit_cast(float, most);
  const float a = found < kLeast ? kLeast : found;
  *absmax = full ? found : a;
  const F r = splat(full ? 1.0f / a : a);
  for_each_step<kIn>(x, n, [&](const char* from, int count, std::int64_t i) {
    const F value = load<kIn>(from);
    const I found_codes = four_bit(full ? value * r : value / r, most < kInfinityBits);
    if (count == kWidth) return Lanes::store_nibbles(codes + i / 2, found_codes);
    std::uint8_t all[kWidth / 2];
    Lanes::store_nibbles(all, found_codes);
    __builtin_memcpy(codes + i / 2, all, static_cast<std::size_t>(count + 1) / 2);
  });
  return most;
}

template <Codes kCodes, Dtype kIn>
std::uint32_t blocks(const Blocks& all) noexcept {
  const FourBit<kCodes> four_bit;
  std::uint32_t most = 0;
  for (std::int64_t i = 0, b = 0; i < all.n; i += all.block, ++b) {
    const bool full = all.n - i >= all.block;
    const std::uint32_t here =
        block<kCodes, kIn>(four_bit, static_cast<const char*>(all.x) + i * bytes_of(kIn),
                           full ? all.block : all.n - i, full, all.codes + i / 2, all.absmax + b);
    most = here > most ? here : most;
  }
  return most;
}

template <Dtype kIn>
constexpr void fill(QuantizeKernels& kernels, int in) {
  kernels.amax[in] = &amax<kIn>;
  const auto encode_from = [&]<Codes kCodes>() {
    kernels.encode[static_cast<int>(kCodes)][in] = &encode<kCodes, kIn>;
  };
  encode_from.template operator()<Codes::f8_e4m3>();
  encode_from.template operator()<Codes::f8_e5m2>();
  encode_from.template operator()<Codes::int8>();
  const auto cast_from = [&]<Codes kCodes>() {
    kernels.cast[static_cast<int>(kCodes)][in] = &cast<kCodes, kIn>;
  };
  cast_from.template operator()<Codes::f32>();
  cast_from.template operator()<Codes::bf16>();
  cast_from.template operator()<Codes::f16>();
  cast_from.template operator()<Codes::f8_e4m3>();
  cast_from.template operator()<Codes::f8_e5m2>();
  kernels.blocks[static_cast<int>(Codes::nf4)][in] = &blocks<Codes::nf4, kIn>;
  kernels.blocks[static_cast<int>(Codes::fp4)][in] = &blocks<Codes::fp4, kIn>;
}
constexpr QuantizeKernels quantize_kernels() {
  QuantizeKernels kernels{};
  fill<Dtype::f64>(kernels, 0);
  fill<Dtype::f32>(kernels, 1);
  fill<Dtype::bf16>(kernels, 2);
  fill<Dtype::f16>(kernels, 3);
  return kernels;
}

}  // namespace
}  // namespace stowage
