// SPDX-License-Identifier: Apache-2.0
// The units of a model as a plan sees them: their order of use, their uses, what names them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "stowage/plan.h"

namespace stowage::planning {

inline constexpr std::uint64_t kSmall = 64 << 10;  // plain tensors below it never move

/// As if what `pack` takes rested so. Throws invalid_argument, naming the weight, where it cannot.
void convert(std::vector<PlanUnit>& units, const Storage& storage);

/// Sets what follows from storage, shape and name: bytes in whole pages where they are 0, and
/// whether the unit stays.
void complete(PlanUnit& unit);

/// Whether it is a weight, or plain and large enough, that one may have out of memory.
bool may_move(const PlanUnit& unit);

/// Uses by the globs of `options`, then the order of use. Throws invalid_argument for names and
/// globs that no unit has.
void apply(const PlanOptions& options, std::vector<PlanUnit>& units);

/// Whether "a" comes before "b" as people count: "layers.2" before "layers.10".
bool natural_less(std::string_view a, std::string_view b) noexcept;

/// XXH3, in hexadecimal, of all (name, storage, shape, bytes at rest), sorted by name.
std::string fingerprint_of(const std::vector<PlanUnit>& units);

/// Whether it is multiplied from codes, so that a part of it is widened for a moment.
bool is_widened(const PlanUnit& unit);
/// The format that its storage begins with: "nf4" of "nf4:block64".
std::string_view family_of(const PlanUnit& unit);

}  // namespace stowage::planning
