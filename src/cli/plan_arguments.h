// SPDX-License-Identifier: Apache-2.0
// The command line of `stowage plan`.
#pragma once
#include <string>
#include <vector>

#include "cli/commands.h"

namespace CLI {
class App;
}

namespace stowage::cli {

/// Options of `plan` as they were typed.
struct PlanTexts {
  std::string ram, storage, activations;
  std::vector<std::string> accelerators, uses, order;
};

void add_plan_options(CLI::App& command, PlanTexts& texts, PlanCommand& plan);
/// Throws Error for what makes no sense.
void read_plan(const PlanTexts& texts, PlanCommand& plan);

}  // namespace stowage::cli
