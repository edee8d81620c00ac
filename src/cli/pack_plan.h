// SPDX-License-Identifier: Apache-2.0
// What pack will do with each tensor, decided before anything is read or written.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/items.h"
#include "stowage/dialect.h"

namespace stowage::cli {

struct PackTask {
  enum class Action { copy, cast, quantize };  // cast: a plain tensor to the compute dtype
  Item item;
  Action action = Action::copy;
  Storage storage{};               // of cast and quantize
  std::string reason;              // why it stays plain, or which rule chose
  std::optional<Dtype> compute{};  // of quantized weights
  // Of what rests in the files of a dialect: as which storage of the same values, in which tensors.
  std::optional<Storage> written{};
  std::vector<DialectTensor> said{};

  /// Whether it rests afterwards, as which storage, and what it then computes in.
  bool rests() const noexcept { return packed() || (action == Action::copy && item.rests()); }
  const Storage& resting() const noexcept { return packed() ? storage : item.weight->storage; }
  std::optional<Dtype> computes() const { return packed() ? compute : item.weight->compute; }
  bool packed() const noexcept { return action == Action::quantize; }
};

/// Throws UsageError for a rule that no tensor matches, invalid_argument where a storage cannot
/// hold a shape.
std::vector<PackTask> plan_pack(const File& file, const PackOptions& options);

/// What the packing becomes in the new file.
std::vector<Declaration> declarations(const PackTask& packing);

}  // namespace stowage::cli
