// SPDX-License-Identifier: Apache-2.0
// A plan as JSON: {"stowage_plan": 1, "model", "machine", "limits", "units", ...}
// (docs/planning.md).
#include "plan/links.h"
#include "store/json_fields.h"
#include "stowage/plan.h"

namespace stowage {
namespace planning {
namespace {

using Json = nlohmann::ordered_json;
constexpr std::uint64_t kPlanVersion = 1;

Json unit_json(const PlanUnit& unit) {
  Json made{{"name", unit.name}, {"bytes", unit.bytes}, {"storage", unit.storage},
            {"tier", unit.tier}, {"work", unit.work},   {"uses", unit.uses},
            {"rows", unit.rows}, {"stays", unit.stays}, {"shape", unit.shape.sizes()},
            {"rest", unit.rest}, {"rests", unit.rests}, {"seconds", unit.seconds},
            {"why", unit.why}};
  if (unit.scratch != 0) made["scratch"] = unit.scratch;
  if (unit.share != 1) made["share"] = unit.share;
  return made;
}

Json moments_json(const Plan& plan) {
  Json list = Json::array();
  for (const PlanMoment& m : plan.over_the_pass) list.push_back({m.unit, m.ram, m.accelerators});
  return list;
}

Shape shape_of(const JsonFields& fields) {
  std::vector<std::int64_t> sizes;
  for (const auto& size : fields.list("shape")) {
    if (!size.is_number_integer()) fields.refuse("shape", "must hold whole numbers");
    sizes.push_back(size.get<std::int64_t>());
  }
  return Shape(sizes);
}

PlanUnit unit_of(const JsonFields& fields) {
  PlanUnit unit;
  unit.name = fields.text("name");
  unit.bytes = fields.whole("bytes");
  unit.storage = fields.text("storage");
  unit.tier = fields.text("tier");
  unit.work = fields.text("work");
  unit.uses = fields.number("uses");
  unit.rows = fields.flag("rows");
  unit.stays = fields.flag("stays");
  unit.rests = fields.all().contains("rests") && fields.flag("rests");
  unit.scratch = fields.all().contains("scratch") ? fields.whole("scratch") : 0;
  unit.share = fields.all().contains("share") ? fields.number("share") : 1;
  unit.shape = shape_of(fields);
  unit.rest = fields.whole("rest");
  unit.seconds = fields.number("seconds");
  unit.why = fields.text("why");
  return unit;
}

PlanMoment moment_of(const nlohmann::json& entry, const JsonFields& around) {
  const bool fits = entry.is_array() && entry.size() == 3 && entry[0].is_number_unsigned() &&
                    entry[1].is_number_unsigned() && entry[2].is_number_unsigned();
  if (!fits) around.refuse("over_the_pass", "must hold lists of three whole numbers");
  return {entry[0].get<std::int64_t>(), entry[1].get<std::uint64_t>(),
          entry[2].get<std::uint64_t>()};
}

void read_predicted(const JsonFields& predicted, Plan& plan) {
  plan.seconds = predicted.number("seconds");
  plan.peak = predicted.wholes("peak");
  plan.moved = predicted.wholes("bytes");
  for (const auto& entry : predicted.list("over_the_pass")) {
    plan.over_the_pass.push_back(moment_of(entry, predicted));
    if (plan.over_the_pass.back().unit >= static_cast<std::int64_t>(plan.units.size()))
      predicted.refuse("over_the_pass", "must name units of the plan");
  }
}

Plan read(const JsonFields& root) {
  Plan plan;
  const JsonFields model = root.fields("model"), machine = root.fields("machine");
  plan.model = model.text("name");
  plan.fingerprint = model.text("fingerprint");
  plan.storage = model.text("storage");
  plan.links = links_of(machine.fields("links"), machine.text("key"));
  const JsonFields limits = root.fields("limits");
  plan.ram = limits.whole("ram");
  for (const auto& [name, bytes] : limits.wholes("accelerators"))
    plan.accelerators.emplace_back(name, bytes);
  std::size_t i = 0;
  for (const auto& unit : root.list("units"))
    plan.units.push_back(unit_of({unit, root.where() + ": unit " + std::to_string(i++)}));
  plan.ring = root.wholes("ring");
  plan.tiles = root.wholes("tiles");
  plan.scratch = root.all().contains("scratch") ? root.whole("scratch") : 0;
  plan.activations = root.whole("activations");
  plan.rows = static_cast<std::int64_t>(root.whole("rows"));
  read_predicted(root.fields("predicted"), plan);
  return plan;
}

std::uint64_t largest(const BytesByName& all) {
  std::uint64_t most = 0;
  for (const auto& [name, bytes] : all) most = std::max(most, bytes);
  return most;
}

}  // namespace
}  // namespace planning

inline namespace v0 {

std::string to_json(const Plan& plan) {
  using planning::Json;
  std::uint64_t bytes = 0;
  Json units = Json::array(), limits = Json::object();
  for (const PlanUnit& unit : plan.units) {
    units.push_back(planning::unit_json(unit));
    bytes += unit.bytes;
  }
  for (const auto& [name, most] : plan.accelerators) limits[name] = most;
  Json json{{"stowage_plan", planning::kPlanVersion},
            {"model",
             {{"name", plan.model},
              {"weights", plan.units.size()},
              {"bytes", bytes},
              {"storage", plan.storage},
              {"fingerprint", plan.fingerprint}}},
            {"machine", {{"key", plan.links.key}, {"links", planning::links_json(plan.links)}}},
            {"limits", {{"ram", plan.ram}, {"accelerators", limits}}},
            {"rows", plan.rows},
            {"units", std::move(units)},
            {"ring", plan.ring},
            {"tile", planning::largest(plan.tiles)},
            {"tiles", plan.tiles},
            {"scratch", plan.scratch},
            {"activations", plan.activations},
            {"predicted",
             {{"seconds", plan.seconds},
              {"peak", plan.peak},
              {"bytes", plan.moved},
              {"over_the_pass", planning::moments_json(plan)}}}};
  if (const auto hits = hits_of(plan)) json["predicted"]["hits"] = *hits;
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Plan plan_from_json(std::string_view text, std::string_view where) {
  const nlohmann::json document = parse_document(text, where);
  const JsonFields root(document, std::string(where));
  const std::uint64_t version = root.whole("stowage_plan");
  if (version != planning::kPlanVersion)
    root.refuse("stowage_plan", "must be 1, got " + std::to_string(version) +
                                    ": a plan of another version of stowage");
  return planning::read(root);
}

}  // namespace v0
}  // namespace stowage
