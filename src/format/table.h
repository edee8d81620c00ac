// SPDX-License-Identifier: Apache-2.0
// The table of formats. A format of at most 8 bits IS its list of values; the list is also what
// the tests compare every kernel with. Beside it stand the forms: how codes lie, whose arithmetic
// makes them, and what may be combined, for a format and for each dialect of one. A header, so that
// kernels are made from it while they are compiled; everything else asks trait() and describe().
#pragma once
#include <array>
#include <bit>
#include <initializer_list>
#include <limits>

#include "format/legal.h"
#include "stowage/descriptor.h"

namespace stowage::table {

constexpr float pow2(int e) {  // for normal results, -126 <= e <= 127
  return std::bit_cast<float>(static_cast<std::uint32_t>(e + 127) << 23);
}

// sign | exponent | mantissa. What the largest exponent holds: inf and NaN (e5m2); numbers, and NaN
// in the last code of each sign (e4m3fn); numbers (e2m1). Source: Micikevicius et al., "FP8 formats
// for deep learning" (2022), and OCP OFP8 1.0, table 1.
enum class Specials { ieee, nan, none };
template <int kExp, int kMan, Specials kSpecials>
consteval auto minifloat_values() {
  constexpr int kBias = (1 << (kExp - 1)) - 1, kOne = 1 << kMan, kTop = (1 << kExp) - 1;
  constexpr std::size_t kSign = std::size_t{1} << (kExp + kMan);
  std::array<float, 2 * kSign> values{};
  for (std::size_t code = 0; code < kSign; ++code) {
    const int exp = static_cast<int>(code) / kOne, man = static_cast<int>(code) % kOne;
    float v = exp == 0 ? static_cast<float>(man) * pow2(1 - kBias - kMan)  // subnormal
                       : static_cast<float>(kOne + man) * pow2(exp - kBias - kMan);
    if (kSpecials == Specials::ieee && exp == kTop)
      v = man == 0 ? std::numeric_limits<float>::infinity()
                   : std::numeric_limits<float>::quiet_NaN();
    if (kSpecials == Specials::nan && code + 1 == kSign)
      v = std::numeric_limits<float>::quiet_NaN();
    values[code] = v;
    values[kSign + code] = -v;
  }
  return values;
}
constexpr auto kE4m3 = minifloat_values<4, 3, Specials::nan>();
constexpr auto kE5m2 = minifloat_values<5, 2, Specials::ieee>();
// OCP microscaling formats (MX) 1.0, table 5: 0 0.5 1 1.5 2 3 4 6 and their negatives.
constexpr auto kE2m1 = minifloat_values<2, 1, Specials::none>();

consteval auto int8_values() {  // two's complement; -128 is never written, but a file may hold it
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code)
    values[static_cast<std::size_t>(code)] = static_cast<float>(code < 128 ? code : code - 256);
  return values;
}
constexpr auto kInt8 = int8_values();

// Of four bits, code c stands for c - 8: "offset binary", which compressed-tensors, GPTQ, AWQ and
// GGUF's Q4_0 hold; so of others, compressed-tensors' and GGUF's Q6_K.
template <int kBits>
consteval auto biased_values() {
  std::array<float, std::size_t{1} << kBits> values{};
  for (std::size_t code = 0; code < values.size(); ++code)
    values[code] = static_cast<float>(code) - static_cast<float>(values.size() / 2);
  return values;
}
constexpr auto kInt4 = biased_values<4>();
constexpr auto kInt2 = biased_values<2>();
constexpr auto kInt3 = biased_values<3>();
constexpr auto kInt5 = biased_values<5>();
constexpr auto kInt6 = biased_values<6>();
constexpr auto kInt7 = biased_values<7>();

// What Q4_K of ggml has, 0 to 15, from the offset of their sub-block; and hqq.
consteval auto uint4_values() {
  std::array<float, 16> values{};
  for (std::size_t code = 0; code < 16; ++code) values[code] = static_cast<float>(code);
  return values;
}
constexpr auto kUint4 = uint4_values();

// Dettmers et al., "QLoRA" (2023), appendix E, with the digits of bitsandbytes' get_4bit_type: the
// quantile formula gives them only to 1e-7, so the literals are the definition.
constexpr std::array<float, 16> kNf4{
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// bitsandbytes' own FP4 (not E2M1): its get_4bit_type lists twelfths, 0 0.0625 8 12 4 6 2 3 and
// the same negated, and divides by 12. Code 8 is +0, since Python's integer -0 has no sign.
consteval auto fp4_values() {
  constexpr std::array<float, 8> kTwelfths{0.0f, 0.0625f, 8.0f, 12.0f, 4.0f, 6.0f, 2.0f, 3.0f};
  std::array<float, 16> values{};
  for (std::size_t code = 0; code < 8; ++code) {
    values[code] = kTwelfths[code] / 12.0f;
    values[code + 8] = code == 0 ? 0.0f : -values[code];
  }
  return values;
}
constexpr auto kFp4 = fp4_values();

constexpr Scaling kNone{};
constexpr Scaling kRow{.kind = Scaling::Kind::row};
constexpr Scaling kBlock32{.kind = Scaling::Kind::block, .block = 32};
constexpr Scaling kBlock64{.kind = Scaling::Kind::block, .block = 64};
constexpr Scaling kBlock128{.kind = Scaling::Kind::block, .block = 128};
constexpr Scaling kRecords{
    .kind = Scaling::Kind::block, .block = kSuperblock, .type = ScaleType::super};
constexpr float kLargestBf16 = 0x1.fep127f;
constexpr float kLargestF32 = std::numeric_limits<float>::max();

constexpr std::array<FormatTrait, kCodesCount> kFormats{{
    {Codes::f32, "f32", 32, kLargestF32, {}, Dtype::f32, kNone},
    {Codes::bf16, "bf16", 16, kLargestBf16, {}, Dtype::bf16, kNone},
    {Codes::f16, "f16", 16, 65504.0f, {}, Dtype::f16, kNone},
    {Codes::f8_e4m3, "f8_e4m3", 8, 448.0f, kE4m3, Dtype::f8_e4m3, kNone},
    {Codes::f8_e5m2, "f8_e5m2", 8, 57344.0f, kE5m2, Dtype::f8_e5m2, kNone},
    {Codes::int8, "int8", 8, 127.0f, kInt8, Dtype::i8, kRow},
    {Codes::nf4, "nf4", 4, 1.0f, kNf4, Dtype::u8, kBlock64},
    {Codes::fp4, "fp4", 4, 1.0f, kFp4, Dtype::u8, kBlock64},
    {Codes::f4_e2m1, "f4_e2m1", 4, 6.0f, kE2m1, Dtype::u8, kBlock32},
    {Codes::int4, "int4", 4, 7.0f, kInt4, Dtype::u8, kBlock128, -8.0f, 7.5f},
    {Codes::uint4, "uint4", 4, 15.0f, kUint4, Dtype::u8, kRecords, 0.0f},
    {Codes::int2, "int2", 2, 1.0f, kInt2, Dtype::u8, kBlock128, -2.0f, 1.5f},
    {Codes::int3, "int3", 3, 3.0f, kInt3, Dtype::u8, kBlock128, -4.0f, 3.5f},
    {Codes::int5, "int5", 5, 15.0f, kInt5, Dtype::u8, kBlock128, -16.0f, 15.5f},
    {Codes::int6, "int6", 6, 31.0f, kInt6, Dtype::u8, kBlock128, -32.0f, 31.5f},
    {Codes::int7, "int7", 7, 63.0f, kInt7, Dtype::u8, kBlock128, -64.0f, 63.5f},
}};
consteval bool formats_in_place() {
  for (std::size_t i = 0; i < kFormats.size(); ++i) {
    const FormatTrait& format = kFormats[i];
    const std::size_t values = format.bits > 8 ? 0 : std::size_t{1} << format.bits;
    if (format.codes != static_cast<Codes>(i) || format.values.size() != values) return false;
  }
  return true;
}
static_assert(formats_in_place(),
              "a row sits at the index of its codes and has one value for each code");

consteval std::uint8_t kinds(std::initializer_list<Scaling::Kind> some) {
  int made = 0;
  for (const Scaling::Kind kind : some) made |= 1 << static_cast<int>(kind);
  return static_cast<std::uint8_t>(made);
}
using Kind = Scaling::Kind;
constexpr Legal kPlain{.kinds = kinds({Kind::none})};
constexpr Legal kScaledLegal{
    .kinds = kinds({Kind::tensor, Kind::row, Kind::row2, Kind::block, Kind::block2}),
    .least_block = kMinBlock,
    .most_block = kMaxBlock,
    .typed = true};
consteval Legal with(Legal legal, std::initializer_list<bool Legal::*> more) {
  for (bool Legal::*const flag : more) legal.*flag = true;
  return legal;
}
constexpr Legal kIntegerLegal = with(kScaledLegal, {&Legal::zero, &Legal::named});
constexpr Legal kInt8Legal = with(kIntegerLegal, {&Legal::absmax});
consteval Legal in_steps(Legal legal, std::int32_t step) {
  legal.step = step;
  legal.least_block = legal.least_block < step ? step : legal.least_block;
  return legal;
}
constexpr Legal kPackedLegal =
    with(in_steps(kScaledLegal, 2), {&Legal::product, &Legal::transposed});
constexpr Legal kPackedIntegerLegal = with(in_steps(kIntegerLegal, 2), {&Legal::sum});
constexpr Legal kDenseLegal = in_steps(kIntegerLegal, 8);
constexpr Legal kDenseOrSuperLegal = with(kDenseLegal, {&Legal::super});
constexpr Legal kPlainOrScaled{.kinds = kPlain.kinds | kScaledLegal.kinds,
                               .least_block = kMinBlock,
                               .most_block = kMaxBlock,
                               .typed = true};
constexpr Legal kBlocks4{.kinds = kinds({Kind::block}),
                         .least_block = kMinBlock4,
                         .most_block = kMaxBlock4,
                         .powers = true,
                         .nested = true};
consteval Legal with_columns(Legal legal) {
  legal.kinds |= kinds({Kind::column});
  return legal;
}
constexpr Legal kUnsignedLegal =
    with_columns(with(in_steps(kScaledLegal, 2), {&Legal::rounded, &Legal::super}));
constexpr Legal kTorchaoLegal{.kinds = kinds({Kind::block}),
                              .least_block = kMinBlockTorchao,
                              .most_block = kMaxBlock4,
                              .powers = true,
                              .open = true};

using enum Packing;
constexpr Dialect kOwn = Dialect::standard;
constexpr std::array kForms{
    FormRow{Codes::f32, kOwn, whole, Codec::cast, FileForm::values, kPlain},
    FormRow{Codes::bf16, kOwn, whole, Codec::cast, FileForm::values, kPlain},
    FormRow{Codes::f16, kOwn, whole, Codec::cast, FileForm::values, kPlain},
    FormRow{Codes::f8_e4m3, kOwn, whole, Codec::amax, FileForm::scaled, kPlainOrScaled},
    FormRow{Codes::f8_e5m2, kOwn, whole, Codec::amax, FileForm::scaled, kPlainOrScaled},
    FormRow{Codes::int8, kOwn, whole, Codec::amax, FileForm::scaled, kInt8Legal},
    FormRow{Codes::nf4, kOwn, high_first, Codec::bitsandbytes, FileForm::quant_state, kBlocks4},
    FormRow{Codes::fp4, kOwn, high_first, Codec::bitsandbytes, FileForm::quant_state, kBlocks4},
    FormRow{Codes::f4_e2m1, kOwn, low_first, Codec::amax, FileForm::manifest, kPackedLegal,
            PowerRule::floor},
    FormRow{Codes::int4, kOwn, low_first, Codec::amax, FileForm::manifest, kPackedIntegerLegal},
    FormRow{Codes::uint4, kOwn, low_first, Codec::ggml, FileForm::manifest, kUnsignedLegal},
    FormRow{Codes::int2, kOwn, dense, Codec::amax, FileForm::manifest, kDenseLegal},
    FormRow{Codes::int3, kOwn, dense, Codec::amax, FileForm::manifest, kDenseLegal},
    FormRow{Codes::int5, kOwn, dense, Codec::amax, FileForm::manifest, kDenseLegal},
    FormRow{Codes::int6, kOwn, dense, Codec::amax, FileForm::manifest, kDenseOrSuperLegal},
    FormRow{Codes::int7, kOwn, dense, Codec::amax, FileForm::manifest, kDenseLegal},
    FormRow{Codes::nf4, Dialect::torchao, high_first, Codec::torchao, FileForm::manifest,
            kTorchaoLegal},
};
consteval bool forms_in_place() {
  for (std::size_t i = 0; i < kFormats.size(); ++i)
    if (kForms[i].codes != kFormats[i].codes || kForms[i].dialect != kOwn) return false;
  return true;
}
static_assert(forms_in_place(), "each format has its form, at the same index; dialects come after");

}  // namespace stowage::table
