// SPDX-License-Identifier: Apache-2.0
// How many experts a token takes, as a model's config or its GGUF file says, and how often each was
// used, as `Uses.save` of Python writes it.
#include <algorithm>
#include <array>
#include <filesystem>
#include <numeric>

#include "base/file.h"
#include "base/formatted.h"
#include "plan/experts.h"
#include "store/json_fields.h"
#include "stowage/plan.h"

namespace stowage {
namespace planning {
namespace {

constexpr std::array<const char*, 6> kRouted{"num_experts_per_tok", "num_experts_per_token",
                                             "experts_per_token",   "moe_topk",
                                             "moe_top_k",           "num_experts_per_topk"};
constexpr std::string_view kOfGguf = ".expert_used_count";
constexpr std::uint64_t kUsesVersion = 1;

// Multimodal models have the config of the text in an object of its own.
std::int64_t find_routed(const nlohmann::json& config) {
  for (const char* key : kRouted)
    if (const auto at = config.find(key); at != config.end() && at->is_number_unsigned())
      return at->get<std::int64_t>();
  for (const auto& [key, inner] : config.items())
    if (inner.is_object())
      if (const std::int64_t routed = find_routed(inner); routed > 0) return routed;
  return 0;
}

std::vector<double> counts_of(const JsonFields& weight) {
  std::vector<double> counts;
  for (const auto& count : weight.list("by_index")) {
    if (!count.is_number() || count.get<double>() < 0)
      weight.refuse("by_index", "must hold numbers of at least 0");
    counts.push_back(count.get<double>());
  }
  return counts;
}

double sum_of(const std::vector<double>& counts) {
  return std::accumulate(counts.begin(), counts.end(), 0.0);
}

}  // namespace

std::int64_t routed_in(std::string_view config) {
  return find_routed(parse_document(config, "config.json"));
}

std::string config_of(const File& file) {
  for (const auto& [key, value] : file.metadata())
    if (key.ends_with(kOfGguf)) return formatted("{{\"{}\": {}}}", kRouted.front(), value);
  const auto beside = std::filesystem::path(file.paths().front()).parent_path() / "config.json";
  if (!std::filesystem::exists(beside)) return "";
  const MappedFile mapped(beside.string());
  return {reinterpret_cast<const char*>(mapped.data()), static_cast<std::size_t>(mapped.size())};
}

}  // namespace planning

inline namespace v0 {

std::map<std::string, std::vector<double>> routing_from_json(std::string_view text,
                                                             std::string_view where) {
  const nlohmann::json document = parse_document(text, where);
  const JsonFields root(document, std::string(where));
  if (root.whole("stowage_uses") != planning::kUsesVersion)
    root.refuse("stowage_uses", "must be 1");
  const JsonFields weights = root.fields("weights");
  std::map<std::string, std::vector<double>> found;
  for (const auto& [name, weight] : weights.all().items()) {
    std::vector<double> counts = planning::counts_of({weight, root.where() + ": " + name});
    if (counts.empty()) continue;
    if (const auto expert = planning::expert_of(name);
        expert && expert->apart && counts.size() == 1) {
      std::vector<double>& each = found[expert->layer];
      each.resize(std::max(each.size(), static_cast<std::size_t>(expert->index) + 1));
      double& uses = each[static_cast<std::size_t>(expert->index)];
      uses = std::max(uses, counts.front());
      continue;
    }
    std::vector<double>& most = found[std::string(planning::layer_of(name))];
    if (planning::sum_of(counts) >= planning::sum_of(most)) most = std::move(counts);
  }
  return found;
}

}  // namespace v0
}  // namespace stowage
