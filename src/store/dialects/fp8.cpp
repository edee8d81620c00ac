// SPDX-License-Identifier: Apache-2.0
// fp8 with scales of blocks, as DeepSeek publishes it and transformers writes it
// (FineGrainedFP8Config), by the configuration beside the files:
//   W            F8_E4M3 [O, K]
//   W_scale_inv  F32, BF16 or F8_E8M0 [ceil(O / M), ceil(K / N)], which multiplies, whatever it is
//                called; U8 are exponents where scale_fmt is ue8m0. [M, N] is weight_block_size;
//                without one, a scale of the whole tensor.
#include "base/checked.h"
#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/eight_bit.h"

namespace stowage::dialects {
namespace fp8 {
namespace {

constexpr std::string_view kScaleInv = "_scale_inv";

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

void read(Claims& claims) {
  const QuantConfig& config = *claims.source().config;
  check(config);
  const Scaling scaling = scaling_of(config);
  const bool exponents = config.text("scale_fmt") == "ue8m0";
  for (const TensorInfo& scale : claims.tensors()) {
    if (!scale.name.ends_with(kScaleInv)) continue;
    const std::string name = scale.name.substr(0, scale.name.size() - kScaleInv.size());
    EightBit weight{.name = name, .codes = name, .scale = scale.name};
    weight.storage = {.codes = Codes::f8_e4m3, .scaling = scaling};
    weight.bytes_are_exponents = exponents;
    WeightInfo& made = weight.add(claims, claims.place(scale));
    for (const char* other : {"input_scale", "activation_scale"})
      add_activation_scale(claims, made, other);
    check_not_listed(claims, made, "modules_to_not_convert");
  }
  refuse_unscaled(claims, kScaleInv);
}

std::string recognise(const TensorSource&) { return ""; }  // its configuration alone says it

}  // namespace
}  // namespace fp8

const FileDialect kFp8{"fp8", "fp8", fp8::recognise, fp8::read};

}  // namespace stowage::dialects
