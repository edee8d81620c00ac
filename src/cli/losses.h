// SPDX-License-Identifier: Apache-2.0
// The errors of many weights: sums, which weight and which block are worst, and how they are told.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "stowage/quantize.h"

namespace stowage::cli {

struct Losses {
  struct Of {
    std::string name;
    Storage storage;
    Loss loss;
  };
  Loss sum{};
  std::optional<Of> worst, worst_block;  // of the largest relative error; the first of equal ones

  void add(const std::string& name, const Storage& storage, const Loss& loss);
};

/// The keys of one weight, documented in docs/cli.md.
nlohmann::ordered_json errors_json(const Loss& loss);
/// Those of many.
nlohmann::ordered_json errors_json(const Losses& losses);
/// "worst block: 0.203 in a.weight, block 17"; empty where no weight has one.
std::string worst_block_text(const Losses& losses);

}  // namespace stowage::cli
