// SPDX-License-Identifier: Apache-2.0
#include "plan/units.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>

#include "base/file.h"
#include "engine/units.h"
#include "plan/experts.h"
#include "store/checksum.h"
#include "store/manifest.h"
#include "store/policy.h"
#include "stowage/descriptor.h"

namespace stowage {
namespace planning {
namespace {

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The number that begins at `at`, which moves behind it.
std::uint64_t number(std::string_view text, std::size_t& at) {
  std::uint64_t value = 0;
  for (; at < text.size() && is_digit(text[at]); ++at)
    value = value * 10 + static_cast<std::uint64_t>(text[at] - '0');
  return value;
}

// Ids are looked up first, and answers computed last, whatever their names sort to.
int rank_of(std::string_view name) {
  if (is_embedding(name)) return 0;
  return is_head(name) ? 2 : 1;
}

// Beyond these, times and bytes of a pass are no numbers to compare.
constexpr double kMostUses = 1e6;

void check_uses(const std::string& of, double uses) {
  if (!(uses >= 0 && uses <= kMostUses))
    throw Error(Code::invalid_argument, "plan: uses of '" + of + "' must be from 0 to 1000000");
}

void apply_uses(const PlanOptions& options, std::vector<PlanUnit>& units) {
  for (const auto& [glob, uses] : options.uses) {
    check_uses(glob, uses);
    bool found = false;
    for (PlanUnit& unit : units) {
      if (!matches(glob, unit.name) && !matches(glob, stack_of(unit.name))) continue;
      unit.uses = uses;
      unit.share = 1;
      unit.rows = false;
      found = true;
    }
    if (!found)
      throw Error(Code::invalid_argument,
                  "plan: uses '" + glob + "' must match a weight, matches none");
  }
}

std::unordered_map<std::string_view, const engine::Unit*> by_name(
    const std::vector<engine::Unit>& all) {
  std::unordered_map<std::string_view, const engine::Unit*> units;
  for (const engine::Unit& unit : all) units.emplace(unit.name, &unit);
  return units;
}

// In whole pages, wherever in a file that is not written yet its parts will begin.
std::uint64_t most_in_memory(const PlanUnit& unit) {
  if (unit.stays) return (unit.rest + kPage - 1) / kPage * kPage;
  const auto pages = [](std::uint64_t bytes) {
    return bytes == 0 ? 0 : (bytes + 2 * kPage - 2) / kPage * kPage;
  };
  if (!is_widened(unit)) return pages(unit.rest);
  const Layout parts = layout(parse_storage(unit.storage), unit.shape);
  std::uint64_t bytes = 0;
  for (int i = 0; i < parts.count; ++i)
    bytes += pages(static_cast<std::uint64_t>(parts.parts[static_cast<std::size_t>(i)].bytes));
  return bytes;
}

// What values have that rest so: those of a plain float its own, others are dequantized to f32.
Dtype values_of(const PlanUnit& unit) {
  for (const auto& [name, dtype] :
       {std::pair{"bf16", Dtype::bf16}, {"f16", Dtype::f16}, {"F64", Dtype::f64}})
    if (unit.storage == name) return dtype;
  return Dtype::f32;
}

// What the policy of `pack` makes of a weight.
void convert(PlanUnit& unit, const Storage& storage) {
  const std::string_view family = family_of(unit);
  const bool floating =
      family == "F64" || std::ranges::any_of(formats(), [&](auto& f) { return f.name == family; });
  const Choice choice = choose({.rules = {}, .storage = storage}, unit.name, unit.shape, floating);
  if (!choice.storage) return;
  const std::string asked = to_string(storage_for_values(*choice.storage, values_of(unit)));
  if (asked == unit.storage) return;
  unit.storage = asked;
  unit.rests = true;
  unit.rest = static_cast<std::uint64_t>(layout(parse_storage(asked), unit.shape).bytes());
  unit.bytes = unit.scratch = 0;
}

}  // namespace

bool is_widened(const PlanUnit& unit) {
  const std::string_view family = family_of(unit);
  return std::ranges::any_of(formats(), [&](const FormatTrait& format) {
    return format.name == family && !is_value_cast(format.codes);
  });
}

// Some storages are spelled by a name of their own: "q4_k" is one of uint4.
std::string_view family_of(const PlanUnit& unit) {
  const std::string_view first = std::string_view(unit.storage).substr(0, unit.storage.find(':'));
  for (const FormatTrait& format : formats())
    if (format.name == first) return format.name;
  try {
    return trait(parse_storage(unit.storage).codes).name;
  } catch (const Error&) {
    return first;  // the dtype of a tensor that is no weight
  }
}

void convert(std::vector<PlanUnit>& units, const Storage& storage) {
  for (PlanUnit& unit : units) {
    try {
      convert(unit, storage);
    } catch (const Error& error) {
      throw Error(error.code(), "plan: " + unit.name + ": " + error.what());
    }
  }
}

bool may_move(const PlanUnit& unit) {
  const bool floating = unit.storage == "f32" || unit.storage == "bf16" || unit.storage == "f16";
  return is_widened(unit) || unit.rests ||
         (floating && unit.shape.rank() >= 2 && unit.rest >= kSmall);
}

void complete(PlanUnit& unit) {
  check_uses(unit.name, unit.uses);
  unit.stays |= !may_move(unit);
  if (unit.bytes == 0) unit.bytes = most_in_memory(unit);
  if (unit.stays) unit.rows = false;
}

bool natural_less(std::string_view a, std::string_view b) noexcept {
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const std::uint64_t x = number(a, i), y = number(b, j);
      if (x != y) return x < y;
    } else {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i;
      ++j;
    }
  }
  return a.size() - i < b.size() - j;
}

void apply(const PlanOptions& options, std::vector<PlanUnit>& units) {
  apply_routing(options, units);
  apply_uses(options, units);
  std::unordered_map<std::string_view, std::size_t> known, place;
  for (const PlanUnit& unit : units) {
    known.emplace(unit.name, 0);
    known.emplace(stack_of(unit.name), 0);
  }
  for (const std::string& name : options.order) {
    if (!known.contains(name))
      throw Error(Code::invalid_argument, "plan: order must name weights, got '" + name + "'");
    place.emplace(name, place.size());
  }
  const auto key = [&](const PlanUnit& unit) {
    auto at = place.find(unit.name);
    if (at == place.end()) at = place.find(stack_of(unit.name));
    return std::pair(at == place.end() ? place.size() : at->second, rank_of(unit.name));
  };
  std::vector<std::tuple<std::pair<std::size_t, int>, std::size_t>> keys;
  for (std::size_t i = 0; i < units.size(); ++i) keys.emplace_back(key(units[i]), i);
  std::ranges::sort(keys, [&](const auto& a, const auto& b) {
    if (std::get<0>(a) != std::get<0>(b)) return std::get<0>(a) < std::get<0>(b);
    return natural_less(units[std::get<1>(a)].name, units[std::get<1>(b)].name);
  });
  std::vector<PlanUnit> sorted;
  sorted.reserve(units.size());
  for (const auto& entry : keys) sorted.push_back(std::move(units[std::get<1>(entry)]));
  units = std::move(sorted);
  sort_experts(units);
}

std::string fingerprint_of(const std::vector<PlanUnit>& units) {
  std::vector<const PlanUnit*> sorted;
  for (const PlanUnit& unit : units) sorted.push_back(&unit);
  std::ranges::sort(sorted, {}, [](const PlanUnit* unit) { return std::string_view(unit->name); });
  Checksum sum;
  const auto add = [&](std::string_view text, char end) {
    sum.add(std::as_bytes(std::span(text)));
    sum.add(std::as_bytes(std::span(&end, 1)));
  };
  for (const PlanUnit* unit : sorted) {
    add(unit->name, '\0');
    add(unit->storage, '\0');
    add(to_string(unit->shape), '\0');
    add(std::to_string(unit->rest), '\n');
  }
  return hex(sum.value());
}

}  // namespace planning

inline namespace v0 {

std::vector<PlanUnit> plan_units(const File& file, const std::optional<Storage>& storage) {
  const std::vector<engine::Unit> all = engine::units_of(file);
  const auto in_memory = planning::by_name(all);
  std::vector<PlanUnit> units;
  std::set<std::string, std::less<>> taken(file.markers().begin(), file.markers().end());
  for (const WeightInfo& weight : file.weights()) {
    PlanUnit unit{.name = weight.name, .storage = to_string(weight.storage), .shape = weight.shape};
    unit.rest = static_cast<std::uint64_t>(layout(weight.storage, weight.shape).bytes());
    taken.insert(weight.parts.begin(), weight.parts.end());
    taken.insert(weight.beside.begin(), weight.beside.end());
    unit.bytes = in_memory.at(weight.name)->bytes;
    unit.scratch = in_memory.at(weight.name)->scratch;
    unit.rests = weight.compute.has_value();  // a cast that no manifest names is a plain tensor
    // Rows of codes in another order are not read through the mapping.
    unit.rows = is_embedding(unit.name) && unit.shape.rank() == 2 && unit.scratch == 0;
    unit.stack = unit.shape.rank() == 3 && planning::names_experts(unit.name);
    units.push_back(std::move(unit));
  }
  for (const TensorInfo& tensor : file.tensors()) {
    if (taken.contains(tensor.name)) continue;
    PlanUnit unit{.name = tensor.name,
                  .storage = tensor.dtype_name,
                  .shape = tensor.shape,
                  .rest = tensor.bytes,
                  .bytes = in_memory.at(tensor.name)->bytes};
    units.push_back(std::move(unit));
  }
  if (storage) planning::convert(units, *storage);
  for (PlanUnit& unit : units) planning::complete(unit);
  return units;
}

}  // namespace v0
}  // namespace stowage
