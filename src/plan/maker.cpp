// SPDX-License-Identifier: Apache-2.0
#include "plan/maker.h"

#include <algorithm>
#include <map>

#include "base/table.h"
#include "engine/units.h"
#include "plan/costs.h"
#include "plan/experts.h"
#include "plan/needs.h"
#include "plan/search.h"
#include "plan/units.h"

namespace stowage::planning {
namespace {

constexpr std::size_t kMoments = 400;  // of a pass that a plan keeps

void check(const PlanOptions& options) {
  const auto refuse = [](const std::string& text) {
    throw Error(Code::invalid_argument, "plan: " + text);
  };
  if (options.rows < 1) refuse("rows must be at least 1, got " + std::to_string(options.rows));
  if (options.accelerators.size() > kMostAccelerators)
    refuse("at most 16 accelerators, got " + std::to_string(options.accelerators.size()));
  for (std::size_t i = 0; i < options.accelerators.size(); ++i) {
    const std::string& name = options.accelerators[i].first;
    if (name.empty() || name == "cpu" || name == "ram" || name == "disk")
      refuse("accelerators must have names such as cuda:0, got '" + name + "'");
    for (std::size_t j = 0; j < i; ++j)
      if (options.accelerators[j].first == name) refuse("'" + name + "' must be given once");
  }
}

struct Largest {
  std::string name{};
  std::uint64_t bytes = 0;
};

// Of what moves, together with what moves with it.
Largest largest_of(const std::vector<PlanUnit>& units, const std::vector<std::size_t>& groups,
                   bool slices_alone) {
  Largest most, now;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (units[i].stays || units[i].rows || (slices_alone && !is_slice(units[i].name))) continue;
    if (i == 0 || groups[i] != groups[i - 1]) now = {units[i].name, 0};
    now.bytes += units[i].bytes;
    if (now.bytes > most.bytes) most = now;
  }
  return most;
}

// Matrices of an expert that are tensors of their own come through scratch where a model has them
// in stacks.
std::uint64_t scratch_of(const PlanUnit& unit) {
  const auto expert = expert_of(unit.name);
  return expert && expert->apart && !unit.stays ? unit.bytes : 0;
}

}  // namespace

PlanMaker::PlanMaker(std::string_view model, std::vector<PlanUnit> units,
                     const PlanOptions& options, const Links& links)
    : options_(options) {
  check(options);
  plan_.model = model;
  plan_.fingerprint = fingerprint_of(units);
  if (options.storage) plan_.storage = to_string(*options.storage);
  plan_.links = links;
  plan_.ram = options.ram;
  plan_.accelerators = options.accelerators;
  plan_.activations = options.activations;
  plan_.rows = options.rows;
  for (const auto& [name, bytes] : options.accelerators)
    plan_.links.accelerators.try_emplace(name, rates_of(links, name));
  apply(options, units);
  plan_.units = std::move(units);
}

const std::string& PlanMaker::name(std::int32_t accelerator) const {
  return plan_.accelerators[static_cast<std::size_t>(accelerator)].first;
}

// Every accelerator has a run of the order, as long in bytes as its limit among all: what goes from
// one to the next is activations.
void PlanMaker::assign_accelerators() {
  accelerators_.assign(plan_.units.size(), -1);
  const auto& all = plan_.accelerators;
  if (all.empty()) return;
  double bytes = 0, limit = 0, passed = 0, reach = static_cast<double>(all[0].second);
  for (const PlanUnit& unit : plan_.units) bytes += static_cast<double>(unit.bytes);
  for (const auto& [name, most] : all) limit += static_cast<double>(most);
  std::size_t now = 0;
  std::map<std::string, std::int32_t> of_experts;  // all matrices of stacks work in one place
  for (std::size_t i = 0; i < plan_.units.size(); ++i) {
    const auto half = static_cast<double>(plan_.units[i].bytes) / 2;
    while (now + 1 < all.size() && (passed + half) * limit > reach * bytes)
      reach += static_cast<double>(all[++now].second);
    accelerators_[i] = static_cast<std::int32_t>(now);
    if (const auto expert = expert_of(plan_.units[i].name); expert && !expert->apart)
      accelerators_[i] = of_experts.try_emplace(expert->of, accelerators_[i]).first->second;
    passed += 2 * half;
  }
}

Candidate PlanMaker::candidate_of(const PlanUnit& unit, std::int32_t accelerator) const {
  const Links& links = plan_.links;
  Candidate made{.accelerator = accelerator};
  made.on_cpu = seconds_on_cpu(unit, plan_.rows, links);
  if (accelerator >= 0) {
    const AcceleratorRates rates = rates_of(links, name(accelerator));
    made.on_accelerator = seconds_on(unit, plan_.rows, rates);
    made.on_cpu += seconds_of_detour(unit, plan_.rows, rates);
    made.copy = unit.uses * static_cast<double>(unit.bytes) / rates.copy;
  }
  if (links.disk > 0) made.read = unit.uses * static_cast<double>(unit.bytes) / links.disk;
  if (unit.rows) {
    made.on_cpu = seconds_of_rows(unit, plan_.rows, links);
    made.accelerator = -1;
    made.fixed = Assignment::disk_cpu;
  } else if (unit.stays) {
    made.fixed = accelerator >= 0 ? Assignment::resident : Assignment::ram_cpu;
  } else {
    made.bytes = unit.bytes;
    made.is_slice = is_slice(unit.name);
  }
  return made;
}

void PlanMaker::weigh_units() {
  for (std::size_t i = 0; i < plan_.units.size(); ++i)
    weighed_.push_back(candidate_of(plan_.units[i], accelerators_[i]));
  groups_ = groups_of(plan_.units);
  join_groups();
}

void PlanMaker::join_groups() {
  for (std::size_t i = 0; i < weighed_.size(); ++i) {
    const Candidate& unit = weighed_[i];
    if (groups_[i] == candidates_.size()) {
      candidates_.push_back(unit);
      continue;
    }
    Candidate& group = candidates_.back();
    group.bytes += unit.bytes;
    group.read += unit.read;
    group.copy += unit.copy;
    group.on_cpu += unit.on_cpu;
    group.on_accelerator += unit.on_accelerator;
  }
}

// What is in memory whatever is chosen: small tensors where they are used, tiles, activations.
void PlanMaker::take_always() {
  const bool alone = plan_.accelerators.empty();
  plan_.tiles["ram"] = 0;
  for (const auto& [name, bytes] : plan_.accelerators) plan_.tiles[name] = 0;
  std::uint64_t scratch = 0, together = 0;
  for (std::size_t i = 0; i < plan_.units.size(); ++i) {
    const PlanUnit& unit = plan_.units[i];
    const std::string where = accelerators_[i] < 0 ? "ram" : name(accelerators_[i]);
    if (unit.stays) always_[where] += unit.bytes;
    together = (i > 0 && groups_[i] == groups_[i - 1] ? together : 0) + scratch_of(unit);
    scratch = std::max({scratch, unit.scratch, together});
    if (alone || options_.works_on_cpu)
      plan_.tiles["ram"] = std::max(plan_.tiles["ram"], tile_on_cpu(unit));
    if (!alone) plan_.tiles[where] = std::max(plan_.tiles[where], tile_on_accelerator(unit));
  }
  plan_.scratch = engine::scratch_for(scratch, plan_.ram);
}

void PlanMaker::subtract_needs() {
  const Largest of_all = largest_of(plan_.units, groups_, false),
                of_slices = largest_of(plan_.units, groups_, true);
  const bool alone = plan_.accelerators.empty();
  std::string problems;
  // What must cross memory there, whatever is chosen.
  const auto left = [&](const std::string& tier, std::uint64_t limit, const Largest& most,
                        bool works) {
    Needs needs;
    needs.add("small tensors that stay", always_[tier]);
    needs.add("the tile that is widened at a time", plan_.tiles[tier]);
    if (works) needs.add("activations", plan_.activations);
    if (tier == "ram") needs.add("scratch for weights in another order", plan_.scratch);
    const std::uint64_t fixed = needs.sum();
    if (most.bytes > 0) needs.add("the largest weight, " + most.name, most.bytes);
    const std::string refusal = needs.refusal(tier, limit);
    if (!refusal.empty()) problems += (problems.empty() ? "" : "; ") + refusal;
    return limit - std::min(fixed, limit);
  };
  limits_.works_on_cpu = options_.works_on_cpu;
  limits_.ram = left("ram", plan_.ram, of_all, alone);
  for (std::size_t a = 0; a < plan_.accelerators.size(); ++a) {
    const auto& [tier, limit] = plan_.accelerators[a];
    limits_.accelerators[a] = left(tier, limit, options_.works_on_cpu ? of_slices : of_all, true);
  }
  if (!problems.empty()) throw Error(Code::invalid_argument, "plan: " + problems);
}

void PlanMaker::describe(PlanUnit& unit, const Candidate& c, Assignment assignment) const {
  unit.work = works_on_cpu(assignment) ? "cpu" : name(c.accelerator);
  unit.tier = rests_on_disk(assignment) ? "disk" : rests_in_ram(assignment) ? "ram" : unit.work;
  unit.seconds = works_on_cpu(assignment) ? c.on_cpu : c.on_accelerator;
  const std::string read = time_text(c.read), copy = time_text(c.copy);
  if (unit.stays) {
    unit.why = may_move(unit) ? "spread over processes: stays in memory"
                              : "plain and small: stays in memory";
  } else if (unit.rows) {
    unit.why = "only the rows that are asked for are read";
  } else if (assignment == Assignment::resident) {
    unit.why = "stays: saves " + copy + " of the link";
  } else if (assignment == Assignment::ram_cpu) {
    unit.why = c.accelerator < 0 ? "stays: saves " + read + " of the disk"
                                 : "works where it rests: the link would take " + copy;
  } else if (assignment == Assignment::disk_cpu) {
    unit.why = "is fetched ahead of its work in " + read;
  } else if (assignment == Assignment::ram_accelerator) {
    unit.why = "crosses the link ahead of its work in " + copy;
  } else {
    unit.why = "is read in " + read + " and crosses the link in " + copy;
  }
}

void PlanMaker::describe(const Placement& placed) {
  for (std::size_t i = 0; i < plan_.units.size(); ++i) {
    Candidate& candidate = weighed_[i];
    if (plan_.units[i].stays) candidate.accelerator = accelerators_[i];
    describe(plan_.units[i], candidate, placed.assignments[groups_[i]]);
  }
}

// The bytes in use whenever a unit's work begins, from when each took room and gave it back.
void PlanMaker::watch(const std::vector<Step>& steps, const std::vector<Moments>& moments) {
  struct Change {
    double time;
    std::int64_t ram, accelerators;
  };
  std::vector<Change> changes;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto bytes = static_cast<std::int64_t>(steps[i].bytes);
    const Moments& m = moments[i];
    if (m.ram_taken >= 0) {
      changes.push_back({m.ram_taken, bytes, 0});
      changes.push_back({m.ram_given, -bytes, 0});
    }
    if (m.taken >= 0) {
      changes.push_back({m.taken, 0, bytes});
      changes.push_back({m.given, 0, -bytes});
    }
  }
  std::ranges::stable_sort(changes, {}, &Change::time);
  std::int64_t ram = 0, accelerators = 0;
  for (const auto& [tier, bytes] : plan_.peak) {
    const auto ring = plan_.ring.find(tier);
    const std::uint64_t fixed = bytes - (ring == plan_.ring.end() ? 0 : ring->second);
    (tier == "ram" ? ram : accelerators) += static_cast<std::int64_t>(fixed);
  }
  std::vector<std::int64_t> first(steps.size());  // unit of each
  for (std::size_t i = groups_.size(); i-- > 0;) first[groups_[i]] = static_cast<std::int64_t>(i);
  const std::size_t stride = (steps.size() + kMoments - 1) / std::max<std::size_t>(kMoments, 1);
  auto change = changes.begin();
  for (std::size_t i = 0; i < steps.size(); ++i) {
    for (; change != changes.end() && change->time <= moments[i].begun; ++change) {
      ram += change->ram;
      accelerators += change->accelerators;
    }
    if (i % std::max<std::size_t>(stride, 1) != 0 && i + 1 != steps.size()) continue;
    plan_.over_the_pass.push_back(
        {first[i], static_cast<std::uint64_t>(std::max<std::int64_t>(ram, 0)),
         static_cast<std::uint64_t>(std::max<std::int64_t>(accelerators, 0))});
  }
}

void PlanMaker::predict(const Placement& placed) {
  plan_.ring["ram"] = placed.rings.ram;
  const bool alone = plan_.accelerators.empty();
  plan_.peak["ram"] =
      placed.rings.ram + plan_.scratch + always_["ram"] + (alone ? plan_.activations : 0);
  plan_.moved["disk->ram"] = 0;
  for (std::size_t a = 0; a < plan_.accelerators.size(); ++a) {
    const std::string& tier = plan_.accelerators[a].first;
    plan_.ring[tier] = placed.rings.accelerators[a];
    plan_.peak[tier] = placed.rings.accelerators[a] + always_[tier] + plan_.activations;
    plan_.moved["ram->" + tier] = 0;
  }
  bool works_on_cpu = false;
  for (const PlanUnit& unit : plan_.units) {
    const auto moved = static_cast<std::uint64_t>(unit.uses * static_cast<double>(unit.bytes));
    if (!unit.stays && unit.tier != "disk") plan_.peak[unit.tier] += unit.bytes;
    if (unit.tier == "disk")
      plan_.moved["disk->ram"] += unit.rows ? bytes_of_rows(unit, plan_.rows) : moved;
    if (unit.work != "cpu" && unit.work != unit.tier) plan_.moved["ram->" + unit.work] += moved;
    works_on_cpu |= unit.work == "cpu" && !unit.rows;
  }
  if (!works_on_cpu) plan_.tiles["ram"] = 0;
  for (const auto& [tier, bytes] : plan_.tiles) plan_.peak[tier] += bytes;
}

Plan PlanMaker::make() && {
  assign_accelerators();
  weigh_units();
  take_always();
  subtract_needs();
  const Placement placed = place(candidates_, limits_);
  describe(placed);
  predict(placed);
  const std::vector<Step> steps = steps_of(candidates_, placed.assignments);
  std::vector<Moments> moments;
  plan_.seconds = Pass().seconds(steps, placed.rings, &moments);
  watch(steps, moments);
  return std::move(plan_);
}

}  // namespace stowage::planning
