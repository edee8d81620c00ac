// SPDX-License-Identifier: Apache-2.0
#include "stowage/weight.h"

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "expect_error.h"
#include "format/reference.h"
#include "storages.h"

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

// A stack of that shape whose values are random, and what its values are.
struct Stack {
  std::vector<std::vector<std::byte>> memory;
  Weight weight;
  std::vector<float> values;

  Stack(const Storage& storage, const Shape& shape)
      : values(static_cast<std::size_t>(shape.elements())) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> given(values.size());
    for (float& x : given) x = normal(random);
    const Layout made = layout(storage, shape);
    std::vector<void*> parts;
    for (int i = 0; i < made.count; ++i)
      memory.emplace_back(static_cast<std::size_t>(made.parts[static_cast<std::size_t>(i)].bytes) +
                          1);
    for (auto& part : memory) parts.push_back(part.data());
    reference::quantize(given.data(), Dtype::f32, shape, storage, parts);
    weight = {storage, shape, Pointers(parts.begin(), parts.end())};
    reference::dequantize(weight, values.data(), Dtype::f32);
  }
};

bool can_be(const Storage& storage, const Shape& shape) {
  try {
    return layout(storage, shape).count > 0;
  } catch (const Error&) {
    return false;
  }
}

TEST(Weight, MatricesOfAStackHaveItsValues) {
  std::set<std::string> with, without;
  for (const std::string& name : samples::covering(samples::codec_features, samples::is_any)) {
    const Storage storage = parse_storage(name);
    for (const Shape& shape : {Shape{3, 4, 32}, {3, 5, 6}, {2, 4, 256}, {2, 2, 96}, {2, 61, 2}}) {
      if (!can_be(storage, shape)) continue;
      const Stack stack(storage, shape);
      const auto each = static_cast<std::size_t>(shape[1] * shape[2]);
      for (std::int64_t e = 0; e < shape[0]; ++e) {
        const std::optional<Weight> one = stack.weight.matrix(e);
        (one ? with : without).insert(name);
        if (!one) continue;
        EXPECT_EQ(one->shape(), (Shape{shape[1], shape[2]}));
        std::vector<float> found(each);
        reference::dequantize(*one, found.data(), Dtype::f32);
        const float* const wanted = stack.values.data() + static_cast<std::size_t>(e) * each;
        EXPECT_EQ(std::memcmp(found.data(), wanted, each * sizeof(float)), 0)
            << name << to_string(shape) << " " << e;
      }
    }
  }
  for (const char* name : {"bf16", "f8_e4m3", "int8:row2", "int8:block32", "nf4:block32", "q4_k",
                           "f8_e4m3:block4x32", "mxfp4", "nvfp4", "int4:row2"}) {
    const Stack stack(parse_storage(name), {2, 4, 256});
    EXPECT_TRUE(stack.weight.matrix(1)) << name;
  }
  EXPECT_GT(with.size(), 40u);
  EXPECT_GT(without.size(), 5u);  // blocks that run on, or lie transposed
}

TEST(Weight, MatricesAreThoseOfStacksAlone) {
  EXPECT_FALSE(Stack(kInt8, {4, 32}).weight.matrix(0));
  EXPECT_FALSE(Stack(parse_storage("nf4"), {2, 61, 2}).weight.matrix(0));  // a block is of both
  const Stack stack(kInt8, {2, 4, 32});
  EXPECT_STOWAGE_ERROR((void)stack.weight.matrix(2), out_of_range,
                       "weight: a matrix of [2, 4, 32] must be 0 to 1, got 2");
  EXPECT_STOWAGE_ERROR((void)stack.weight.matrix(-1), out_of_range, "got -1");
}

}  // namespace
}  // namespace stowage
