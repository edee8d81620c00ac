// SPDX-License-Identifier: Apache-2.0
// What packing did: bytes, errors and what stayed plain, as text or JSON.
#pragma once
#include <string>
#include <vector>

#include "cli/pack_plan.h"
#include "stowage/quantize.h"

namespace stowage::cli {

struct Outcome {
  PackTask packing;
  std::uint64_t bytes = 0;  // in the new file
  Loss loss{};              // of packed weights
};

/// `left_out`: of convert, the tensors that OUT does not get.
std::string report_text(const PackOptions& options, const std::vector<Outcome>& outcomes,
                        const std::vector<std::string>& left_out = {});
/// The keys are documented in docs/cli.md.
std::string report_json(const PackOptions& options, const std::vector<Outcome>& outcomes,
                        const std::vector<std::string>& left_out = {});

}  // namespace stowage::cli
