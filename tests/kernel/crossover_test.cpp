// SPDX-License-Identifier: Apache-2.0
// Which way a product takes is what the crossover in force says; what it says is measured, and has
// bounds.
#include "kernel/crossover.h"

#include "base/threads.h"
#include "expect_error.h"
#include "kernel/linear_cases.h"

namespace stowage::linear_test {
namespace {

/// What is in force again at the end.
class CrossoverTest : public testing::Test {
 protected:
  ~CrossoverTest() override { use_crossover(before_); }
  const Crossover before_ = crossover();
};

Values product(const char* storage, std::int64_t m) {
  const Weight weight = make_weight(storage, {96, 1024}, Data::heavy);
  const Values& x = make_values(Dtype::f32, m * 1024, Data::normal, 3);
  Values y{Dtype::f32, std::vector<std::byte>(bytes_of(Dtype::f32, m * 96))};
  linear(x.data(), m, Dtype::f32, weight, nullptr, y.bytes.data(), &inline_executor());
  return y;
}

TEST_F(CrossoverTest, DecidesWhichWayIsTaken) {
  Crossover some = before_;
  some.rows = 8;
  use_crossover(some);
  EXPECT_EQ(crossover(), some);
  const Values few = product("f8_e4m3:row", 8), many = product("f8_e4m3:row", 9);
  some.rows = 9;
  use_crossover(some);
  EXPECT_EQ(product("f8_e4m3:row", 8).bytes, few.bytes);
  EXPECT_NE(product("f8_e4m3:row", 9).bytes, many.bytes) << "sums in another order";
  some.rows = 8;
  use_crossover(some);
  EXPECT_EQ(product("f8_e4m3:row", 9).bytes, many.bytes);
}

TEST_F(CrossoverTest, HasBounds) {
  Crossover some = before_;
  some.rows = kMostRows + 1;
  EXPECT_STOWAGE_ERROR(use_crossover(some), invalid_argument,
                       "crossover: rows must be from 0 to 64, got 65");
  some.rows = before_.rows;
  some.words = -1;
  EXPECT_STOWAGE_ERROR(use_crossover(some), invalid_argument,
                       "crossover: words must be from 0 to 16, got -1");
  EXPECT_EQ(crossover(), before_);
}

TEST_F(CrossoverTest, IsMeasuredAndChangesNothing) {
  const Crossover made = measure_crossover();
  EXPECT_EQ(crossover(), before_);
  for (const CrossoverField& field : kCrossoverFields) {
    EXPECT_GE(made.*field.value, 0) << field.name;
    EXPECT_LE(made.*field.value, field.most) << field.name;
  }
  EXPECT_GE(made.rows, 1);
  EXPECT_EQ(made.own, before_.own) << "only the torch ops can measure that";
  use_crossover(made);  // and all of it may be put in force
}

// Where codes are asked for to: neither at the ends of streams, nor of arrays, nor anywhere else
// does it change a byte.
TEST_F(CrossoverTest, WhatIsFetchedWhereChangesNoByte) {
  for (const char* storage : {"f8_e4m3:row", "f8_e4m3:block128x128", "int8:row", "int8:block32:f16",
                              "nf4", "int4:block64:bf16", "mxfp4", "q6_k", "int3:block128:bf16"})
    for (const std::int64_t k : {std::int64_t{256}, std::int64_t{2560}, std::int64_t{4608}})
      for (const std::int64_t m : {1, 6, 70}) {
        const Weight weight = make_weight(storage, {75, k}, Data::normal);
        const Values& x = make_values(Dtype::bf16, m * k, Data::normal, 3);
        Values y[2];
        for (int near = 0; near < 2; ++near) {
          Crossover some = before_;
          some.near = near;
          use_crossover(some);
          y[near] = {Dtype::bf16, std::vector<std::byte>(bytes_of(Dtype::bf16, m * 75))};
          linear(x.data(), m, Dtype::bf16, weight, nullptr, y[near].bytes.data(),
                 &inline_executor());
        }
        EXPECT_EQ(y[0].bytes, y[1].bytes) << storage << " " << k << " " << m;
      }
}

TEST_F(CrossoverTest, MayChangeWhileProductsRun) {
  const Values wanted[] = {product("nf4", 3), product("nf4", 40)};
  const auto pool = make_pool(3);
  pool->for_each(3, [&](std::int64_t i) {
    for (int run = 0; run < 40; ++run)
      if (i == 0)
        use_crossover(run % 2 == 0 ? before_ : built_in_crossover());
      else
        EXPECT_EQ(product("nf4", i == 1 ? 3 : 40).bytes, wanted[i - 1].bytes);
  });
}

}  // namespace
}  // namespace stowage::linear_test
