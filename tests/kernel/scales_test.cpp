// SPDX-License-Identifier: Apache-2.0
// Kept scales become the same fp32 numbers on every instruction set, from any one of them on, and
// nothing beside them is read.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "fenced.h"
#include "kernel/samples.h"

namespace stowage {
namespace {

struct Family {
  const char* name;
  Expand ScaleKernels::*expand;
  std::int64_t bytes, scales;  // of one record of the first part
};
constexpr Family kFamilies[] = {{"e8m0", &ScaleKernels::e8m0, 1, 1},
                                {"bf16", &ScaleKernels::bf16, 2, 1},
                                {"f16", &ScaleKernels::f16, 2, 1},
                                {"mapped", &ScaleKernels::mapped, 1, 1},
                                {"product", &ScaleKernels::product, 1, 1},
                                {"product_bf16", &ScaleKernels::product_bf16, 1, 1},
                                {"quotient", &ScaleKernels::quotient, 1, 1},
                                {"q4_k", &ScaleKernels::q4_k, 16, 8},
                                {"q6_k", &ScaleKernels::q6_k, 18, 16}};
constexpr std::int64_t kMost = 1216, kOuter = 96;

const Kernels& plainest() { return *runnable_kernels().front().kernels; }

/// Bits of all results, NaN as one number.
std::vector<std::uint32_t> expanded(const Kernels& table, const Family& family,
                                    const KeptScales& kept, std::int64_t first, std::int64_t n) {
  std::vector<float> out(2 * kExpandedScales, -1.0f);
  (table.scales.*family.expand)(kept, first, n, out.data());
  std::vector<std::uint32_t> bits(out.size());
  std::memcpy(bits.data(), out.data(), out.size() * sizeof(float));
  for (std::size_t i = 0; i < out.size(); ++i)
    if (std::isnan(out[i])) bits[i] = 0x7FC00000;
  return bits;
}

STOWAGE_ON_EACH_ISA(Scales, AreTheSameNumbersEverywhere) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> outer, map;
  for (int i = 0; i < 64; ++i) outer.push_back(normal(random));
  outer[3] = 0x1p125f, outer[5] = 0x1p-140f, outer[7] = INFINITY;
  for (int i = 0; i < 256; ++i) map.push_back(normal(random));
  const float offset = 0.25f;
  const samples::Fenced room(kMost * 2);
  for (const Family& family : kFamilies) {
    const std::int64_t records = kMost / family.scales;
    std::vector<std::byte> part(static_cast<std::size_t>(records * family.bytes));
    for (std::byte& b : part) b = static_cast<std::byte>(random());
    // Codes that are numbers first, then some of e4m3 that are none.
    if (family.bytes == 1)
      for (std::size_t i = 0; i < part.size() / 2; ++i) part[i] &= std::byte{0x77};
    for (const auto against : {samples::Fenced::Against::end, samples::Fenced::Against::begin}) {
      const KeptScales kept{{room.piece(part, against), outer.data(), map.data(), &offset}, kOuter};
      for (const std::int64_t first : {0, 1, 8, 64, 128, 160, 255, 704})
        for (const std::int64_t n : {1, 7, 8, 16, 31, 32, 64, 255, 256, 384, 500, 512}) {
          const auto made = expanded(table, family, kept, first, n);
          ASSERT_EQ(made, expanded(plainest(), family, kept, first, n))
              << family.name << " from " << first << ", " << n;
          const std::uint32_t untouched = 0xBF800000;
          ASSERT_EQ(made[static_cast<std::size_t>(n)], untouched) << family.name;
        }
      const std::int64_t last = records * family.scales - 300;  // up to the fence
      ASSERT_EQ(expanded(table, family, kept, last, 300),
                expanded(plainest(), family, kept, last, 300))
          << family.name;
    }
  }
}

}  // namespace
}  // namespace stowage
