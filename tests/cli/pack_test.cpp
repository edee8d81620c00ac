// SPDX-License-Identifier: Apache-2.0
// `stowage pack`: what it writes equals what the library quantizes, for every way of asking.
#include <sched.h>
#include <sys/mount.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace stowage::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

std::string storage_of(const File& file, const char* name) {
  return to_string(file.find_weight(name)->storage);
}

std::vector<float> values_of(const File& file, const char* name) {
  const Weight weight = file.weight(name);
  std::vector<float> values(static_cast<std::size_t>(weight.shape().elements()));
  dequantize(weight, {0, weight.rows()}, values.data(), Dtype::f32);
  return values;
}

std::vector<float> rounded(const std::vector<float>& values, const Shape& shape,
                           const char* storage) {
  const Weight weight = quantize(values.data(), Dtype::f32, shape, parse_storage(storage));
  std::vector<float> out(values.size());
  dequantize(weight, {0, weight.rows()}, out.data(), Dtype::f32);
  return out;
}

class Pack : public Program {
 protected:
  Pack() { write_model(path("m.safetensors"), small_model()); }
  File packed(std::vector<std::string> options) const {
    options.insert(options.begin(), {"pack", "m.safetensors", "p.safetensors"});
    expect_ok(options);
    return File::open(path("p.safetensors"));
  }
};

TEST_F(Pack, WritesWhatTheLibraryQuantizes) {
  for (const char* storage : {"f8_e4m3", "f8_e5m2:tensor", "f8_e4m3:row", "int8", "int8:block32",
                              "nf4", "nf4:nested", "fp4:block128:nested", "bf16"}) {
    const File file = packed({"--storage", storage, "--force"});
    EXPECT_EQ(storage_of(file, "embed.weight"), to_string(parse_storage(storage)));
    EXPECT_EQ(values_of(file, "embed.weight"), rounded(some_values(512, 1), {8, 64}, storage));
    EXPECT_EQ(values_of(file, "layers.0.linear.weight"),
              rounded(some_values(1024, 2), {16, 64}, storage));
    EXPECT_EQ(storage_of(file, "lm_head.weight"), "f32");
    EXPECT_EQ(values_of(file, "layers.0.norm.weight"), some_values(64, 4));
    EXPECT_EQ(file.bytes(*file.find("steps"))[3], std::byte{7});
  }
}

TEST_F(Pack, PrintsBytesAndErrors) {
  const std::string text =
      expect_ok({"pack", "m.safetensors", "p.safetensors", "--storage", "nf4"});
  EXPECT_THAT(text, HasSubstr("p.safetensors: 2 of 7 tensors packed, 6.00 KiB -> "));
  EXPECT_THAT(text, HasSubstr("error: max "));
  EXPECT_THAT(text, HasSubstr("worst: "));
  EXPECT_THAT(text, HasSubstr("      1  a head; name it in a rule to pack it\n"));
}

TEST_F(Pack, JsonReportsEveryTensor) {
  const json report = json::parse(
      expect_ok({"pack", "m.safetensors", "p.safetensors", "--storage", "int8", "--json"}));
  ASSERT_EQ(report["weights"].size(), 2u);
  ASSERT_EQ(report["not_packed"].size(), 5u);
  const json& weight = report["weights"][0];
  const std::vector<float> x = some_values(512, 1), w = rounded(x, {8, 64}, "int8");
  double max_error = 0, error2 = 0, value2 = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double e = static_cast<double>(x[i]) - w[i];
    max_error = std::max(max_error, std::fabs(e));
    error2 += e * e;
    value2 += static_cast<double>(x[i]) * x[i];
  }
  EXPECT_EQ(weight["name"], "embed.weight");
  EXPECT_EQ(weight["storage"], "int8:row");
  EXPECT_EQ(weight["compute"], "f32");
  EXPECT_EQ(weight["bytes_before"], 2048);
  EXPECT_EQ(weight["bytes"], 512 + 32);
  EXPECT_DOUBLE_EQ(weight["max_error"], max_error);
  EXPECT_NEAR(weight["rms_error"], std::sqrt(error2 / 512), 1e-12);
  EXPECT_NEAR(weight["relative_error"], std::sqrt(error2 / value2), 1e-9);
  EXPECT_EQ(report["not_packed"][0]["reason"], "fewer than two dimensions");
  EXPECT_EQ(report["total"]["elements"], 512 + 1024);
}

TEST_F(Pack, RulesChooseByNameAndCanTakeTheHead) {
  const File file = packed({"--storage", "nf4", "--rule", "lm_head=int8", "--rule", "embed=plain"});
  EXPECT_EQ(storage_of(file, "lm_head.weight"), "int8:row");
  EXPECT_EQ(storage_of(file, "embed.weight"), "f32");
  EXPECT_EQ(storage_of(file, "layers.0.linear.weight"), "nf4:block64");
}

TEST_F(Pack, RulesAloneTakeWhatTheyName) {
  const File file = packed({"--rule", "layers.*=f8_e4m3"});
  EXPECT_EQ(storage_of(file, "layers.0.linear.weight"), "f8_e4m3");
  EXPECT_EQ(storage_of(file, "embed.weight"), "f32");
}

TEST_F(Pack, ComputeIsRecordedAndCastsPlainTensors) {
  const File file = packed({"--storage", "nf4", "--compute", "bf16"});
  EXPECT_EQ(file.find_weight("embed.weight")->compute, Dtype::bf16);
  EXPECT_EQ(storage_of(file, "lm_head.weight"), "bf16");
  EXPECT_EQ(storage_of(file, "layers.0.linear.bias"), "bf16");
  EXPECT_EQ(values_of(file, "mask")[1], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(file.find("steps")->dtype, Dtype::i64);
}

TEST_F(Pack, WithoutComputeEachWeightKeepsItsOwn) {
  EXPECT_EQ(packed({"--storage", "nf4"}).find_weight("embed.weight")->compute, Dtype::f32);
}

TEST_F(Pack, AHeadThatEqualsAnEmbeddingFollowsIt) {
  write_model(path("m.safetensors"),
              {f32_tensor("embed.weight", {8, 64}, 1), f32_tensor("lm_head.weight", {8, 64}, 1)});
  EXPECT_EQ(storage_of(packed({"--storage", "int8"}), "lm_head.weight"), "int8:row");
}

TEST_F(Pack, RepackingStartsFromTheRestingValues) {
  packed({"--storage", "int8"});
  expect_ok({"pack", "p.safetensors", "q.safetensors", "--storage", "nf4"});
  const File file = File::open(path("q.safetensors"));
  const auto once = rounded(some_values(512, 1), {8, 64}, "int8");
  EXPECT_EQ(values_of(file, "embed.weight"), rounded(once, {8, 64}, "nf4"));
  EXPECT_EQ(file.find_weight("embed.weight")->compute, Dtype::f32);
}

TEST_F(Pack, WhatRestsAlreadyIsCopiedByteForByte) {
  packed({"--storage", "nf4:nested"});
  const std::string text =
      expect_ok({"pack", "p.safetensors", "q.safetensors", "--storage", "nf4:nested"});
  EXPECT_THAT(text, HasSubstr("2  is nf4:block64:nested already"));
  EXPECT_EQ(read_text(path("p.safetensors")), read_text(path("q.safetensors")));
}

TEST_F(Pack, ARuleCanMakeRestingWeightsPlain) {
  packed({"--storage", "int8", "--compute", "f16"});
  expect_ok(
      {"pack", "p.safetensors", "q.safetensors", "--storage", "nf4", "--rule", "embed=plain"});
  const File file = File::open(path("q.safetensors"));
  EXPECT_EQ(storage_of(file, "embed.weight"), "f16");
  EXPECT_EQ(storage_of(file, "layers.0.linear.weight"), "nf4:block64");
}

TEST_F(Pack, F64WeightsAreQuantizedFromTheirOwnValues) {
  std::vector<double> values(128);
  for (std::size_t i = 0; i < 128; ++i) values[i] = std::sin(static_cast<double>(i)) / 3;
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  write_model(path("m.safetensors"), {{"a.weight", Dtype::f64, {2, 64}, {data, data + 1024}}});
  const File file = packed({"--storage", "f8_e4m3"});
  const Weight expected = quantize(values.data(), Dtype::f64, {2, 64}, parse_storage("f8_e4m3"));
  EXPECT_EQ(0, std::memcmp(file.weight("a.weight").part(0), expected.part(0), 128));
  EXPECT_EQ(file.find_weight("a.weight")->compute, Dtype::f32);
}

TEST_F(Pack, NonfiniteWeightsPassOnRequest) {
  std::vector<float> values = some_values(128, 9);
  values[5] = std::numeric_limits<float>::quiet_NaN();
  write_model(path("m.safetensors"), {f32_tensor("a.weight", {2, 64}, values)});
  const std::string error =
      expect_failure(1, {"pack", "m.safetensors", "p.safetensors", "--storage", "nf4"});
  EXPECT_THAT(error, HasSubstr("m.safetensors: a.weight: "));
  EXPECT_THAT(error, HasSubstr("must be finite"));
  EXPECT_THAT(error, HasSubstr("(--keep-nonfinite keeps it)"));
  const File file = packed({"--storage", "nf4", "--keep-nonfinite"});
  EXPECT_TRUE(std::isnan(values_of(file, "a.weight")[5]));
}

TEST_F(Pack, ShardsAreIndexed) {
  expect_ok({"pack", "m.safetensors", "out", "--storage", "int8", "--shard-size", "2KiB"});
  EXPECT_TRUE(fs::exists(path("out/model.safetensors.index.json")));
  const File file = File::open(path("out"));
  EXPECT_GT(file.paths().size(), 1u);
  EXPECT_EQ(values_of(file, "embed.weight"), rounded(some_values(512, 1), {8, 64}, "int8"));
}

TEST_F(Pack, AFolderKeepsItsConfigurationAndTokenizer) {
  fs::create_directory(path("in"));
  fs::rename(path("m.safetensors"), path("in/model.safetensors"));
  write_text(path("in/config.json"), "{\"model_type\":  \"llama\"}");
  write_text(path("in/tokenizer.json"), "{}");
  write_text(path("in/pytorch_model.bin"), "old");
  write_text(path("in/pytorch_model.bin.index.json"), "{}");
  write_text(path("in/.hidden.json"), "{}");
  expect_ok({"pack", "in", "a/b/out", "--storage", "int8"});
  json config = json::parse(read_text(path("a/b/out/config.json")));
  EXPECT_EQ(config["quantization_config"]["format"], "int-quantized");
  config.erase("quantization_config");
  EXPECT_EQ(config, json::parse(R"({"model_type": "llama"})"));
  EXPECT_TRUE(fs::exists(path("a/b/out/tokenizer.json")));
  EXPECT_EQ(std::distance(fs::directory_iterator(path("a/b/out")), {}), 3);
}

TEST_F(Pack, ForBitsandbytesWritesItsConfiguration) {
  fs::create_directory(path("in"));
  fs::rename(path("m.safetensors"), path("in/model.safetensors"));
  write_text(path("in/config.json"), R"({"model_type": "llama", "dtype": "float32"})");
  expect_ok({"pack", "in", "out", "--storage", "nf4:nested", "--for", "bitsandbytes", "--compute",
             "bf16"});
  const File file = File::open(path("out"));
  EXPECT_EQ(storage_of(file, "layers.0.linear.weight"), "nf4:block64:nested");
  EXPECT_EQ(storage_of(file, "embed.weight"), "bf16");
  EXPECT_EQ(storage_of(file, "lm_head.weight"), "bf16");
  const json config = json::parse(read_text(path("out/config.json")));
  EXPECT_EQ(config["dtype"], "bfloat16");
  const json& quantization = config["quantization_config"];
  EXPECT_EQ(quantization["quant_method"], "bitsandbytes");
  EXPECT_EQ(quantization["bnb_4bit_quant_type"], "nf4");
  EXPECT_EQ(quantization["bnb_4bit_use_double_quant"], true);
  EXPECT_EQ(quantization["bnb_4bit_compute_dtype"], "bfloat16");
  EXPECT_EQ(quantization["llm_int8_skip_modules"], json({"lm_head"}));
  // Packed again, the old key would make transformers look for what is not there.
  expect_ok({"pack", "out", "again", "--storage", "int8"});
  const json again = json::parse(read_text(path("again/config.json")))["quantization_config"];
  EXPECT_EQ(again["quant_method"], "compressed-tensors");
  EXPECT_EQ(again["format"], "int-quantized");
}

#if !defined(__SANITIZE_ADDRESS__)  // its shadow counts as private memory
TEST_F(Pack, StreamsTensorByTensor) {
  constexpr rlim_t kMiB = 1 << 20;
  std::vector<Tensor> tensors;  // 40 MiB in ten tensors
  for (int i = 0; i < 10; ++i)
    tensors.push_back(f32_tensor("t" + std::to_string(i) + ".weight", {1024, 1024}, 1));
  write_model(path("m.safetensors"), tensors);
  using Named = std::pair<const char*, rlim_t>;  // 20 and 10 MiB come out
  for (const auto& [storage, limit] : {Named{"bf16", 16 * kMiB}, Named{"int8", 8 * kMiB}}) {
    const Result result = run({"pack", "m.safetensors", std::string(storage), "--storage", storage},
                              {.variables = {"STOWAGE_THREADS=1"}, .private_bytes = limit});
    EXPECT_EQ(result.code, 0) << result.err;
  }
}
#endif

TEST_F(Pack, ForceReplacesAFile) {
  packed({"--storage", "int8"});
  EXPECT_THAT(expect_failure(1, {"pack", "m.safetensors", "p.safetensors", "--storage", "nf4"}),
              HasSubstr("p.safetensors: must not exist yet (--force replaces it)"));
  EXPECT_EQ(storage_of(packed({"--storage", "nf4", "--force"}), "embed.weight"), "nf4:block64");
}

// A file system of its own, where this process may have one.
TEST_F(Pack, AFullDiskIsAnErrorThatLeavesNothing) {
  write_model(path("m.safetensors"),
              {f32_tensor("a.weight", {512, 512}, 1), f32_tensor("b.weight", {512, 512}, 2)});
  fs::create_directory(path("full"));
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("none", path("full").c_str(), "tmpfs", 0, "size=400k") != 0) {
    GTEST_SKIP() << "this process cannot mount";
  }
  for (const char* const storage : {"int8", "f8_e4m3:row"}) {
    const std::string text =
        expect_failure(1, {"pack", "m.safetensors", "full/o", "--storage", storage});
    EXPECT_THAT(text, testing::HasSubstr("bytes of space, got "));
  }
  expect_ok({"pack", "m.safetensors", "full/o", "--storage", "nf4"});
  ::umount2(path("full").c_str(), MNT_DETACH);
}

// The space that was free when it was asked for is gone when it is taken.
TEST_F(Pack, AFileThatMayNotGrowIsAnErrorThatLeavesNothing) {
  write_model(path("m.safetensors"), small_model());
  const std::set<std::string> before = names();
  const Result result =
      run({"pack", "m.safetensors", "o", "--storage", "int8"}, {.file_bytes = 512});
  EXPECT_EQ(result.code, 1) << result.err;
  EXPECT_THAT(result.err, testing::HasSubstr("File too large"));
  EXPECT_EQ(names(), before);
}

}  // namespace
}  // namespace stowage::cli
