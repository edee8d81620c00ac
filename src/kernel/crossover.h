// SPDX-License-Identifier: Apache-2.0
// The numbers of a crossover by their names, for files and for STOWAGE_CROSSOVER.
#pragma once
#include <array>

#include "stowage/crossover.h"

namespace stowage {

struct CrossoverField {
  const char* name;
  std::int64_t Crossover::*value;
  std::int64_t most;  // that the way takes
};
inline constexpr std::int64_t kAnyRows = std::int64_t{1} << 30;
inline constexpr std::int64_t kMostWidened = 64, kMostInIntegers = 16;  // rows of x
inline constexpr std::array kCrossoverFields{
    CrossoverField{"rows", &Crossover::rows, kMostWidened},
    CrossoverField{"long_groups", &Crossover::long_groups, kMostInIntegers},
    CrossoverField{"short_groups", &Crossover::short_groups, kMostInIntegers},
    CrossoverField{"bytes", &Crossover::bytes, kMostInIntegers},
    CrossoverField{"words", &Crossover::words, kMostInIntegers},
    CrossoverField{"own", &Crossover::own, kAnyRows},
    CrossoverField{"own_bf16", &Crossover::own_bf16, kAnyRows},
    CrossoverField{"own_pairs", &Crossover::own_pairs, kAnyRows},
    CrossoverField{"own_codes", &Crossover::own_codes, kAnyRows}};

/// What this build has for the instruction set.
Crossover built_in_crossover();

}  // namespace stowage
