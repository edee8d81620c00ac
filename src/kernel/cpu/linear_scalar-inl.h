// SPDX-License-Identifier: Apache-2.0
// The linear family for any CPU.
#pragma once
#include "kernel/cpu/linear_read-inl.h"

namespace stowage {
namespace {

constexpr int kTileRows = 1, kTileVectors = 4;  // with two chains, 8 sums in 16 registers
inline F multiply_add(F a, F b, F c) { return a * b + c; }
/// sums[j] = all lanes of x[j].
inline void sum4(const F (&x)[4], float (&sums)[4]) {
  for (int j = 0; j < 4; ++j) sums[j] = (x[j][0] + x[j][2]) + (x[j][1] + x[j][3]);
}
inline void arrange(float*, std::int64_t) noexcept {}

}  // namespace
}  // namespace stowage
#include "kernel/cpu/linear-inl.h"
