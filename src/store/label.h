// SPDX-License-Identifier: Apache-2.0
// The label of a weight: a small text tensor "<weight>.stowage", U8, that says what the weight is
// where names, types and shapes of its tensors do not. Tensors without a file have no manifest:
//   {"version": 1, "storage": "int8:block48", "shape": [4, 96]}
// label() of stowage/writer.h makes it.
#pragma once
#include <string>
#include <string_view>

#include "store/manifest.h"

namespace stowage {

inline constexpr std::string_view kLabel = ".stowage";

/// Throws bad_file.
ManifestWeight parse_label(const Place& place, std::string_view json);

}  // namespace stowage
