// SPDX-License-Identifier: Apache-2.0
// Rows of bf16 times weights that are widened to bf16, several at a time or in registers, on every
// instruction set; what holds only where pairs of bf16 numbers are multiplied says so.
#include <gtest/gtest.h>

#include <limits>

#include "base/cpu.h"
#include "kernel/linear_cases.h"
#include "kernel/linear_weight.h"

namespace stowage::linear_test {
namespace {

struct Dimensions {
  std::int64_t m, n, k;
};
void check_bound(const Kernels& table, const std::string& storage, const Dimensions& of) {
  const auto& [m, n, k] = of;
  const Weight weight = make_weight(storage, {n, k}, Data::heavy, 3);
  const Values x = make_values(Dtype::bf16, m * k, Data::normal, 4);
  const Values bias = make_values(Dtype::bf16, n, Data::normal, 5);
  expect_within_bound(run_linear(table, x, m, weight, &bias, inline_executor()),
                      exact(x, m, weight, &bias), k,
                      storage + " m " + std::to_string(m) + " k " + std::to_string(k));
}

// Parts of x of one row to six, and several.
STOWAGE_ON_EACH_ISA(LinearPairsOn, EveryStorage) {
  for (const std::string& storage : storages())
    for (const Dimensions& of : {Dimensions{3, 68, 256}, {4, 12, 512}, {7, 4, 256}, {13, 8, 768}})
      check_bound(table, storage, of);
}
// Rows of weight that no four share; columns that no pairs share, and more than are widened at a
// time.
STOWAGE_ON_EACH_ISA(LinearPairsOn, EveryShape) {
  for (const char* storage : {"f8_e4m3:row", "f8_e4m3", "int8:tensor", "f8_e5m2:block128x128"})
    for (const Dimensions& of :
         {Dimensions{3, 300, 1}, {5, 70, 33}, {6, 5, 4129}, {61, 130, 31}, {4, 3, 9000}})
      check_bound(table, storage, of);
}

// One row to four by fp8 in registers: rows that no two share, groups that end between them.
STOWAGE_ON_EACH_ISA(LinearPairsOn, FewRowsByFloat8) {
  for (const char* storage :
       {"f8_e4m3", "f8_e5m2", "f8_e4m3:row", "f8_e5m2:tensor", "f8_e4m3:row:bf16",
        "f8_e4m3:block64", "f8_e4m3:block128x128", "f8_e5m2:block64x192", "f8_e4m3:block128:f16",
        "f8_e4m3:block32:e8m0", "f8_e4m3:row2"})
    for (const std::int64_t k : {64, 128, 192, 1024, 4160, 16448})
      for (const std::int64_t m : {1, 2, 3, 4})
        check_bound(table, storage, {m, k > 9000 ? 3 : 67, k});
  for (const char* storage : {"f8_e4m3:block32:e8m0", "f8_e5m2:block16", "f8_e4m3:block8x32"})
    for (const std::int64_t k : {64, 192, 1088})
      for (const std::int64_t m : {5, 6, 8, 9}) check_bound(table, storage, {m, 67, k});
}

// More rows by codes of a byte, eight at a time: parts of four rows of x to eight, rows of weight
// that no two share, columns that come in several stretches, and groups that end in them.
STOWAGE_ON_EACH_ISA(LinearPairsOn, MoreRowsByCodesOfAByte) {
  for (const char* storage :
       {"f8_e4m3", "f8_e5m2:row", "int8:row", "int8:tensor", "int8:row:bf16", "int8:block64",
        "f8_e4m3:block128x128", "int8:block192:f16", "f8_e5m2:block64x192", "int8:row2"})
    for (const std::int64_t k : {64, 192, 1152, 4224, 16512})
      for (const std::int64_t m : {3, 5, 6, 8, 9, 15, 22}) {
        if (!samples::holds(parse_storage(storage), {67, k})) continue;
        check_bound(table, storage, {m, k > 9000 ? 3 : 67, k});
      }
}

// Codes of four bits: two codes in either order, groups of each kind of length, some of which go on
// from row to row, zeros and offsets beside scales, scales that are expanded, rounded values.
STOWAGE_ON_EACH_ISA(LinearPairsOn, SomeRowsByCodesOfFourBits) {
  for (const char* storage :
       {"int4:block64", "int4:block32:bf16", "int4:block192", "int4:block128:f16:zero", "mxfp4",
        "nvfp4", "nf4:block32", "nf4:block1024", "fp4:block256", "q4_k",
        "int4:block64:f16:zero_sum", "f4_e2m1:block64", "int4:row", "nf4:block64:nested",
        "nf4:torchao:block64:bf16", "nf4:torchao:block32:bf16"})
    for (const std::int64_t k : {64, 192, 768, 2304, 4608})
      for (const std::int64_t m : {1, 2, 3, 4, 5, 8, 9, 16, 23}) {
        if (!samples::holds(parse_storage(storage), {67, k})) continue;
        check_bound(table, storage, {m, k > 4000 ? 5 : 67, k});
      }
  // So long that rows of x come in parts.
  for (const char* storage : {"nf4", "int4:block128:f16:zero", "mxfp4", "q4_k"})
    for (const std::int64_t m : {5, 13}) check_bound(table, storage, {m, 5, 43264});
}

TEST(LinearPairs, CodesOfFourBitsAreReadWhereRowsBeginWithGroups) {
  for (const NamedKernels& level : runnable_kernels()) {
    const bool has = level.kernels->linear.bf16.pairs != nullptr;
    EXPECT_EQ(has, level.kernels->linear.bf16.exact != nullptr) << level.name;
    const auto reads = [&](const char* storage, std::int64_t columns, std::int64_t m) {
      const Weight weight = make_weight(storage, {6, columns}, Data::normal);
      return LinearWeight(*level.kernels, weight, "linear").has_dot_bf16(m);
    };
    for (const char* storage : {"int4:block64", "int4:block384", "int4:row", "int4:tensor", "mxfp4",
                                "nvfp4", "nf4:block32", "nf4:block128", "int4:block64:f16:zero"})
      EXPECT_EQ(reads(storage, 384, 4), has) << storage;
    for (const char* storage :
         {"int8:row", "int4:block48", "int3:block64", "int4:block16:f16:zero", "nf4:block512"})
      EXPECT_FALSE(reads(storage, 384, 4)) << storage;
    EXPECT_FALSE(reads("int4:block32", 96, 4));
    EXPECT_EQ(reads("nf4:block64", 384, 1), has);
    for (const char* storage : {"mxfp4", "nvfp4", "int4:block64"})  // which integers are quicker by
      EXPECT_FALSE(reads(storage, 384, 1)) << storage;
    EXPECT_FALSE(reads("int4:block32:f16:zero", 384, 2));
    EXPECT_FALSE(reads("nvfp4", 384, 13));  // decoded once for all
  }
}

// Nothing is left of the bound but the fp32 sum and the rounding of the result.
void expect_close(const Weight& weight, const Values& y, const std::vector<double>& truth,
                  const std::vector<double>& magnitude) {
  const auto k = static_cast<double>(weight.row_elements());
  for (std::size_t i = 0; i < truth.size(); ++i)
    ASSERT_LE(
        std::abs(y[static_cast<std::int64_t>(i)] - truth[i]),
        0x1p-8 * std::abs(truth[i]) + (k + 8) * 0x1p-24 * magnitude[i] + 0x1p-126 * (4 * k + 1))
        << to_string(weight.storage()) << " " << i;
}

TEST(LinearPairs, Float8IsReadWhereGroupsAreHalvesOrBlocks) {
  for (const NamedKernels& level : runnable_kernels()) {
    const bool has = level.kernels->linear.bf16.e4m3 != nullptr;
    EXPECT_EQ(has, level.kernels->isa >= Isa::avx512bf16) << level.name;
    const auto reads = [&](const char* storage, std::int64_t columns) {
      const Weight weight = make_weight(storage, {6, columns}, Data::normal);
      return LinearWeight(*level.kernels, weight, "linear").has_dot_float8(4);
    };
    for (const char* storage : {"f8_e4m3", "f8_e5m2:tensor", "f8_e4m3:row:bf16", "f8_e4m3:block64",
                                "f8_e4m3:block128x128", "f8_e5m2:block192", "f8_e4m3:block32",
                                "f8_e5m2:block16:bf16", "f8_e4m3:block8x32"})
      EXPECT_EQ(reads(storage, 384), has) << storage;
    for (const char* storage : {"int8:row", "f8_e4m3:block48", "f8_e4m3:block96", "nf4"})
      EXPECT_FALSE(reads(storage, 384)) << storage;
    EXPECT_FALSE(reads("f8_e4m3:row", 100));
  }
}

TEST(LinearPairs, CodesOfAByteAreReadWhereRowsBeginWithGroups) {
  for (const NamedKernels& level : runnable_kernels()) {
    const bool has = level.kernels->linear.bf16.pairs != nullptr;
    EXPECT_EQ(has, level.kernels->linear.bf16.eights_int8 != nullptr) << level.name;
    const auto reads = [&](const char* storage, std::int64_t columns) {
      const Weight weight = make_weight(storage, {6, columns}, Data::normal);
      return LinearWeight(*level.kernels, weight, "linear").has_dot_eights();
    };
    for (const char* storage : {"f8_e4m3", "f8_e5m2:tensor", "f8_e4m3:row:bf16", "int8:row",
                                "int8:tensor", "f8_e4m3:block128x128", "int8:block192"})
      EXPECT_EQ(reads(storage, 384), has) << storage;
    for (const char* storage : {"int8:block32", "f8_e4m3:block16", "f8_e4m3:block48", "mxint8",
                                "f8_e4m3:block256", "int8:block64:zero", "nf4"})
      EXPECT_FALSE(reads(storage, 384)) << storage;
    EXPECT_FALSE(reads("int8:row", 100));
  }
}

TEST(LinearPairs, ValuesAreThoseOfDequantize) {
  if (!cpu_features().runs_avx512bf16()) GTEST_SKIP() << "no AVX512-BF16";
  const std::int64_t n = 9, k = 512;
  for (const char* storage :
       {"f8_e4m3:block16:bf16", "int4:block32:bf16", "mxfp4", "int4:block64",
        "int4:block128:f16:zero", "q4_k", "int8:block32:zero", "q6_k", "int3:block64"})
    for (const std::int64_t m : {9, 14}) {
      const Weight weight = make_weight(storage, {n, k}, Data::normal);
      const Values x = make_values(Dtype::bf16, m * k, Data::normal, 1);
      const Exact truth = exact(x, m, weight, nullptr);
      const Values y = run_linear(*samples::variant("avx512bf16+pairs"), x, m, weight, nullptr,
                                  inline_executor());
      expect_close(weight, y, truth.y, truth.magnitude);
    }
}

// Results are as close to products with values that were not rounded to bf16.
void expect_scaled_sums(const char* storage, std::int64_t m, std::int64_t n, std::int64_t k) {
  const Weight weight = make_weight(storage, {n, k}, Data::normal);
  const Values x = make_values(Dtype::bf16, m * k, Data::normal, 1);
  Values w{Dtype::f32, std::vector<std::byte>(bytes_of(Dtype::f32, n * k))};
  reference::dequantize(weight, w.bytes.data(), Dtype::f32);
  std::vector<double> truth, magnitude;
  for (std::int64_t j = 0; j < m; ++j)
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = 0, size = 0;
      for (std::int64_t c = 0; c < k; ++c) {
        sum += x[j * k + c] * w[i * k + c];
        size += std::abs(x[j * k + c] * w[i * k + c]);
      }
      truth.push_back(sum), magnitude.push_back(size);
    }
  const Values y =
      run_linear(*samples::variant("avx512bf16+pairs"), x, m, weight, nullptr, inline_executor());
  expect_close(weight, y, truth, magnitude);
}
TEST(LinearPairs, OneScaleOfARowMultipliesItsSum) {
  if (!cpu_features().runs_avx512bf16()) GTEST_SKIP() << "no AVX512-BF16";
  for (const char* storage :
       {"f8_e4m3:row", "f8_e5m2:row", "int8:row", "f8_e4m3:tensor", "int4:row", "f4_e2m1:row"})
    expect_scaled_sums(storage, 6, 7, 300);
}
TEST(LinearPairs, ScalesMultiplySumsOfFewRowsByCodesOfFourBits) {
  if (!cpu_features().runs_avx512bf16()) GTEST_SKIP() << "no AVX512-BF16";
  for (const char* storage :
       {"int4:block64", "int4:block128", "int4:block16", "mxfp4", "nvfp4", "f4_e2m1:row"})
    for (const std::int64_t m : {2, 3}) expect_scaled_sums(storage, m, 7, 384);
  for (const char* storage : {"int4:block64", "f4_e2m1:block128", "int4:row", "nvfp4"})
    for (const std::int64_t m : {5, 6}) expect_scaled_sums(storage, m, 9, 640);
  for (const char* storage : {"int4:block32:bf16", "mxfp4", "nvfp4"})
    for (const std::int64_t m : {4, 7, 8}) expect_scaled_sums(storage, m, 6, 576);
}

STOWAGE_ON_EACH_ISA(LinearPairsOn, IsTheSameOnAnyNumberOfThreads) {
  const std::int64_t n = 515, k = 1280;
  for (const char* storage :
       {"f8_e4m3:row", "int4:block32:bf16", "q4_k", "int8:block32", "int8:row", "nvfp4"}) {
    const Weight weight = make_weight(storage, {n, k}, Data::normal);
    for (const std::int64_t m : {1, 2, 3, 4, 7, 16, 33, 70}) {
      const Values x = make_values(Dtype::bf16, m * k, Data::normal, 5);
      expect_same_on_threads(table, x, m, weight);
    }
  }
}

// What is no number, infinite or -128 among codes and scales does to its rows what it does to the
// values of dequantize, and nothing to others.
STOWAGE_ON_EACH_ISA(LinearPairsOn, OddCodesAndScalesReachTheirRows) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  struct Odd {
    const char* storage;
    std::uint8_t code;
  };
  const std::int64_t n = 9, k = 1216;
  for (const auto& [storage, code] : {Odd{"f8_e4m3:row", 0xFF},
                                      {"f8_e4m3:row", 0x7F},
                                      {"f8_e5m2:row", 0xFC},
                                      {"f8_e5m2:row", 0x7D},
                                      {"int8:row", 0x80}}) {
    for (const std::int64_t m : {1, 2, 4, 5}) {
      const Values x = make_values(Dtype::bf16, m * k, Data::normal, 3);
      const Weight whole = make_weight(storage, {n, k}, Data::normal);
      for (const float scale : {1.0f, 0.0f, 0x1p-140f, -2.0f, kInfinite, kNan}) {
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(n * k));
        std::vector<float> scales(static_cast<std::size_t>(n));
        std::memcpy(codes.data(), whole.part(0), codes.size());
        std::memcpy(scales.data(), whole.part(1), scales.size() * sizeof(float));
        codes[static_cast<std::size_t>(2 * k + 71)] = code;
        scales[4] = scale;
        const void* parts[] = {codes.data(), scales.data()};
        const Weight odd(whole.storage(), whole.shape(), parts);
        const Exact truth = exact(x, m, odd, nullptr);
        const Values y = run_linear(table, x, m, odd, nullptr, inline_executor());
        for (std::size_t i = 0; i < truth.y.size(); ++i) {
          const double got = y[static_cast<std::int64_t>(i)], wanted = truth.y[i];
          const std::string where =
              std::string(storage) + " " + std::to_string(scale) + " " + std::to_string(i);
          ASSERT_EQ(std::isnan(got), std::isnan(wanted)) << where;
          if (!std::isfinite(wanted)) {
            ASSERT_TRUE(std::isnan(wanted) || got == wanted) << where;
            continue;
          }
          ASSERT_LE(std::abs(got - wanted),
                    0x1p-8 * std::abs(wanted) + 0x1p-7 * truth.magnitude[i] + 0x1p-126 * 4000)
              << where;
        }
      }
    }
  }
}

}  // namespace
}  // namespace stowage::linear_test
