// SPDX-License-Identifier: Apache-2.0
// `stowage convert`: golden folders of one dialect in another, with the same values, and back.
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace stowage::cli {
namespace {

using nlohmann::json;

// The dialects that have the values of a golden folder, and its own name as OUT.
struct Row {
  std::string folder, own;
  std::vector<std::string> others;
};
const std::vector<Row> kRows{
    {"awq-gemm", "awq", {"compressed-tensors", "gptq", "gptq:gptq_v2", "torchao"}},
    {"bnb-int8", "bitsandbytes", {}},
    {"bnb-nf4", "bitsandbytes", {}},
    {"bnb-nf4-nested", "bitsandbytes", {}},
    {"comfy-fp8",
     "comfyui",
     {"compressed-tensors", "fp8", "modelopt", "comfyui-scaled", "torchao"}},
    {"comfy-fp8-scaled", "comfyui-scaled", {"compressed-tensors", "fp8", "modelopt", "comfyui"}},
    {"comfy-mxfp8", "comfyui", {"compressed-tensors", "modelopt"}},
    {"comfy-nvfp4", "comfyui", {}},
    {"comfy-nvfp4-header", "comfyui", {}},
    {"ct-fp8-block", "compressed-tensors", {"fp8"}},
    {"ct-fp8-channel", "compressed-tensors", {"modelopt", "torchao"}},
    {"ct-fp8-tensor", "compressed-tensors", {"fp8", "modelopt", "comfyui", "torchao"}},
    {"ct-int3-dense", "compressed-tensors", {}},
    {"ct-int4-asym-g32", "compressed-tensors", {"torchao"}},
    {"ct-int4-channel-ragged", "compressed-tensors", {}},
    {"ct-int4-g128", "compressed-tensors", {"gptq", "awq"}},
    {"ct-int4-g-idx", "compressed-tensors", {"gptq", "gptq:gptq_v2"}},
    {"ct-int8", "compressed-tensors", {"torchao", "compressed-tensors:pack-quantized"}},
    {"ct-int8-pack", "compressed-tensors:pack-quantized", {"torchao", "compressed-tensors"}},
    {"ct-mxfp4", "compressed-tensors", {}},
    {"ct-mxfp8", "compressed-tensors", {"modelopt"}},
    {"ct-nvfp4", "compressed-tensors", {}},
    {"deepseek-v4", "fp8", {"compressed-tensors"}},
    {"fp8-block-e8m0", "fp8", {"compressed-tensors"}},
    {"fp8-block-f32", "fp8", {"compressed-tensors"}},
    {"gptq-v1", "gptq", {"compressed-tensors", "awq", "gptq:gptq_v2"}},
    {"gptq-v1-actorder", "gptq", {"compressed-tensors", "gptq:gptq_v2"}},
    {"gptq-v2", "gptq:gptq_v2", {"compressed-tensors", "awq", "gptq", "torchao"}},
    {"gptq-v2-actorder", "gptq:gptq_v2", {"compressed-tensors", "gptq"}},
    {"hqq-4bit", "hqq", {}},
    {"hqq-4bit-axis0", "hqq", {}},
    {"modelopt-fp8", "modelopt", {"compressed-tensors", "fp8", "torchao"}},
    {"modelopt-mxfp8", "modelopt", {"compressed-tensors"}},
    {"modelopt-nvfp4", "modelopt", {}},
    {"mxfp4-gpt-oss", "mxfp4", {}},
    {"torchao-float8", "torchao", {"compressed-tensors", "modelopt"}},
    {"torchao-int8", "torchao", {"compressed-tensors"}},
    {"torchao-int4", "torchao", {}},
    {"torchao-intx4", "torchao", {"compressed-tensors", "gptq", "gptq:gptq_v2", "awq"}},
};

std::vector<float> values_of(const File& file, const std::string& name) {
  const Weight weight = file.weight(name);
  std::vector<float> values(static_cast<std::size_t>(weight.shape().elements()));
  dequantize(weight, {0, weight.rows()}, values.data(), Dtype::f32);
  return values;
}

bool same_bytes(const File& a, const TensorInfo& x, const File& b, const TensorInfo& y) {
  return x.dtype == y.dtype && std::ranges::equal(a.bytes(x), b.bytes(y));
}

class Convert : public Program {
 protected:
  void copy_golden(const std::string& folder, const std::string& to) const {
    fs::create_directory(path(to));
    for (const auto& entry : fs::directory_iterator(STOWAGE_GOLDEN "/dialects/" + folder))
      if (entry.path().filename() != "expected.safetensors")
        fs::copy(entry.path(), path(to) / entry.path().filename());
  }
  // All weights with the bits of their values, all other tensors with their bytes.
  void expect_same_values(const std::string& before, const std::string& after) const {
    const File a = File::open(path(before)), b = File::open(path(after));
    ASSERT_EQ(a.weights().size(), b.weights().size());
    for (const WeightInfo& weight : a.weights()) {
      ASSERT_NE(b.find_weight(weight.name), nullptr) << weight.name;
      const auto x = values_of(a, weight.name), y = values_of(b, weight.name);
      EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(float)), 0) << weight.name;
    }
  }
  // The tensors of weights, where the scales have come back as numbers of the same type.
  void expect_same_tensors(const std::string& before, const std::string& after) const {
    const File a = File::open(path(before)), b = File::open(path(after));
    EXPECT_EQ(a.dialect(), b.dialect());
    for (const WeightInfo& weight : a.weights()) {
      const WeightInfo& other = *b.find_weight(weight.name);
      if (other.storage != weight.storage) continue;
      const bool rounded = !weight.forms.empty() && weight.forms[1].rounded;
      for (std::size_t i = 0; i < weight.parts.size(); ++i) {
        if (i == 1 && rounded) continue;  // once is enough
        if (weight.parts[i].find("quant_state") != std::string::npos)
          continue;  // of another length
        EXPECT_TRUE(same_bytes(a, *a.find(weight.parts[i]), b, *b.find(other.parts[i])))
            << weight.parts[i];
      }
    }
  }
};

TEST_F(Convert, GoldenFoldersKeepTheirValuesThereAndBack) {
  for (const Row& row : kRows) {
    copy_golden(row.folder, row.folder);
    std::vector<std::string> all = row.others;
    all.push_back(row.own);
    for (const std::string& dialect : all) {
      SCOPED_TRACE(row.folder + " to " + dialect);
      const std::string there = row.folder + "-" + dialect, back = there + "-back";
      expect_ok({"convert", row.folder, there, "--to", dialect});
      EXPECT_EQ(File::open(path(there)).dialect(), dialect.substr(0, dialect.find(':')));
      expect_same_values(row.folder, there);
      expect_ok({"convert", there, back, "--to", row.own});
      expect_same_values(row.folder, back);
      expect_same_tensors(row.folder, back);
    }
  }
}

// 3 bits of 128 columns: 13 words of ten in older releases, the 12 of one string in today's.
TEST_F(Convert, WordsOfWholeNumbersBecomeOneString) {
  copy_golden("ct-int3-padded", "in");
  expect_ok({"convert", "in", "out", "--to", "compressed-tensors"});
  expect_same_values("in", "out");
  const std::string codes = File::open(path("in")).weights().front().parts.front();
  EXPECT_EQ(File::open(path("in")).find(codes)->shape, (Shape{64, 13}));
  EXPECT_EQ(File::open(path("out")).find(codes)->shape, (Shape{64, 12}));
}

TEST_F(Convert, GgufFilesKeepTheirValues) {
  using Pair = std::pair<std::string, std::vector<std::string>>;
  for (const auto& [folder, all] :
       {Pair{"gguf-q4-0", {"compressed-tensors", "gptq", "awq"}},
        Pair{"gguf-q8-0", {"compressed-tensors"}}, Pair{"gguf-mxfp4", {"compressed-tensors"}}}) {
    copy_golden(folder, folder);
    std::string file = folder + "/";
    for (const auto& entry : fs::directory_iterator(path(folder)))
      if (entry.path().extension() == ".gguf") file += entry.path().filename().string();
    for (const std::string& dialect : all) {
      SCOPED_TRACE(folder + " to " + dialect);
      expect_ok({"convert", file, folder + dialect, "--to", dialect});
      expect_same_values(file, folder + dialect);
    }
  }
}

TEST_F(Convert, QuantizesAPlainModelWithATableOfErrors) {
  fs::create_directory(path("in"));
  write_model(path("in/model.safetensors"), {f32_tensor("a.q_proj.weight", {128, 256}, 1),
                                             f32_tensor("a.k_proj.weight", {64, 256}, 2),
                                             f32_tensor("embed.weight", {64, 128}, 3)});
  write_text(path("in/config.json"), R"({"model_type": "llama"})");
  write_text(path("in/tokenizer.json"), "{}");
  using Pair = std::pair<std::string, std::string>;
  for (const auto& [dialect, storage] :
       {Pair{"compressed-tensors", "f8_e4m3:row:bf16"}, Pair{"compressed-tensors", "int4:block64"},
        Pair{"compressed-tensors", "int5:block64:bf16"},
        Pair{"compressed-tensors", "int6:row:zero"}, Pair{"compressed-tensors", "int7:tensor"},
        Pair{"compressed-tensors", "f4_e2m1:block16:e4m3_quotient"},
        Pair{"compressed-tensors", "mxfp4"}, Pair{"fp8", "f8_e4m3:block128x128"},
        Pair{"fp8", "f8_e4m3:block128x128:e8m0"}, Pair{"modelopt", "nvfp4"},
        Pair{"modelopt", "f8_e4m3:tensor"}, Pair{"bitsandbytes", "nf4:nested"},
        Pair{"bitsandbytes", "int8:row:absmax"}, Pair{"gptq", "int4:block64:f16:zero"},
        Pair{"awq", "int4:block64:f16:zero"}, Pair{"torchao", "int8:row"},
        Pair{"comfyui", "f8_e4m3:tensor"}, Pair{"comfyui-scaled", "f8_e5m2:tensor"}}) {
    SCOPED_TRACE(dialect + " " + storage);
    const std::string out = dialect + storage;
    const json report = json::parse(
        expect_ok({"convert", "in", out, "--to", dialect, "--storage", storage, "--json"}));
    const File file = File::open(path(out));
    EXPECT_EQ(file.dialect(), dialect);
    EXPECT_EQ(report["weights"].size(), 2u);
    for (const char* name : {"a.q_proj.weight", "a.k_proj.weight"}) {
      ASSERT_NE(file.find_weight(name), nullptr);
      EXPECT_EQ(file.find_weight(name)->storage, parse_storage(storage));
    }
    for (const json& weight : report["weights"]) {
      EXPECT_GT(weight["relative_error"], 0);
      EXPECT_LT(weight["relative_error"], 0.2);
    }
    EXPECT_EQ(file.find("embed.weight")->dtype, Dtype::f32);
    EXPECT_EQ(read_text(path(out) / "tokenizer.json"), "{}");
    EXPECT_EQ(json::parse(read_text(path(out) / "config.json"))["model_type"], "llama");
  }
}

TEST_F(Convert, SaysEachGroupOfModulesOfAMixedModel) {
  fs::create_directory(path("in"));
  write_model(path("in/model.safetensors"),
              {f32_tensor("a.weight", {64, 256}, 1), f32_tensor("b.weight", {64, 256}, 2),
               f32_tensor("c.weight", {64, 256}, 3)});
  expect_ok({"convert", "in", "out", "--to", "compressed-tensors", "--storage", "int8:row",
             "--rule", "a=f8_e4m3:block64", "--rule", "c=plain"});
  const File file = File::open(path("out"));
  EXPECT_EQ(to_string(file.find_weight("a.weight")->storage), "f8_e4m3:block64");
  EXPECT_EQ(to_string(file.find_weight("b.weight")->storage), "int8:row");
  const json said = json::parse(read_text(path("out/config.json")))["quantization_config"];
  EXPECT_EQ(said["format"], "mixed-precision");
  EXPECT_EQ(said["ignore"], json({"lm_head", "c"}));
  EXPECT_EQ(said["config_groups"]["group_0"]["targets"], json({"a"}));
}

TEST_F(Convert, KeepsNumbersForActivationsOrSaysWhichItLeavesOut) {
  copy_golden("modelopt-fp8", "in");
  expect_ok({"convert", "in", "kept", "--to", "compressed-tensors"});
  const File in = File::open(path("in")), kept = File::open(path("kept"));
  const std::string name = "model.layers.0.mlp.up_proj.input_scale";
  ASSERT_NE(kept.find(name), nullptr);
  EXPECT_TRUE(same_bytes(in, *in.find(name), kept, *kept.find(name)));
  const json said = json::parse(read_text(path("kept/config.json")))["quantization_config"];
  EXPECT_EQ(said["config_groups"]["group_0"]["input_activations"]["dynamic"], false);
  EXPECT_FALSE(fs::exists(path("kept/hf_quant_config.json")));  // it would say another form
  EXPECT_THAT(expect_ok({"convert", "in", "lost", "--to", "fp8"}),
              testing::HasSubstr("left out: 3 numbers for activations, which fp8 does not name: "
                                 "model.layers.0.mlp.down_proj.input_scale, ..."));
}

TEST_F(Convert, WritesShardsThatOpen) {
  copy_golden("fp8-block-f32", "in");
  expect_ok({"convert", "in", "out", "--to", "compressed-tensors", "--shard-size", "30000"});
  EXPECT_GT(File::open(path("out")).paths().size(), 1u);
  expect_same_values("in", "out");
}

#if !defined(__SANITIZE_ADDRESS__)  // its shadow counts as private memory
TEST_F(Convert, StreamsTensorByTensor) {
  constexpr rlim_t kMiB = 1 << 20;
  std::vector<Tensor> tensors;  // 40 MiB in ten tensors
  for (int i = 0; i < 10; ++i)
    tensors.push_back(f32_tensor("t" + std::to_string(i) + ".weight", {1024, 1024}, 1));
  write_model(path("m.safetensors"), tensors);
  const Surroundings small{.variables = {"STOWAGE_THREADS=1"}, .private_bytes = 10 * kMiB};
  const std::vector<std::string> first{
      "convert",   "m.safetensors",     "ct", "--to", "compressed-tensors",
      "--storage", "int4:block128:bf16"};
  for (const auto& command : {first, {"convert", "ct", "gptq", "--to", "gptq"}}) {
    const Result result = run(command, small);
    EXPECT_EQ(result.code, 0) << result.err;
  }
  expect_same_values("ct", "gptq");
}
#endif

TEST_F(Convert, RefusesBeforeAnythingIsWritten) {
  copy_golden("ct-int4-asym-g32", "int4");
  copy_golden("modelopt-fp8", "fp8");
  copy_golden("bnb-int8", "bnb");
  fs::remove(path("bnb/config.json"));  // without which nobody says whose codes they are
  write_model(path("m.safetensors"), {f32_tensor("a.weight", {60, 100}, 1)});
  fs::create_directory(path("gpt"));
  write_model(path("gpt/model.safetensors"), {f32_tensor("a.weight", {60, 100}, 1)});
  write_text(path("gpt/config.json"), R"({"model_type": "gpt2"})");
  struct Case {
    int code;
    std::vector<std::string> arguments;
    std::string text;
  };
  const std::vector<Case> cases{
      {2, {"int4", "out"}, "--to is required"},
      {2, {"int4", "out", "--to", "ggml"}, "--to: must be one of comfyui, comfyui-scaled, "},
      {2, {"int4", "out", "--to", "gptq:v3"}, "got 'gptq:v3'"},
      {2, {"int4", "out", "--to", "gptq:"}, "got 'gptq:'"},
      {2, {"fp8", "o.safetensors", "--to", "fp8"}, "--to fp8: OUT must be a folder"},
      {2, {"fp8", "out", "--to", "fp8", "--rule", "x=nf4"}, "rule 'x': must match"},
      {1,
       {"int4", "out", "--to", "bitsandbytes"},
       "model.layers.0.mlp.down_proj.weight: must rest in a storage that bitsandbytes has, got "
       "int4:block32:bf16:zero [100, 96]; it is held by torchao, compressed-tensors"},
      {1,
       {"int4", "out", "--to", "compressed-tensors:int-quantized"},
       "must rest in a storage that compressed-tensors:int-quantized has"},
      {1, {"fp8", "o.safetensors", "--to", "comfyui"}, "must have a scale that bf16 holds"},
      {1, {"bnb", "out", "--to", "torchao"}, "must be a weight that is read here"},
      {1, {"m.safetensors", "out", "--to", "fp8"}, "must hold a weight that rests, got none"},
      {1,
       {"m.safetensors", "out", "--to", "gptq", "--storage", "int4:block20:f16:zero"},
       "must rest in a storage that gptq has, got int4:block20:f16:zero [60, 100]"},
      {1,
       {"gpt", "out", "--to", "torchao", "--storage", "int8:row"},
       "model_type must be one whose layers are Linear, got gpt2"},
      {1,
       {"gpt", "out", "--to", "comfyui", "--storage", "f8_e5m2:tensor"},
       "model_type must be one whose layers are Linear, got gpt2"},
      {1, {"int4", "fp8", "--to", "compressed-tensors"}, "must be a new or empty folder"},
  };
  for (const auto& [code, arguments, text] : cases) {
    SCOPED_TRACE(text);
    std::vector<std::string> all{"convert"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    EXPECT_THAT(expect_failure(code, all), testing::HasSubstr(text));
    EXPECT_FALSE(fs::exists(path("out")));
    EXPECT_FALSE(fs::exists(path("o.safetensors")));
  }
}

}  // namespace
}  // namespace stowage::cli
