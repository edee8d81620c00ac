// SPDX-License-Identifier: Apache-2.0
// Rows of bf16 as matrices, on every instruction set; what holds only where tiles multiply them
// says so.
#include <gtest/gtest.h>

#include <thread>

#include "base/cpu.h"
#include "kernel/linear_cases.h"
#include "kernel/linear_weight.h"

namespace stowage::linear_test {
namespace {

struct MatrixSizes {
  std::int64_t m, n, k;
};
std::string text_of(const std::string& storage, const MatrixSizes& of) {
  return storage + " m " + std::to_string(of.m) + " n " + std::to_string(of.n) + " k " +
         std::to_string(of.k);
}
/// The same table, whose matrices take as many rows as they can.
Kernels by_matrices(const Kernels& table) {
  Kernels other = table;
  if (table.linear.matrices.multiply != nullptr) other.linear.matrices.most_by_vectors = 4;
  return other;
}
void check_linear(const Kernels& table, const std::string& storage, const MatrixSizes& of) {
  const auto& [m, n, k] = of;
  const Weight weight = make_weight(storage, {n, k}, Data::normal, 3);
  const Values x = make_values(Dtype::bf16, m * k, Data::normal, 4);
  const Values bias = make_values(Dtype::bf16, n, Data::normal, 5);
  expect_within_bound(run_linear(by_matrices(table), x, m, weight, &bias, inline_executor()),
                      exact(x, m, weight, &bias), k, text_of(storage, of));
}
void check_gradient(const Kernels& table, const std::string& storage, const MatrixSizes& of) {
  const auto& [m, n, k] = of;
  const Weight weight = make_weight(storage, {n, k}, Data::normal, 3);
  const Values g = make_values(Dtype::bf16, m * n, Data::normal, 4);
  expect_within_bound(run_gradient(by_matrices(table), g, m, weight, inline_executor()),
                      exact(g, m, weight, nullptr, true), n, "gradient " + text_of(storage, of));
}

// Tiles of x of one, of two and an odd one; rows and columns that fill none.
STOWAGE_ON_EACH_ISA(LinearMatricesOn, EveryStorage) {
  for (const std::string& storage : storages())
    for (const MatrixSizes& of : {MatrixSizes{5, 68, 256}, {20, 20, 512}, {49, 36, 768}}) {
      check_linear(table, storage, of);
      check_gradient(table, storage, of);
    }
}
// Depths that end in a tile or begin a second stretch; parts of weight of which the last is short.
STOWAGE_ON_EACH_ISA(LinearMatricesOn, EveryShape) {
  for (const char* storage : {"f8_e4m3:row", "int8:tensor", "f8_e5m2:block128x128", "bf16"})
    for (const MatrixSizes& of : {MatrixSizes{5, 1, 1},
                                  {16, 300, 1},
                                  {33, 17, 31},
                                  {6, 70, 33},
                                  {7, 5, 4129},
                                  {61, 270, 97},
                                  {5, 1, 8200},
                                  {6, 4100, 5}}) {
      check_linear(table, storage, of);
      check_gradient(table, storage, of);
    }
}
// More x than is cached, and more rows of it than are shared.
TEST(LinearMatrices, ManyRows) {
  const Kernels& table = best_kernels();
  for (const MatrixSizes& of : {MatrixSizes{600, 40, 1300}, {540, 300, 40}, {1100, 33, 96}}) {
    check_linear(table, "f8_e4m3:row", of);
    check_linear(table, "int4:block32:bf16", of);
    check_gradient(table, "f8_e4m3:row", of);
  }
}

// An element is summed in one order: so are all rows of x, whatever their number.
STOWAGE_ON_EACH_ISA(LinearMatricesOn, ARowIsTheSameAmongAnyOthers) {
  if (table.linear.matrices.multiply == nullptr) return;
  const Kernels always = by_matrices(table);
  const std::int64_t n = 70, k = 1312, most = 700;
  for (const char* storage : {"int8:row", "mxfp4", "bf16"}) {
    const Weight weight = make_weight(storage, {n, k}, Data::normal);
    const Values x = make_values(Dtype::bf16, most * k, Data::normal, 5);
    const Values every = run_linear(always, x, most, weight, nullptr, inline_executor());
    for (const std::int64_t m : {5, 16, 17, 300}) {
      const Values some = run_linear(always, x, m, weight, nullptr, inline_executor());
      EXPECT_EQ(std::memcmp(some.data(), every.data(), some.bytes.size()), 0) << storage << m;
    }
  }
}

TEST(LinearMatrices, AreOfBf16AndWeightsOfUpTo8BitsOrOfIt) {
  for (const NamedKernels& level : runnable_kernels()) {
    const bool has = level.kernels->linear.matrices.multiply != nullptr;
    EXPECT_EQ(has,
              level.name == "amx" || level.name == "avx512bf16+pairs" || level.name == "neon+bf16")
        << level.name;
    const Kernels always = by_matrices(*level.kernels);
    const auto fits = [&](const char* storage, std::int64_t m, Dtype dtype) {
      const Weight weight = make_weight(storage, {6, 96}, Data::normal);
      const LinearWeight rows(always, weight, "linear");
      return fits_matrices(
          {&always.linear, &rows, nullptr, m, dtype, nullptr, nullptr, &inline_executor()});
    };
    for (const char* storage : {"f8_e4m3:row", "int8:row", "nf4", "int3:block32", "bf16"})
      EXPECT_EQ(fits(storage, 5, Dtype::bf16), has) << storage;
    EXPECT_FALSE(fits("f8_e4m3:row", 4, Dtype::bf16));
    EXPECT_FALSE(fits("f8_e4m3:row", 64, Dtype::f32));
    EXPECT_FALSE(fits("f8_e4m3:row", 64, Dtype::f16));
    EXPECT_FALSE(fits("f16", 64, Dtype::bf16));
    EXPECT_FALSE(fits("f32", 64, Dtype::bf16));
  }
}

// Another library may have tiles of its own on the thread.
TEST(LinearMatrices, AThreadHasWhatItHadBefore) {
  if (!cpu_features().runs_amx()) GTEST_SKIP() << "no AMX";
  const Kernels* table = &kernels_named("amx");
  const MatrixKernels& kernels = table->linear.matrices;
  MatrixState first, second, third;
  kernels.begin(&first);
  EXPECT_EQ(first.bytes[0], 0);  // no palette
  kernels.begin(&second);
  EXPECT_EQ(second.bytes[0], 1);
  kernels.end(&second);
  kernels.begin(&third);
  EXPECT_EQ(std::memcmp(second.bytes, third.bytes, sizeof second.bytes), 0);
  kernels.end(&first);
  kernels.begin(&third);
  EXPECT_EQ(third.bytes[0], 0);
  kernels.end(&third);
  const Weight weight = make_weight("f8_e4m3:row", {64, 256}, Data::normal);
  const Values x = make_values(Dtype::bf16, 32 * 256, Data::normal, 5);
  const Values y = run_linear(*table, x, 32, weight, nullptr, inline_executor());
  kernels.begin(&third);
  EXPECT_EQ(third.bytes[0], 0);
  kernels.end(&third);
  std::jthread([&] {  // which began after the system was asked
    EXPECT_EQ(run_linear(*table, x, 32, weight, nullptr, inline_executor()).bytes, y.bytes);
  });
}

}  // namespace
}  // namespace stowage::linear_test
