// SPDX-License-Identifier: Apache-2.0
// A weight of int4 whose tensors are transposed: columns first, eight codes in an I32 word.
#pragma once
#include <string>

#include "store/dialects/dialects.h"

namespace stowage::dialects {

struct Int4Words {
  std::string module;
  PartForm codes, zeros;   // of MODULE.qweight and MODULE.qzeros; MODULE.scales is [groups, O]
  Shape shape;             // [O, K], as qweight says it
  std::int64_t group = 0;  // columns; 0: a whole row

  /// Refuses what is missing, and what is not as the storage asks.
  WeightInfo& add(Claims& claims) const;
};

/// Columns of a group as `key` of the configuration says it; 0 for -1, which is a whole row.
std::int64_t int4_group(const QuantConfig& config, const char* key);

}  // namespace stowage::dialects
