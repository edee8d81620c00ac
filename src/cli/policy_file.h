// SPDX-License-Identifier: Apache-2.0
// What stowage.Policy of Python tells as JSON, as far as it is about files.
#pragma once
#include <string>

#include "cli/commands.h"

namespace stowage::cli {

/// Takes the storage, rules, skips and compute dtype of the file at `path` into `options`. What a
/// policy says of how weights work is left to who loads them. Throws UsageError for what is none,
/// and for what needs a model that runs; io.
void read_policy(const std::string& path, PackOptions& options);

}  // namespace stowage::cli
