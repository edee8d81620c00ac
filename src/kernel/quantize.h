// SPDX-License-Identifier: Apache-2.0
// The quantize family: what an instruction set implements. Pointers and counts only. Every kernel
// that reads values reports the largest fp32 bit pattern of |x| it met: more than kInfinityBits is
// a NaN, that itself an infinity, and unsigned integers order |x| as floats do.
#pragma once
#include <cstdint>

#include "kernel/dequantize.h"

namespace stowage {
inline constexpr std::uint32_t kInfinityBits = 0x7F800000;

/// The largest |x| of n values. f64 is rounded to fp32 first.
using AmaxKernel = std::uint32_t (*)(const void* x, std::int64_t n) noexcept;
/// The largest |x| of each group of `group` values of n; the last group may be short. `asked`: who
/// encoded the values before these has asked for these, which are then read without asking, so that
/// there is time to ask for the lines that `codes` of 8 bits go to; null: for none.
struct ManyValues {
  const void* x;
  std::int64_t n;
  std::int64_t group;
  bool asked = false;
  const void* codes = nullptr;
};
using AmaxesKernel = void (*)(const ManyValues& values, std::uint32_t* out) noexcept;
/// How far values lie below and above 0, as AmaxKernel has it: bits of -min(x, 0) and of max(x, 0).
struct Extremes {
  std::uint32_t below, above;
};
using ExtremesKernel = void (*)(const void* x, std::int64_t n, std::int64_t group,
                                Extremes* out) noexcept;
/// The same of n values each with what is there: below[i] and above[i] only grow.
using ReachKernel = void (*)(const void* x, std::int64_t n, std::uint32_t* below,
                             std::uint32_t* above) noexcept;
/// n values in groups of `group`, even where two codes are in a byte; the last may be short. r and
/// zero: one for each group. f64 is rounded to fp32 first. Two codes in a byte: the first in the
/// low half, and a half without a code is 0.
struct ScaledGroups {
  const void* x;
  std::int64_t n;
  std::int64_t group;
  const float* r;
  const float* zero;
  void* codes;
};
/// codes[i] = RNE(clamp(fl(x[i] * r), -F, F)), for finite x and r > 0 that make |x r|, for codes of
/// 8 bits, at most next to F: r = fl(1 / fl(amax / F)). Or RNE(clamp(fl(fl(x[i] * r) + zero))), all
/// codes of the format, for finite x r.
using EncodeKernel = void (*)(const ScaledGroups& groups) noexcept;
/// codes[i] = x[i] rounded once, to nearest even, saturating; NaN and inf pass as the format has
/// them. Returns the largest |x|; a finite f64 too large for fp32 counts as finite.
using CastKernel = std::uint32_t (*)(const void* x, std::int64_t n, void* codes) noexcept;
/// n values in blocks of `block` (even): one absmax each, and two codes in a byte, the first in the
/// high nibble. A short last block (the tensor's end) divides where the others multiply; n odd pads
/// with the code of zero. Returns the largest |x|.
struct Blocks {
  const void* x;
  std::int64_t n;
  std::int64_t block;
  std::uint8_t* codes;
  float* absmax;
};
using BlocksKernel = std::uint32_t (*)(const Blocks& blocks) noexcept;

/// As BlocksKernel for nf4:torchao: x and absmax are numbers of one dtype, in which quotients are
/// rounded; blocks are whole. `thresholds`: torchao_thresholds() of that dtype.
using TorchaoKernel = std::uint32_t (*)(const Blocks& blocks, const float* thresholds) noexcept;

/// codes[i] = RNE(clamp(fl(fl(x[i] * r) + zero), least, most)) as int8; no zeros: as if they were
/// 0.
using EncodeWithinKernel = void (*)(const ScaledGroups& groups, float least, float most) noexcept;
/// n numbers, a multiple of 8, as dense codes, each more by half of the range of `bits` bits.
using PackKernel = void (*)(const std::int8_t* numbers, int bits, std::int64_t n,
                            std::uint8_t* codes) noexcept;

struct QuantizeKernels {
  AmaxKernel amax[kValueDtypes];
  AmaxesKernel amaxes[kValueDtypes];
  ExtremesKernel reach[kValueDtypes];
  ReachKernel reach_each[kValueDtypes];
  EncodeKernel encode[kCodesCount][kValueDtypes];       // of Codec::amax; else null
  EncodeKernel divide[kCodesCount][kValueDtypes];       // of fl(x[i] / r): f4_e2m1; else null
  EncodeKernel encode_from[kCodesCount][kValueDtypes];  // with zeros: int8, int4; else null
  CastKernel cast[kCodesCount][kValueDtypes];      // f32, bf16, f16, f8_e4m3, f8_e5m2; else null
  BlocksKernel blocks[kCodesCount][kValueDtypes];  // nf4, fp4; else null
  TorchaoKernel torchao[kValueDtypes];             // f32, bf16, f16; else null
  EncodeWithinKernel within[kValueDtypes];         // what pack then takes
  PackKernel pack;
};
}  // namespace stowage
