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
#include <algorithm>
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

ScaledCodes coded(const std::string& name, const Algorithm& algorithm) {
  return {.name = name,
          .codes = name,
          .scale = name + std::string(kScale),
          .third = name + std::string(kOuter),
          .storage = parse_storage(algorithm.storage),
          .bytes_are_exponents = algorithm.exponents};
}

void read(Claims& claims) {
  const QuantConfig& config = *claims.source().config;
  const Algorithm& algorithm = algorithm_of(config);
  const Storage storage = parse_storage(algorithm.storage);
  if (storage.scaling.type == ScaleType::e4m3) check_groups(config, storage);
  for (const TensorInfo& scale : claims.tensors()) {
    if (!scale.name.ends_with(kWeightScale) || claims.is_taken(scale.name)) continue;
    const std::string name = scale.name.substr(0, scale.name.size() - kScale.size());
    WeightInfo& made = coded(name, algorithm).add(claims, claims.place(scale));
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

const Algorithm* algorithm_for(const Storage& storage) {
  const auto at = std::ranges::find_if(kAlgorithms, [&](const Algorithm& algorithm) {
    Storage made = parse_storage(algorithm.storage);
    if (algorithm.exponents) made.scaling.type = ScaleType::e8m0;
    return made == storage;
  });
  return at == kAlgorithms.end() ? nullptr : &*at;
}

bool write(Wording& wording, const WeightInfo& weight) {
  const Algorithm* const algorithm = algorithm_for(weight.storage);
  if (algorithm == nullptr || weight.shape.rank() != 2 || !weight.name.ends_with(".weight"))
    return false;
  coded(weight.name, *algorithm).write(wording, weight);
  return true;
}

// Both files say it: readers of either take it from there.
void finish(Wording& wording) {
  wording.check_same("quant_algo", [](const Storage& storage) { return to_string(storage); });
  const Storage& storage = wording.weights().front().storage;
  const Algorithm& algorithm = *algorithm_for(storage);
  const std::vector<std::string> plain = wording.plain_modules();
  Wording::Json weights{
      {"dynamic", false}, {"num_bits", trait(storage.codes).bits}, {"type", "float"}};
  Wording::Json own{{"quant_algo", algorithm.name}, {"kv_cache_quant_algo", nullptr}};
  if (storage.scaling.kind == Scaling::Kind::block)
    weights["group_size"] = own["group_size"] = storage.scaling.block;
  own["exclude_modules"] = plain;
  Wording::Json group{{"weights", weights}, {"targets", Wording::Json::array({"Linear"})}};
  if (wording.has_input_scales()) group["input_activations"] = weights;
  const Wording::Json producer{{"name", "modelopt"}};  // by which readers know the form
  wording.set_config({{"config_groups", {{"group_0", group}}},
                      {"ignore", plain},
                      {"quant_algo", algorithm.name},
                      {"producer", producer},
                      {"quant_method", "modelopt"}});
  wording.set_file("hf_quant_config.json", {{"producer", producer}, {"quantization", own}});
}

std::string recognise(const TensorSource&) { return ""; }

}  // namespace
}  // namespace modelopt

const FileDialect kModelOpt{"modelopt",     "modelopt",      modelopt::recognise,
                            modelopt::read, modelopt::write, modelopt::finish};

}  // namespace stowage::dialects
