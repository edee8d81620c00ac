// SPDX-License-Identifier: Apache-2.0
// From how many rows of x on another way to multiply is quicker: measured on this machine, or what
// the library was built with. Ways differ in their last bits, within the bounds of docs/numbers.md.
#pragma once
#include <cstdint>

#include "stowage/error.h"

namespace stowage {
inline namespace v0 {

/// The most rows of x that a way is worth it for; 0: never.
struct Crossover {
  std::int64_t rows = 0;  // by widened rows of weight, up to 64; more are taken by tiles
  /// 4-bit codes in integers, up to 16 (of bf16 to 4, where pairs or matrices of it multiply):
  std::int64_t long_groups = 0;   // groups of 64 and more,
  std::int64_t short_groups = 0;  // and of 16 and 32
  std::int64_t bytes = 0;         // codes of a byte in groups of 16 and 32 in integers, up to 16
  std::int64_t words = 0;         // nf4 and fp4 in integers, up to 16
  std::int64_t float8 = 0;        // fp8 whose bits move to those of fp32, up to 16
  std::int64_t vectors = 0;       // bf16, before matrices of it multiply, up to 64
  std::int64_t near = 0;          // 1: codes of one row are asked for into the L1 cache
  // By kernels of ours before torch's product of dequantized tiles; the torch ops read these.
  std::int64_t own = 0;           // fp32 and f16
  std::int64_t own_bf16 = 0;      // bf16 by any storage
  std::int64_t own_matrices = 0;  // and by weights of up to 8 bits in matrices,
  std::int64_t own_gradient = 0;  // and gradients by them
  bool operator==(const Crossover&) const = default;
};

/// What is in force: at first what this build has for the instruction set.
STOWAGE_API Crossover crossover();
/// Puts another in force, for the products that begin from then on. Throws invalid_argument where a
/// number is negative or above what its way can take.
STOWAGE_API void use_crossover(const Crossover& crossover);
/// What is quicker here, for the ways of this library, each on one thread; what it does not measure
/// is as in force. Takes less than a second; changes nothing.
STOWAGE_API Crossover measure_crossover();

}  // namespace v0
}  // namespace stowage
