// SPDX-License-Identifier: Apache-2.0
#include "stowage/weight.h"

#include <memory>
#include <vector>

#include "expect_error.h"

namespace stowage {
namespace {

const Storage kInt8 = parse_storage("int8");
using Pointers = std::vector<const void*>;

TEST(Weight, KeepsDescriptorAndParts) {
  const std::vector<std::uint8_t> codes(6);
  const std::vector<float> scale(2);
  const Weight weight(kInt8, {2, 3}, Pointers{codes.data(), scale.data()});
  EXPECT_EQ(weight.storage(), kInt8);
  EXPECT_EQ(weight.shape(), (Shape{2, 3}));
  EXPECT_EQ(weight.rows(), 2);
  EXPECT_EQ(weight.row_elements(), 3);
  EXPECT_EQ(weight.part(0), codes.data());
  EXPECT_EQ(weight.part(1), scale.data());
  EXPECT_EQ(weight.bytes(), 6 + 8);
}

TEST(Weight, CopiesKeepTheOwnerAlive) {
  auto owner = std::make_shared<std::vector<float>>(4);
  const std::weak_ptr<const void> watch = owner;
  Weight copy;
  {
    const Weight weight(parse_storage("f32"), {4}, Pointers{owner->data()}, owner);
    owner.reset();
    copy = weight;
  }
  EXPECT_FALSE(watch.expired());
  copy = Weight{};
  EXPECT_TRUE(watch.expired());
}

TEST(Weight, RefusesTheWrongNumberOfParts) {
  const std::uint8_t code = 0;
  EXPECT_STOWAGE_ERROR(Weight(kInt8, {1, 1}, Pointers{&code}), invalid_argument,
                       "weight: int8:row must have 2 parts (codes, scale), got 1");
}

TEST(Weight, RefusesMissingMemory) {
  const std::uint8_t code = 0;
  EXPECT_STOWAGE_ERROR(Weight(kInt8, {1, 1}, Pointers{&code, nullptr}), invalid_argument,
                       "weight: part scale of int8:row must hold 4 bytes, got a null pointer");
  EXPECT_NO_THROW(Weight(kInt8, {0, 8}, Pointers{nullptr, nullptr}));  // an empty weight needs none
}

}  // namespace
}  // namespace stowage
