// SPDX-License-Identifier: Apache-2.0
#include "store/gguf.h"

#include <gmock/gmock.h>

#include "scratch.h"
#include "store/made_gguf.h"
#include "stowage/file.h"
#include "stowage/quantize.h"
#include "stowage/writer.h"

namespace stowage::test {
namespace {

std::string array_of_texts() {
  return gguf_number<std::uint32_t>(8) + gguf_number<std::uint64_t>(2) + gguf_text("a") +
         gguf_text("bc");
}

// Sizes are turned; what has no value of its own stays out of the metadata.
TEST(Gguf, SaysWhatItHolds) {
  const std::string content =
      gguf({gguf_key("general.architecture", 8, gguf_text("llama")),
            gguf_key("tokens", 9, array_of_texts()), gguf_key("n", 4, gguf_number(7u)),
            gguf_key("x", 6, gguf_number(0.5f)), gguf_key("yes", 7, "\x01")},
           {{"one", {3, 2}}, {"half", {4}, 1, 32}, {"blocks", {64, 2}, 8, 64}},
           std::string(32 + 32 + 136, 'x'));
  const auto bytes = std::as_bytes(std::span(content));
  const Header header = parse_gguf("f", bytes, content.size());
  using Pair = std::pair<const std::string, std::string>;
  EXPECT_THAT(header.metadata,
              testing::UnorderedElementsAre(Pair("general.architecture", "llama"), Pair("n", "7"),
                                            Pair("x", "0.5"), Pair("yes", "true")));
  ASSERT_EQ(header.tensors.size(), 3U);
  EXPECT_EQ(header.data_start, content.size() - 200);
  EXPECT_EQ(header.tensors[0].shape, (Shape{2, 3}));
  EXPECT_EQ(header.tensors[0].dtype, Dtype::f32);
  EXPECT_EQ(header.tensors[0].bytes, 24U);
  EXPECT_EQ(header.tensors[1].dtype, Dtype::f16);
  EXPECT_EQ(header.tensors[1].offset, header.data_start + 32);
  EXPECT_EQ(header.tensors[2].dtype, Dtype::unknown);
  EXPECT_EQ(header.tensors[2].dtype_name, "Q8_0");
  EXPECT_EQ(header.tensors[2].bytes, 136U);
}

TEST(Gguf, AlignsAsItSays) {
  const std::string content = gguf({gguf_key("general.alignment", 4, gguf_number(64u))},
                                   {{"s", {1}}, {"t", {1}, 0, 64}}, std::string(68, 'x'), 64);
  const Header header = parse_gguf("f", std::as_bytes(std::span(content)), content.size());
  EXPECT_EQ(header.data_start % 64, 0U);
  EXPECT_EQ(header.tensors[1].offset, header.data_start + 64);
}

TEST(Gguf, OpensWithItsValues) {
  const Scratch folder;
  const float values[2] = {1.5f, -2};
  const std::string data(reinterpret_cast<const char*>(values), sizeof values);
  folder.write("m.gguf", gguf({}, {{"w", {2, 1}}}, data + std::string(24, '\0')));
  const File file = File::open(folder.path());
  EXPECT_EQ(file.dialect(), "gguf");
  ASSERT_EQ(file.weights().size(), 1U);
  EXPECT_EQ(file.weights()[0].shape, (Shape{1, 2}));
  EXPECT_EQ(std::memcmp(file.bytes(*file.find("w")).data(), values, sizeof values), 0);
}

// Of experts, too; E4M3 0x38 and F16 0x3c00 are 1.
TEST(Gguf, BlocksOpenWithTheirValues) {
  std::string data, scaled;
  for (int block = 0; block < 12; ++block) {
    data += std::string("\0\x3c", 2);
    for (int i = 0; i < 32; ++i) data += static_cast<char>(block * 32 + i);
  }
  data.append((32 - data.size() % 32) % 32, '\0');
  const std::uint64_t second = data.size();
  for (int i = 0; i < 4; ++i) data += '\x38';
  data += std::string(32, '\x21') + std::string(28, '\0');
  data += gguf_number(3.0F);
  const Scratch folder;
  folder.write("m.gguf", gguf({},
                              {{"e", {64, 3, 2}, 8},
                               {"a.weight", {64, 1}, 40, second},
                               {"a.scale", {1}, 0, second + 64}},
                              data));
  const File file = File::open(folder.path());
  ASSERT_EQ(file.weights().size(), 2U);
  std::vector<float> found(384);
  dequantize(file.weight("e"), {0, 2}, found.data(), Dtype::f32);
  for (int i = 0; i < 384; ++i)
    EXPECT_EQ(found[static_cast<std::size_t>(i)], static_cast<std::int8_t>(i)) << i;
  dequantize(file.weight("a.weight"), {0, 1}, found.data(), Dtype::f32);
  for (std::size_t i = 0; i < 64; ++i)  // codes 1 and 2 of E2M1, by halves of 16
    EXPECT_EQ(found[i], i % 16 < 8 ? 1.5F : 3.0F) << i;
}

// The frame is as it was, byte for byte; the data is what is written.
TEST(Gguf, IsWrittenAgain) {
  const Scratch folder;
  const std::string content =
      gguf({gguf_key("tokens", 9, array_of_texts())}, {{"a", {3}}, {"b", {2}, 1, 32}},
           std::string(12, 'a') + std::string(20, '\0') + "bbbb");
  const std::string path = folder.write("m.gguf", content);
  const File file = File::open(path);
  const std::string again = folder.path("again.gguf");
  WriterOptions options;
  options.like = {{"again.gguf", file.header(0), content.size()}};
  Writer writer(again, {}, options);
  for (const TensorInfo& tensor : file.tensors()) writer.write(tensor.name, file.bytes(tensor));
  writer.finish();
  EXPECT_EQ(folder.read("again.gguf"), content);
}

}  // namespace
}  // namespace stowage::test
