// SPDX-License-Identifier: Apache-2.0
// Files that contradict the dialect that they or their configuration show.
#include "store/refusal_rows.h"

namespace stowage::test {
namespace {

struct Piece {
  std::string name, dtype, shape;
  std::size_t bytes;
  std::string content = {};  // none: ones
};

std::string content(const std::vector<Piece>& pieces, const std::string& metadata = "") {
  std::string entries = metadata, data;
  std::size_t at = 0;
  for (const Piece& piece : pieces) {
    entries += (entries.empty() ? "" : ",") +
               tensor(piece.name, piece.dtype, piece.shape, at, at + piece.bytes);
    at += piece.bytes;
    data += piece.content.empty() ? std::string(piece.bytes, '\1') : piece.content;
  }
  return safetensors("{" + entries + "}", data);
}

// A model beside a config.json with this quantization_config.
Make model(const std::string& config, const std::vector<Piece>& pieces,
           const std::string& metadata = "") {
  return [=](const Scratch& s) {
    s.write("model.safetensors", content(pieces, metadata));
    if (!config.empty())
      s.write("config.json", R"({"rate": Infinity, "quantization_config": )" + config + "}");
  };
}

const std::string kFp8 = R"({"quant_method": "fp8", "weight_block_size": [128, 128]})";
const Piece kCodes{"a.weight", "F8_E4M3", "[192,8]", 1536};
const Piece kScale{"a.weight_scale_inv", "F32", "[2,1]", 8};

std::string words_of(std::initializer_list<std::uint32_t> words) {
  std::string made;
  for (const std::uint32_t word : words)
    for (int byte = 0; byte < 4; ++byte) made += static_cast<char>(word >> 8 * byte & 0xff);
  return made;
}

std::string compressed(const std::string& weights, const std::string& format = "float-quantized") {
  return R"({"quant_method": "compressed-tensors", "format": ")" + format +
         R"(", "config_groups": {"g": {"targets": ["Linear"], "weights": )" + weights + "}}}";
}

const char* const kInt4 =
    R"({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})";

const std::string kNvfp4 = R"({"quant_method": "modelopt", "quant_algo": "NVFP4"})";
const Piece kPairs{"a.weight", "U8", "[2,16]", 32};
const Piece kUnder{"a.weight_scale", "F8_E4M3", "[2,2]", 4};

std::string comfy(const std::string& format) {
  return R"("__metadata__":{"_quantization_metadata":"{\"layers\":{\"a\":{\"format\":\")" + format +
         R"(\"}}}"})";
}
const char* const kTensorGroup =
    R"({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16})";

const Rows kDialects{{
    {Refusal::dialect_unknown,
     "a scheme that nobody here reads",
     model(R"({"quant_method": "quip"})", {{"a.weight", "F32", "[1]", 4}}),
     {"config.json: byte 42", "quant_method 'quip'"}},
    {Refusal::dialect_ambiguous,
     "a marker and a configuration",
     model(kFp8, {kCodes, kScale, {"scaled_fp8", "F8_E4M3", "[0]", 0}}),
     {"comfyui-scaled (tensor 'scaled_fp8') and fp8 (quant_method 'fp8' of"}},
    {Refusal::dialect_ambiguous,
     "two markers",
     model("", {{"a.comfy_quant", "U8", "[2]", 2}, {"scaled_fp8", "F32", "[0]", 0}}),
     {"comfyui (tensor 'a.comfy_quant') and comfyui-scaled"}},
    {Refusal::dialect_unknown,
     "a method of no name, which is nobody's",
     model(R"({"quant_method": ""})", {{"a.weight", "F32", "[1]", 4}}),
     {"config.json: byte 42", "quant_method ''"}},
    {Refusal::dialect_config, "no method", model(R"({"bits": 4})", {}), {"no quant_method"}},
    {Refusal::dialect_config,
     "no block size, which no quotient tells",
     model(R"({"quant_method": "fp8"})", {kCodes, kScale}),
     {"no weight_block_size"}},
    {Refusal::dialect_config,
     "a block of three",
     model(R"({"quant_method": "fp8", "weight_block_size": [1, 2, 3]})", {}),
     {"weight_block_size '[1,2,3]'"}},
    {Refusal::dialect_config,
     "a format of compressed-tensors that is not read",
     model(compressed("{}", "marlin-24"), {}),
     {"format 'marlin-24'"}},
    {Refusal::dialect_config,
     "a strategy that is not read",
     model(compressed(R"({"num_bits": 8, "type": "float", "strategy": "spiral"})"), {}),
     {"strategy 'spiral'"}},
    {Refusal::dialect_config,
     "a quant_algo that is not read",
     model(R"({"quant_method": "modelopt", "quant_algo": "W3"})", {}),
     {"quant_algo 'W3'"}},
    {Refusal::dialect_config,
     "a tensor of torchao that is not read",
     model("", {},
           R"("__metadata__":{"tensor_names":"[\"a\"]","a":"{\"_type\": \"Int3Tensor\"}"})"),
     {"metadata 'a'", "_type 'Int3Tensor'"}},
    {Refusal::dialect_config,
     "a compute dtype of torchao that is no text",
     model("", {{"_a_qdata", "I8", "[2,4]", 8}, {"_a_scale", "F32", "[2,1]", 8}},
           R"("__metadata__":{"tensor_names":"[\"a\"]","a":"{\"_type\": \"Int8Tensor\",)"
           R"( \"_data\": {\"block_size\": [1, 4], \"dtype\": {\"_data\": 3}}}"})"),
     {"metadata 'a'", "dtype '3'"}},
    {Refusal::dialect_config,
     "names of torchao that are no list",
     model("", {}, R"("__metadata__":{"tensor_names":"{\"a\": \"a\"}"})"),
     {"metadata 'tensor_names'", "no list of names"}},
    {Refusal::dialect_config,
     "a format of a group that is no text",
     model(R"({"quant_method": "compressed-tensors", "format": "float-quantized",)"
           R"( "config_groups": {"g": {"format": 3, "weights": {}}}})",
           {}),
     {"format '3'"}},
    {Refusal::dialect_config,
     "targets that are no texts",
     model(R"({"quant_method": "compressed-tensors", "format": "float-quantized",)"
           R"( "config_groups": {"g": {"targets": [1], "weights": {"num_bits": 8,)"
           R"( "type": "float", "strategy": "tensor"}}}})",
           {}),
     {"targets '[1]'"}},
    {Refusal::dialect_config,
     "a format of ComfyUI that is not read",
     model(
         "", {},
         R"("__metadata__":{"_quantization_metadata":"{\"layers\":{\"a\":{\"format\":\"x\"}}}"})"),
     {"metadata '_quantization_metadata'", "format 'x'"}},
    {Refusal::dialect_part,
     "scales for another block size",
     model(kFp8, {kCodes, {"a.weight_scale_inv", "F32", "[3,1]", 12}}),
     {"tensor 'a.weight_scale_inv': byte ", "[3, 1] for [2, 1]", "f8_e4m3:block128x128"}},
    {Refusal::dialect_part, "no scale", model(kFp8, {kCodes}), {"no 'a.weight_scale_inv'"}},
    {Refusal::dialect_part, "no codes", model(kFp8, {kScale}), {"no 'a.weight' (F8_E4M3)"}},
    {Refusal::dialect_part,
     "bytes that no configuration calls exponents",
     model(kFp8, {kCodes, {"a.weight_scale_inv", "U8", "[2,1]", 2}}),
     {"U8 [2, 1] for scales of"}},
    {Refusal::dialect_part,
     "packed experts that no configuration tells",
     model(kFp8, {{"a.weight", "I8", "[4,32]", 128}, {"a.scale", "F8_E8M0", "[4,2]", 8}}),
     {"tensor 'a.weight'", "I8 [4, 32] with expert_dtype ''"}},
    {Refusal::dialect_part,
     "exponents of experts for another block size",
     [](const Scratch& s) {
       s.write("model.safetensors",
               content({{"a.weight", "I8", "[4,32]", 128}, {"a.scale", "F8_E8M0", "[4,4]", 16}}));
       s.write("config.json", R"({"expert_dtype": "fp4", "quantization_config": )" + kFp8 + "}");
     },
     {"tensor 'a.scale'", "[4, 4] for [4, 2]"}},
    {Refusal::dialect_part,
     "exponents without codes",
     model(kFp8, {{"a.scale", "F8_E8M0", "[4,2]", 8}}),
     {"no 'a.weight' (F8_E4M3)"}},
    {Refusal::dialect_part,
     "a column of GPTQ in a group that is not there",
     model(R"({"quant_method": "gptq", "bits": 4, "group_size": 8})",
           {{"a.qweight", "I32", "[2,8]", 64},
            {"a.scales", "F16", "[2,8]", 32},
            {"a.qzeros", "I32", "[2,1]", 8},
            {"a.g_idx", "I32", "[16]", 64}}),
     {"tensor 'a.g_idx'", "group 16843009 of column 0, of 2 groups"}},
    {Refusal::dialect_part,
     "a column of GPTQ in a group below the first",
     model(R"({"quant_method": "gptq", "bits": 4, "group_size": -1})",
           {{"a.qweight", "I32", "[2,8]", 64},
            {"a.scales", "F16", "[1,8]", 16},
            {"a.qzeros", "I32", "[1,1]", 4},
            {"a.g_idx", "I32", "[16]", 64,
             words_of({0, 0, 0, 0xffffffff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})}}),
     {"tensor 'a.g_idx'", "group -1 of column 3, of 1 groups"}},
    {Refusal::dialect_part,
     "groups of columns for another number of columns",
     model(R"({"quant_method": "gptq", "bits": 4, "group_size": 8})",
           {{"a.qweight", "I32", "[2,8]", 64},
            {"a.scales", "F16", "[2,8]", 32},
            {"a.qzeros", "I32", "[2,1]", 8},
            {"a.g_idx", "I32", "[8]", 32}}),
     {"tensor 'a.g_idx'", "I32 [8] for I32 [16]"}},
    {Refusal::dialect_part,
     "scales of GPTQ for another group size",
     model(R"({"quant_method": "gptq", "bits": 4, "group_size": 4})",
           {{"a.qweight", "I32", "[2,8]", 64}, {"a.scales", "F16", "[2,8]", 32}}),
     {"tensor 'a.scales'", "F16 [2, 8] for F16 [4, 8]"}},
    {Refusal::dialect_config,
     "GPTQ of three bits",
     model(R"({"quant_method": "gptq", "bits": 3, "group_size": 4})", {}),
     {"bits '3'"}},
    {Refusal::dialect_config,
     "GPTQ with modules of their own bits",
     model(R"({"quant_method": "gptq", "bits": 4, "group_size": 4, "dynamic": {"a": {}}})", {}),
     {R"(dynamic '{"a":{}}')"}},
    {Refusal::dialect_config,
     "GPTQ for one vendor's kernel",
     model(R"({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"})", {}),
     {"checkpoint_format 'marlin'"}},
    {Refusal::dialect_config,
     "AWQ in another version",
     model(R"({"quant_method": "awq", "bits": 4, "version": "gemv", "zero_point": true})", {}),
     {"version 'gemv'"}},
    {Refusal::dialect_config,
     "AWQ without zero points",
     model(R"({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": false})", {}),
     {"without zero_point"}},
    {Refusal::dialect_part,
     "words that reach past the columns",
     model(compressed(kInt4, "pack-quantized"), {{"a.weight_packed", "I32", "[2,4]", 32},
                                                 {"a.weight_scale", "BF16", "[2,1]", 4},
                                                 {"a.weight_shape", "I64", "[2]", 16}}),
     {"tensor 'a.weight_shape'", "for 'a.weight_packed' I32 [2, 4], 8 columns each"}},
    {Refusal::dialect_part,
     "columns that lack a word",
     model(compressed(kInt4, "pack-quantized"),
           {{"a.weight_packed", "I32", "[2,4]", 32},
            {"a.weight_scale", "BF16", "[2,2]", 8},
            {"a.weight_shape", "I64", "[2]", 16, words_of({2, 0, 34, 0})}}),
     {"tensor 'a.weight_shape'", "[2, 34] for 'a.weight_packed' I32 [2, 4]"}},
    {Refusal::dialect_part,
     "columns of pairs that are odd",
     model(compressed(kInt4, "pack-quantized"),
           {{"a.weight_packed", "I32", "[2,4]", 32},
            {"a.weight_scale", "BF16", "[2,1]", 4},
            {"a.weight_shape", "I64", "[2]", 16, words_of({2, 0, 31, 0})}}),
     {"tensor 'a.weight_packed'"}},
    {Refusal::dialect_part,
     "words of AWQ for columns that are no multiple of eight",
     model(R"({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": true,)"
           R"( "group_size": -1})",
           {{"a.qweight", "I32", "[12,1]", 48},
            {"a.scales", "F16", "[1,8]", 16},
            {"a.qzeros", "I32", "[1,1]", 4}}),
     {"tensor 'a.qweight'", "size 0 a multiple of 8"}},
    {Refusal::dialect_config,
     "a layer of ComfyUI in two formats",
     [](const Scratch& s) {
       const std::string said = R"({"format": "float8_e5m2"})";
       s.write("model.safetensors",
               safetensors("{"
                           R"("__metadata__":{"_quantization_metadata":"{\"layers\":{\"a\":)"
                           R"({\"format\":\"float8_e4m3fn\"}}}"},)" +
                               tensor("a.comfy_quant", "U8",
                                      "[" + std::to_string(said.size()) + "]", 0, said.size()) +
                               "}",
                           said));
     },
     {"tensor 'a.comfy_quant'", "format 'float8_e5m2' of 'a'", "says is 'float8_e4m3fn'"}},
    {Refusal::dialect_part,
     "two markers of two types",
     model("", {{"a.scaled_fp8", "F8_E4M3", "[0]", 0}, {"b.scaled_fp8", "F8_E5M2", "[0]", 0}}),
     {"tensor 'b.scaled_fp8'", "F8_E5M2 [0] beside a marker of f8_e4m3"}},
    {Refusal::dialect_config,
     "asymmetric integers of eight bits",
     model(compressed(R"({"num_bits": 8, "type": "int", "strategy": "channel",)"
                      R"( "symmetric": false})",
                      "int-quantized"),
           {}),
     {"weights with symmetric 'false'"}},
    {Refusal::dialect_part,
     "codes in a module that ModelOpt excludes",
     model(R"({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["a"]})",
           {{"a.weight", "F8_E4M3", "[2,4]", 8}, {"a.weight_scale", "F32", "[]", 4}}),
     {"tensor 'a.weight'", "exclude_modules of", "config.json"}},
    {Refusal::dialect_part,
     "scales of blocks in a row",
     model(kFp8,
           {{"a.weight", "F8_E4M3", "[192,160]", 30720}, {"a.weight_scale_inv", "F32", "[4]", 16}}),
     {"tensor 'a.weight_scale_inv'", "F32 [4] for [2, 2]"}},
    {Refusal::dialect_part,
     "scales of torchao for blocks of one row",
     model("", {{"_w_qdata", "I8", "[4,8]", 32}, {"_w_scale", "F32", "[4,2]", 32}},
           R"("__metadata__":{"tensor_names":"[\"w\"]","w":"{\"_type\": \"Int8Tensor\",)"
           R"( \"_data\": {\"block_size\": [2, 4]}}"})"),
     {"tensor '_w_scale'", "[4, 2] for [2, 2]"}},
    {Refusal::dialect_part,
     "scales as the group of all others has them",
     model(R"({"quant_method": "compressed-tensors", "format": "float-quantized",)"
           R"( "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8,)"
           R"( "type": "float", "strategy": "channel"}}, "h": {"targets": ["a"], "weights": {)"
           R"("num_bits": 8, "type": "float", "strategy": "tensor"}}}})",
           {{"a.weight", "F8_E4M3", "[2,4]", 8}, {"a.weight_scale", "F32", "[2,1]", 8}}),
     {"tensor 'a.weight_scale'", "F32 [2, 1] for []"}},
    {Refusal::dialect_part,
     "words without their shape",
     model(compressed(kInt4, "pack-quantized"),
           {{"a.weight_packed", "I32", "[2,4]", 32}, {"a.weight_scale", "BF16", "[2,1]", 4}}),
     {"no 'a.weight_shape' (I64 [2])"}},
    {Refusal::dialect_part,
     "words without their scales",
     model(compressed(kInt4, "pack-quantized"), {{"a.weight_packed", "I32", "[2,4]", 32}}),
     {"tensor 'a.weight_packed'", "no 'a.weight_scale'"}},
    {Refusal::dialect_part,
     "more columns than a size can say",
     model(compressed(kInt4, "pack-quantized"),
           {{"a.weight_packed", "I32", "[0,2305843009213693952]", 0},
            {"a.weight_scale", "BF16", "[0,0]", 0}}),
     {"tensor 'a.weight_packed'", "8 times dimension 1"}},
    {Refusal::dialect_part,
     "more columns of GPTQ than a size can say",
     model(R"({"quant_method": "gptq", "bits": 4, "group_size": -1})",
           {{"a.qweight", "I32", "[2305843009213693952,0]", 0}, {"a.scales", "F16", "[1,0]", 0}}),
     {"tensor 'a.qweight'", "8 times dimension 0"}},
    {Refusal::dialect_part,
     "more tiles than a size can say",
     model("",
           {{"a.weight", "F8_E4M3", "[9223372036854775807,0]", 0},
            {"a.weight_scale", "U8", "[0,0]", 0}},
           R"("__metadata__":{"_quantization_metadata":"{\"layers\":{\"a\":{\"format\":)"
           R"(\"mxfp8\"}}}"})"),
     {"tensor 'a.weight_scale'", "U8 [0, 0] for [9223372036854775807, 0]"}},
    {Refusal::dialect_part,
     "zero points of a symmetric weight in words",
     model(compressed(kInt4, "pack-quantized"), {{"a.weight_packed", "I32", "[2,4]", 32},
                                                 {"a.weight_scale", "BF16", "[2,1]", 4},
                                                 {"a.weight_zero_point", "I32", "[1,1]", 4}}),
     {"tensor 'a.weight_zero_point'", "for weights that are symmetric"}},
    {Refusal::dialect_part,
     "a zero point of a symmetric weight that is not zero",
     model(compressed(R"({"num_bits": 8, "type": "int", "strategy": "channel"})", "int-quantized"),
           {{"a.weight", "I8", "[2,4]", 8},
            {"a.weight_scale", "F32", "[2,1]", 8},
            {"a.weight_zero_point", "I8", "[2,1]", 2}}),
     {"tensor 'a.weight_zero_point'", "not 0"}},
    {Refusal::dialect_part,
     "zero points in words, and one scale of all",
     model(compressed(R"({"num_bits": 4, "type": "int", "symmetric": false, "strategy": "tensor"})",
                      "pack-quantized"),
           {{"a.weight_packed", "I32", "[2,4]", 32},
            {"a.weight_shape", "I64", "[2]", 16, words_of({2, 0, 32, 0})},
            {"a.weight_scale", "BF16", "[1]", 2},
            {"a.weight_zero_point", "I32", "[1]", 4}}),
     {"tensor 'a.weight_packed'", "with zero points in words of rows"}},
    {Refusal::dialect_part,
     "a column in a group that is not there",
     model(compressed(kInt4, "pack-quantized"),
           {{"a.weight_packed", "I32", "[2,4]", 32},
            {"a.weight_shape", "I64", "[2]", 16, words_of({2, 0, 32, 0})},
            {"a.weight_scale", "BF16", "[2,1]", 4},
            {"a.weight_g_idx", "I32", "[32]", 128}}),
     {"tensor 'a.weight_g_idx'", "group 16843009 of column 0, of 1 groups"}},
    {Refusal::dialect_part,
     "groups of columns whose codes are not in words",
     model(compressed(R"({"num_bits": 8, "type": "int", "strategy": "channel"})", "int-quantized"),
           {{"a.weight", "I8", "[2,4]", 8},
            {"a.weight_scale", "F32", "[2,1]", 8},
            {"a.weight_g_idx", "I32", "[4]", 16}}),
     {"tensor 'a.weight_g_idx'", "for codes that are not in words"}},
    {Refusal::dialect_part,
     "no zero points",
     model(compressed(R"({"num_bits": 4, "type": "int", "symmetric": false, "strategy": "group",)"
                      R"( "group_size": 32})",
                      "pack-quantized"),
           {{"a.weight_packed", "I32", "[9,4]", 144},
            {"a.weight_scale", "BF16", "[9,1]", 18},
            {"a.weight_shape", "I64", "[2]", 16, words_of({9, 0, 32, 0})}}),
     {"no 'a.weight_zero_point' (I32 [2, 1])"}},
    {Refusal::dialect_config,
     "integers of three bits in words",
     model(compressed(R"({"num_bits": 3, "type": "int", "strategy": "channel"})", "pack-quantized"),
           {}),
     {"pack-quantized of weights of other than 4 or 8 num_bits"}},
    {Refusal::dialect_part,
     "exponents that are in no tiles",
     model("", {{"a.weight", "F8_E4M3", "[32,32]", 1024}, {"a.weight_scale", "U8", "[32,1]", 32}},
           R"("__metadata__":{"_quantization_metadata":"{\"layers\":{\"a\":{\"format\":)"
           R"(\"mxfp8\"}}}"})"),
     {"tensor 'a.weight_scale'", "[32, 1] for [128, 4]"}},
    {Refusal::dialect_config,
     "packed integers as floats of 4 bits",
     model(compressed(R"({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})",
                      "mxfp4-pack-quantized"),
           {}),
     {"type 'int'"}},
    {Refusal::dialect_config,
     "floats of 8 bits in a format of 4",
     model(compressed(R"({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32})",
                      "mxfp4-pack-quantized"),
           {}),
     {"mxfp4-pack-quantized of weights of other than 4 num_bits"}},
    {Refusal::dialect_config,
     "a group size of NVFP4 that it does not have",
     model(R"({"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups":)"
           R"( {"g": {"weights": {"group_size": 32}}}})",
           {}),
     {"group_size '32' of nvfp4"}},
    {Refusal::dialect_config,
     "NVFP4 of ModelOpt after another algorithm",
     model(R"({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})", {}),
     {"quant_algo 'NVFP4_AWQ'"}},
    {Refusal::dialect_part,
     "scales under no number",
     model(kNvfp4, {kPairs, kUnder}),
     {"tensor 'a.weight'", "no 'a.weight_scale_2' (F32)"}},
    {Refusal::dialect_part,
     "scales under two numbers",
     model(kNvfp4, {kPairs, kUnder, {"a.weight_scale_2", "F32", "[2]", 8}}),
     {"tensor 'a.weight_scale_2'", "F32 [2] for one F32"}},
    {Refusal::dialect_part,
     "scales of another type under one number",
     model(kNvfp4,
           {kPairs, {"a.weight_scale", "F32", "[2,2]", 16}, {"a.weight_scale_2", "F32", "[]", 4}}),
     {"tensor 'a.weight_scale'", "F32 [2, 2] for scales of F8_E4M3"}},
    {Refusal::dialect_part,
     "scales of NVFP4 for another block size",
     model(
         kNvfp4,
         {kPairs, {"a.weight_scale", "F8_E4M3", "[2,1]", 2}, {"a.weight_scale_2", "F32", "[]", 4}}),
     {"tensor 'a.weight_scale'", "[2, 1] for [2, 2], nvfp4 of [2, 32]"}},
    {Refusal::dialect_part,
     "a number over no scales",
     model(kNvfp4, {kPairs, {"a.weight_scale_2", "F32", "[]", 4}}),
     {"tensor 'a.weight_scale_2'", "over the scales of no weight"}},
    {Refusal::dialect_part,
     "a number over no scales, of compressed-tensors",
     model(compressed(kTensorGroup, "nvfp4-pack-quantized"),
           {{"a.weight_global_scale", "F32", "[1]", 4}}),
     {"tensor 'a.weight_global_scale'", "over the scales of no weight"}},
    {Refusal::dialect_part,
     "scales of compressed-tensors under no number",
     model(compressed(kTensorGroup, "nvfp4-pack-quantized"),
           {{"a.weight_packed", "U8", "[2,16]", 32}, kUnder}),
     {"tensor 'a.weight_packed'", "no 'a.weight_global_scale' (F32)"}},
    {Refusal::dialect_config,
     "groups that stand under no number, in a format where they do",
     model(compressed(R"({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16})",
                      "nvfp4-pack-quantized"),
           {}),
     {"strategy 'group'"}},
    {Refusal::dialect_config,
     "groups under one number, in a format without",
     model(compressed(kTensorGroup, "mxfp4-pack-quantized"), {}),
     {"strategy 'tensor_group'"}},
    {Refusal::dialect_part,
     "scales of NVFP4 that are in no tiles",
     model("", {kPairs, kUnder, {"a.weight_scale_2", "F32", "[]", 4}}, comfy("nvfp4")),
     {"tensor 'a.weight_scale'", "F8_E4M3 [2, 2] for [128, 4]"}},
    {Refusal::dialect_part,
     "numbers in the place of exponents",
     model("",
           {{"a.weight", "F8_E4M3", "[32,32]", 1024}, {"a.weight_scale", "F32", "[128,4]", 2048}},
           comfy("mxfp8")),
     {"tensor 'a.weight_scale'", "F32 [128, 4] for scales of U8 or F8_E8M0"}},
    {Refusal::dialect_part,
     "codes in a module that is not converted",
     model(R"({"quant_method": "fp8", "weight_block_size": [128, 128],)"
           R"( "modules_to_not_convert": ["a"]})",
           {kCodes, kScale}),
     {"tensor 'a.weight'", "modules_to_not_convert of", "config.json"}},
    {Refusal::dialect_part,
     "a marker of values",
     model("", {{"x.scaled_fp8", "F8_E4M3", "[3]", 3}}),
     {"tensor 'x.scaled_fp8'"}},
    {Refusal::dialect_part,
     "a zero point of torchao that is not zero",
     model("",
           {{"_w_qdata", "I8", "[2,4]", 8},
            {"_w_scale", "F32", "[2,1]", 8},
            {"_w_zero_point", "I8", "[2,1]", 2}},
           R"("__metadata__":{"tensor_names":"[\"w\"]","w":"{\"_type\": \"Int8Tensor\",)"
           R"( \"_data\": {\"block_size\": [1, 4]}}"})"),
     {"tensor '_w_zero_point'", "not 0"}},
    {Refusal::json_syntax,
     "a configuration that is cut",
     model(R"({"quant_method": )", {}),
     {"config.json: byte "}},
}};

}  // namespace
}  // namespace stowage::test
