// SPDX-License-Identifier: Apache-2.0
// The dequantize family: what an instruction set implements. Pointers and counts only.
#pragma once
#include <cstdint>

#include "stowage/storage.h"

namespace stowage {
inline constexpr int kValueDtypes = 4;   // f64, f32, bf16, f16, in this order
int value_index(Dtype dtype) noexcept;   // place of a value dtype in such tables
Codes cast_codes(Dtype dtype) noexcept;  // of numbers of that dtype; f64 has none: f32

/// Of a row whose columns have their groups by name: element first + i is of group groups[first +
/// i], or of the nearest that there is, the last of which is number `last`. It has the scale
/// scales[group], and stands for its distance from zeros[group]; null: from 0.
struct NamedGroups {
  const std::int32_t* groups;
  std::int32_t last;
  const float* zeros;
};
/// n elements of one weight, from element `first` of `codes`: element first + i has the code at
/// that index and the scale scales[(first + i) / group]; null scales stand for 1. `values` are
/// those that 4-bit codes name, 16 floats (doubles, for weights of f64); null stands for the
/// format's own. A code stands for its distance from zeros[(first + i) / group]; null: from 0.
/// offsets[(first + i) / group] is taken off the product; null: nothing is. Where `rounds` is a
/// dtype, offsets are taken off codes instead, and the difference is rounded to it, and the
/// product. `factor`: products are multiplied by it too, each in turn.
struct Run {
  const void* codes;
  std::int64_t first;
  const float* scales;
  std::int64_t group;
  std::int64_t n;
  const void* values = nullptr;
  const std::int8_t* zeros = nullptr;
  const NamedGroups* named = nullptr;  // in the place of `group` and `zeros`
  const float* offsets = nullptr;
  Dtype rounds = Dtype::unknown;
  float factor = 1;

  Run part(std::int64_t begin, std::int64_t count) const noexcept {
    return {codes, first + begin, scales,  group,  count, values,
            zeros, named,         offsets, rounds, factor};
  }
};
/// out[i] = round((value[code] - zero) * scale * factor - offset), an exact difference, fp32
/// products one by one, another fp32 difference and one rounding, but where `rounds` says; every
/// NaN becomes the positive quiet NaN of the output type. Casts in their own type are copied.
using DequantizeKernel = void (*)(const Run& run, void* out) noexcept;
/// out[i] = code i of `bits` bits less half of their range, for i < n: codes lie densely. Of an
/// eight of them all are read, and written.
using UnpackKernel = void (*)(const std::uint8_t* codes, int bits, std::int64_t n,
                              std::int8_t* out) noexcept;
struct DequantizeKernels {
  DequantizeKernel to[kCodesCount][kValueDtypes];  // [Codes][value_index(out dtype)]; dense: null
  UnpackKernel unpack;                             // what the kernels of int8 then read
};
}  // namespace stowage
