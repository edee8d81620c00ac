// SPDX-License-Identifier: Apache-2.0
// The linear family for any CPU.
#pragma once
#include "kernel/cpu/linear_read-inl.h"

namespace stowage {
namespace {

constexpr int kTileRows = 2, kTileVectors = 4;  // 8 sums in 16 registers
inline F multiply_add(F a, F b, F c) { return a * b + c; }
inline float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline void arrange(float*, std::int64_t) noexcept {}

}  // namespace
}  // namespace stowage
#include "kernel/cpu/linear-inl.h"
