// SPDX-License-Identifier: Apache-2.0
// What the kernels know of the 4-bit formats, derived from the table of formats as plain arrays.
#pragma once
#include <cstdint>

#include "stowage/storage.h"

namespace stowage {
/// Values sorted in ascending order have ranks 0 to 15. A scaled input v has the rank that is the
/// number of thresholds strictly below v; NaN is above all. Of codes with a sign whose values are
/// scaled to the largest one, the ranks are those of the eight magnitudes.
struct FourBitTables {
  float values[16];        // by code
  float thresholds[16];    // 15 between neighbours in rank, and one that is not used
  std::int32_t codes[16];  // by rank
};
/// `codes` have 16 values.
const FourBitTables& four_bit_tables(Codes codes) noexcept;
/// nf4:torchao in f32, bf16 or f16: code k is left at the last number of that dtype, threshold k,
/// for which the rule still gives it. 15 of them, ascending, and one that is not used.
const float* torchao_thresholds(Dtype dtype) noexcept;
}  // namespace stowage
