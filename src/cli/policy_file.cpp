// SPDX-License-Identifier: Apache-2.0
#include "cli/policy_file.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>

#include "base/formatted.h"
#include "cli/text.h"

namespace stowage::cli {
namespace {

using Json = nlohmann::ordered_json;  // the first rule that matches decides

// How weights work, and what a report measures: nothing of it is in a file.
constexpr std::array<std::string_view, 5> kOfWork{"exact", "measure", "working", "blocks",
                                                  "input_cast"};
constexpr std::array<std::string_view, 5> kOfModels{"max_error", "on_exceed", "calibrate", "budget",
                                                    "buffers"};
constexpr std::array<std::string_view, 3> kNamedSkips{"diffusion", "language", "auto"};
constexpr std::array<std::pair<std::string_view, Dtype>, 3> kComputes{
    {{"float32", Dtype::f32}, {"bfloat16", Dtype::bf16}, {"float16", Dtype::f16}}};

class Reading {
 public:
  Reading(std::string path, PackOptions& options) : path_(std::move(path)), options_(options) {}

  void take(const std::string& name, const Json& value) {
    if (name == "storage")
      options_.policy.storage = storage(name, value);
    else if (name == "rules")
      for (const auto& [glob, wanted] : object(name, value).items())
        options_.policy.rules.push_back({glob, storage(formatted("rules['{}']", glob), wanted)});
    else if (name == "skip")
      take_skips(value);
    else if (name == "compute_dtype")
      options_.compute = compute(value);
    else if (name == "allow_unmatched")
      options_.allow_unmatched = flag(name, value);
    else if (name == "keep_nonfinite")
      options_.keep_nonfinite = flag(name, value);
    else if (std::ranges::count(kOfModels, name) != 0)
      refuse(name, "be left out here: it needs a model that runs (stowage.stow)", value);
    else if (std::ranges::count(kOfWork, name) == 0)
      refuse(name, "be an argument of stowage.Policy", value);
  }

 private:
  [[noreturn]] void refuse(const std::string& name, std::string_view rule, const Json& got) const {
    throw UsageError(formatted("{}: {} must {}, got {}", path_, name, rule, got.dump()));
  }
  const Json& object(const std::string& name, const Json& value) const {
    if (!value.is_object()) refuse(name, "be an object of globs", value);
    return value;
  }
  bool flag(const std::string& name, const Json& value) const {
    if (!value.is_boolean()) refuse(name, "be true or false", value);
    return value.get<bool>();
  }
  std::optional<Storage> storage(const std::string& name, const Json& value) const {
    if (value.is_null()) return std::nullopt;
    if (!value.is_string()) refuse(name, "be one storage or null", value);
    try {
      return parse_storage(value.get<std::string>());
    } catch (const Error& error) {
      throw UsageError(formatted("{}: {}: {}", path_, name, error.what()));
    }
  }
  Dtype compute(const Json& value) const {
    for (const auto& [name, dtype] : kComputes)
      if (value == name) return dtype;
    refuse("compute_dtype", "be float32, bfloat16 or float16", value);
  }
  void take_skips(const Json& value) {
    for (const Json& one : value.is_array() ? value : Json::array({value})) {
      if (!one.is_string()) refuse("skip", "be globs", one);
      const std::string glob = one.get<std::string>();
      if (std::ranges::count(kNamedSkips, glob) != 0)
        refuse("skip", "be globs: the named lists are Python's (stowage.skips)", one);
      options_.policy.skips.push_back(glob);
    }
  }

  std::string path_;
  PackOptions& options_;
};

}  // namespace

void read_policy(const std::string& path, PackOptions& options) {
  const std::string text = read_text(path);
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object())
    throw UsageError(path + ": must be the JSON object that stowage.Policy.to_dict() gives");
  Reading reading(path, options);
  for (const auto& [name, value] : json.items()) reading.take(name, value);
  if (!options.policy.storage && options.policy.rules.empty())
    throw UsageError(path + ": must have a storage or rules, has neither");
}

}  // namespace stowage::cli
