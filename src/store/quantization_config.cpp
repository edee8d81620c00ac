// SPDX-License-Identifier: Apache-2.0
// Keys and values are those of QuantizationConfig.model_dump() of compressed-tensors, 0.15 to 0.20.
#include "stowage/quantization_config.h"

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "base/formatted.h"
#include "store/json.h"
#include "stowage/descriptor.h"

namespace stowage {
namespace {

using Kind = Scaling::Kind;
constexpr std::string_view kWeight = ".weight";

// A scheme of compressed-tensors: how modules are scaled.
struct Scheme {
  std::string_view type, strategy, format;
  std::int32_t group = 0;  // values, 0: none
  auto operator<=>(const Scheme&) const = default;
};

// What holds weights of modules that its readers dequantize; nothing for all else: formats and
// scalings that it lacks, ragged groups, which it refuses, and parameters of other names.
std::optional<Scheme> scheme_of(const WeightInfo& weight) {
  const Scaling& scaling = weight.storage.scaling;
  Scheme made{"float", "channel", "float-quantized"};
  if (weight.storage.codes == Codes::int8)
    made = {"int", "channel", "int-quantized"};
  else if (weight.storage.codes != Codes::f8_e4m3)
    return std::nullopt;
  if (scaling.type == ScaleType::e8m0 || scaling.type == ScaleType::absmax) return std::nullopt;
  if (scaling.zero != Zero::none || scaling.actorder) return std::nullopt;
  if (weight.shape.rank() != 2 || !weight.name.ends_with(kWeight)) return std::nullopt;
  if (scaling.kind == Kind::row) return made;
  if (scaling.kind == Kind::tensor) {
    made.strategy = "tensor";
    return made;
  }
  if (scaling.kind != Kind::block || weight.shape[1] % scaling.block != 0) return std::nullopt;
  made.strategy = "group";
  made.group = scaling.block;
  return made;
}

std::string group_text(const Scheme& scheme, const std::vector<std::string>& modules) {
  std::string targets;
  for (const std::string& module : modules)
    targets += (targets.empty() ? "" : ", ") + json_string(module);
  return formatted(
      R"({{"targets": [{}], "weights": {{"num_bits": 8, "type": "{}", "symmetric": true, )"
      R"("group_size": {}, "strategy": "{}", "dynamic": false}}, "input_activations": null, )"
      R"("output_activations": null, "format": "{}"}})",
      targets, scheme.type, scheme.group == 0 ? "null" : std::to_string(scheme.group),
      scheme.strategy, scheme.format);
}

}  // namespace

inline namespace v0 {

std::string quantization_config(std::span<const WeightInfo> weights) {
  std::map<Scheme, std::vector<std::string>> groups;
  bool sayable = true, rests = false;
  for (const WeightInfo& weight : weights) {
    if (is_cast(weight.storage)) continue;  // values as they are
    rests = true;
    const auto scheme = scheme_of(weight);
    sayable = sayable && scheme.has_value();
    const std::size_t module = weight.name.size() - kWeight.size();
    if (scheme) groups[*scheme].push_back(weight.name.substr(0, module));
  }
  if (!rests) return "";
  for (auto& [scheme, modules] : groups) std::ranges::sort(modules);
  std::string format = groups.empty() ? "" : std::string(groups.begin()->first.format);
  for (const auto& [scheme, modules] : groups)
    if (scheme.format != format) format = "mixed-precision";
  if (!sayable) {
    // Readers check the name of a format before they open a file.
    groups = {{Scheme{"int", "channel", "stowage"}, {"Linear"}}};
    format = "stowage";
  }
  std::string texts;
  for (const auto& [scheme, modules] : groups)
    texts +=
        formatted("{}\"group_{}\": {}", texts.empty() ? "" : ", ",
                  std::distance(groups.begin(), groups.find(scheme)), group_text(scheme, modules));
  return formatted(
      R"({{"quant_method": "compressed-tensors", "format": "{}", "quantization_status": )"
      R"("compressed", "config_groups": {{{}}}, "ignore": [], "kv_cache_scheme": null}})",
      format, texts);
}

}  // namespace v0
}  // namespace stowage
