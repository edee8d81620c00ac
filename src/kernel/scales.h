// SPDX-License-Identifier: Apache-2.0
// The family of scales: what a weight keeps in the place of fp32 numbers becomes fp32 numbers, many
// at a time, before the others read them. What an instruction set implements; pointers and counts
// only.
#pragma once
#include <cstdint>

#include "stowage/descriptor.h"

namespace stowage {

/// How many scales that are not fp32 numbers are expanded at a time: four rows of 32,000 columns,
/// in 8 KiB.
inline constexpr std::int64_t kExpandedScales = 2048;

/// Scales as a weight keeps them: its parts but the codes.
struct KeptScales {
  const void* parts[kMaxParts - 1] = {};
  std::int64_t outer = 1;  // scales that share a number of their own
};
/// out[i] = scale first + i in fp32, for i < n; out[kExpandedScales + i] its offset, if it has one.
using Expand = void (*)(const KeptScales& kept, std::int64_t first, std::int64_t n,
                        float* out) noexcept;

struct ScaleKernels {
  struct OfType {
    Expand f32, bf16, f16;
  };
  Expand e8m0, bf16, f16;                  // numbers of that type
  Expand mapped;                           // codes of a map, under fp32 numbers, and an offset
  Expand product, product_bf16, quotient;  // e4m3 numbers under fp32 numbers
  Expand q4_k, q6_k;                       // records of superblocks
  OfType added, taken;  // numbers of that type, and behind them those that stand for 0; of the
                        // other sign where they are added to products
};
}  // namespace stowage
