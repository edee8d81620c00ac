// SPDX-License-Identifier: Apache-2.0
// Experts of mixtures in a plan: which weights are of the same one, how often a pass uses it, and
// stacks of matrices as units that come one by one. What is of one expert is used together, and so
// gets one place.
#pragma once
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/plan.h"

namespace stowage::planning {

/// Whose weight it is: "experts.3.up_proj.weight" and "experts.up_proj[3]" are of "experts", 3.
struct ExpertName {
  std::string of, layer;  // the module of all of them, and what names have up to a layer's number
  std::int64_t index;
  bool apart;  // it is a tensor of its own: a model may have all of them in a stack
};
std::optional<ExpertName> expert_of(std::string_view name);

/// What a name has up to its last number: "model.layers.3" of "model.layers.3.mlp.experts".
std::string_view layer_of(std::string_view name);
/// The stack of a slice's name, "experts.w" of "experts.w[3]"; any other name as it is.
std::string_view stack_of(std::string_view name);
/// Whether a weight of three dimensions is the matrices of experts, as far as its name tells.
bool names_experts(std::string_view name);

/// Whether it names one matrix of a stack.
bool is_slice(std::string_view name);

/// Puts a unit for each matrix in the place of stacks whose matrices can come one by one, but for
/// those of these names.
void split_stacks(std::vector<PlanUnit>& units,
                  const std::set<std::string, std::less<>>& whole = {});

/// How many experts a token takes, by the text of a config.json; 0: it does not say. Throws
/// bad_file.
std::int64_t routed_in(std::string_view config);
/// The text of the config.json beside a file, or what the metadata of GGUF say in its place; ""
/// where there is none. Throws io.
std::string config_of(const File& file);
/// Uses and shares of experts by `routed`, `config` and `routing` of the options. Throws
/// invalid_argument for a layer of `routing` that the units do not have, or that has another number
/// of experts, and where `routed` is of no expert.
void apply_routing(const PlanOptions& options, std::vector<PlanUnit>& units);

/// Sorts what is of one expert behind the first of it; the rest stays in order.
void sort_experts(std::vector<PlanUnit>& units);
/// For each unit the number of those that get one place with it: they rise by at most one.
std::vector<std::size_t> groups_of(const std::vector<PlanUnit>& units);

}  // namespace stowage::planning
