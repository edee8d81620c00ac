// SPDX-License-Identifier: Apache-2.0
// ComfyUI before its layers had a JSON of their own. A marker says the form of a whole file:
//   PREFIX.scaled_fp8    of the type of the codes (F32: F8_E4M3), without elements, or with two:
//                        products in full precision, which is how everything here is multiplied
//   LAYER.weight         F8_E4M3 or F8_E5M2 [O, K]
//   LAYER.scale_weight   F32 [] or [1], rounded to the compute dtype ahead of the product
//   LAYER.scale_input    a number for activations
// Layers without a scale_weight are plain.
#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"

namespace stowage::dialects {
namespace comfyui_scaled {
namespace {

constexpr std::string_view kMarker = "scaled_fp8", kScaleWeight = ".scale_weight";

bool is_marker(const TensorInfo& tensor) {
  return tensor.name == kMarker || tensor.name.ends_with("." + std::string(kMarker));
}

// The storage that the markers say.
Storage read_markers(Claims& claims) {
  std::optional<Codes> codes;
  for (const TensorInfo& marker : claims.tensors()) {
    if (!is_marker(marker)) continue;
    const bool e5m2 = marker.dtype == Dtype::f8_e5m2;
    const bool legal = e5m2 || marker.dtype == Dtype::f8_e4m3 || marker.dtype == Dtype::f32;
    const std::int64_t elements = marker.shape.elements();
    if (!legal || (elements != 0 && elements != 2))
      refuse(Refusal::dialect_part, claims.place(marker),
             described(marker) + " for F8_E4M3, F8_E5M2 or F32 with no elements or two");
    const Codes said = e5m2 ? Codes::f8_e5m2 : Codes::f8_e4m3;
    if (codes && *codes != said)
      refuse(Refusal::dialect_part, claims.place(marker),
             formatted("{} beside a marker of {}", described(marker), trait(*codes).name));
    codes = said;
    claims.take_marker(marker.name);
  }
  return {.codes = codes.value_or(Codes::f8_e4m3), .scaling = {.kind = Scaling::Kind::tensor}};
}

ScaledCodes coded(const std::string& layer, const Storage& storage) {
  return {.name = layer + ".weight",
          .codes = layer + ".weight",
          .scale = layer + std::string(kScaleWeight),
          .storage = storage,
          .scale_form = {.rounded = true}};
}

void read(Claims& claims) {
  const Storage storage = read_markers(claims);
  for (const TensorInfo& scale : claims.tensors()) {
    if (!scale.name.ends_with(kScaleWeight)) continue;
    const std::string layer = scale.name.substr(0, scale.name.size() - kScaleWeight.size());
    const ScaledCodes weight = coded(layer, storage);
    add_activation_scale(claims, weight.add(claims, claims.place(scale)), "scale_input");
  }
}

bool write(Wording& wording, const WeightInfo& weight) {
  const Storage& storage = weight.storage;
  const bool codes =
      storage == parse_storage("f8_e4m3:tensor") || storage == parse_storage("f8_e5m2:tensor");
  if (!codes || weight.shape.rank() != 2 || !weight.name.ends_with(".weight")) return false;
  coded(std::string(module_of(weight.name)), storage).write(wording, weight);
  return true;
}

void finish(Wording& wording) {
  wording.check_same("marker", [](const Storage& storage) { return to_string(storage); });
  wording.add_marker(std::string(kMarker), trait(wording.weights().front().storage.codes).disk,
                     Shape{0}, "");
}

std::string recognise(const TensorSource& source) {
  for (const TensorInfo& tensor : source.tensors)
    if (is_marker(tensor)) return formatted("tensor {}", in_quotes(tensor.name));
  return "";
}

}  // namespace
}  // namespace comfyui_scaled

const FileDialect kComfyUiScaled{"comfyui-scaled",          "",
                                 comfyui_scaled::recognise, comfyui_scaled::read,
                                 comfyui_scaled::write,     comfyui_scaled::finish};

}  // namespace stowage::dialects
