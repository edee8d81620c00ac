// SPDX-License-Identifier: Apache-2.0
#include "plan/experts.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <numeric>
#include <span>
#include <unordered_map>

#include "base/formatted.h"

namespace stowage {
namespace planning {
namespace {

constexpr std::uint64_t kLeastSlice = 16 << 10;  // bytes: a smaller matrix comes with its stack
constexpr std::int64_t kMostExperts = 1 << 16;   // of a layer: a higher number is none of an expert
constexpr double kUnseen = 0.5;  // uses of an expert that nobody saw (Krichevsky and Trofimov)

std::optional<std::int64_t> number_of(std::string_view text) {
  std::int64_t value = 0;
  const auto [stopped, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc{} && stopped == text.data() + text.size() && value >= 0 &&
                     !text.starts_with('-');
  return whole ? std::optional(value) : std::nullopt;
}

std::string_view without(std::string_view text, std::string_view end) {
  return text.ends_with(end) ? text.substr(0, text.size() - end.size()) : text;
}

std::string_view parent_of(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : name.substr(0, dot);
}

// "name[3]": where the bracket is, and the number.
std::optional<std::pair<std::size_t, std::int64_t>> slice_of(std::string_view name) {
  if (!name.ends_with(']')) return std::nullopt;
  const std::size_t bracket = name.rfind('[');
  if (bracket == std::string_view::npos) return std::nullopt;
  const auto index = number_of(name.substr(bracket + 1, name.size() - bracket - 2));
  return index && *index < kMostExperts ? std::optional(std::pair(bracket, *index)) : std::nullopt;
}

// Calls `each(begin, part)` for what dots part; stops where it returns false.
template <class Each>
void for_parts(std::string_view name, Each&& each) {
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    if (!each(begin, name.substr(begin, end - begin))) return;
    begin = end + 1;
  }
}

// Of a stack in a file whose rows of one index have bytes of their own, but for what all share.
bool comes_by_index(const PlanUnit& unit) {
  if (!unit.stack || unit.shape.rank() != 3 || unit.scratch != 0) return false;
  if (std::max(unit.shape[0], unit.total) < 2) return false;
  if (unit.rest < kLeastSlice * static_cast<std::uint64_t>(unit.shape[0])) return false;
  Storage storage;
  try {
    storage = parse_storage(unit.storage);
  } catch (const Error&) {
    return false;  // a tensor that is no weight
  }
  const Layout all = layout(storage, unit.shape);
  const Layout one = layout(storage, Shape({1, unit.shape[1], unit.shape[2]}));
  for (std::size_t i = 0; i < static_cast<std::size_t>(all.count); ++i) {
    const std::int64_t bytes = one.parts[i].bytes;
    if (all.parts[i].bytes != bytes && all.parts[i].bytes != bytes * unit.shape[0]) return false;
  }
  return true;
}

struct Experts {
  std::string layer;
  std::int64_t count = 0;
  bool apart = false;  // those that nobody used may be left out of uses
};

// The last matrix of a stack that is one unit, as where an accelerator is: it fetches of it what
// tokens are routed to. Else whose weight a unit is.
std::optional<ExpertName> last_expert_of(const PlanUnit& unit) {
  if (!comes_by_index(unit)) return expert_of(unit.name);
  return expert_of(formatted("{}[{}]", unit.name, unit.first + unit.shape[0] - 1));
}

std::map<std::string, Experts> experts_in(const std::vector<PlanUnit>& units) {
  std::map<std::string, Experts> found;
  for (const PlanUnit& unit : units)
    if (const auto expert = last_expert_of(unit)) {
      Experts& experts = found[expert->of];
      experts.layer = expert->layer;
      experts.count = std::max({experts.count, expert->index + 1, unit.total});
      experts.apart |= expert->apart;
    }
  return found;
}

std::string_view last_part(std::string_view name) {
  return name.substr(std::min(name.rfind('.') + 1, name.size()));
}

// Models name the layers of files otherwise: "model.layers.3" is "language_model.layers.3", where
// no other layer has that number.
const Experts* find_layer(const std::map<std::string, Experts>& all, std::string_view layer) {
  const Experts* by_number = nullptr;
  std::size_t found = 0;
  for (const auto& [of, experts] : all) {
    if (experts.layer == layer) return &experts;
    if (last_part(experts.layer) != last_part(layer)) continue;
    by_number = &experts;
    ++found;
  }
  return found == 1 ? by_number : nullptr;
}

// How often a token uses each: probabilities that add up to `routed`, none above 1.
std::vector<double> probabilities(const std::vector<double>& counts, std::int64_t routed) {
  double sum = 0;
  for (const double count : counts) sum += count + kUnseen;
  std::vector<double> found;
  for (const double count : counts)
    found.push_back(std::min(1.0, static_cast<double>(routed) * (count + kUnseen) / sum));
  return found;
}

std::map<std::string, std::vector<double>> by_layer(const PlanOptions& options,
                                                    const std::map<std::string, Experts>& all) {
  std::map<std::string, std::vector<double>> counts;
  for (const auto& [layer, given] : options.routing) {
    const Experts* const experts = find_layer(all, layer);
    if (experts == nullptr)
      throw Error(Code::invalid_argument,
                  "plan: uses of experts must be of layers that the model has, got " + layer);
    const auto count = static_cast<std::size_t>(experts->count);
    if (given.size() > count || (given.size() < count && !experts->apart))
      throw Error(Code::invalid_argument,
                  formatted("plan: uses of experts must be of all {} of {}, got {}", experts->count,
                            experts->layer, given.size()));
    counts[experts->layer] = given;
    counts[experts->layer].resize(count);
  }
  return counts;
}

}  // namespace

std::string_view layer_of(std::string_view name) {
  std::size_t end = name.size();
  for_parts(name, [&](std::size_t begin, std::string_view part) {
    if (number_of(part)) end = begin + part.size();
    return true;
  });
  return name.substr(0, end);
}

std::string_view stack_of(std::string_view name) {
  const auto slice = slice_of(name);
  return slice ? name.substr(0, slice->first) : name;
}

bool is_slice(std::string_view name) { return slice_of(name).has_value(); }

bool names_experts(std::string_view name) {
  bool found = false;
  for_parts(name, [&](std::size_t, std::string_view part) {
    found |= part.ends_with("experts") || part.ends_with("_exps");
    return !found;
  });
  return found;
}

std::optional<ExpertName> expert_of(std::string_view name) {
  if (const auto slice = slice_of(name)) {
    const std::string of(parent_of(without(name.substr(0, slice->first), ".weight")));
    return ExpertName{of, std::string(layer_of(of)), slice->second, false};
  }
  std::optional<ExpertName> found;
  bool after = false;
  for_parts(name, [&](std::size_t begin, std::string_view part) {
    constexpr std::string_view kExpert = "expert_";
    const auto index = number_of(part.starts_with(kExpert) ? part.substr(kExpert.size()) : part);
    if (after && index && *index < kMostExperts) {
      const std::string of(name.substr(0, begin - 1));
      found = ExpertName{of, std::string(layer_of(of)), *index, true};
    }
    after = part.ends_with("experts");
    return !found;
  });
  return found;
}

void split_stacks(std::vector<PlanUnit>& units, const std::set<std::string, std::less<>>& whole) {
  std::vector<PlanUnit> all;
  for (PlanUnit& unit : units) {
    if (!comes_by_index(unit) || whole.contains(unit.name)) {
      all.push_back(std::move(unit));
      continue;
    }
    PlanUnit one = unit;
    one.shape = Shape({1, unit.shape[1], unit.shape[2]});
    one.rest = static_cast<std::uint64_t>(layout(parse_storage(unit.storage), one.shape).bytes());
    one.bytes = one.index_scratch = 0;
    one.scratch = unit.index_scratch;
    one.rests = true;
    one.stack = false;
    for (std::int64_t i = 0; i < unit.shape[0]; ++i) {
      one.name = formatted("{}[{}]", unit.name, unit.first + i);
      all.push_back(one);
    }
  }
  units = std::move(all);
}

void apply_routing(const PlanOptions& options, std::vector<PlanUnit>& units) {
  if (options.routed < 0)
    throw Error(Code::invalid_argument,
                formatted("plan: routed must be at least 0, got {}", options.routed));
  const std::map<std::string, Experts> all = experts_in(units);
  if (all.empty() && (options.routed > 0 || !options.routing.empty()))
    throw Error(Code::invalid_argument,
                "plan: routed and uses of experts must be of a model that has some, which come by "
                "themselves");
  const bool says = options.routed == 0 && !all.empty() && !options.config.empty();
  const std::int64_t routed = says ? routed_in(options.config) : options.routed;
  if (routed == 0 && !options.routing.empty())
    throw Error(Code::invalid_argument,
                "plan: uses of experts must come with routed, how many a token takes");
  const std::map<std::string, std::vector<double>> counts = by_layer(options, all);
  if (routed == 0) return;
  std::map<std::string, std::vector<double>> chances;  // of a token, by the module of all
  for (const auto& [of, experts] : all) {
    const auto at = counts.find(experts.layer);
    const std::vector<double> alike(static_cast<std::size_t>(experts.count), 1);
    const bool known = at != counts.end() && at->second.size() == alike.size();
    chances[of] = probabilities(known ? at->second : alike, routed);
  }
  const auto rows = static_cast<double>(options.rows);
  for (PlanUnit& unit : units) {
    const auto expert = last_expert_of(unit);
    if (!expert) continue;
    const std::span all_chances = chances.at(expert->of);
    const bool is_stack = comes_by_index(unit);
    const auto count = static_cast<std::size_t>(is_stack ? unit.shape[0] : 1);
    const auto some =
        all_chances.subspan(static_cast<std::size_t>(expert->index) + 1 - count, count);
    double chance = 0, uses = 0;  // of a stack, the part of its matrices
    for (const double one : some) {
      chance += one / static_cast<double>(some.size());
      uses += (1 - std::pow(1 - one, rows)) / static_cast<double>(some.size());
    }
    unit.uses = uses;
    unit.share = uses > 0 ? chance / uses : 1;
  }
}

void sort_experts(std::vector<PlanUnit>& units) {
  std::unordered_map<std::string, std::size_t> first;
  std::vector<std::size_t> place(units.size()), order(units.size());
  for (std::size_t i = 0; i < units.size(); ++i) {
    place[i] = i;
    if (const auto expert = expert_of(units[i].name))
      place[i] = first.try_emplace(formatted("{}[{}]", expert->of, expert->index), i).first->second;
  }
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return place[i]; });
  std::vector<PlanUnit> sorted;
  sorted.reserve(units.size());
  for (const std::size_t i : order) sorted.push_back(std::move(units[i]));
  units = std::move(sorted);
}

std::vector<std::size_t> groups_of(const std::vector<PlanUnit>& units) {
  std::vector<std::size_t> groups;
  std::optional<ExpertName> before;
  for (const PlanUnit& unit : units) {
    std::optional<ExpertName> expert;
    if (!unit.stays && !unit.rows) expert = expert_of(unit.name);
    const bool together =
        expert && before && expert->of == before->of && expert->index == before->index;
    groups.push_back(groups.empty() ? 0 : groups.back() + (together ? 0 : 1));
    before = std::move(expert);
  }
  return groups;
}

}  // namespace planning

inline namespace v0 {

bool is_of_expert(std::string_view name) { return planning::expert_of(name).has_value(); }

std::vector<PlanExperts> experts_of(const Plan& plan) {
  std::vector<PlanExperts> found;
  std::unordered_map<std::string, std::size_t> at;
  for (const PlanUnit& unit : plan.units) {
    const auto expert = planning::expert_of(unit.name);
    if (!expert || unit.stays) continue;
    const auto [entry, is_new] = at.try_emplace(expert->of, found.size());
    if (is_new) found.push_back({expert->of, {}});
    std::vector<PlanExpert>& experts = found[entry->second].experts;
    const auto index = static_cast<std::size_t>(expert->index);
    if (experts.size() <= index) experts.resize(index + 1);
    experts[index].uses = unit.uses;
    experts[index].bytes += unit.bytes;
    experts[index].tier = unit.tier;
  }
  return found;
}

std::optional<double> hits_of(const Plan& plan) {
  double uses = 0, hits = 0;
  for (const PlanExperts& layer : experts_of(plan))
    for (const PlanExpert& expert : layer.experts) {
      uses += expert.uses;
      if (expert.tier != "disk") hits += expert.uses;
    }
  return uses > 0 ? std::optional(hits / uses) : std::nullopt;
}

}  // namespace v0
}  // namespace stowage
