// SPDX-License-Identifier: Apache-2.0
// What is fuzzed: each takes any bytes and must either accept them or throw stowage::Error.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace stowage::fuzz {

using Bytes = std::span<const std::uint8_t>;

void dialect(Bytes bytes);      // a config.json, a zero byte, and the file that lies beside it
void file(Bytes bytes);         // a whole safetensors file: frame, header, manifest, weights
void header(Bytes bytes);       // the JSON of a header, with as much data as its tensors say
void shard_index(Bytes bytes);  // model.safetensors.index.json
void manifest(Bytes bytes);     // the value of the metadata key "stowage"
void quant_state(Bytes bytes);  // the JSON beside a 4-bit weight

}  // namespace stowage::fuzz
