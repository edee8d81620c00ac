// SPDX-License-Identifier: Apache-2.0
#include "store/policy.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace stowage {
namespace {

constexpr std::array<std::string_view, 5> kHeads{"classifier", "score", "qa_outputs",
                                                 "classification_head", "lm_head"};
constexpr std::array<std::string_view, 3> kRouters{"router", "gate", "shared_expert_gate"};
constexpr std::int64_t kFewRows = 4;  // a router has at most this part of its columns as rows
// Parts that PEFT adds to the path of what it wraps.
constexpr std::array<std::string_view, 2> kWrappers{"base_layer", "original_module"};
// Embeddings whose name does not hold "embed": GPT-2's tables, and T5's.
constexpr std::array<std::string_view, 3> kTables{"wte", "wpe", "shared"};
constexpr int kMinRank = 2, kMaxRank = 5;  // of Linear, Embedding and Conv weights

bool contains(std::span<const std::string_view> list, std::string_view word) {
  return std::ranges::find(list, word) != list.end();
}

std::string lower(std::string_view text) {
  std::string result(text);
  std::ranges::transform(result, result.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

std::string_view last_part(std::string_view path) {
  const std::size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string_view without_wrappers(std::string_view path) {
  while (path.find('.') != std::string_view::npos && contains(kWrappers, last_part(path)))
    path.remove_suffix(last_part(path).size() + 1);
  return path;
}

// Why the defaults leave a tensor plain; empty if they select it.
std::string default_refusal(const Policy& policy, std::string_view name, const Shape& shape) {
  if (name != "weight" && !name.ends_with(".weight")) return "not named weight";
  if (shape.rank() > kMaxRank) return "more than five dimensions";
  if (lower(name).find("norm") != std::string::npos) return "a norm";
  if (is_head(name)) return "a head; name it in a rule to pack it";
  if (is_router(name, shape)) return "a router; name it in a rule to pack it";
  if (!policy.linears_only) return "";
  if (shape.rank() != 2) return "not a matrix";
  return is_embedding(name) ? "an embedding" : "";
}

}  // namespace

Rule parse_rule(std::string_view text) {
  const std::size_t equals = text.rfind('=');
  if (equals == std::string_view::npos || equals == 0)
    throw Error(Code::invalid_argument,
                "rule: must be GLOB=STORAGE or GLOB=plain, got '" + std::string(text) + "'");
  const std::string_view storage = text.substr(equals + 1);
  Rule rule{std::string(text.substr(0, equals)), std::nullopt};
  if (storage != "plain") rule.storage = parse_storage(storage);
  return rule;
}

bool matches(const std::string& glob, std::string_view name) {
  for (std::string text(name); !text.empty(); text = module_path(text))
    if (fnmatch(glob.c_str(), text.c_str(), FNM_NOESCAPE) == 0) return true;
  return false;
}

Choice choose(const Policy& policy, std::string_view name, const Shape& shape, bool floating) {
  if (!floating) return {std::nullopt, "not floating"};
  if (shape.rank() < kMinRank) return {std::nullopt, "fewer than two dimensions"};
  for (const std::string& glob : policy.skips)
    if (matches(glob, name)) return {std::nullopt, "skip '" + glob + "' keeps it plain"};
  for (const Rule& rule : policy.rules) {
    if (!matches(rule.glob, name)) continue;
    if (rule.storage) return {rule.storage, "rule '" + rule.glob + "'"};
    return {std::nullopt, "rule '" + rule.glob + "' keeps it plain"};
  }
  if (!policy.storage) return {std::nullopt, "no rule names it"};
  const std::string refusal = default_refusal(policy, name, shape);
  if (!refusal.empty()) return {std::nullopt, refusal};
  return {policy.storage, ""};
}

std::string_view module_path(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view{} : name.substr(0, dot);
}

bool is_head(std::string_view name) {
  return contains(kHeads, last_part(without_wrappers(module_path(name))));
}

bool is_router(std::string_view name, const Shape& shape) {
  if (shape.rank() != 2 || shape[0] * kFewRows > shape[1]) return false;
  return contains(kRouters, last_part(without_wrappers(module_path(name))));
}

bool is_embedding(std::string_view name) {
  const std::string part = lower(last_part(without_wrappers(module_path(name))));
  return part.find("emb") != std::string::npos || contains(kTables, part);
}

}  // namespace stowage
