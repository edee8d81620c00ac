// SPDX-License-Identifier: Apache-2.0
// ComfyUI, by a JSON beside each layer, in the header, or both; names and prefixes are free:
//   __metadata__._quantization_metadata   {"layers": {"LAYER": {"format": "float8_e4m3fn"}}}
//   LAYER.comfy_quant                     U8, {"format": "float8_e4m3fn"}
//   LAYER.weight, LAYER.weight_scale      F8_E4M3 or F8_E5M2 [O, K], F32 []; its decoder rounds
//                                         the scale to the compute dtype ahead of the product
//   LAYER.weight, LAYER.weight_scale      mxfp8: F8_E4M3 [O, K], both multiples of 32; U8 exponents
//                                         [O, K / 32], rounded up to tiles of [128, 4]
//   LAYER.weight, LAYER.weight_scale      nvfp4: U8 [O, K / 2], the first of two columns in the
//                                         high bits, both multiples of 16; F8_E4M3 [O, K / 16] in
//                                         the same tiles
//   LAYER.weight_scale_2                  nvfp4: F32 [], which its decoder multiplies in bf16
//   LAYER.input_scale                     a number for activations
// The shape of a layer of mxfp8 or nvfp4 before it was padded is not said.
#include <algorithm>
#include <array>

#include "base/formatted.h"
#include "store/dialects/dialects.h"
#include "store/dialects/scaled_codes.h"
#include "store/json_fields.h"

namespace stowage::dialects {
namespace comfyui {
namespace {

using Json = nlohmann::json;
constexpr std::string_view kMetadata = "_quantization_metadata", kQuant = ".comfy_quant";

constexpr PartForm kRounded{.rounded = true};
constexpr PartForm kHighFirst{
    .in_file = 4, .in_part = 4, .word = 8, .order = {1, 0, 2, 3, 4, 5, 6, 7}};
constexpr PartForm kTiles{.in_file = 8, .in_part = 8, .word = 8, .tiled = true};

struct Format {
  std::string_view name, storage;
  PartForm scales, codes = {};
};
constexpr std::array<Format, 4> kFormats{
    {{"float8_e4m3fn", "f8_e4m3:tensor", kRounded},
     {"float8_e5m2", "f8_e5m2:tensor", kRounded},
     {"mxfp8", "f8_e4m3:block32:e8m0", kTiles},
     {"nvfp4", "f4_e2m1:block16:e4m3_bf16", kTiles, kHighFirst}}};

// What is said of a layer, and where: the tensor beside it, or the metadata of a shard.
struct Said {
  const Format* format;
  Place place;
};
using Layers = std::map<std::string, Said>;

const Format& format_of(const Place& place, const Json& layer) {
  const auto said = layer.is_object() ? layer.find("format") : layer.end();
  if (!layer.is_object() || said == layer.end() || !said->is_string())
    refuse(Refusal::dialect_config, place, "a layer without a format");
  for (const Format& format : kFormats)
    if (format.name == said->get<std::string>()) return format;
  refuse(Refusal::dialect_config, place, "format " + in_quotes(said->get<std::string>()));
}

void add_layer(Layers& layers, const std::string& name, const Said& said) {
  const auto [at, added] = layers.emplace(name, said);
  if (!added && at->second.format != said.format)
    refuse(Refusal::dialect_config, said.place,
           formatted("format {} of {}, which the header says is {}", in_quotes(said.format->name),
                     in_quotes(name), in_quotes(at->second.format->name)));
}

void read_header(const TensorSource& source, Layers& layers) {
  for (std::size_t i = 0; i < source.metadata.size(); ++i) {
    const auto text = source.metadata[i]->find(std::string(kMetadata));
    if (text == source.metadata[i]->end()) continue;
    const Place place{formatted("{}: metadata {}", source.paths[i], in_quotes(kMetadata)), "", {}};
    const Json said = parse_document(text->second, place);
    const auto all = said.find("layers");
    if (all == said.end() || !all->is_object()) refuse(Refusal::dialect_config, place, "no layers");
    for (const auto& [name, layer] : all->items())
      add_layer(layers, name, {&format_of(place, layer), place});
  }
}

void read_tensors(const Claims& claims, Layers& layers) {
  for (const TensorInfo& tensor : claims.tensors()) {
    if (!tensor.name.ends_with(kQuant)) continue;
    const Place place = claims.place(tensor);
    if (tensor.dtype != Dtype::u8 || tensor.bytes > kLongestText)
      refuse(Refusal::dialect_part, place, described(tensor) + " for a short U8 text");
    const Json said = parse_document(claims.read(tensor), place);
    const std::string name = tensor.name.substr(0, tensor.name.size() - kQuant.size());
    add_layer(layers, name, {&format_of(place, said), place});
  }
}

ScaledCodes coded(const std::string& layer, const Format& format) {
  ScaledCodes weight{.name = layer + ".weight"};
  weight.codes = weight.name;
  weight.scale = weight.name + "_scale";
  weight.storage = parse_storage(format.storage);
  weight.third = weight.name + "_scale_2";
  weight.bytes_are_exponents = weight.storage.scaling.type == ScaleType::e8m0;
  weight.codes_form = format.codes, weight.scale_form = format.scales;
  return weight;
}

void read(Claims& claims) {
  Layers layers;
  read_header(claims.source(), layers);
  read_tensors(claims, layers);
  for (const auto& [name, said] : layers) {
    WeightInfo& made = coded(name, *said.format).add(claims, said.place);
    add_activation_scale(claims, made, "input_scale");
    const std::string beside = name + std::string(kQuant);
    if (claims.find(beside) != nullptr) claims.add_beside(made, beside);
  }
}

// Layers of both sizes a multiple of what its kernels pad them to: the true shape is said nowhere.
bool write(Wording& wording, const WeightInfo& weight) {
  const auto format = std::ranges::find_if(
      kFormats, [&](const Format& one) { return parse_storage(one.storage) == weight.storage; });
  if (format == kFormats.end() || weight.shape.rank() != 2 || !weight.name.ends_with(".weight"))
    return false;
  const std::int32_t block = weight.storage.scaling.block;
  if (block != 0 && (weight.shape[0] % block != 0 || weight.shape[1] % block != 0)) return false;
  const std::string layer(module_of(weight.name));
  coded(layer, *format).write(wording, weight);
  std::string said = Json{{"format", format->name}}.dump();
  const auto length = static_cast<std::int64_t>(said.size());
  wording.add_text(layer + std::string(kQuant), Dtype::u8, Shape{length}, std::move(said));
  return true;
}

void finish(Wording&) {}

std::string recognise(const TensorSource& source) {
  for (const auto* metadata : source.metadata)
    if (metadata->contains(std::string(kMetadata)))
      return formatted("metadata {}", in_quotes(kMetadata));
  for (const TensorInfo& tensor : source.tensors)
    if (tensor.name.ends_with(kQuant)) return formatted("tensor {}", in_quotes(tensor.name));
  return "";
}

}  // namespace
}  // namespace comfyui

const FileDialect kComfyUi{"comfyui",      "", comfyui::recognise, comfyui::read, comfyui::write,
                           comfyui::finish};

}  // namespace stowage::dialects
