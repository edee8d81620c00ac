// SPDX-License-Identifier: Apache-2.0
// 4-bit weights times bf16, on every instruction set; what holds only where pairs of bf16 numbers
// are multiplied says so.
#include <gtest/gtest.h>

#include <limits>

#include "base/cpu.h"
#include "kernel/linear_cases.h"

namespace stowage::linear_test {
namespace {

constexpr std::int64_t kMostByScales = 6;  // rows of x for which values are not rounded one by one

constexpr const char* kFourBits[] = {"nf4",
                                     "fp4",
                                     "nf4:block128",
                                     "nf4:block4096",
                                     "fp4:block256:nested",
                                     "nf4:block64:nested",
                                     "nf4:torchao:block64:scaler1:f32",
                                     "nf4:torchao:block64:scaler1:bf16",
                                     "nf4:torchao:block64:scaler1:f16"};

TEST(LinearBf16, IsWhatThisCpuChooses) {
  if (!cpu_features().runs_avx512bf16()) GTEST_SKIP() << "no AVX512-BF16";
  const Kernels* pairs = samples::variant("avx512bf16+pairs");
  ASSERT_NE(pairs, nullptr);
  EXPECT_NE(pairs->linear.bf16.arrange, nullptr);
  // Of the two variants the quicker one has the name of the set.
  const Kernels& chosen = kernels_named("avx512bf16");
  EXPECT_TRUE(&chosen == pairs || &chosen == samples::variant("avx512bf16"));
  EXPECT_EQ(kernels_named("avx512").linear.bf16.arrange, nullptr);
}

// Even and odd numbers of blocks, rows that no four share, every number of vectors and parts of x.
STOWAGE_ON_EACH_ISA(LinearBf16On, EveryShape) {
  struct Sizes {
    std::int64_t m, n, k;
  };
  const Sizes sizes[] = {{1, 1, 64},   {1, 9, 128},  {2, 7, 192},  {3, 13, 4160},
                         {4, 5, 64},   {5, 8, 320},  {6, 70, 128}, {7, 9, 8256},
                         {13, 6, 192}, {61, 5, 256}, {130, 4, 64}};
  for (const char* storage : kFourBits)
    for (const auto& [m, n, k] : sizes) {
      const Weight weight = make_weight(storage, {n, k}, Data::normal, 3);
      const Values x = make_values(Dtype::bf16, m * k, Data::normal, 4);
      const Values bias = make_values(Dtype::bf16, n, Data::normal, 5);
      expect_within_bound(
          run_linear(table, x, m, weight, &bias, inline_executor()), exact(x, m, weight, &bias), k,
          std::string(storage) + " m " + std::to_string(m) + " k " + std::to_string(k));
    }
}

// With more rows of x each value is the one that dequantize gives: nothing is left of the bound but
// the fp32 sum and the rounding of the result.
TEST(LinearBf16, ValuesAreThoseOfDequantize) {
  if (!cpu_features().runs_avx512bf16()) GTEST_SKIP() << "no AVX512-BF16";
  for (const char* storage :
       {"nf4", "fp4", "nf4:block64:nested", "nf4:torchao:block64:scaler1:bf16"}) {
    const std::int64_t m = kMostByScales + 1, n = 9, k = 448;
    const Weight weight = make_weight(storage, {n, k}, Data::normal);
    const Values x = make_values(Dtype::bf16, m * k, Data::normal, 1);
    const Exact truth = exact(x, m, weight, nullptr);
    const Values y =
        run_linear(*samples::variant("avx512bf16+pairs"), x, m, weight, nullptr, inline_executor());
    for (std::int64_t i = 0; i < m * n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      EXPECT_LE(std::abs(y[i] - truth.y[at]),
                0x1p-8 * std::abs(truth.y[at]) + (k + 8) * 0x1p-24 * truth.magnitude[at])
          << storage << " " << i;
    }
  }
}

STOWAGE_ON_EACH_ISA(LinearBf16On, IsTheSameOnAnyNumberOfThreads) {
  const std::int64_t n = 515, k = 1088;
  for (const char* storage : {"nf4", "fp4", "nf4:block64:nested"}) {
    const Weight weight = make_weight(storage, {n, k}, Data::normal);
    for (const std::int64_t m : {1, 2, 4, 8, 33, 70}) {
      const Values x = make_values(Dtype::bf16, m * k, Data::normal, 5);
      expect_same_on_threads(table, x, m, weight);
    }
  }
}

// A block whose scale is infinite or NaN makes the rows that have it what its values make them: all
// signs of infinity, so NaN; and no others, also where a row ends with 64 columns and such a block
// begins the next one.
STOWAGE_ON_EACH_ISA(LinearBf16On, BrokenScalesBreakTheirRows) {
  const std::int64_t n = 9;
  for (const char* storage : {"nf4", "int4:block64", "mxfp4"})
    for (const std::int64_t k : {1024, 1088}) {
      const Weight whole = make_weight(storage, {n, k}, Data::normal);
      const bool bytes = whole.storage().codes == Codes::f4_e2m1;  // scales are e8m0
      const std::size_t of_row = static_cast<std::size_t>(k) / (bytes ? 32 : 64);
      std::vector<float> scales(9 * of_row);
      std::memcpy(scales.data(), whole.part(1), bytes ? scales.size() : 4 * scales.size());
      if (bytes) {
        auto* exponents = reinterpret_cast<std::uint8_t*>(scales.data());
        exponents[2 * of_row] = exponents[9 * of_row - 1] = 0xFF;  // NaN
      } else {
        scales[2 * of_row] = std::numeric_limits<float>::infinity();
        scales[9 * of_row - 1] = std::numeric_limits<float>::quiet_NaN();
      }
      const void* parts[] = {whole.part(0), scales.data()};
      const Weight broken(whole.storage(), whole.shape(), parts);
      for (const std::int64_t m : {1, 2, 3, 4, 7, 9, 20}) {
        const Values x = make_values(Dtype::bf16, m * k, Data::normal, 3);
        const Values y = run_linear(table, x, m, broken, nullptr, inline_executor());
        for (std::int64_t i = 0; i < m * n; ++i)
          EXPECT_EQ(std::isnan(y[i]), i % n == 2 || i % n == 8)
              << storage << " " << k << " " << m << " " << i;
      }
    }
}

STOWAGE_ON_EACH_ISA(LinearBf16On, NanAndInfinityInXReachTheirRow) {
  const std::int64_t n = 6, k = 832;
  const Weight weight = make_weight("nf4", {n, k}, Data::normal);
  for (const std::int64_t m : {1, 2, 3, 5}) {
    Values x = make_values(Dtype::bf16, m * k, Data::normal, 3);
    const std::uint16_t nan = 0x7FC0;
    std::memcpy(&x.bytes[static_cast<std::size_t>((m - 1) * k + 131) * 2], &nan, 2);
    const Values y = run_linear(table, x, m, weight, nullptr, inline_executor());
    for (std::int64_t i = 0; i < m * n; ++i) EXPECT_EQ(std::isnan(y[i]), i >= (m - 1) * n) << m;
  }
}

// What docs/numbers.md adds for subnormal numbers, which pairs of bf16 numbers take as zero.
STOWAGE_ON_EACH_ISA(LinearBf16On, SubnormalFactorsLoseAtMostThemselves) {
  const std::int64_t n = 5, k = 1088;
  const Weight plain = make_weight("nf4", {n, k}, Data::normal);
  std::vector<float> scales(static_cast<std::size_t>(n * k / 64), 0x1p-120f);
  const void* parts[] = {plain.part(0), scales.data()};
  const Weight weights[] = {plain, Weight(plain.storage(), plain.shape(), parts)};
  for (const Weight& weight : weights)
    for (const double size : {1.0, 0x1p-124, 0x1p-130})
      for (const std::int64_t m : {1, 4}) {
        Values x = make_values(Dtype::bf16, m * k, Data::normal, 3);
        double sum_x = 0, sum_w = 0;
        for (std::int64_t i = 0; i < m * k; ++i) {
          const std::uint16_t small = f32_to_bf16(static_cast<float>(x[i] * size));
          std::memcpy(&x.bytes[static_cast<std::size_t>(i) * 2], &small, 2);
          sum_x += std::abs(x[i]);
        }
        const Exact truth = exact(x, m, weight, nullptr);
        for (std::size_t i = 0; i < scales.size(); ++i)
          sum_w += 64 * std::abs(static_cast<const float*>(weight.part(1))[i]);
        const Values y = run_linear(table, x, m, weight, nullptr, inline_executor());
        for (std::int64_t i = 0; i < m * n; ++i) {
          const auto at = static_cast<std::size_t>(i);
          EXPECT_LE(std::abs(y[i] - truth.y[at]),
                    0x1p-8 * std::abs(truth.y[at]) + 0x1p-7 * truth.magnitude[at] +
                        0x1p-126 * (sum_x + sum_w + static_cast<double>(2 * k)))
              << size << " " << i;
        }
      }
}

}  // namespace
}  // namespace stowage::linear_test
