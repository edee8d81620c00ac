// SPDX-License-Identifier: Apache-2.0
// `stowage report`: what a model is made of, from headers alone; with a plan, where it rests.
#include "stowage/report.h"

#include <optional>

#include "cli/commands.h"
#include "cli/text.h"
#include "page/page.h"

namespace stowage::cli {

void report(const ReportCommand& command) {
  const File file = File::open(command.model);
  Report made = report_of(file, command.model);
  std::optional<Plan> plan;
  if (!command.plan.empty()) {
    plan = plan_from_json(read_text(command.plan), command.plan);
    check_plan(*plan, file);
    place(made, *plan);
  }
  PlanMeasured measured;
  if (!command.measured.empty())
    measured = measured_from_json(read_text(command.measured), command.measured);
  const Plan* const beside = plan ? &*plan : nullptr;
  if (!command.html.empty()) write_text(command.html, page::html_of(made, beside, measured));
  print(command.json ? to_json(made) : page::text_of(made, beside, measured));
}

}  // namespace stowage::cli
