// SPDX-License-Identifier: Apache-2.0
// `stowage convert`, killed at any moment: OUT is then a whole model, or none that is read as one,
// and the same command makes it whole.
#include <random>

#include "cli/program.h"
#include "stowage/error.h"

namespace stowage::cli {
namespace {

class ConvertKill : public Program {};

// Whether there is a model; one that is there is whole: the tensors of `wanted`.
bool is_whole(const std::string& path, const File& wanted) {
  try {
    const File file = File::open(path);
    EXPECT_EQ(file.dialect(), wanted.dialect());
    EXPECT_EQ(file.tensors().size(), wanted.tensors().size());
    for (const TensorInfo& tensor : wanted.tensors()) {
      const TensorInfo* const found = file.find(tensor.name);
      EXPECT_TRUE(found != nullptr && std::ranges::equal(file.bytes(*found), wanted.bytes(tensor)))
          << tensor.name;
    }
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::bad_file) << error.what();
    EXPECT_THAT(error.what(), testing::AnyOf(testing::HasSubstr("[folder_empty]"),
                                             testing::HasSubstr("[index_missing]"),
                                             testing::HasSubstr("[folder_ambiguous]")));
    return false;
  }
}

TEST_F(ConvertKill, OutIsWholeOrNoModel) {
  fs::create_directory(path("in"));
  std::vector<Tensor> tensors;
  for (int i = 0; i < 8; ++i)
    tensors.push_back(f32_tensor("t" + std::to_string(i) + ".weight", {256, 1024},
                                 static_cast<std::uint32_t>(i)));
  write_model(path("in/model.safetensors"), tensors);
  write_text(path("in/config.json"), R"({"model_type": "llama"})");
  write_text(path("in/tokenizer.json"), "{}");
  const char* const wanted = std::getenv("STOWAGE_KILLS");  // `make test-all` sets 100
  const int count = wanted != nullptr ? std::atoi(wanted) : 12;
  std::mt19937 random(3);
  expect_ok({"convert", "in", "wanted", "--to", "gptq", "--storage", "int4:block64:f16:zero"});
  const File wanted_file = File::open(path("wanted"));
  int whole = 0, none = 0;
  for (int i = 0; i < count; ++i) {
    const bool sharded = i % 2 != 0;
    std::vector<std::string> arguments{
        "convert", "in", "out", "--to", "gptq", "--storage", "int4:block64:f16:zero"};
    if (sharded) arguments.insert(arguments.end(), {"--shard-size", "400KB"});
    const int after = static_cast<int>(random() % 60'000);
    const Result result = run(arguments, {.interrupt_after_us = after, .signal = SIGKILL});
    ASSERT_TRUE(result.code == 0 || result.code == -SIGKILL) << result.err;
    const bool there = fs::exists(path("out")) && is_whole(path("out"), wanted_file);
    EXPECT_TRUE(there || result.code != 0);
    (there ? whole : none) += 1;
    if (!there) {
      expect_ok(arguments);
      EXPECT_TRUE(is_whole(path("out"), wanted_file));
    }
    const std::set<std::string> left = names();
    EXPECT_TRUE(std::ranges::none_of(
        left, [](const std::string& name) { return name.find(".tmp") != std::string::npos; }));
    fs::remove_all(path("out"));
  }
  EXPECT_GT(none, 0);
}

}  // namespace
}  // namespace stowage::cli
