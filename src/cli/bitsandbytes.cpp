// SPDX-License-Identifier: Apache-2.0
// Keys and defaults are those of transformers' BitsAndBytesConfig.to_dict(), 5.x.
#include "cli/bitsandbytes.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/formatted.h"
#include "cli/text.h"
#include "stowage/descriptor.h"
#include "stowage/quantization_config.h"

namespace stowage::cli {
namespace {

using Json = nlohmann::ordered_json;

// Models of transformers' Conv1D, whose matrices lie [in, out].
constexpr std::array<std::string_view, 5> kTransposed{"gpt2", "openai-gpt", "ctrl", "imagegpt",
                                                      "decision_transformer"};

Json parse_config(const Output& output, const std::string& text) {
  try {
    Json config = Json::parse(text);
    if (config.is_object()) return config;
  } catch (const Json::parse_error& error) {
    throw Error(Code::bad_file,
                formatted("{}: must be JSON, byte {}", output.config_path(), error.byte));
  } catch (const Json::out_of_range&) {
    throw Error(Code::bad_file, output.config_path() + ": must have numbers that doubles hold");
  }
  throw Error(Code::bad_file, output.config_path() + ": must be a JSON object");
}

// Readers of a dialect take a matrix for that of a Linear module, which lies [out, in].
void check_linear(const Output& output, const Json& config) {
  const Json type = config.contains("model_type") ? config["model_type"] : Json();
  if (std::ranges::any_of(kTransposed, [&](std::string_view other) { return type == other; }))
    throw Error(Code::unsupported,
                formatted("{}: model_type must be one whose layers are Linear, got {}",
                          output.config_path(), type.get<std::string>()));
}

void check_storages(const std::vector<PackTask>& packings) {
  const PackTask* first = nullptr;
  for (const PackTask& packing : packings) {
    if (!packing.packed()) continue;
    const std::string found = packing.item.name + " as " + to_string(packing.storage);
    if (describe(packing.storage).file != FileForm::quant_state)
      throw UsageError("--for bitsandbytes: storages must be nf4 or fp4, got " + found);
    if (packing.item.shape.rank() != 2 || is_embedding(packing.item.name))
      throw UsageError("--for bitsandbytes: must pack weights of Linear modules, got " + found);
    if (first == nullptr) first = &packing;
    if (packing.storage.codes != first->storage.codes)
      throw UsageError("--for bitsandbytes: must be all nf4 or all fp4, got both");
  }
  if (first == nullptr) throw UsageError("--for bitsandbytes: must pack a weight, got none");
}

// transformers 5 writes "dtype", older ones "torch_dtype".
void set_dtype(Json& config, std::optional<Dtype> compute) {
  if (!compute) return;
  const bool older = config.contains("torch_dtype") || !config.contains("dtype");
  if (older) config["torch_dtype"] = torch_name(*compute);
  if (config.contains("dtype")) config["dtype"] = torch_name(*compute);
}

void set_keys(Json& config, const std::map<std::string, std::string>& keys) {
  for (const auto& [key, value] : keys) config[key] = Json::parse(value);
}

std::string config_for_bitsandbytes(const Output& output, const std::vector<PackTask>& packings,
                                    const PackOptions& options) {
  check_storages(packings);
  if (!output.is_folder())
    throw UsageError("--for bitsandbytes: OUT must be a folder, got '" + options.out + "'");
  const auto text = output.config();
  if (!text) throw Error(Code::io, output.config_path() + ": must exist, transformers reads it");
  Json config = parse_config(output, *text);
  check_linear(output, config);
  DialectModel model;
  for (const PackTask& packing : packings) {
    const Item& item = packing.item;
    if (packing.packed())
      model.weights.push_back({item.name, packing.storage, item.shape, {}, packing.compute});
    else
      for (const Declaration& plain : declarations(packing)) model.others.push_back(plain);
  }
  set_dtype(config, options.compute);
  set_keys(config, in_dialect("bitsandbytes", model).config);
  return json_text(config);
}

}  // namespace

std::optional<std::string> packed_config(const Output& output,
                                         const std::vector<PackTask>& packings,
                                         const PackOptions& options) {
  if (options.for_bitsandbytes) return config_for_bitsandbytes(output, packings, options);
  const auto text = output.config();
  if (!text) return text;
  std::vector<WeightInfo> resting;
  for (const PackTask& packing : packings) {
    const WeightInfo* const weight = packing.item.weight;
    if (packing.packed())
      resting.push_back({packing.item.name, packing.storage, packing.item.shape, {}, {}});
    else if (packing.action == PackTask::Action::copy && weight != nullptr)
      resting.push_back({weight->name, weight->storage, weight->shape, {}, {}});
  }
  const std::string said = quantization_config(resting);
  if (said.empty()) return plain_config(output, options.compute);
  Json config = parse_config(output, *text);
  set_dtype(config, options.compute);
  config["quantization_config"] = Json::parse(said);
  return json_text(config);
}

SideFiles converted_configs(const Output& output, const DialectFiles& files,
                            const PackOptions& options) {
  SideFiles made{.made = files.files, .says_quantized = true};
  const auto text = output.config();
  Json config = text ? parse_config(output, *text) : Json::object();
  check_linear(output, config);
  if (files.config.empty()) {
    made.config = plain_config(output, std::nullopt);
    return made;
  }
  if (!output.is_folder())
    throw UsageError(formatted("--to {}: OUT must be a folder, whose config.json says it, got '{}'",
                               options.dialect, options.out));
  for (const char* of_others : {"quantization_config", "compression_config", "expert_dtype"})
    config.erase(of_others);
  set_keys(config, files.config);
  made.config = json_text(config);
  return made;
}

std::optional<std::string> plain_config(const Output& output, std::optional<Dtype> compute) {
  auto text = output.config();
  if (!text) return text;
  Json config = parse_config(output, *text);
  const Json before = config;
  config.erase("quantization_config");
  set_dtype(config, compute);
  return config == before ? text : json_text(config);
}

}  // namespace stowage::cli
