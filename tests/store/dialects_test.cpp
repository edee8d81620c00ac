// SPDX-License-Identifier: Apache-2.0
// Files that the owners of dialects have written (tests/golden/dialects): each opens without being
// named, with the values that its owner's decoder gives, bit for bit.
#include "store/dialects/dialects.h"

#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "scratch.h"
#include "stowage/file.h"
#include "stowage/quantize.h"

namespace stowage::test {
namespace {

namespace fs = std::filesystem;

struct Golden {
  std::string folder, dialect, storage;  // of two kinds of weights: both
};
const std::vector<Golden> kGolden{
    {"comfy-fp8", "comfyui", "f8_e4m3:tensor"},
    {"comfy-mxfp8", "comfyui", "f8_e4m3:block32:e8m0"},
    {"comfy-nvfp4", "comfyui", "f4_e2m1:block16:e4m3_bf16"},
    {"comfy-nvfp4-header", "comfyui", "f4_e2m1:block16:e4m3_bf16"},
    {"comfy-fp8-scaled", "comfyui-scaled", "f8_e4m3:tensor"},
    {"torchao-int8", "torchao", "int8:row"},
    {"torchao-float8", "torchao", "f8_e4m3:row"},
    {"torchao-intx4", "torchao", "int4:block32:bf16:zero"},
    {"torchao-int4", "torchao", "int4:block64:bf16:zero_sum"},
    {"fp8-block-f32", "fp8", "f8_e4m3:block128x128"},
    {"fp8-block-e8m0", "fp8", "f8_e4m3:block128x128:e8m0"},
    {"deepseek-v4", "fp8", "f8_e4m3:block128x128:e8m0 and mxfp4"},
    {"ct-fp8-block", "compressed-tensors", "f8_e4m3:block128x128:bf16"},
    {"ct-fp8-tensor", "compressed-tensors", "f8_e4m3:tensor:bf16"},
    {"ct-fp8-channel", "compressed-tensors", "f8_e4m3:row:bf16"},
    {"ct-int8", "compressed-tensors", "int8:row:bf16"},
    {"ct-int4-g128", "compressed-tensors", "int4:block128:bf16"},
    {"ct-int4-channel-ragged", "compressed-tensors", "int4:row:bf16"},
    {"ct-int3-dense", "compressed-tensors", "int3:block32:bf16"},
    {"ct-int3-padded", "compressed-tensors", "int3:block32:bf16"},
    {"ct-int8-pack", "compressed-tensors", "int8:row:bf16"},
    {"ct-int4-asym-g32", "compressed-tensors", "int4:block32:bf16:zero"},
    {"ct-int4-g-idx", "compressed-tensors", "int4:block32:bf16:actorder"},
    {"gptq-v1", "gptq", "int4:block128:f16:zero"},
    {"gptq-v1-actorder", "gptq", "int4:block32:f16:zero:actorder"},
    {"gptq-v2-actorder", "gptq", "int4:block32:f16:zero:actorder"},
    {"gptq-v2", "gptq", "int4:block64:f16:zero"},
    {"awq-gemm", "awq", "int4:block64:f16:zero"},
    {"hqq-4bit", "hqq", "uint4:block64:f16:zero_rounded"},
    {"hqq-4bit-axis0", "hqq", "uint4:column64:bf16:zero_rounded"},
    {"ct-mxfp4", "compressed-tensors", "mxfp4"},
    {"mxfp4-gpt-oss", "mxfp4", "mxfp4:transposed"},
    {"ct-mxfp8", "compressed-tensors", "f8_e4m3:block32:e8m0"},
    {"ct-nvfp4", "compressed-tensors", "f4_e2m1:block16:e4m3_quotient"},
    {"modelopt-nvfp4", "modelopt", "nvfp4"},
    {"modelopt-fp8", "modelopt", "f8_e4m3:tensor"},
    {"modelopt-mxfp8", "modelopt", "f8_e4m3:block32:e8m0"},
    {"bnb-int8", "bitsandbytes", "int8:row:absmax"},
    {"bnb-nf4", "bitsandbytes", "nf4:block64"},
    {"bnb-nf4-nested", "bitsandbytes", "nf4:block64:nested"},
    {"gguf-q8-0", "gguf", "int8:block32:f16"},
    {"gguf-q4-0", "gguf", "int4:block32:f16"},
    {"gguf-q4-k", "gguf", "q4_k"},
    {"gguf-q6-k", "gguf", "q6_k"},
    {"gguf-mxfp4", "gguf", "mxfp4"},
    {"gguf-nvfp4", "gguf", "nvfp4"},
};

std::string path_of(const std::string& folder) {
  return std::string(STOWAGE_GOLDEN).append("/dialects/").append(folder);
}

// expected.safetensors would make the folder one of two models.
void copy_model(const std::string& folder, const Scratch& to) {
  for (const auto& entry : fs::directory_iterator(path_of(folder)))
    if (entry.path().filename() != "expected.safetensors")
      fs::copy(entry.path(), to.path(entry.path().filename().string()));
}

// Bits of bf16 or f16; every NaN is one. Of f32, which no NaN is of, halves.
std::vector<std::uint16_t> bits_of_values(const void* values, std::size_t bytes, Dtype dtype,
                                          bool signed_zeros) {
  std::vector<std::uint16_t> found(bytes / 2);
  std::memcpy(found.data(), values, bytes);
  if (dtype == Dtype::f32) return found;
  const std::uint16_t infinity = dtype == Dtype::bf16 ? 0x7f80 : 0x7c00;
  for (std::uint16_t& value : found) {
    if ((value & 0x7fff) > infinity) value = 0x7fff;
    if (!signed_zeros && value == 0x8000) value = 0;
  }
  return found;
}

void expect_values(const File& file, const std::string& name, const File& expected,
                   const TensorInfo& tensor) {
  SCOPED_TRACE(tensor.name);
  ASSERT_EQ(file.find_weight(name)->shape, tensor.shape);
  const Weight weight = file.weight(name, tensor.dtype);
  std::vector<std::byte> made(tensor.bytes);
  dequantize(weight, {0, weight.rows()}, made.data(), tensor.dtype);
  // ModelOpt's decoder alone reads code 8 of E2M1 as +0.
  const bool signs = file.dialect() != "modelopt" || tensor.dtype == Dtype::f32;
  EXPECT_EQ(bits_of_values(made.data(), made.size(), tensor.dtype, signs),
            bits_of_values(expected.bytes(tensor).data(), tensor.bytes, tensor.dtype, signs));
}

TEST(Dialects, EveryGoldenFolderOpensWithItsOwnersValues) {
  for (const Golden& golden : kGolden) {
    SCOPED_TRACE(golden.folder);
    const Scratch folder;
    copy_model(golden.folder, folder);
    const File file = File::open(folder.path());
    EXPECT_EQ(file.dialect(), golden.dialect);
    const File expected = File::open(path_of(golden.folder) + "/expected.safetensors");
    for (const TensorInfo& tensor : expected.tensors()) {
      const std::size_t other = tensor.name.find("::");  // of another owner, dtype or shape
      const std::string which = other == std::string::npos ? "" : tensor.name.substr(other);
      if (!which.empty() && which != "::float16" && which != "::padded" &&
          which != "::diffusers-bfl")
        continue;
      const std::string name = tensor.name.substr(0, other);
      if (which.empty() && expected.find(name + "::padded") != nullptr)
        continue;  // not in the file
      ASSERT_NE(file.find_weight(name), nullptr) << name;
      EXPECT_THAT(golden.storage, testing::HasSubstr(to_string(file.find_weight(name)->storage)));
      expect_values(file, name, expected, tensor);
    }
  }
}

}  // namespace
}  // namespace stowage::test
