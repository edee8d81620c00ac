// SPDX-License-Identifier: Apache-2.0
// The reference codec: what every kernel must equal, byte for byte. Slow and plain on purpose: one
// element at a time, exact double arithmetic or single fp32 operations in the order of the rules
// (docs/numbers.md). It shares tables of values with the kernels and no arithmetic.
#pragma once
#include <cstdint>
#include <span>

#include "stowage/weight.h"

namespace stowage::reference {

/// Element i of a row-major array of f64, f32, bf16 or f16; exact.
double read(const void* values, Dtype dtype, std::int64_t i) noexcept;

/// The code of the finite value of a table that is nearest to x; of two as near that whose code is
/// even; of two zeros the one of the sign of x.
std::uint32_t nearest_code(Codes codes, double x) noexcept;
/// x in the precision of a plain cast (f32, bf16, f16, f8), rounded once to nearest even, clamped
/// to the largest value; x is finite.
double round(Codes codes, double x) noexcept;
/// The same of f32, bf16 and f16, but what lies beyond the largest value becomes infinity, and what
/// is not finite stays.
double narrow(Codes codes, double x) noexcept;

/// The code of a plain cast. Finite x saturates. inf becomes inf, or NaN in e4m3, which has none;
/// NaN keeps its sign and nothing else of its bits.
std::uint32_t encode(Codes codes, double x) noexcept;

/// The scale of a group: fl(amax / F), 1 for amax 0, at least 2^-126.
float scale_of(float amax, float divisor) noexcept;

/// The place of element i of a weight in the order in which codes lie: i, but where they lie
/// transposed.
std::int64_t place_of(const Storage& storage, const Shape& shape, std::int64_t i);
/// Which of its scales element i of a weight has, where storage and shape say it.
std::int64_t scale_index(const Storage& storage, const Shape& shape, std::int64_t i);
/// The same of any weight.
std::int64_t scale_index(const Weight& weight, std::int64_t i);

/// Which of the numbers that scales stand under is over that of element i.
std::int64_t outer_index(const Storage& storage, const Shape& shape, std::int64_t i);

/// Code i of `width` bits among codes that lie densely, whose bits may be anything before.
void put_dense(std::uint8_t* codes, int width, std::int64_t i, unsigned code) noexcept;
/// The code of x in [-1, 1] under nf4 or fp4: how many thresholds lie strictly below x, as a place
/// in the order of the values. NaN lies above all.
std::uint8_t encode4(Codes codes, float x) noexcept;
/// The 15 thresholds of nf4 or fp4: fp32 midpoints of neighbouring values.
std::span<const float> thresholds4(Codes codes) noexcept;

/// As stowage::quantize_into.
void quantize(const void* values, Dtype dtype, const Shape& shape, const Storage& storage,
              std::span<void* const> parts, bool keep_nonfinite = false);

/// What a scale of such a type is under its number.
float number_under(ScaleType type, double scale, double outer) noexcept;
/// The scale that element i of a weight is multiplied with; 1 for plain casts.
float scale_at(const Weight& weight, std::int64_t i) noexcept;
/// What is taken off the product of a code and its scale, for element i: 0 but where a storage
/// says.
float offset_at(const Weight& weight, std::int64_t i) noexcept;
/// What stands for 0 in the group of element i: 0 but where a storage says.
float zero_at(const Weight& weight, std::int64_t i) noexcept;
/// Element i: table value, less that of the zero, times scale, one fp32 product, less the offset,
/// one fp32 difference; of zero_sum table value times scale, plus the zero; of zero_rounded the
/// difference in the type of the scales, and so the product; of nf4:torchao the product in its own
/// dtype, and then as fp32.
float value_at(const Weight& weight, std::int64_t i) noexcept;
/// All elements, rounded once to f64, f32, bf16 or f16; NaN becomes the positive quiet NaN. A plain
/// cast in its own type is copied.
void dequantize(const Weight& weight, void* out, Dtype dtype);

/// quantize() of superblocks: `parts` as layout(storage) has them; the values are finite.
void quantize_ggml(const void* values, Dtype dtype, const Shape& shape, const Storage& storage,
                   std::span<void* const> parts);
/// The scale and the offset of element i of such a weight.
struct ScaleAndOffset {
  float scale = 1, offset = 0;
};
ScaleAndOffset scale_and_offset_at(const Weight& weight, std::int64_t i) noexcept;

/// quantize() of nf4:torchao: `parts` as layout(storage) has them; the values are finite. Values of
/// another dtype are first cast to that of the parts, as the plain cast does.
void quantize_torchao(const void* values, Dtype dtype, std::int64_t n, const Storage& storage,
                      std::span<void* const> parts);
/// Element i of such a weight, exact: r(value * r(r(q / factor) + mean)).
double torchao_value_at(const Weight& weight, std::int64_t i) noexcept;
/// The scale of its block; f64 scales are rounded to fp32.
float torchao_scale_at(const Weight& weight, std::int64_t i) noexcept;

}  // namespace stowage::reference
