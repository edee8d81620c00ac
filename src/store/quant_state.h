// SPDX-License-Identifier: Apache-2.0
// The JSON quant state that bitsandbytes keeps beside a 4-bit weight, in the tensor
// "<weight>.quant_state.bitsandbytes__nf4" (or __fp4), U8, one byte a character:
//   {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 256],
//    "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.57}
#pragma once
#include <string>
#include <string_view>

#include "store/refusal.h"
#include "stowage/descriptor.h"
#include "stowage/storage.h"

namespace stowage {

inline constexpr std::string_view kQuantStatePrefix = ".quant_state.bitsandbytes__";

struct QuantState {
  Storage storage;
  Shape shape;
  Dtype compute = Dtype::bf16;
  float nested_offset = 0;  // bitsandbytes: a JSON double, narrowed to fp32 on reading
};

/// Whether files describe a weight of this storage by a quant state.
inline bool has_quant_state(const Storage& storage) {
  return describe(storage).file == FileForm::quant_state;
}

/// `place` names the tensor and the byte of its first character. Throws bad_file.
QuantState parse_quant_state(const Place& place, std::string_view json);

}  // namespace stowage
