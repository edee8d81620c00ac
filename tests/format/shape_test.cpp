// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "expect_error.h"
#include "stowage/storage.h"

namespace stowage {
namespace {

TEST(Shape, CountsElementsAndRows) {
  const Shape shape{3, 4, 5};
  EXPECT_EQ(shape.rank(), 3);
  EXPECT_EQ(shape.elements(), 60);
  EXPECT_EQ(shape.rows(), 3);
  EXPECT_EQ(shape.row_elements(), 20);
  EXPECT_EQ(shape[2], 5);
  EXPECT_EQ(to_string(shape), "[3, 4, 5]");
}

TEST(Shape, AScalarIsOneRowOfOneElement) {
  const Shape shape;
  EXPECT_EQ(shape.elements(), 1);
  EXPECT_EQ(shape.rows(), 1);
  EXPECT_EQ(shape.row_elements(), 1);
  EXPECT_EQ(to_string(shape), "[]");
}

TEST(Shape, AnEmptyDimensionEmptiesTheWeight) {
  const Shape shape{0, 4, 5};
  EXPECT_EQ(shape.elements(), 0);
  EXPECT_EQ(shape.row_elements(), 20);
  EXPECT_EQ((Shape{4, 0}).rows(), 4);
}

TEST(Shape, ComparesByRankAndSizes) {
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_NE((Shape{2, 3}), (Shape{3, 2}));
  EXPECT_NE((Shape{6}), (Shape{6, 1}));
}

TEST(Shape, RefusesWhatCannotBeCounted) {
  EXPECT_STOWAGE_ERROR(Shape({2, -1}), invalid_argument,
                       "shape: sizes must not be negative, got [2, -1]");
  EXPECT_STOWAGE_ERROR(Shape(std::vector<std::int64_t>(9, 1)), invalid_argument,
                       "at most 8 dimensions");
  constexpr std::int64_t kHuge = std::int64_t{1} << 40;
  EXPECT_STOWAGE_ERROR(Shape({kHuge, kHuge}), invalid_argument, "must fit 64 bits");
  EXPECT_STOWAGE_ERROR(Shape({0, kHuge, kHuge}), invalid_argument, "must fit 64 bits");
}

}  // namespace
}  // namespace stowage
