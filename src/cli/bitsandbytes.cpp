// SPDX-License-Identifier: Apache-2.0
// Keys and defaults are those of transformers' BitsAndBytesConfig.to_dict(), 5.x.
#include "cli/bitsandbytes.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/formatted.h"
#include "stowage/descriptor.h"
#include "stowage/quantization_config.h"

namespace stowage::cli {
namespace {

using Json = nlohmann::ordered_json;

// Models of transformers' Conv1D, whose matrices lie [in, out]: bitsandbytes transposes them first.
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

std::string torch_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::bf16:
      return "bfloat16";
    case Dtype::f16:
      return "float16";
    case Dtype::f64:
      return "float64";
    default:
      return "float32";
  }
}

std::string_view module_name(const PackTask& packing) { return module_path(packing.item.name); }

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

// Modules that stay plain although transformers would take them for 4-bit ones. lm_head always: it
// may be tied, and then no tensor of the file shows it.
std::vector<std::string> skipped_modules(const std::vector<PackTask>& packings) {
  std::vector<std::string> skipped{"lm_head"};
  for (const PackTask& packing : packings) {
    const std::string& name = packing.item.name;
    if (packing.packed() || packing.item.shape.rank() != 2 || !name.ends_with(".weight")) continue;
    if (!is_embedding(name) && module_name(packing) != "lm_head")
      skipped.emplace_back(module_name(packing));
  }
  return skipped;
}

// transformers skips every module whose path starts or ends with a listed name.
void check_skips(const std::vector<std::string>& skipped, const std::vector<PackTask>& packings) {
  for (const PackTask& packing : packings)
    for (const std::string& name : skipped)
      if (packing.packed() &&
          (module_name(packing).ends_with(name) || module_name(packing).starts_with(name + ".")))
        throw Error(Code::unsupported,
                    formatted("--for bitsandbytes: llm_int8_skip_modules cannot name '{}' "
                              "without '{}', which is packed",
                              name, module_name(packing)));
}

Json quantization_config(const std::vector<PackTask>& packings,
                         const std::vector<std::string>& skipped) {
  const auto packed = std::ranges::find_if(packings, &PackTask::packed);
  const bool nested = std::ranges::any_of(packings, [](const PackTask& packing) {
    return packing.packed() && packing.storage.scaling.nested;
  });
  return {{"_load_in_4bit", true},
          {"_load_in_8bit", false},
          {"bnb_4bit_compute_dtype", torch_name(packed->compute.value_or(Dtype::bf16))},
          {"bnb_4bit_quant_storage", "uint8"},
          {"bnb_4bit_quant_type", std::string(trait(packed->storage.codes).name)},
          {"bnb_4bit_use_double_quant", nested},
          {"llm_int8_enable_fp32_cpu_offload", false},
          {"llm_int8_has_fp16_weight", false},
          {"llm_int8_skip_modules", skipped},
          {"llm_int8_threshold", 6.0},
          {"load_in_4bit", true},
          {"load_in_8bit", false},
          {"quant_method", "bitsandbytes"}};
}

// transformers 5 writes "dtype", older ones "torch_dtype".
void set_dtype(Json& config, std::optional<Dtype> compute) {
  if (!compute) return;
  const bool older = config.contains("torch_dtype") || !config.contains("dtype");
  if (older) config["torch_dtype"] = torch_name(*compute);
  if (config.contains("dtype")) config["dtype"] = torch_name(*compute);
}

std::string text_of(const Json& config) { return config.dump(2) + "\n"; }

std::string config_for_bitsandbytes(const Output& output, const std::vector<PackTask>& packings,
                                    const PackOptions& options) {
  check_storages(packings);
  if (!output.is_folder())
    throw UsageError("--for bitsandbytes: OUT must be a folder, got '" + options.out + "'");
  const auto text = output.config();
  if (!text) throw Error(Code::io, output.config_path() + ": must exist, transformers reads it");
  Json config = parse_config(output, *text);
  const Json type = config.contains("model_type") ? config["model_type"] : Json();
  if (std::ranges::any_of(kTransposed, [&](std::string_view other) { return type == other; }))
    throw Error(Code::unsupported, output.config_path() +
                                       ": model_type must be one whose layers "
                                       "are Linear, got " +
                                       type.get<std::string>());
  const std::vector<std::string> skipped = skipped_modules(packings);
  check_skips(skipped, packings);
  set_dtype(config, options.compute);
  config["quantization_config"] = quantization_config(packings, skipped);
  return text_of(config);
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
  return text_of(config);
}

std::optional<std::string> plain_config(const Output& output, std::optional<Dtype> compute) {
  auto text = output.config();
  if (!text) return text;
  Json config = parse_config(output, *text);
  const Json before = config;
  config.erase("quantization_config");
  set_dtype(config, compute);
  return config == before ? text : text_of(config);
}

}  // namespace stowage::cli
