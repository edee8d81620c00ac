// SPDX-License-Identifier: Apache-2.0
// What the tensors of a plan become in the files of a dialect, decided before anything is written.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "cli/pack_plan.h"

namespace stowage::cli {

/// The files, and what OUT does not get.
struct Conversion {
  DialectFiles files;
  std::map<std::string, std::string> metadata;  // of the header, IN's with that of the dialect
  std::vector<std::string> left_out;  // numbers for activations that the dialect has no name for
};

/// Gives each weight that rests its tensors, and takes tensors that only show IN's dialect out of
/// the plan. Throws unsupported, naming a weight, its storage and the dialects that have it.
Conversion plan_conversion(const File& file, std::vector<PackTask>& packings,
                           const std::string& dialect);

}  // namespace stowage::cli
