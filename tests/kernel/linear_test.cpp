// SPDX-License-Identifier: Apache-2.0
#include "kernel/linear.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "base/threads.h"
#include "expect_error.h"
#include "kernel/fixed_point.h"

namespace stowage::linear_test {
namespace {

void check(const Kernels& table, const std::string& storage, Dtype dtype, std::int64_t m,
           std::int64_t n, std::int64_t k, Data data) {
  const std::string what = storage + " " + std::string(disk_name(dtype)) + " m " +
                           std::to_string(m) + " n " + std::to_string(n) + " k " +
                           std::to_string(k);
  if (!samples::holds(parse_storage(storage), {n, k})) return;
  const auto seed = static_cast<std::uint32_t>(m * 131 + n * 17 + k);
  const Weight weight = make_weight(storage, {n, k}, data, seed);
  const Values bias = make_values(dtype, n, Data::normal, seed + 1);
  const Values x = make_values(dtype, m * k, data, seed + 2);
  const Values g = make_values(dtype, m * n, data, seed + 3);
  const Values* with_bias = m % 2 == 0 ? &bias : nullptr;
  Executor& inline_ = inline_executor();
  expect_within_bound(run_linear(table, x, m, weight, with_bias, inline_),
                      exact(x, m, weight, with_bias), k, "linear " + what,
                      lost_in_integers(table, x, m, weight));
  expect_within_bound(run_gradient(table, g, m, weight, inline_),
                      exact(g, m, weight, nullptr, true), n, "gradient " + what);
}

STOWAGE_ON_EACH_ISA(LinearOn, EveryLengthUpToThreeVectorsAndOne) {
  for (const std::string& storage : storages())
    for (const Dtype dtype : kDtypes)
      for (std::int64_t k = 0; k <= 49; ++k)
        check(table, storage, dtype, 1 + k % 3, 3, k, Data::normal);
}

STOWAGE_ON_EACH_ISA(LinearOn, EveryPath) {
  struct Sizes {
    std::int64_t m, n, k;
  };
  // Tiny, dot products, few rows, tiles; rows that begin inside a group or a byte; more columns
  // than are widened at a time; more rows than a tile has.
  const Sizes sizes[] = {{1, 70, 256},  {1, 5, 2100},  {1, 67, 1000}, {3, 66, 192}, {16, 9, 1031},
                         {17, 21, 300}, {40, 130, 96}, {64, 16, 16},  {5, 15, 15},  {300, 17, 33}};
  for (const std::string& storage : storages())
    for (std::size_t i = 0; i < std::size(sizes); ++i)
      check(table, storage, kDtypes[i % 3], sizes[i].m, sizes[i].n, sizes[i].k, Data::heavy);
}

STOWAGE_ON_EACH_ISA(LinearOn, HeavyTailsAndCancellation) {
  for (const std::string& storage : storages())
    for (const Dtype dtype : kDtypes)
      for (const Data data : {Data::heavy, Data::adversarial})
        for (const std::int64_t m : {1, 4, 20}) check(table, storage, dtype, m, 33, 512, data);
}

STOWAGE_ON_EACH_ISA(LinearOn, IsTheSameOnAnyNumberOfThreads) {
  for (const char* storage :
       {"f8_e4m3:row", "int8:block32", "nf4:block64:nested", "bf16", "f4_e2m1:block32:e8m0"}) {
    const Weight weight = make_weight(storage, {515, 1100}, Data::normal);
    for (const std::int64_t m : {1, 3, 16, 33}) {
      const Values x = make_values(m == 3 ? Dtype::bf16 : Dtype::f32, m * 1100, Data::normal, 5);
      const Values g = make_values(Dtype::bf16, m * 515, Data::normal, 6);
      const Values y = run_linear(table, x, m, weight, nullptr, inline_executor());
      const Values gx = run_gradient(table, g, m, weight, inline_executor());
      for (const int threads : {2, 3, 7}) {
        const auto pool = make_pool(threads);
        EXPECT_EQ(run_linear(table, x, m, weight, nullptr, *pool).bytes, y.bytes)
            << storage << " " << m << " " << threads;
        EXPECT_EQ(run_gradient(table, g, m, weight, *pool).bytes, gx.bytes)
            << storage << " " << m << " " << threads;
      }
    }
  }
}

// Four rows of weight far apart, whose scales are expanded some at a time, the last of them fewer;
// of a few rows, which many threads take, they are not.
STOWAGE_ON_EACH_ISA(LinearOn, OneRowTakesRowsOfWeightInStreams) {
  const std::int64_t n = 300, k = 1536;
  for (const char* storage :
       {"nf4", "nf4:block64:nested", "int4:block64", "int4:block128:f16:zero", "mxfp4", "nvfp4",
        "q4_k", "q6_k", "int3:block128:bf16", "int4:block32:bf16:zero_sum",
        "uint4:block64:bf16:zero_rounded", "int8:block32:f16", "f8_e4m3:block32:e8m0",
        "f8_e5m2:block16:bf16", "f8_e4m3:block128x128"})
    for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
      const Weight weight = make_weight(storage, {n, k}, Data::heavy);
      const Values x = make_values(dtype, k, Data::normal, 11);
      const Values y = run_linear(table, x, 1, weight, nullptr, inline_executor());
      expect_within_bound(y, exact(x, 1, weight, nullptr), k, storage,
                          lost_in_integers(table, x, 1, weight));
      EXPECT_EQ(run_linear(table, x, 1, weight, nullptr, *make_pool(5)).bytes, y.bytes) << storage;
    }
}

// A dense product of the dequantized weight: fp32 sums of blocks, rounded once at the end.
std::vector<double> dense(const Values& x, std::int64_t m, const Weight& weight) {
  const std::int64_t n = weight.shape()[0], k = weight.shape()[1];
  Values w{x.dtype, std::vector<std::byte>(bytes_of(x.dtype, n * k))};
  reference::dequantize(weight, w.bytes.data(), x.dtype);
  std::vector<double> y;
  for (std::int64_t i = 0; i < m; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (std::int64_t d = 0; d < k; d += 256) {
        float partial = 0;
        for (std::int64_t e = d; e < std::min(k, d + 256); ++e)
          partial += static_cast<float>(x[i * k + e]) * static_cast<float>(w[j * k + e]);
        sum += partial;
      }
      y.push_back(x.dtype == Dtype::f32    ? sum
                  : x.dtype == Dtype::bf16 ? bf16_to_f32(f32_to_bf16(sum))
                                           : f16_to_f32(f32_to_f16(sum)));
    }
  return y;
}

STOWAGE_ON_EACH_ISA(LinearOn, ErrsAtMostTwiceAsMuchAsADenseProduct) {
  for (const char* storage : {"f8_e4m3", "f8_e4m3:row", "int8:row", "nf4", "nf4:block64:nested"})
    for (const Dtype dtype : kDtypes)
      for (const std::int64_t m : {1, 2, 20}) {
        const Weight weight = make_weight(storage, {64, 1536}, Data::normal);
        const Values x = make_values(dtype, m * 1536, Data::normal, 9);
        const Exact truth = exact(x, m, weight, nullptr);
        const Values y = run_linear(table, x, m, weight, nullptr, inline_executor());
        const std::vector<double>& other =
            samples::kept(key_of(x, m, weight, nullptr), [&] { return dense(x, m, weight); });
        double ours = 0, theirs = 0, our_most = 0, their_most = 0;
        for (std::size_t i = 0; i < other.size(); ++i) {
          const double our = std::abs(y[static_cast<std::int64_t>(i)] - truth.y[i]);
          const double their = std::abs(other[i] - truth.y[i]);
          ours += our * our, theirs += their * their;
          our_most = std::max(our_most, our), their_most = std::max(their_most, their);
        }
        EXPECT_LE(std::sqrt(ours), 2 * std::sqrt(theirs)) << storage << " " << disk_name(dtype);
        EXPECT_LE(our_most, 2 * their_most) << storage << " " << disk_name(dtype) << " " << m;
      }
}

// Sums that a scale multiplies afterwards reach beyond fp32 where their values do not.
STOWAGE_ON_EACH_ISA(LinearOn, SumsThatOverflowBeforeTheirScaleDoNotAfter) {
  const std::int64_t n = 9, k = 256;
  for (const char* storage : {"f8_e5m2:row", "f8_e5m2:block128x128", "f8_e5m2:block32", "int8:row"})
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16})
      for (const std::int64_t m : {1, 2, 4, 6, 20, 50}) {
        Weight weight = make_weight(storage, {n, k}, Data::normal, 2);
        std::vector<float> scales(
            static_cast<std::size_t>(layout(weight.storage(), weight.shape()).parts[1].bytes) / 4,
            0x1p-20f);
        const void* parts[] = {weight.part(0), scales.data()};
        const Weight small(weight.storage(), weight.shape(), parts);
        Values x = make_values(dtype, m * k, Data::normal, 3);
        for (std::int64_t i = 0; i < m * k; ++i) {
          const auto large = static_cast<float>(std::ldexp(x[i], 118));
          const std::uint16_t half = f32_to_bf16(large);
          const auto width = bytes_of(dtype, 1);
          std::memcpy(&x.bytes[static_cast<std::size_t>(i) * width],
                      dtype == Dtype::f32 ? static_cast<const void*>(&large) : &half, width);
        }
        expect_within_bound(run_linear(table, x, m, small, nullptr, inline_executor()),
                            made_exact(x, m, small, nullptr, false), k, storage);
      }
}

STOWAGE_ON_EACH_ISA(LinearOn, ComputesInFp32WhatBf16CannotHold) {
  // 1 + 2^-12 is no bf16 number: a path through bf16 would lose the whole result.
  const std::vector<float> ones(64, 1.0f), x = [] {
    std::vector<float> values(64 * 32, -1.0f);
    for (std::size_t i = 0; i < values.size(); i += 2) values[i] = 1.0f + 0x1p-12f;
    return values;
  }();
  const void* parts[] = {ones.data()};
  const Weight weight(parse_storage("f32"), {1, 64}, parts);
  for (const std::int64_t m : {1, 3, 32}) {
    std::vector<float> y(static_cast<std::size_t>(m));
    linear_with(table, x.data(), m, Dtype::f32, weight, nullptr, y.data(), inline_executor());
    for (const float value : y) EXPECT_EQ(value, 32 * 0x1p-12f);
  }
}

STOWAGE_ON_EACH_ISA(LinearOn, CarriesNanAndInfinityThroughEveryPath) {
  for (const char* storage : {"f8_e4m3", "f8_e5m2", "bf16"}) {
    const Weight weight = make_weight(storage, {20, 200}, Data::normal);
    std::vector<std::uint8_t> codes(20 * 200 * 2, 0);
    std::memcpy(codes.data(), weight.part(0), static_cast<std::size_t>(weight.bytes()));
    const std::size_t width = static_cast<std::size_t>(weight.bytes()) / 4000;
    // The last byte of an element holds sign and exponent.
    for (const std::size_t element : {3 * 200 + 7, 5 * 200 + 199})
      for (std::size_t b = 0; b < width; ++b) codes[element * width + b] = 0x7F;
    if (width == 2) codes[(3 * 200 + 7) * 2] = codes[(5 * 200 + 199) * 2] = 0xC0;
    const void* parts[] = {codes.data()};
    const Weight broken(weight.storage(), weight.shape(), parts);
    for (const std::int64_t m : {1, 2, 20}) {
      const Values x = make_values(Dtype::f32, m * 200, Data::normal, 3);
      const Values y = run_linear(table, x, m, broken, nullptr, inline_executor());
      for (std::int64_t i = 0; i < m * 20; ++i)
        EXPECT_EQ(std::isnan(y[i]), i % 20 == 3 || i % 20 == 5) << storage << " " << m << " " << i;
    }
  }
}

STOWAGE_ON_EACH_ISA(LinearOn, EmptySizes) {
  const float bias[3] = {1, 2, 3};
  const float x[4] = {1, 1, 1, 1};
  std::vector<float> y(300, 7.0f);
  for (const char* storage : {"f8_e4m3", "int8:row", "nf4", "nf4:block64:nested"}) {
    const Weight no_columns = make_weight(storage, {3, 0}, Data::normal);
    for (const std::int64_t m : {1, 2, 100}) {
      std::fill(y.begin(), y.end(), 7.0f);
      linear_with(table, x, m, Dtype::f32, no_columns, bias, y.data(), inline_executor());
      for (std::int64_t i = 0; i < 3 * m; ++i)
        EXPECT_EQ(y[static_cast<std::size_t>(i)], bias[i % 3]) << storage << " " << m;
    }
    const Weight no_rows = make_weight(storage, {0, 3}, Data::normal);
    std::fill(y.begin(), y.end(), 7.0f);
    linear_grad_input_with(table, x, 1, Dtype::f32, no_rows, y.data(), inline_executor());
    EXPECT_EQ(y[0], 0.0f);
    EXPECT_EQ(y[3], 7.0f);
    linear_with(table, nullptr, 5, Dtype::f32, no_rows, nullptr, nullptr, inline_executor());
    linear_with(table, nullptr, 0, Dtype::f32, no_columns, nullptr, nullptr, inline_executor());
    linear_grad_input_with(table, nullptr, 5, Dtype::f32, no_columns, nullptr, inline_executor());
  }
}

TEST(Linear, RefusesWhatItCannotMultiply) {
  const float x[64] = {};
  float y[64];
  const Weight matrix = make_weight("f8_e4m3", {4, 4}, Data::normal);
  const Weight cube = make_weight("f8_e4m3", {2, 2, 2}, Data::normal);
  EXPECT_STOWAGE_ERROR(linear(x, 1, Dtype::f64, matrix, nullptr, y), invalid_argument,
                       "linear: dtype must be f32, bf16 or f16, got F64");
  EXPECT_STOWAGE_ERROR(linear(x, -1, Dtype::f32, matrix, nullptr, y), invalid_argument,
                       "must not be negative, got -1");
  EXPECT_STOWAGE_ERROR(linear(nullptr, 1, Dtype::f32, matrix, nullptr, y), invalid_argument,
                       "must not be null");
  EXPECT_STOWAGE_ERROR(linear(x, 1, Dtype::f32, cube, nullptr, y), invalid_argument,
                       "linear: weight must have 2 dimensions, got shape [2, 2, 2]");
  EXPECT_STOWAGE_ERROR(linear_grad_input(x, 1, Dtype::f32, cube, y), invalid_argument,
                       "linear_grad_input: weight must have 2 dimensions");
  EXPECT_STOWAGE_ERROR(linear_fixed(x, 1, cube, nullptr, y), invalid_argument,
                       "linear_fixed: weight must have 2 dimensions");
}

// The stated order, written down once more, one operation at a time.
float by_hand(const float* x, const Weight& weight, std::int64_t row, const float* bias) {
  std::array<volatile float, 16> sums{};
  const std::int64_t columns = weight.shape()[1];
  for (std::int64_t k = 0; k < columns; ++k) {
    const volatile float product = x[k] * reference::value_at(weight, row * columns + k);
    volatile float& sum = sums[static_cast<std::size_t>(k % 16)];
    sum = sum + product;
  }
  for (std::size_t s = 8; s > 0; s /= 2)
    for (std::size_t j = 0; j < s; ++j) sums[j] = sums[j] + sums[j + s];
  return bias == nullptr ? sums[0] : sums[0] + bias[row];
}

STOWAGE_ON_EACH_ISA(LinearFixedOn, IsTheStatedOrderOnAnyNumberOfThreads) {
  struct Sizes {
    std::int64_t m, n, k;
  };
  const Sizes sizes[] = {{1, 1, 1},   {3, 5, 0},    {2, 7, 15},    {1, 4, 16},
                         {17, 3, 33}, {2, 3, 5000}, {40, 70, 100}, {5, 4, 96}};
  const auto pool = make_pool(3);
  std::vector<std::string> every = storages();
  for (const char* type : {"f32", "bf16", "f16", "f64"})
    every.push_back(std::string("nf4:torchao:block16:scaler2:") + type);
  for (const std::string& storage : every)
    for (const auto& [m, n, k] : sizes)
      for (const Data data : {Data::normal, Data::adversarial}) {
        if (!samples::holds(parse_storage(storage), {n, k})) continue;
        const Weight weight = make_weight(storage, {n, k}, data);
        const Values x = make_values(Dtype::f32, m * k, data, 2);
        const Values bias = make_values(Dtype::f32, n, data, 3);
        const auto* xs = static_cast<const float*>(x.data());
        const auto* biases = m == 1 ? nullptr : static_cast<const float*>(bias.data());
        const std::vector<float>& expected =
            samples::kept(key_of(x, m, weight, m == 1 ? nullptr : &bias), [&] {
              std::vector<float> sums;
              for (std::int64_t i = 0; i < m; ++i)
                for (std::int64_t row = 0; row < n; ++row)
                  sums.push_back(by_hand(xs + i * k, weight, row, biases));
              return sums;
            });
        for (Executor* executor : {&inline_executor(), pool.get()}) {
          std::vector<float> y(expected.size(), -1.0f);
          linear_fixed_with(table, xs, m, weight, biases, y.data(), *executor);
          ASSERT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0)
              << storage << " k " << k;
        }
      }
}

}  // namespace
}  // namespace stowage::linear_test
