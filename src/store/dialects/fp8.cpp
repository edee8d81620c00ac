// SPDX-License-Identifier: Apache-2.0
// fp8 with scales of blocks, as DeepSeek publishes it and transformers writes it
// (FineGrainedFP8Config), by the configuration beside the files:
//   W             F8_E4M3 [O, K]
//   W_scale_inv   F32, BF16 or F8_E8M0 [ceil(O / M), ceil(K / N)], which multiplies, whatever it
//                 is called; U8 are exponents where scale_fmt is ue8m0. [M, N] is
//                 weight_block_size; without one, a scale of the whole tensor.
//   MODULE.scale  is its name beside MODULE.weight in DeepSeek's own releases
// Those have experts of E2M1 where expert_dtype, outside of the quantization_config, is fp4:
//   W             I8 [O, K / 2], the first of two columns in the low bits
//   MODULE.scale  F8_E8M0 [O, K / 32]
#include <algorithm>

#include "base/checked.h"
#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"

namespace stowage::dialects {
namespace fp8 {
namespace {

constexpr std::string_view kScaleInv = "_scale_inv", kScale = ".scale";

bool is_power(const TensorInfo& scale) { return scale.dtype == Dtype::f8_e8m0; }

// What the configuration says of all weights.
Scaling scaling_of(const QuantConfig& config) {
  const auto said = config.all().find("weight_block_size");
  if (said == config.all().end()) config.refuse("no weight_block_size");
  Storage storage{.codes = Codes::f8_e4m3, .scaling = {.kind = Scaling::Kind::tensor}};
  if (said->is_null()) return storage.scaling;
  const auto size = [&](std::size_t i) {
    const bool legal = said->is_array() && said->size() == 2 && (*said)[i].is_number_unsigned();
    return legal ? (*said)[i].get<std::uint64_t>() : 0;
  };
  try {
    return parse_storage(formatted("f8_e4m3:block{}x{}", size(0), size(1))).scaling;
  } catch (const Error&) {
    config.refuse("weight_block_size " + in_quotes(said->dump()));
  }
}

void check(const QuantConfig& config) {
  if (const auto fmt = config.text("fmt"); fmt && *fmt != "e4m3")
    config.refuse("fmt " + in_quotes(*fmt));
  const auto scale = config.text("scale_fmt");
  if (scale && *scale != "float" && *scale != "ue8m0")
    config.refuse("scale_fmt " + in_quotes(*scale));
}

// The weight that a tensor scales by its name; "" for none. A scale that is a number of the model
// itself has no codes beside it.
std::string weight_of(const Claims& claims, const TensorInfo& scale) {
  const std::string& name = scale.name;
  if (name.ends_with(kScaleInv)) return name.substr(0, name.size() - kScaleInv.size());
  if (!name.ends_with(kScale)) return "";
  std::string weight = name.substr(0, name.size() - kScale.size()) + ".weight";
  const TensorInfo* const codes = claims.find(weight);
  const bool scales = codes != nullptr && (codes->dtype == Dtype::f8_e4m3 ||
                                           (codes->dtype == Dtype::i8 && is_power(scale)));
  return scales || (codes == nullptr && is_power(scale)) ? weight : "";
}

// Experts of two E2M1 in a byte.
void set_packed(const Claims& claims, const TensorInfo& codes, ScaledCodes& weight) {
  const std::string& said = claims.source().config->expert_dtype();
  if (said != "fp4")
    refuse(Refusal::dialect_part, claims.place(codes),
           formatted("{} with expert_dtype {}", described(codes), in_quotes(said)));
  weight.storage = parse_storage("mxfp4");
  weight.codes_in = Dtype::i8;
}

void read(Claims& claims) {
  const QuantConfig& config = *claims.source().config;
  check(config);
  const Scaling scaling = scaling_of(config);
  const bool exponents = config.text("scale_fmt") == "ue8m0";
  for (const TensorInfo& scale : claims.tensors()) {
    const std::string name = weight_of(claims, scale);
    if (name.empty()) continue;
    ScaledCodes weight{.name = name, .codes = name, .scale = scale.name};
    weight.storage = {.codes = Codes::f8_e4m3, .scaling = scaling};
    weight.bytes_are_exponents = exponents;
    const TensorInfo* const codes = claims.find(name);
    if (codes != nullptr && codes->dtype == Dtype::i8) set_packed(claims, *codes, weight);
    WeightInfo& made = weight.add(claims, claims.place(scale));
    for (const char* other : {"input_scale", "activation_scale"})
      add_activation_scale(claims, made, other);
    check_not_listed(claims, made, "modules_to_not_convert");
  }
  refuse_unscaled(claims, kScaleInv);
}

bool is_expert(const WeightInfo& weight) { return weight.storage == parse_storage("mxfp4"); }
bool has_experts(const Wording& wording) {
  return std::ranges::any_of(wording.weights(), is_expert);
}

// Where experts are of fp4 the names are those of DeepSeek's releases, which alone have them.
bool write(Wording& wording, const WeightInfo& weight) {
  const auto& [codes, dialect, scaling] = weight.storage;
  const bool blocks =
      scaling.kind == Scaling::Kind::block2 || scaling.kind == Scaling::Kind::tensor;
  const bool dense = codes == Codes::f8_e4m3 && blocks && scaling.type != ScaleType::f16;
  if (weight.shape.rank() != 2 || !weight.name.ends_with(".weight")) return false;
  if (!dense && !is_expert(weight)) return false;
  ScaledCodes made{.name = weight.name, .codes = weight.name};
  made.scale = has_experts(wording) ? std::string(module_of(weight.name)) + std::string(kScale)
                                    : weight.name + std::string(kScaleInv);
  if (is_expert(weight)) made.codes_in = Dtype::i8;
  made.write(wording, weight);
  return true;
}

void finish(Wording& wording) {
  const auto dense = [](const Storage& storage) {
    return storage.codes == Codes::f8_e4m3 ? to_string(storage) : "";
  };
  const auto first = std::ranges::find_if_not(wording.weights(), is_expert);
  if (first == wording.weights().end())
    wording.refuse(wording.weights().front(), "experts alone, without a matrix of f8_e4m3");
  for (const WeightInfo& weight : wording.weights())
    if (!is_expert(weight) && dense(weight.storage) != dense(first->storage))
      wording.refuse(weight,
                     formatted("{} beside {} as {}: one weight_block_size is said of all",
                               to_string(weight.storage), first->name, to_string(first->storage)));
  const Scaling& scaling = first->storage.scaling;
  Wording::Json size;  // null: of whole tensors
  if (scaling.kind == Scaling::Kind::block2) size = {scaling.rows, scaling.block};
  wording.set_config({{"quant_method", "fp8"},
                      {"modules_to_not_convert", wording.plain_modules()},
                      {"activation_scheme", "dynamic"},
                      {"weight_block_size", size},
                      {"scale_fmt", scaling.type == ScaleType::e8m0 ? "ue8m0" : "float"},
                      {"fmt", "e4m3"}});
  if (has_experts(wording)) wording.set_key("expert_dtype", "fp4");
}

std::string recognise(const TensorSource&) { return ""; }  // its configuration alone says it

}  // namespace
}  // namespace fp8

const FileDialect kFp8{"fp8", "fp8", fp8::recognise, fp8::read, fp8::write, fp8::finish};

}  // namespace stowage::dialects
