// SPDX-License-Identifier: Apache-2.0
// ModelOpt of NVIDIA, by quant_algo in config.json, or in its own hf_quant_config.json alone:
//   W                F8_E4M3 [O, K]
//   W_scale          FP8: F32 []; FP8_PC_PT: F32 [O, 1] or [O]; MXFP8: U8 exponents [O, K / 32]
//   MODULE.*_scale   numbers for activations
// Its own decoder rounds the scale of FP8 to the compute dtype first; kernels that scale a product,
// and everybody else, do not: neither do we (docs/dialects.md).
#include <array>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"

namespace stowage::dialects {
namespace modelopt {
namespace {

constexpr std::string_view kWeightScale = ".weight_scale", kScale = "_scale";

struct Algorithm {
  std::string_view name, storage;
  bool exponents;
};
constexpr std::array<Algorithm, 3> kAlgorithms{{{"FP8", "f8_e4m3:tensor", false},
                                                {"FP8_PC_PT", "f8_e4m3:row", false},
                                                {"MXFP8", "f8_e4m3:block32", true}}};

const Algorithm& algorithm_of(const QuantConfig& config) {
  const std::string said = config.text("quant_algo").value_or("");
  for (const Algorithm& algorithm : kAlgorithms)
    if (algorithm.name == said) return algorithm;
  config.refuse("quant_algo " + in_quotes(said));
}

void read(Claims& claims) {
  const QuantConfig& config = *claims.source().config;
  const Algorithm& algorithm = algorithm_of(config);
  for (const TensorInfo& scale : claims.tensors()) {
    if (!scale.name.ends_with(kWeightScale) || claims.is_taken(scale.name)) continue;
    const std::string name = scale.name.substr(0, scale.name.size() - kScale.size());
    ScaledCodes weight{.name = name, .codes = name, .scale = scale.name};
    weight.storage = parse_storage(algorithm.storage);
    weight.bytes_are_exponents = algorithm.exponents;
    WeightInfo& made = weight.add(claims, claims.place(scale));
    for (const char* other : {"input_scale", "output_scale", "k_scale", "v_scale"})
      add_activation_scale(claims, made, other);
    for (const char* key : {"ignore", "exclude_modules"}) check_not_listed(claims, made, key);
  }
  refuse_unscaled(claims, kScale);
}

std::string recognise(const TensorSource&) { return ""; }

}  // namespace
}  // namespace modelopt

const FileDialect kModelOpt{"modelopt", "modelopt", modelopt::recognise, modelopt::read};

}  // namespace stowage::dialects
