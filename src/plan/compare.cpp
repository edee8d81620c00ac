// SPDX-License-Identifier: Apache-2.0
// A plan beside the pass that was measured, in a sentence: how far it is off, and why, most likely.
#include <algorithm>
#include <cmath>

#include "base/formatted.h"
#include "base/table.h"
#include "store/json_fields.h"
#include "stowage/error.h"
#include "stowage/plan.h"

namespace stowage {
namespace planning {
namespace {

constexpr double kNear = 0.15;  // of the prediction
constexpr const char* kDisk = "disk->ram";

double off(double predicted, double measured) {
  return predicted > 0 ? measured / predicted - 1 : 0;
}

std::string percent(double share) { return formatted("{:+.0f} %", 100 * share); }

std::string rate_text(double rate) { return formatted("{:.2f} GB/s", rate / 1e9); }

std::uint64_t at(const BytesByName& bytes, const std::string& name) {
  const auto found = bytes.find(name);
  return found == bytes.end() ? 0 : found->second;
}

// A link that carried another number of bytes than planned: "" for none.
std::string moved_otherwise(const Plan& plan, const PlanMeasured& measured) {
  for (const auto& [link, bytes] : measured.moved) {
    const std::uint64_t planned = at(plan.moved, link);
    const double more = static_cast<double>(bytes) - static_cast<double>(planned);
    if (std::abs(more) > kNear * static_cast<double>(std::max(planned, bytes)))
      return formatted("{} carried {} in a pass, planned {}", link, size_text(bytes),
                       size_text(planned));
  }
  return "";
}

// What the disk gave in a second of the pass, beside its rate: below it while the work is longer.
std::string disk_rate(const Plan& plan, const PlanMeasured& measured) {
  const std::uint64_t bytes = at(measured.moved, kDisk);
  if (bytes == 0 || plan.links.disk <= 0) return "";
  const double seen = static_cast<double>(bytes) / measured.seconds;
  return formatted("the disk gave {}, planned {}", rate_text(seen), rate_text(plan.links.disk));
}

bool disk_is_faster(const Plan& plan, const PlanMeasured& measured) {
  const auto bytes = static_cast<double>(at(measured.moved, kDisk));
  return plan.links.disk > 0 && bytes / measured.seconds > (1 + kNear) * plan.links.disk;
}

double planned_work(const Plan& plan) {
  double seconds = 0;
  for (const PlanUnit& unit : plan.units) seconds += unit.seconds;
  return std::min(seconds, plan.seconds);
}

std::string with(const std::string& text, const std::string& more) {
  return more.empty() ? text : text + "; " + more;
}

// Waits or work: whichever has most of the difference.
std::string split(const Plan& plan, const PlanMeasured& measured) {
  const double work = planned_work(plan), wait = plan.seconds - work;
  const double waited = std::min(*measured.stall, measured.seconds);
  const double worked = measured.seconds - waited;
  if (std::abs(waited - wait) >= std::abs(worked - work)) {
    const std::string text = formatted("waits for weights took {}, planned {}", time_text(waited),
                                       time_text(std::max(wait, 0.0)));
    return with(text, disk_rate(plan, measured));
  }
  const std::string text =
      formatted("work took {}, planned {}", time_text(worked), time_text(work));
  if (worked < work) return text;
  return text + "; attention, norms and Python are not planned, nor others on the same cores";
}

std::string reason(const Plan& plan, const PlanMeasured& measured) {
  if (disk_is_faster(plan, measured))
    return with(disk_rate(plan, measured), "the file lies in the page cache");
  if (std::string moved = moved_otherwise(plan, measured); !moved.empty()) return moved;
  if (measured.stall) return split(plan, measured);
  return with(disk_rate(plan, measured), "how long the work waited was not measured");
}

double seconds_of(const JsonFields& fields, const char* key) {
  return fields.all().contains(key) ? fields.number(key) : 0;
}

}  // namespace
}  // namespace planning

inline namespace v0 {

PlanMeasured measured_from_json(std::string_view text, std::string_view where) {
  const nlohmann::json document = parse_document(text, where);
  const JsonFields fields(document, std::string(where));
  PlanMeasured measured;
  measured.seconds = planning::seconds_of(fields, "seconds");
  if (document.contains("peak")) measured.peak = fields.wholes("peak");
  if (document.contains("bytes")) measured.moved = fields.wholes("bytes");
  if (document.contains("stall")) measured.stall = fields.number("stall");
  return measured;
}

std::string compare(const Plan& plan, const PlanMeasured& measured) {
  if (!(measured.seconds > 0))
    throw Error(
        Code::invalid_argument,
        formatted("stowage::compare: seconds of a pass must be above 0, got {}", measured.seconds));
  const double share = planning::off(plan.seconds, measured.seconds);
  std::string text = formatted("predicted {}, measured {} ({})", time_text(plan.seconds),
                               time_text(measured.seconds), planning::percent(share));
  if (std::abs(share) > planning::kNear) text += ": " + planning::reason(plan, measured);
  for (const auto& [tier, bytes] : measured.peak) {
    const std::uint64_t planned = planning::at(plan.peak, tier);
    const double more = planning::off(static_cast<double>(planned), static_cast<double>(bytes));
    if (std::abs(more) > planning::kNear)
      text += formatted("; peak of {} {}, predicted {} ({})", tier, size_text(bytes),
                        size_text(planned), planning::percent(more));
  }
  return text;
}

}  // namespace v0
}  // namespace stowage
