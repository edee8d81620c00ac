// SPDX-License-Identifier: Apache-2.0
// The tables of the 4-bit formats, and the order of value types.
#include "kernel/tables.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "format/reference.h"
#include "kernel/dequantize.h"

namespace stowage::tables_test {
namespace {

TEST(FourBitTables, AreThoseOfTheReference) {
  for (const Codes codes : {Codes::nf4, Codes::fp4}) {
    const FourBitTables& tables = four_bit_tables(codes);
    EXPECT_TRUE(std::ranges::equal(trait(codes).values, tables.values));
    EXPECT_TRUE(
        std::ranges::equal(reference::thresholds4(codes), std::span(tables.thresholds).first(15)));
    for (int rank = 0; rank < 15; ++rank) {
      EXPECT_EQ(reference::encode4(codes, tables.thresholds[rank]), tables.codes[rank]);
      EXPECT_LE(tables.values[tables.codes[rank]], tables.values[tables.codes[rank + 1]]);
    }
  }
}

TEST(ValueIndex, OrdersTheValueTypes) {
  EXPECT_EQ(value_index(Dtype::f64), 0);
  EXPECT_EQ(value_index(Dtype::f32), 1);
  EXPECT_EQ(value_index(Dtype::bf16), 2);
  EXPECT_EQ(value_index(Dtype::f16), 3);
  EXPECT_EQ(value_index(Dtype::i8), -1);
}

}  // namespace
}  // namespace stowage::tables_test
