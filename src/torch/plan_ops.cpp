// SPDX-License-Identifier: Apache-2.0
// Ops on plans: a request and a plan cross as JSON.
#include "stowage/plan.h"

#include <nlohmann/json.hpp>

#include "page/page.h"
#include "torch/arguments.h"

namespace stowage::door {
namespace {
using nlohmann::json;

template <class Body>
auto of_request(const char* where, Body body) {
  try {
    return body();
  } catch (const json::exception& error) {
    throw Error(Code::invalid_argument, std::string(where) + ": " + error.what());
  }
}

std::vector<PlanUnit> units_of(const json& list) {
  std::vector<PlanUnit> units;
  for (const json& given : list) {
    PlanUnit unit{.name = given.at("name"), .storage = given.at("storage")};
    unit.shape = Shape(given.at("shape").get<std::vector<std::int64_t>>());
    unit.rest = given.at("rest");
    unit.rows = given.at("rows");
    unit.rests = given.value("rests", false);
    unit.scratch = given.value("scratch", std::uint64_t{0});
    unit.index_scratch = given.value("index_scratch", std::uint64_t{0});
    unit.uses = given.value("uses", 1.0);
    unit.share = given.value("share", 1.0);
    unit.stack = given.value("stack", false);
    unit.stays = given.value("stays", false);
    unit.first = given.value("first", std::int64_t{0});
    unit.total = given.value("total", std::int64_t{0});
    units.push_back(std::move(unit));
  }
  return units;
}

PlanOptions plan_options_of(const json& request) {
  PlanOptions options{.ram = request.at("ram")};
  for (const json& entry : request.at("accelerators"))
    options.accelerators.emplace_back(entry.at(0), entry.at(1));
  for (const json& entry : request.at("uses")) options.uses.emplace_back(entry.at(0), entry.at(1));
  if (const json& storage = request.at("storage"); !storage.is_null())
    options.storage = parse_storage(storage.get<std::string>());
  options.rows = request.at("rows");
  options.activations = request.at("activations");
  options.works_on_cpu = request.at("works_on_cpu");
  options.order = request.at("order").get<std::vector<std::string>>();
  options.routed = request.value("routed", std::int64_t{0});
  options.config = request.value("config", std::string());
  if (const std::string routing = request.value("routing", std::string()); !routing.empty())
    options.routing = routing_from_json(routing);
  return options;
}

// {"path" or null, "name", "units", "ram", "accelerators": [[name, bytes]], "uses": [[glob, n]],
//  "storage", "rows", "activations", "works_on_cpu", "order", "routed", "config", "routing": uses
//  as JSON, or ""}; the links as links_measure gives them.
Tensor plan_make(const std::string& text, const std::string& links) {
  const Plan plan = of_request("stowage::plan_make", [&] {
    const json request = json::parse(text);
    const PlanOptions options = plan_options_of(request);
    const Links rates = links_from_json(links);
    if (request.at("path").is_null())
      return make_plan(request.at("name").get<std::string>(), units_of(request.at("units")),
                       options, rates);
    Plan made = make_plan(File::open(request.at("path")), options, rates);
    made.model = request.at("name");
    return made;
  });
  return text_bytes(to_json(plan));
}

Tensor plan_text(const std::string& plan) { return text_bytes(to_text(plan_from_json(plan))); }

// As to_json() of the same plan gives it: checked, and without what this version does not know.
Tensor plan_read(const std::string& plan, const std::string& where) {
  return text_bytes(to_json(plan_from_json(plan, where)));
}

// {"path" or null, "name", "units"}
void plan_check(const std::string& plan, const std::string& text) {
  const Plan made = plan_from_json(plan);
  of_request("stowage::plan_check", [&] {
    const json request = json::parse(text);
    if (request.at("path").is_null())
      check_plan(made, request.at("name").get<std::string>(), units_of(request.at("units")));
    else
      check_plan(made, File::open(request.at("path")));
    return true;
  });
}

// `measured`: as measured_from_json() reads it.
Tensor plan_html(const std::string& plan, const std::string& measured) {
  return text_bytes(page::html_of(plan_from_json(plan), measured_from_json(measured)));
}

Tensor plan_compare(const std::string& plan, const std::string& measured) {
  return text_bytes(compare(plan_from_json(plan), measured_from_json(measured)));
}

// `report` as report_from_json() reads it; `plan` is "" for none.
Tensor report_html(const std::string& text, const std::string& plan, const std::string& measured) {
  Report report = report_from_json(text);
  const PlanMeasured was = measured_from_json(measured);
  if (plan.empty()) return text_bytes(page::html_of(report, nullptr, was));
  const Plan made = plan_from_json(plan);
  return text_bytes(page::html_of(report, &made, was));
}

Tensor machine_key_op() { return text_bytes(machine_key()); }

Tensor links_measure(const std::string& path, bool anew) {
  return text_bytes(to_json(links_of_this_machine(path, anew)));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stowage, CompositeExplicitAutograd, m) {
  m.impl("plan_make", TORCH_BOX(&Door<&plan_make>::call));
  m.impl("plan_text", TORCH_BOX(&Door<&plan_text>::call));
  m.impl("plan_read", TORCH_BOX(&Door<&plan_read>::call));
  m.impl("plan_check", TORCH_BOX(&Door<&plan_check>::call));
  m.impl("plan_html", TORCH_BOX(&Door<&plan_html>::call));
  m.impl("plan_compare", TORCH_BOX(&Door<&plan_compare>::call));
  m.impl("report_html", TORCH_BOX(&Door<&report_html>::call));
  m.impl("machine_key", TORCH_BOX(&Door<&machine_key_op>::call));
  m.impl("links_measure", TORCH_BOX(&Door<&links_measure>::call));
}
}  // namespace stowage::door
