// SPDX-License-Identifier: Apache-2.0
// The config.json of what pack and unpack write, and the one that transformers needs to open 4-bit
// weights through bitsandbytes.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cli/model_folder.h"
#include "cli/pack_plan.h"

namespace stowage::cli {

/// The new config.json: with a quantization_config of what rests, under --for bitsandbytes in its
/// form; nothing where the model has none. Throws UsageError where the plan holds what bitsandbytes
/// cannot, io without a config.json, bad_file where it is no JSON object, unsupported for models
/// whose matrices lie [in, out].
std::optional<std::string> packed_config(const Output& output,
                                         const std::vector<PackTask>& packings,
                                         const PackOptions& options);

/// Of what convert writes: config.json with the keys of the dialect, and its further files. Throws
/// UsageError where they need a folder, bad_file and unsupported as packed_config().
SideFiles converted_configs(const Output& output, const DialectFiles& files,
                            const PackOptions& options);

/// The same text without quantization_config: of a model that is plain again.
std::optional<std::string> plain_config(const Output& output, std::optional<Dtype> compute);

}  // namespace stowage::cli
