// SPDX-License-Identifier: Apache-2.0
// `stowage inspect --compare`: what the weights of a model would weigh in some storages, and how
// far they would be from their values.
#pragma once
#include <string>
#include <vector>

#include "stowage/storage.h"

namespace stowage::cli {

/// "nf4,int8:row" -> storages. Throws invalid_argument.
std::vector<Storage> parse_storages(std::string_view text);
/// Quantizes every weight that pack would take in each storage and prints a table, or JSON with the
/// keys of docs/cli.md. One weight is at work at a time; nothing is written.
void compare(const std::string& model, const std::vector<Storage>& storages, bool json);

}  // namespace stowage::cli
