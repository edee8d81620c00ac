// SPDX-License-Identifier: Apache-2.0
// What a unit costs: seconds over each link and of work, from the rates of a machine.
#pragma once
#include <cstdint>

#include "stowage/plan.h"

namespace stowage::planning {

inline constexpr std::uint64_t kTile = 4 << 20;  // the most that the CPU's kernels widen at a time

/// Seconds of work where a unit is in the host's memory, and on an accelerator that has it.
double seconds_on_cpu(const PlanUnit& unit, std::int64_t rows, const Links& links);
double seconds_on(const PlanUnit& unit, std::int64_t rows, const AcceleratorRates& rates);
/// Seconds to look up rows of a unit that rests on the disk.
double seconds_of_rows(const PlanUnit& unit, std::int64_t rows, const Links& links);
std::uint64_t bytes_of_rows(const PlanUnit& unit, std::int64_t rows);
/// Seconds that x and y of a product take over the link and back, where the work is on the CPU.
double seconds_of_detour(const PlanUnit& unit, std::int64_t rows, const AcceleratorRates& rates);
/// The rates of an accelerator, or assumed ones.
AcceleratorRates rates_of(const Links& links, const std::string& accelerator);

/// Bytes that are widened at a time while it works.
std::uint64_t tile_on_cpu(const PlanUnit& unit);
std::uint64_t tile_on_accelerator(const PlanUnit& unit);

}  // namespace stowage::planning
