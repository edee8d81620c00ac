// SPDX-License-Identifier: Apache-2.0
// `stowage unpack`: plain tensors that hold what dequantize gives.
#include "cli/program.h"

namespace stowage::cli {
namespace {

class Unpack : public Program {
 protected:
  Unpack() {
    write_model(path("m.safetensors"), small_model());
    expect_ok(
        {"pack", "m.safetensors", "p.safetensors", "--storage", "nf4:nested", "--compute", "bf16"});
  }
  void expect_unpacked(Dtype dtype, const std::vector<std::string>& options) const {
    std::vector<std::string> arguments{"unpack", "p.safetensors", "u.safetensors", "--force"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    expect_ok(arguments);
    const File packed = File::open(path("p.safetensors")),
               plain = File::open(path("u.safetensors"));
    EXPECT_EQ(plain.tensors().size(), 7u);
    for (const char* name : {"embed.weight", "layers.0.linear.weight", "lm_head.weight", "mask"}) {
      const Weight weight = packed.weight(name);
      std::vector<std::byte> expected(static_cast<std::size_t>(weight.shape().elements()) *
                                      static_cast<std::size_t>(bits(dtype)) / 8);
      dequantize(weight, {0, weight.rows()}, expected.data(), dtype);
      const TensorInfo* tensor = plain.find(name);
      ASSERT_NE(tensor, nullptr) << name;
      EXPECT_EQ(tensor->dtype, dtype) << name;
      EXPECT_TRUE(std::ranges::equal(plain.bytes(*tensor), expected)) << name;
    }
    EXPECT_EQ(plain.find("steps")->dtype, Dtype::i64);
  }
};

TEST_F(Unpack, GivesEachWeightItsComputeDtype) { expect_unpacked(Dtype::bf16, {}); }

TEST_F(Unpack, GivesEveryValueDtype) {
  expect_unpacked(Dtype::f32, {"--compute", "f32"});
  expect_unpacked(Dtype::f16, {"--compute", "f16"});
  expect_unpacked(Dtype::f64, {"--compute", "f64"});
}

TEST_F(Unpack, F64TensorsAreRounded) {
  const std::vector<double> values{1.0 + 0x1p-8 + 0x1p-40, -2.5};
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  write_model(path("d.safetensors"), {{"x", Dtype::f64, {2}, {data, data + 16}}});
  expect_ok({"unpack", "d.safetensors", "e.safetensors", "--compute", "bf16"});
  const File file = File::open(path("e.safetensors"));
  std::uint16_t first = 0;
  std::memcpy(&first, file.bytes(*file.find("x")).data(), 2);
  EXPECT_EQ(first, 0x3f81);  // rounded once
}

TEST_F(Unpack, AFolderLosesItsQuantizationConfig) {
  fs::create_directory(path("in"));
  fs::rename(path("p.safetensors"), path("in/model.safetensors"));
  write_text(path("in/config.json"), R"({"a": 1, "quantization_config": {}})");
  EXPECT_EQ(expect_ok({"unpack", "in", "out"}), "out: 2 of 7 tensors unpacked\n");
  EXPECT_EQ(read_text(path("out/config.json")), "{\n  \"a\": 1\n}\n");
  EXPECT_EQ(
      expect_ok({"unpack", "in", "again", "--json"}),
      "{\n  \"in\": \"in\",\n  \"out\": \"again\",\n  \"tensors\": 7,\n  \"unpacked\": 2\n}\n");
}

}  // namespace
}  // namespace stowage::cli
