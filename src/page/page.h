// SPDX-License-Identifier: Apache-2.0
// What a person sees of a plan or a report: one page without any other resource, or text.
#pragma once
#include <string>

#include "stowage/report.h"

namespace stowage::page {

/// Memory over the pass, bytes by tier and by storage, and what was predicted beside what was
/// measured.
std::string html_of(const Plan& plan, const PlanMeasured& measured = {});
/// Both show the same figures. `plan` may be null; what was measured is then shown alone.
std::string html_of(const Report& report, const Plan* plan = nullptr,
                    const PlanMeasured& measured = {});
std::string text_of(const Report& report, const Plan* plan = nullptr,
                    const PlanMeasured& measured = {});

}  // namespace stowage::page
