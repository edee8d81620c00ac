// SPDX-License-Identifier: Apache-2.0
#include "store/dialects/wording.h"

#include <algorithm>

#include "base/formatted.h"
#include "store/policy.h"

namespace stowage::dialects {

std::vector<std::string> Wording::plain_modules() const {
  std::vector<std::string> found;
  const auto is_lm_head = [](const auto& one) { return module_path(one.name) == "lm_head"; };
  if (std::ranges::none_of(weights(), is_lm_head)) found.emplace_back("lm_head");
  for (const Declaration& other : model_.others) {
    const bool matrix = other.shape.rank() == 2 && other.name.ends_with(".weight");
    if (matrix && !is_embedding(other.name) && !is_lm_head(other))
      found.emplace_back(module_path(other.name));
  }
  return found;
}

bool Wording::has_input_scales() const {
  return std::ranges::all_of(weights(), [this](const WeightInfo& weight) {
    const std::string name = formatted("{}.input_scale", module_path(weight.name));
    return std::ranges::find(model_.others, name, &Declaration::name) != model_.others.end();
  });
}

void Wording::check_same(const char* what, std::string (*of)(const Storage& storage)) const {
  for (const WeightInfo& weight : weights())
    if (of(weight.storage) != of(weights().front().storage))
      refuse(weight, formatted("{} beside {} as {}: one {} is said of all weights",
                               to_string(weight.storage), weights().front().name,
                               to_string(weights().front().storage), what));
}

void Wording::refuse(const WeightInfo& weight, const std::string& got) const {
  throw Error(Code::unsupported,
              formatted("{}: must be as its dialect has it, got {}", weight.name, got));
}

void Wording::add_part(const std::string& name, Dtype dtype, const Shape& shape, int part,
                       const PartForm& form) {
  files_.weights.back().push_back(
      {{name, dtype, shape, {}}, DialectTensor::From::part, part, form});
}
void Wording::add_text(const std::string& name, Dtype dtype, const Shape& shape,
                       std::string bytes) {
  files_.weights.back().push_back(
      {{name, dtype, shape, {}}, DialectTensor::From::text, 0, {}, std::move(bytes)});
}
void Wording::add_quant_state(const std::string& name, Dtype dtype, const Shape& shape,
                              std::string bytes) {
  files_.weights.back().push_back(
      {{name, dtype, shape, {}}, DialectTensor::From::quant_state, 0, {}, std::move(bytes)});
}
void Wording::add_marker(const std::string& name, Dtype dtype, const Shape& shape,
                         std::string bytes) {
  files_.markers.push_back(
      {{name, dtype, shape, {}}, DialectTensor::From::text, 0, {}, std::move(bytes)});
}

}  // namespace stowage::dialects
