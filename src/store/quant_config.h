// SPDX-License-Identifier: Apache-2.0
// What the config.json beside a model says of how its weights are quantized: the object under
// "quantization_config", and the dtype that the model computes in. Of the rest only expert_dtype is
// read.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/refusal.h"
#include "stowage/storage.h"

namespace stowage {

class QuantConfig {
 public:
  /// The text of `path`; nothing where it has no quantization_config. Throws bad_file.
  static std::optional<QuantConfig> parse(const std::string& path, std::string_view text);
  /// Of config.json in a folder, else of hf_quant_config.json.
  static std::optional<QuantConfig> in_folder(const std::string& folder);

  const std::string& method() const noexcept { return method_; }  // "fp8", ...
  const std::optional<Dtype>& compute() const noexcept { return compute_; }
  /// Of DeepSeek's experts, which stands beside quantization_config: "fp4"; "" where it does not.
  const std::string& expert_dtype() const noexcept { return expert_dtype_; }
  const nlohmann::json& all() const noexcept { return all_; }
  /// Nothing where the key is absent or null; refuses values of another type.
  std::optional<std::string> text(const char* key) const;
  std::vector<std::string> texts(const char* key) const;
  /// The module of a weight, if the lists of that key name it: by its path, or by a part of it at
  /// dots that begins or ends the path.
  bool lists(const char* key, std::string_view module) const;

  const Place& place() const noexcept { return place_; }
  [[noreturn]] void refuse(const std::string& got) const;

 private:
  QuantConfig(Place place, std::string_view object);
  void set_method();

  Place place_;
  nlohmann::json all_;
  std::string method_, expert_dtype_;
  std::optional<Dtype> compute_;
};

/// The value of a key of the outermost object of a JSON text, found without reading the rest as
/// strictly as JSON asks: where it begins, and its length. Python writes Infinity.
struct JsonMember {
  std::size_t begin, size;
};
std::optional<JsonMember> find_member(std::string_view json, std::string_view key);

}  // namespace stowage
