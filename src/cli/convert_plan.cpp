// SPDX-License-Identifier: Apache-2.0
#include "cli/convert_plan.h"

#include <algorithm>
#include <cstring>

#include "base/formatted.h"
#include "cli/restated.h"
#include "store/policy.h"

namespace stowage::cli {
namespace {

constexpr std::string_view kInputScale = "input_scale";

bool is_scale(const TensorInfo& tensor) {
  const std::string_view last = std::string_view(tensor.name).substr(tensor.name.rfind('.') + 1);
  return is_value_dtype(tensor.dtype) && last.find("scale") != std::string_view::npos;
}

// A number for activations has one meaning in all dialects that call it so, beside 8-bit codes of
// the same values.
bool is_kept(const TensorInfo& tensor, const PackTask& packing, std::string_view dialect) {
  const bool named = dialect.starts_with("compressed-tensors") || dialect == "modelopt";
  const Scaling::Kind kind = packing.resting().scaling.kind;
  return named && !packing.packed() && packing.resting().codes == Codes::f8_e4m3 &&
         (kind == Scaling::Kind::tensor || kind == Scaling::Kind::row) &&
         tensor.shape.elements() == 1 && tensor.name.ends_with("." + std::string(kInputScale));
}

// What stands beside the weights of IN and tells more than what they are.
void keep_activations(const File& file, std::vector<PackTask>& packings, std::string_view dialect,
                      Conversion& made) {
  std::vector<PackTask> kept;
  for (const PackTask& packing : packings) {
    if (packing.item.weight == nullptr) continue;
    for (const std::string& name : packing.item.weight->beside) {
      const TensorInfo* const tensor = file.find(name);
      if (tensor == nullptr || !is_scale(*tensor)) continue;
      if (packing.rests() && is_kept(*tensor, packing, dialect))
        kept.push_back({.item = {name, tensor->shape, nullptr, tensor, tensor->bytes},
                        .reason = "a number for activations"});
      else
        made.left_out.push_back(name);
    }
  }
  packings.insert(packings.end(), kept.begin(), kept.end());
}

// That of IN's own dialect says nothing of OUT.
std::map<std::string, std::string> metadata_of(const File& file, const DialectFiles& files) {
  std::map<std::string, std::string> made = files.metadata;
  for (const auto& [key, value] : file.metadata()) {
    const bool of_dialect = key == "_quantization_metadata" || key == "tensor_names" ||
                            file.find(key) != nullptr || file.find_weight(key) != nullptr;
    if (!of_dialect) made.emplace(key, value);
  }
  return made;
}

// What rests as it is must not be rounded where nobody asked for it.
void check_rounded(const File& file, const PackTask& packing, const std::string& dialect) {
  const auto rounded = [](const DialectTensor& tensor) { return tensor.form.rounded; };
  if (packing.packed() || std::ranges::none_of(packing.said, rounded)) return;
  const Weight weight = restated(file.weight(packing.item.name), *packing.written);
  const Weight other = with_rounded_scales(weight);
  float said = 0, held = 0;
  std::memcpy(&said, weight.part(1), sizeof said);
  std::memcpy(&held, other.part(1), sizeof held);
  if (std::memcmp(&said, &held, sizeof said) != 0)
    throw Error(
        Code::unsupported,
        formatted("{}: must have a scale that bf16 holds, as {} rounds it, got {} (--storage "
                  "{} quantizes it anew)",
                  packing.item.name, dialect, said, to_string(*packing.written)));
}

}  // namespace

Conversion plan_conversion(const File& file, std::vector<PackTask>& packings,
                           const std::string& dialect) {
  Conversion made;
  if (!file.unreadable().empty()) {
    const auto& [name, beside] = *file.unreadable().begin();
    throw Error(
        Code::unsupported,
        formatted("{}: must be a weight that is read here, got codes with {}", name, beside));
  }
  keep_activations(file, packings, dialect, made);
  DialectModel model;
  for (PackTask& packing : packings) {
    if (!packing.rests()) {
      for (const Declaration& plain : declarations(packing)) model.others.push_back(plain);
      continue;
    }
    WeightInfo weight{
        packing.item.name, packing.resting(), packing.item.shape, {}, packing.computes()};
    packing.written = storage_in_dialect(dialect, weight).value_or(weight.storage);
    if (*packing.written != weight.storage)
      packing.reason += formatted(", the same values as {}", to_string(*packing.written));
    weight.storage = *packing.written;
    model.weights.push_back(std::move(weight));
  }
  made.files = in_dialect(dialect, model);
  auto said = made.files.weights.begin();
  for (PackTask& packing : packings)
    if (packing.rests()) packing.said = std::move(*said++);
  for (const PackTask& packing : packings) check_rounded(file, packing, dialect);
  made.metadata = metadata_of(file, made.files);
  return made;
}

}  // namespace stowage::cli
