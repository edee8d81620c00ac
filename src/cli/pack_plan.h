// SPDX-License-Identifier: Apache-2.0
// What pack will do with each tensor, decided before anything is read or written.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/items.h"

namespace stowage::cli {

struct PackTask {
  enum class Action { copy, cast, quantize };  // cast: a plain tensor to the compute dtype
  Item item;
  Action action = Action::copy;
  Storage storage{};             // of cast and quantize
  std::string reason;            // why it stays plain, or which rule chose
  std::optional<Dtype> compute;  // of quantized weights

  bool packed() const noexcept { return action == Action::quantize; }
};

/// Throws UsageError for a rule that no tensor matches, invalid_argument where a storage cannot
/// hold a shape.
std::vector<PackTask> plan_pack(const File& file, const PackOptions& options);

/// What the packing becomes in the new file.
std::vector<Declaration> declarations(const PackTask& packing);

}  // namespace stowage::cli
