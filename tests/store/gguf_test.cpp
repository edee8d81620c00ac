// SPDX-License-Identifier: Apache-2.0
#include "store/gguf.h"

#include <gmock/gmock.h>

#include "scratch.h"
#include "store/made_gguf.h"
#include "stowage/file.h"
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
