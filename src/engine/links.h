// SPDX-License-Identifier: Apache-2.0
// The rates of a machine: measured, kept in a file, and as JSON.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "engine/json_fields.h"
#include "stowage/plan.h"

namespace stowage::engine {

nlohmann::ordered_json links_json(const Links& links);  // without the key
Links links_of(const Fields& fields, std::string key);

/// The disk that a file or folder lies on, "254:1".
std::string disk_key(const std::string& path);

/// Bytes per second out of the files at `path` (or one that is made there for a moment), past the
/// page cache and out of it.
std::pair<double, double> measure_disk(const std::string& path);
/// All that does not depend on a disk.
Links measure_machine();

}  // namespace stowage::engine
