// SPDX-License-Identifier: Apache-2.0
// ModelOpt of NVIDIA, by quant_algo in config.json, or in its own hf_quant_config.json alone:
//   W                F8_E4M3 [O, K]
//   W_scale          FP8: F32 []; FP8_PC_PT: F32 [O, 1] or [O]; MXFP8: U8 exponents [O, K / 32]
//   W, W_scale,      NVFP4: U8 [O, K / 2], the first of two columns in the low bits; F8_E4M3
//   W_scale_2        [O, K / 16]; F32 [], which multiplies the scales first
//   MODULE.*_scale   numbers for activations
// Its own decoder rounds the scale of FP8 to the compute dtype first; kernels that scale a product,
// and everybody else, do not: neither do we (docs/dialects.md). It also reads code 8 of NVFP4 as
// +0, which is -0.
#include <array>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"

namespace stowage::dialects {
namespace modelopt {
namespace {

using Json = nlohmann::json;
constexpr std::string_view kWeightScale = ".weight_scale", kScale = "_scale", kOuter = "_scale_2";

struct Algorithm {
  std::string_view name, storage;
  bool exponents;
};
constexpr std::array<Algorithm, 4> kAlgorithms{{{"FP8", "f8_e4m3:tensor", false},
                                                {"FP8_PC_PT", "f8_e4m3:row", false},
                                                {"MXFP8", "f8_e4m3:block32", true},
                                                {"NVFP4", "nvfp4", false}}};

const Algorithm& algorithm_of(const QuantConfig& config) {
  const std::string said = config.text("quant_algo").value_or("");
  for (const Algorithm& algorithm : kAlgorithms)
    if (algorithm.name == said) return algorithm;
  config.refuse("quant_algo " + in_quotes(said));
}

// Where the configuration says how many columns share a scale, it says those of the algorithm: for
// all, or of groups of modules.
void check_group(const QuantConfig& config, const Json& said, const Storage& storage) {
  const auto size = said.find("group_size");
  if (size == said.end() || size->is_null() || *size == storage.scaling.block) return;
  config.refuse(formatted("group_size {} of {}", in_quotes(size->dump()), to_string(storage)));
}

void check_groups(const QuantConfig& config, const Storage& storage) {
  check_group(config, config.all(), storage);
  const auto groups = config.all().find("config_groups");
  if (groups == config.all().end() || !groups->is_object()) return;
  for (const auto& [key, group] : groups->items()) {
    const auto weights = group.is_object() ? group.find("weights") : group.end();
    if (group.is_object() && weights != group.end() && weights->is_object())
      check_group(config, *weights, storage);
  }
}

void read(Claims& claims) {
  const QuantConfig& config = *claims.source().config;
  const Algorithm& algorithm = algorithm_of(config);
  const Storage storage = parse_storage(algorithm.storage);
  if (storage.scaling.type == ScaleType::e4m3) check_groups(config, storage);
  for (const TensorInfo& scale : claims.tensors()) {
    if (!scale.name.ends_with(kWeightScale) || claims.is_taken(scale.name)) continue;
    const std::string name = scale.name.substr(0, scale.name.size() - kScale.size());
    ScaledCodes weight{.name = name, .codes = name, .scale = scale.name};
    weight.storage = storage;
    weight.third = name + std::string(kOuter);
    weight.bytes_are_exponents = algorithm.exponents;
    WeightInfo& made = weight.add(claims, claims.place(scale));
    for (const char* other : {"input_scale", "output_scale", "k_scale", "v_scale"})
      add_activation_scale(claims, made, other);
    for (const char* key : {"ignore", "exclude_modules"}) check_not_listed(claims, made, key);
  }
  refuse_unscaled(claims, kScale);
  for (const TensorInfo& tensor : claims.tensors())
    if (tensor.name.ends_with(kOuter) && !claims.is_taken(tensor.name))
      refuse(Refusal::dialect_part, claims.place(tensor),
             described(tensor) + " over the scales of no weight");
}

std::string recognise(const TensorSource&) { return ""; }

}  // namespace
}  // namespace modelopt

const FileDialect kModelOpt{"modelopt", "modelopt", modelopt::recognise, modelopt::read};

}  // namespace stowage::dialects
