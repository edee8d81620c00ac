// SPDX-License-Identifier: Apache-2.0
// Quantizing, once for each instruction set: scaled codes, plain casts and 4-bit blocks, over the
// four types of input.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernel/cpu/amax-inl.h"
#include "kernel/cpu/dense-inl.h"
#include "kernel/cpu/formats-inl.h"
#include "kernel/quantize.h"
#include "kernel/tables.h"

namespace stowage {
namespace {

/// RNE of a magnitude to a sign, an exponent and kMantissa bits of mantissa.
//   a, in [2^e, 2^(e+1))       e at least that of the least normal number, even if a is not
//   a 2^(kMantissa - 23)       one unit of a's code is the grid of fp32 beside 2^e
//   2^e + a 2^(kMantissa - 23) 2^e and those units, rounded; a carry to the next e is right too
/// Returns the bits of that sum: units in the low half, e in the high one, 7 bits up. kBack, an
/// even number of units that 2^e has from the start, takes back what the bias of e adds to a code.
template <Codes kCodes>
I minifloat_sum(I a) {
  constexpr int kMantissa = mantissa_of(kCodes), kLeast = least_exponent(kCodes);
  constexpr float kUnit = 1.0f / static_cast<float>(1 << (23 - kMantissa));
  constexpr int kBack = -(kLeast << kMantissa) & 0xFF;
  static_assert(kBack % 2 == 0, "ties go to the code that is even");
  const I one = (max(a, splat(kLeast << 23)) & 0x7F800000) | kBack;
  return as_int(Lanes::add_scaled(as_float(a), kUnit, as_float(one)));
}
/// The code, of a magnitude that was cut to the largest value, in the low byte; above it is noise.
template <Codes kCodes>
I minifloat_magnitude(I a) {
  const I sum = minifloat_sum<kCodes>(a);
  return sum + shift_right(sum, 23 - mantissa_of(kCodes));
}

inline I cut(I a, float most) { return min(a, splat(__builtin_bit_cast(std::int32_t, most))); }

/// The code of the nearest integer of those from kLeast to kMost. 1.5 x 2^23 has a grid of 1.
template <Codes kCodes, int kLeast, int kMost>
I integer_code(F v) {
  v = v < static_cast<float>(kLeast) ? splat(static_cast<float>(kLeast)) : v;
  v = v > static_cast<float>(kMost) ? splat(static_cast<float>(kMost)) : v;
  return as_int(v + 0x1.8p23f) - (as_int(splat(0x1.8p23f)) + first_integer(kCodes));
}

/// Clamps a number to the format and rounds it; the code is in the low bits of each lane.
template <Codes kCodes>
struct Encoder {
  I operator()(F x) const {
    constexpr FormatTrait kFormat = format_of(kCodes);
    if constexpr (is_integer(kCodes) && kFormat.lowest != -kFormat.largest)
      return integer_code<kCodes, static_cast<int>(kFormat.lowest),
                          static_cast<int>(kFormat.largest)>(x);
    const I a = cut(magnitude(x), kFormat.largest), s = sign(x);
    if constexpr (is_integer(kCodes))  // 1.5 x 2^23 has a grid of 1
      return as_int(as_float(a | s) + 0x1.8p23f) -
             (as_int(splat(0x1.8p23f)) + first_integer(kCodes));
    if constexpr (mantissa_of(kCodes) >= 0 && bits_of(kCodes) == 8)
      return minifloat_magnitude<kCodes>(a) | shift_right(s, 24);
    if constexpr (mantissa_of(kCodes) >= 0 && is_four_bit(kCodes))
      return (minifloat_magnitude<kCodes>(a) & 7) | shift_right(s, 28);
    if constexpr (kCodes == Codes::bf16) return bf16_bits(as_float(a | s));
    if constexpr (kCodes == Codes::f16) return f16_bits(as_float(a | s));
    if constexpr (kCodes == Codes::f32) return a | s;
    static_assert(is_integer(kCodes) || mantissa_of(kCodes) >= 0 || bits_of(kCodes) > 8,
                  "a format of 8 bits must be encoded here");
  }
};
/// Sixteen values that no arithmetic gives: the rank of the number among the thresholds stands for
/// its code. What is beyond the last value lies beyond the last threshold.
template <Codes kCodes>
requires(is_ranked(kCodes)) struct Encoder<kCodes> {
  Lanes::Ranks ranks;
  Lanes::Table16 codes;
  Encoder()
      : ranks(four_bit_tables(kCodes).thresholds),
        codes(Lanes::load_table(four_bit_tables(kCodes).codes)) {}
  I operator()(F x) const {
    if constexpr (!has_sign(kCodes)) return Lanes::look_up(codes, ranks.of(x));
    return Lanes::look_up(codes, ranks.of(as_float(magnitude(x)))) | shift_right(sign(x), 28);
  }
};

/// `exact` has the sign and the finiteness of the input, x its value.
template <Codes kCodes>
I encode_any(F x, F exact) {
  const I a = magnitude(exact), s = shift_right(sign(exact), 32 - bits_of(kCodes));
  const I special = is_nan(a) ? splat(nan_code(kCodes)) : splat(infinity_code(kCodes));
  return a >= static_cast<std::int32_t>(kInfinity) ? special | s : Encoder<kCodes>()(x);
}

template <Codes kCodes>
void store_codes(void* to, I codes) {
  if constexpr (is_four_bit(kCodes)) Lanes::store_nibbles<packing_of(kCodes)>(to, codes);
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
  const int bytes = is_four_bit(kCodes) ? (n + 1) / 2 : n * bits_of(kCodes) / 8;
  __builtin_memcpy(to, all, static_cast<std::size_t>(bytes));
}

/// fp8 codes of bf16 numbers, a pair a lane, whose magnitudes times r are at most next to the
/// largest value: a code in the low byte of each half.
template <Codes kCodes>
I float8_pair(I pair, I magnitudes, F r) {
  constexpr int kMantissa = mantissa_of(kCodes);
  const I low = minifloat_sum<kCodes>(as_int(as_float(magnitudes << 16) * r));
  const I high = minifloat_sum<kCodes>(as_int(as_float(magnitudes & kUpper) * r));
  // The code to bits 8 to 15, below the sign of a bf16 number.
  const I low_code = Lanes::template add_halves<8, 1 + kMantissa>(low);
  const I high_code = Lanes::template add_halves<8, 1 + kMantissa>(high);
  const I codes = Lanes::template select<0x0000FFFF>(low_code, high_code << 16);
  return as_pairs(as_halves(Lanes::template select<0x7FFF7FFF>(codes, pair)) >> 8);
}
/// The same for int8: next to 1.5 x 2^23 the grid of fp32 is 1.
inline I int8_pair(I pair, F r) {
  const I low = as_int(lower(pair) * r + 0x1.8p23f);
  const I high = as_int(upper(pair) * r + 0x1.8p23f);
  return Lanes::select<0x0000FFFF>(low, high << 16) & 0x00FF00FF;
}
template <Codes kCodes>
I encode_pair(I pair, F r) {
  if constexpr (is_integer(kCodes))
    return int8_pair(pair, r);
  else
    return float8_pair<kCodes>(pair, pair & 0x7FFF7FFF, r);
}
/// A plain cast: any magnitude.
template <Codes kCodes>
I cast_pair(I pair, H magnitudes) {
  constexpr auto kMost = static_cast<std::uint16_t>(word_of(largest_value(kCodes)) >> 16);
  const H most = kMost - H{};
  return float8_pair<kCodes>(pair, as_pairs(magnitudes < most ? magnitudes : most), splat(1.0f));
}

/// begin() takes the numbers of the next group, code(v) makes the codes of a vector of its values
/// and code_pair(pair), if formats of 8 bits have it, those of two bf16 a lane, a code a half.
template <Codes kCodes, Dtype kIn, class Begin, class Code, class CodePair = std::nullptr_t>
void encode_by(const ScaledGroups& all, Begin&& begin, Code&& code, CodePair code_pair = {}) {
  constexpr bool kPairs = !std::is_same_v<CodePair, std::nullptr_t>;
  constexpr bool kShares = packing_of(kCodes) == Packing::low_first;  // a byte, as pairs a lane
  const Grouped groups{all.x, all.n, all.group, ahead_of(all.n * bytes_of(kIn))};
  const auto step = [&]<int kStep>(const char* from, int count, std::int64_t i) {
    char* to = static_cast<char*>(all.codes) + i * bits_of(kCodes) / 8;
    if constexpr (kStep == kWidth) {
      store_codes<kCodes>(to, code(load<kIn>(from)), count);
    } else if constexpr (kShares) {
      const auto pair = load_as<I>(from);
      Lanes::store_u8(to, code(lower(pair)) | code(upper(pair)) << 4);
    } else {
      Lanes::store_low_bytes(to, code_pair(load_as<I>(from)),
                             code_pair(load_as<I>(from + 4 * kWidth)));
    }
  };
  const auto end = [] {};
  if constexpr (kIn == Dtype::bf16 && kShares)
    for_each_group<kIn, 3, 2 * kWidth, kWidth>(groups, begin, step, end);
  else if constexpr (kIn == Dtype::bf16 && kPairs)
    for_each_group<kIn, 3, 4 * kWidth, kWidth>(groups, begin, step, end);
  else
    for_each_group<kIn, 3, kWidth>(groups, begin, step, end);
}

/// Codes of 8 bits of long groups of bf16.
template <Codes kCodes>
void encode_long(const ScaledGroups& all) {
  const float* next = all.r;
  const std::int64_t ahead = ahead_of(2 * all.n);
  for (std::int64_t at = 0; at < all.n; at += all.group) {
    const auto* x = static_cast<const char*>(all.x) + 2 * at;
    auto* to = static_cast<char*>(all.codes) + at;
    const std::int64_t n = all.n - at < all.group ? all.n - at : all.group;
    const F r = splat(*next++);
    const std::int64_t done =
        for_each_quad<3>(x, n, ahead, [&](const I(&pairs)[2], std::int64_t i) {
          Lanes::store_low_bytes(to + i, encode_pair<kCodes>(pairs[0], r),
                                 encode_pair<kCodes>(pairs[1], r));
        });
    for_each_step<Dtype::bf16>(
        x + 2 * done, n - done,
        [&](const char* from, int count, std::int64_t i) {
          store_codes<kCodes>(to + done + i, Encoder<kCodes>()(load<Dtype::bf16>(from) * r), count);
        },
        ahead);
  }
}

template <Codes kCodes, Dtype kIn>
void encode(const ScaledGroups& all) noexcept {
  const Encoder<kCodes> encoder;
  const float* next = all.r;
  F r{};
  const auto begin = [&] { r = splat(*next++); };
  const auto code = [&](F v) { return encoder(v * r); };
  if constexpr (bits_of(kCodes) == 8 && kIn == Dtype::bf16)
    if (all.group >= kLong) return encode_long<kCodes>(all);
  if constexpr (bits_of(kCodes) == 8)
    encode_by<kCodes, kIn>(all, begin, code, [&](I pair) { return encode_pair<kCodes>(pair, r); });
  else
    encode_by<kCodes, kIn>(all, begin, code);
}

template <Codes kCodes, Dtype kIn>
void divide(const ScaledGroups& all) noexcept {
  const Encoder<kCodes> encoder;
  const float* next = all.r;
  F s{};
  encode_by<kCodes, kIn>(
      all, [&] { s = splat(*next++); }, [&](F v) { return encoder(v / s); });
}

/// `count` numbers of those that values have one each of, then zeros.
inline F numbers_at(const float* from, int count) {
  if (count == kWidth) return Lanes::load_f32(from);
  float some[kWidth] = {};
  __builtin_memcpy(some, from, static_cast<std::size_t>(count) * sizeof(float));
  return Lanes::load_f32(some);
}

template <Codes kCodes, Dtype kIn>
void encode_from(const ScaledGroups& all) noexcept {
  constexpr int kLeast = least_integer(kCodes), kMost = kLeast + (1 << bits_of(kCodes)) - 1;
  if (all.group == 1) {
    auto* const to = static_cast<char*>(all.codes);
    for_each_step<kIn>(all.x, all.n, [&](const char* from, int count, std::int64_t i) {
      const F moved =
          load<kIn>(from) * numbers_at(all.r + i, count) + numbers_at(all.zero + i, count);
      store_codes<kCodes>(to + i * bits_of(kCodes) / 8, integer_code<kCodes, kLeast, kMost>(moved),
                          count);
    });
    return;
  }
  const float *next = all.r, *next_zero = all.zero;
  F r{}, zero{};
  encode_by<kCodes, kIn>(
      all, [&] { r = splat(*next++), zero = splat(*next_zero++); },
      [&](F v) { return integer_code<kCodes, kLeast, kMost>(v * r + zero); });
}

/// Integers of any range within int8, a byte each.
template <Dtype kIn>
void encode_within(const ScaledGroups& all, float least, float most) noexcept {
  const F lowest = splat(least), highest = splat(most);
  const float *next = all.r, *next_zero = all.zero;
  F r{}, zero{};
  const auto begin = [&] {
    r = splat(*next++);
    if (next_zero != nullptr) zero = splat(*next_zero++);
  };
  encode_by<Codes::int8, kIn>(all, begin, [&](F x) {
    F v = x * r + zero;
    v = v < lowest ? lowest : v;
    v = v > highest ? highest : v;
    return as_int(v + 0x1.8p23f) - as_int(splat(0x1.8p23f));
  });
}

/// Some elements of a cast, with or without the code for infinity and NaN; the largest |x|.
template <Codes kCodes, Dtype kIn, bool kFinite>
std::uint32_t cast_some(const void* x, std::int64_t n, void* codes) {
  auto* to = static_cast<char*>(codes);
  std::int64_t done = 0;
  std::uint32_t whole = 0;
  if constexpr (kIn == Dtype::bf16 && is_float8(kCodes) && kFinite) {
    H most{};
    done = for_each_quad<3>(x, n, kAhead, [&](const I(&pairs)[2], std::int64_t i) {
      const H a = magnitudes(pairs[0]), b = magnitudes(pairs[1]);
      most = max(most, max(a, b));
      Lanes::store_low_bytes(to + i, cast_pair<kCodes>(pairs[0], a),
                             cast_pair<kCodes>(pairs[1], b));
    });
    whole = Lanes::largest(larger(most));
  }
  I most{};
  const auto* from_rest = static_cast<const char*>(x) + done * bytes_of(kIn);
  for_each_step<kIn>(from_rest, n - done, [&](const char* from, int count, std::int64_t i) {
    const F exact = load<kIn, true>(from);
    // fp64 to fp32 is one rounding; to anything shorter it goes by way of round-to-odd.
    const F value = kCodes == Codes::f32 ? load<kIn>(from) : exact;
    most = max(most, magnitude(exact));
    store_codes<kCodes>(to + (done + i) * bits_of(kCodes) / 8,
                        kFinite ? Encoder<kCodes>()(value) : encode_any<kCodes>(value, exact),
                        count);
  });
  const std::uint32_t rest = Lanes::largest(most);
  return rest > whole ? rest : whole;
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
  std::conditional_t<is_spread(kCodes), Lanes::SpreadRanks, Lanes::Ranks> ranks;
  Lanes::Table16 codes;
  FourBit()
      : ranks(four_bit_tables(kCodes).thresholds),
        codes(Lanes::load_table(four_bit_tables(kCodes).codes)) {}
  /// `finite`: v is a number, at most an ulp outside [-1, 1].
  I operator()(F v, bool finite) const {
    if constexpr (!is_spread(kCodes))
      return Lanes::look_up(codes, ranks.of(v));
    else
      return finite ? ranks.of_spread(v) : ranks.of(v);
  }
  /// The same of four vectors.
  void of_four(const F (&v)[4], bool finite, I (&found)[4]) const {
    if constexpr (requires { ranks.of(v, found); }) {
      ranks.of(v, found);
      if constexpr (!is_spread(kCodes))
        for (I& each : found) each = Lanes::look_up(codes, each);
    } else {
      for (int j = 0; j < 4; ++j) found[j] = (*this)(v[j], finite);
    }
  }
};

/// Its largest magnitude as bits, and its absmax. A short block at the end, which is divided by it,
/// has no smaller one than `divisor`, as in bitsandbytes.
template <Dtype kIn>
std::uint32_t scale_block(const char* x, std::int64_t n, bool full, float* absmax, float* divisor) {
  constexpr float kLeast = 1e-38f;
  const std::uint32_t most = amax<kIn>(x, n);
  const float found =
      most > kInfinityBits ? __builtin_bit_cast(float, kQuietNan) : __builtin_bit_cast(float, most);
  *divisor = found < kLeast ? kLeast : found;
  *absmax = full ? found : *divisor;
  return most;
}

/// Full blocks are multiplied by `by`, others divided.
template <Codes kCodes, Dtype kIn>
void encode_block(const FourBit<kCodes>& four_bit, const char* x, std::int64_t n, bool full,
                  float by, bool finite, std::uint8_t* codes) {
  constexpr Packing kPacking = packing_of(kCodes);
  const F r = splat(by);
  std::int64_t done = 0;
  for (; full && done + 4 * kWidth <= n; done += 4 * kWidth) {
    F scaled[4];
    I found[4];
    for (int j = 0; j < 4; ++j) scaled[j] = load<kIn>(x + (done + j * kWidth) * bytes_of(kIn)) * r;
    four_bit.of_four(scaled, finite, found);
    Lanes::store_nibbles4<kPacking>(codes + done / 2, found);
  }
  x += done * bytes_of(kIn);
  codes += done / 2;
  for_each_step<kIn>(x, n - done, [&](const char* from, int count, std::int64_t i) {
    const F value = load<kIn>(from);
    const I found_codes = four_bit(full ? value * r : value / r, finite);
    if (count == kWidth) return Lanes::store_nibbles<kPacking>(codes + i / 2, found_codes);
    std::uint8_t all[kWidth / 2];
    Lanes::store_nibbles<kPacking>(all, found_codes);
    __builtin_memcpy(codes + i / 2, all, static_cast<std::size_t>(count + 1) / 2);
  });
}

/// Scales of some blocks first, then their codes: none waits for a maximum and a quotient.
template <Codes kCodes, Dtype kIn>
std::uint32_t blocks(const Blocks& all) noexcept {
  constexpr int kAtOnce = 16;
  static_assert(kAtOnce % kWidth == 0);
  const FourBit<kCodes> four_bit;
  std::uint32_t most = 0;
  for (std::int64_t begin = 0; begin < all.n; begin += kAtOnce * all.block) {
    std::uint32_t mosts[kAtOnce];
    float divisors[kAtOnce], by[kAtOnce];
    for (float& divisor : divisors) divisor = 1;
    const auto for_each_block = [&](auto&& body) {
      for (std::int64_t k = 0, i = begin; k < kAtOnce && i < all.n; ++k, i += all.block) {
        const bool full = all.n - i >= all.block;
        body(k, i, full ? all.block : all.n - i, full);
      }
    };
    const auto* const x = static_cast<const char*>(all.x);
    for_each_block([&](std::int64_t k, std::int64_t i, std::int64_t n, bool full) {
      mosts[k] = scale_block<kIn>(x + i * bytes_of(kIn), n, full, all.absmax + i / all.block,
                                  divisors + k);
      most = mosts[k] > most ? mosts[k] : most;
    });
    for (int k = 0; k < kAtOnce; k += kWidth)
      Lanes::store_f32(by + k, 1.0f / Lanes::load_f32(divisors + k));
    for_each_block([&](std::int64_t k, std::int64_t i, std::int64_t n, bool full) {
      encode_block<kCodes, kIn>(four_bit, x + i * bytes_of(kIn), n, full,
                                full ? by[k] : divisors[k], mosts[k] < kInfinityBits,
                                all.codes + i / 2);
    });
  }
  return most;
}

template <Dtype kIn>
std::uint32_t torchao_blocks(const Blocks& all, const float* thresholds) noexcept {
  const Lanes::SpreadRanks ranks(thresholds);
  std::uint32_t most = 0;
  for (std::int64_t i = 0; i < all.n; i += all.block) {
    const char* x = static_cast<const char*>(all.x) + i * bytes_of(kIn);
    const std::uint32_t here = amax<kIn>(x, all.block);
    most = here > most ? here : most;
    const float absmax = __builtin_bit_cast(float, here);
    all.absmax[i / all.block] = absmax;
    std::uint8_t* codes = all.codes + i / 2;
    if (here == 0 || here >= kInfinityBits) {  // quotients are NaN, which takes the first code
      __builtin_memset(codes, 0, static_cast<std::size_t>(all.block / 2));
      continue;
    }
    for (std::int64_t k = 0; k < all.block; k += kWidth) {  // kWidth divides all blocks
      const F quotient = load<kIn>(x + k * bytes_of(kIn)) / splat(absmax);
      Lanes::store_nibbles<Packing::high_first>(codes + k / 2,
                                                ranks.of_spread(round_as<kIn>(quotient)));
    }
  }
  return most;
}

void pack(const std::int8_t* numbers, int bits, std::int64_t n, std::uint8_t* codes) noexcept {
  with_bits(bits, [&]<int kBits>() { pack_all<kBits>(numbers, n, codes); });
}

template <Dtype kIn>
constexpr void fill(QuantizeKernels& kernels, int in) {
  kernels.amax[in] = &amax<kIn>;
  kernels.amaxes[in] = &amaxes<kIn>;
  kernels.reach[in] = &reach<kIn>;
  kernels.reach_each[in] = &reach_each<kIn>;
  kernels.within[in] = &encode_within<kIn>;
  for_all_codes([&]<Codes kCodes>() {
    constexpr int kRow = static_cast<int>(kCodes);
    if constexpr (is_blockwise(kCodes)) kernels.blocks[kRow][in] = &blocks<kCodes, kIn>;
    if constexpr (is_scaled(kCodes)) kernels.encode[kRow][in] = &encode<kCodes, kIn>;
    if constexpr (may_have_products(kCodes)) kernels.divide[kRow][in] = &divide<kCodes, kIn>;
    if constexpr (may_have_zeros(kCodes) || may_have_offsets(kCodes))
      kernels.encode_from[kRow][in] = &encode_from<kCodes, kIn>;
    if constexpr (has_casts(kCodes)) kernels.cast[kRow][in] = &cast<kCodes, kIn>;
  });
}
constexpr QuantizeKernels quantize_kernels() {
  QuantizeKernels kernels{};
  fill<Dtype::f64>(kernels, 0);
  fill<Dtype::f32>(kernels, 1);
  fill<Dtype::bf16>(kernels, 2);
  fill<Dtype::f16>(kernels, 3);
  kernels.torchao[1] = &torchao_blocks<Dtype::f32>;
  kernels.torchao[2] = &torchao_blocks<Dtype::bf16>;
  kernels.torchao[3] = &torchao_blocks<Dtype::f16>;
  kernels.pack = &pack;
  return kernels;
}

}  // namespace
}  // namespace stowage
