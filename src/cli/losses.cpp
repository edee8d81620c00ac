// SPDX-License-Identifier: Apache-2.0
#include "cli/losses.h"

#include <nlohmann/json.hpp>

#include "base/formatted.h"
#include "cli/text.h"

namespace stowage::cli {
namespace {

using Json = nlohmann::ordered_json;

Json name_of(const std::optional<Losses::Of>& weight) {
  return weight ? Json(weight->name) : Json(nullptr);
}

}  // namespace

void Losses::add(const std::string& name, const Storage& storage, const Loss& loss) {
  sum += loss;
  if (!worst || loss.relative() > worst->loss.relative()) worst = {name, storage, loss};
  if (loss.worst_block < 0) return;
  if (!worst_block || loss.worst_block_error > worst_block->loss.worst_block_error)
    worst_block = {name, storage, loss};
}

Json errors_json(const Loss& loss) {
  return {{"elements", loss.elements},
          {"max_error", loss.max_error},
          {"rms_error", loss.rms()},
          {"relative_error", loss.relative()},
          {"saturated", loss.saturated},
          {"nonfinite", loss.nonfinite},
          {"worst_block_error", loss.worst_block_error},
          {"worst_block", loss.worst_block < 0 ? Json(nullptr) : Json(loss.worst_block)}};
}

Json errors_json(const Losses& losses) {
  Json json = errors_json(losses.sum);
  if (losses.worst_block) json["worst_block"] = losses.worst_block->loss.worst_block;
  json["worst_block_of"] = name_of(losses.worst_block);
  json["worst"] = name_of(losses.worst);
  return json;
}

std::string worst_block_text(const Losses& losses) {
  if (!losses.worst_block) return "";
  const auto& [name, storage, loss] = *losses.worst_block;
  return formatted("worst block: relative {:.3g}, number {} of {}", loss.worst_block_error,
                   loss.worst_block, printable(name));
}

}  // namespace stowage::cli
