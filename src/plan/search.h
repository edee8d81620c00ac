// SPDX-License-Identifier: Apache-2.0
// The placement in which a pass takes the least time within the limits of memory, or nearly.
#pragma once
#include <span>

#include "plan/placement.h"

namespace stowage::planning {

/// Every unit fits RAM, and its accelerator too unless it may work on the CPU.
Placement place(std::span<const Candidate> units, const Limits& limits);

}  // namespace stowage::planning
