// SPDX-License-Identifier: Apache-2.0
// What writers of dialects share while they put a model into the words of one: each says the
// tensors of a weight, weight by weight, and then what its readers are told of all.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/dialect.h"

namespace stowage::dialects {

class Wording {
 public:
  using Json = nlohmann::ordered_json;
  /// `form`: of the dialect, "" where it may choose.
  Wording(std::string_view form, const DialectModel& model) : form_(form), model_(model) {}

  std::string_view form() const noexcept { return form_; }
  bool asks_for(std::string_view form) const noexcept { return form_.empty() || form_ == form; }
  const std::vector<WeightInfo>& weights() const noexcept { return model_.weights; }
  const DialectModel& model() const noexcept { return model_; }
  /// Modules with a matrix that stays plain and could be taken for a weight of a Linear module; the
  /// head always, which may be tied and then shows in no tensor, unless it rests.
  std::vector<std::string> plain_modules() const;
  /// Whether every module with a weight has a number for its activations, MODULE.input_scale.
  bool has_input_scales() const;
  /// What all weights must have in common; refuses the first that has it not, naming both.
  void check_same(const char* what, std::string (*of)(const Storage& storage)) const;
  [[noreturn]] void refuse(const WeightInfo& weight, const std::string& got) const;

  /// Begins the tensors of the next weight.
  void next_weight() { files_.weights.emplace_back(); }
  void add_part(const std::string& name, Dtype dtype, const Shape& shape, int part,
                const PartForm& form = {});
  void add_text(const std::string& name, Dtype dtype, const Shape& shape, std::string bytes);
  void add_quant_state(const std::string& name, Dtype dtype, const Shape& shape, std::string bytes);
  void add_marker(const std::string& name, Dtype dtype, const Shape& shape, std::string bytes);
  void set_config(const Json& quantization) { set_key("quantization_config", quantization); }
  void set_key(const std::string& key, const Json& value) { files_.config[key] = value.dump(); }
  void set_file(const std::string& name, const Json& text) {
    files_.files[name] = text.dump(4) + "\n";
  }
  void set_metadata(const std::string& key, const Json& value) {
    files_.metadata[key] = value.dump();
  }

  DialectFiles take() { return std::move(files_); }

 private:
  std::string_view form_;
  const DialectModel& model_;
  DialectFiles files_;
};

/// The bytes of numbers, as a tensor has them.
template <class T>
std::string bytes_of_numbers(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)};
}

}  // namespace stowage::dialects
