// SPDX-License-Identifier: Apache-2.0
// What each legal scale shape means; scale_refusals.cpp has those that mean nothing.
#include "store/scale_shape.h"

#include <gtest/gtest.h>

#include "stowage/writer.h"

namespace stowage {
namespace {

std::string meaning(const Shape& weight, const Shape& scale) {
  const TensorInfo w{.name = "w", .dtype = Dtype::i8, .dtype_name = "I8", .shape = weight};
  const TensorInfo s{.name = "w_scale", .dtype = Dtype::f32, .dtype_name = "F32", .shape = scale};
  return to_string(storage_from_scale(Codes::int8, w, s, {"f", "w_scale", 0}));
}

TEST(ScaleShape, SaysTheScaling) {
  EXPECT_EQ(meaning({4, 8}, {}), "int8:tensor");
  EXPECT_EQ(meaning({4, 8}, {1}), "int8:tensor");
  EXPECT_EQ(meaning({4, 8}, {4, 1}), "int8:row");
  EXPECT_EQ(meaning({4, 8}, {4}), "int8:row");
  EXPECT_EQ(meaning({4}, {4}), "int8:row");
  EXPECT_EQ(meaning({4, 3, 2, 2}, {4, 1, 1, 1}), "int8:row");
  EXPECT_EQ(meaning({4, 3, 8}, {4, 3, 1}), "int8:row2");
}

TEST(ScaleShape, SaysTheBlockWhereOnlyOneIsUsual) {
  EXPECT_EQ(meaning({4, 128}, {4, 2}), "int8:block64");
  EXPECT_EQ(meaning({4, 130}, {4, 3}), "int8:block64");
  EXPECT_EQ(meaning({4, 48}, {4, 4}), "int8:block12");
  EXPECT_EQ(meaning({4, 2, 64}, {4, 4}), "int8:block32") << "rows are those of dim 0";
  EXPECT_EQ(meaning({4, 29}, {4, 10}), "int8:block3") << "no other size gives 10";
  EXPECT_EQ(meaning({4, 2, 12}, {4, 1}), "int8:row") << "whatever the block's size";
}

// For every shape: what the layout of a storage gives is read as a storage with the same values.
TEST(ScaleShape, AgreesWithTheLayoutOfEveryScaling) {
  for (const Shape& shape :
       {Shape{1, 1}, Shape{1, 8}, Shape{6, 1}, Shape{6, 64}, Shape{2, 3, 64}}) {
    for (const char* name : {"int8:tensor", "int8:row", "int8:row2", "int8:block32"}) {
      const Storage storage = parse_storage(name);
      const Shape scale = layout(storage, shape).parts[1].shape;
      const Storage read = parse_storage(meaning(shape, scale));
      EXPECT_EQ(layout(read, shape).parts[1].shape.elements(), scale.elements())
          << name << " " << to_string(shape) << " read as " << to_string(read);
    }
  }
}

}  // namespace
}  // namespace stowage
