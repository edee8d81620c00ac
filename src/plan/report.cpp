// SPDX-License-Identifier: Apache-2.0
// The weights of a report, from a file and as JSON: {"stowage_report": 1, "model", "weights"}.
#include "stowage/report.h"

#include <set>

#include "plan/experts.h"
#include "store/json_fields.h"
#include "store/policy.h"
#include "stowage/error.h"

namespace stowage {
namespace planning {
namespace {

using Json = nlohmann::ordered_json;
constexpr std::uint64_t kReportVersion = 1;

bool is_weight(const ReportWeight& weight) {
  try {
    parse_storage(weight.storage);
    return true;
  } catch (const Error&) {
    return false;  // a dtype as the file spells it
  }
}

Json known(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }
Json known(const std::optional<double>& number) { return number ? Json(*number) : Json(nullptr); }

Json weight_json(const ReportWeight& weight) {
  return {{"name", weight.name},
          {"storage", weight.storage},
          {"kind", kind_of(weight)},
          {"shape", weight.shape.sizes()},
          {"bytes", weight.bytes},
          {"bytes_in_bf16", bytes_in_bf16(weight)},
          {"compute", known(weight.compute)},
          {"tier", known(weight.tier)},
          {"max_error", known(weight.max_error)},
          {"relative_error", known(weight.relative_error)}};
}

// As storages and torch name them.
std::string compute_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64:
      return "f64";
    case Dtype::f32:
      return "f32";
    case Dtype::bf16:
      return "bf16";
    case Dtype::f16:
      return "f16";
    default:
      return "";
  }
}

bool has(const JsonFields& fields, const char* key) {
  const auto found = fields.all().find(key);
  return found != fields.all().end() && !found->is_null();
}

ReportWeight weight_of(const JsonFields& fields) {
  ReportWeight weight{.name = fields.text("name"), .storage = fields.text("storage")};
  std::vector<std::int64_t> sizes;
  for (const auto& size : fields.list("shape")) {
    if (!size.is_number_integer()) fields.refuse("shape", "must hold whole numbers");
    sizes.push_back(size.get<std::int64_t>());
  }
  weight.shape = Shape(sizes);
  weight.bytes = fields.whole("bytes");
  if (has(fields, "compute")) weight.compute = fields.text("compute");
  if (has(fields, "tier")) weight.tier = fields.text("tier");
  if (has(fields, "max_error")) weight.max_error = fields.number("max_error");
  if (has(fields, "relative_error")) weight.relative_error = fields.number("relative_error");
  return weight;
}

}  // namespace
}  // namespace planning

inline namespace v0 {

std::string kind_of(const ReportWeight& weight) {
  if (!planning::is_weight(weight)) return "other";
  if (weight.shape.rank() > 2) return "convolution";
  if (weight.shape.rank() < 2) return "vector";
  if (is_embedding(weight.name)) return "embedding";
  return is_head(weight.name) ? "head" : "matrix";
}

std::uint64_t bytes_in_bf16(const ReportWeight& weight) {
  if (!planning::is_weight(weight)) return weight.bytes;
  return 2 * static_cast<std::uint64_t>(weight.shape.elements());
}

Report report_of(const File& file, std::string_view model) {
  Report report{.model = std::string(model)};
  for (const PlanUnit& unit : plan_units(file)) {
    ReportWeight weight{
        .name = unit.name, .storage = unit.storage, .shape = unit.shape, .bytes = unit.rest};
    const WeightInfo* info = file.find_weight(unit.name);
    if (info != nullptr && info->compute) weight.compute = planning::compute_name(*info->compute);
    report.weights.push_back(std::move(weight));
  }
  return report;
}

void place(Report& report, const Plan& plan) {
  std::map<std::string_view, std::set<std::string_view>> stacks;  // whose matrices are units
  for (const PlanUnit& unit : plan.units) stacks[planning::stack_of(unit.name)].insert(unit.tier);
  for (ReportWeight& weight : report.weights) {
    const auto at = stacks.find(weight.name);
    if (at == stacks.end()) continue;
    weight.tier.clear();
    for (const std::string_view tier : at->second)
      weight.tier += (weight.tier.empty() ? "" : " and ") + std::string(tier);
  }
}

std::string to_json(const Report& report) {
  planning::Json weights = planning::Json::array(), storages = planning::Json::object(),
                 kinds = planning::Json::object();
  std::uint64_t bytes = 0, in_bf16 = 0;
  BytesByName by_storage, by_kind;
  for (const ReportWeight& weight : report.weights) {
    weights.push_back(planning::weight_json(weight));
    bytes += weight.bytes;
    in_bf16 += bytes_in_bf16(weight);
    by_storage[weight.storage] += weight.bytes;
    by_kind[kind_of(weight)] += weight.bytes;
  }
  for (const auto& [name, count] : by_storage) storages[name] = count;
  for (const auto& [name, count] : by_kind) kinds[name] = count;
  const planning::Json json{{"stowage_report", planning::kReportVersion},
                            {"model", report.model},
                            {"bytes", bytes},
                            {"bytes_in_bf16", in_bf16},
                            {"storages", storages},
                            {"kinds", kinds},
                            {"weights", weights},
                            {"notes", report.notes}};
  return json.dump(2, ' ', false, planning::Json::error_handler_t::replace) + "\n";
}

Report report_from_json(std::string_view text, std::string_view where) {
  const nlohmann::json document = parse_document(text, where);
  const JsonFields fields(document, std::string(where));
  if (fields.whole("stowage_report") != planning::kReportVersion)
    fields.refuse("stowage_report", "must be 1");
  Report report{.model = fields.text("model")};
  for (const auto& weight : fields.list("weights"))
    report.weights.push_back(planning::weight_of({weight, std::string(where) + ": weights"}));
  for (const auto& note : fields.list("notes")) {
    if (!note.is_string()) fields.refuse("notes", "must hold texts");
    report.notes.push_back(note.get<std::string>());
  }
  return report;
}

}  // namespace v0
}  // namespace stowage
