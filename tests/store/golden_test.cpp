// SPDX-License-Identifier: Apache-2.0
// Files that releases have written: they open, hold the storage of their name and the same values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "stowage/file.h"
#include "stowage/quantize.h"

namespace stowage {
namespace {

std::vector<std::string> versions() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(STOWAGE_GOLDEN)) {
    if (std::filesystem::exists(entry.path() / "input.safetensors"))  // dialects/ is others'
      found.push_back(entry.path().string());
  }
  return found;
}

std::string file_name(std::string storage) {
  std::ranges::replace(storage, ':', '-');
  return storage + ".safetensors";
}

// A tensor of f32 that a golden file holds at any byte.
std::vector<float> floats(const File& file, const TensorInfo& tensor) {
  std::vector<float> values(tensor.bytes / sizeof(float));
  std::memcpy(values.data(), file.bytes(tensor).data(), tensor.bytes);
  return values;
}

void expect_same_parts(const Weight& kept, const Weight& made) {
  const Layout parts = layout(kept.storage(), kept.shape());
  for (int i = 0; i < parts.count; ++i) {
    const Part& part = parts.parts[static_cast<std::size_t>(i)];
    EXPECT_EQ(std::memcmp(kept.part(i), made.part(i), static_cast<std::size_t>(part.bytes)), 0)
        << part.name;
  }
}

// One expected tensor, named "<storage> <weight>".
void check(const std::string& folder, const File& input, const File& expected,
           const TensorInfo& tensor) {
  SCOPED_TRACE(folder + " " + tensor.name);
  const std::size_t space = tensor.name.find(' ');
  const std::string storage = tensor.name.substr(0, space), name = tensor.name.substr(space + 1);
  const File file = File::open(folder + "/" + file_name(storage));
  EXPECT_GT(file.verify(), 0);
  const Weight weight = file.weight(name);
  EXPECT_EQ(to_string(weight.storage()), storage);
  ASSERT_EQ(weight.shape(), tensor.shape);
  std::vector<float> out(tensor.bytes / sizeof(float));
  dequantize(weight, {0, weight.rows()}, out.data(), Dtype::f32);
  EXPECT_EQ(std::memcmp(out.data(), expected.bytes(tensor).data(), tensor.bytes), 0);
  const std::vector<float> values = floats(input, *input.find(name));
  expect_same_parts(weight, quantize(values.data(), Dtype::f32, tensor.shape, weight.storage()));
}

TEST(Golden, EveryReleasedFileOpensWithItsValues) {
  std::size_t checked = 0;
  for (const std::string& folder : versions()) {
    const File input = File::open(folder + "/input.safetensors");
    const File expected = File::open(folder + "/expected.safetensors");
    for (const TensorInfo& tensor : expected.tensors()) check(folder, input, expected, tensor);
    checked += expected.tensors().size();
  }
  EXPECT_GE(checked, 50U);
}

}  // namespace
}  // namespace stowage
