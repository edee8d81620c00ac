// SPDX-License-Identifier: Apache-2.0
// Weights of int4 whose tensors are transposed: columns first, eight codes in an I32 word.
#pragma once
#include <string>

#include "store/dialects/dialects.h"

namespace stowage::dialects {

struct Int4Words {
  PartForm codes, zeros;   // of MODULE.qweight and MODULE.qzeros; MODULE.scales is [groups, O]
  int packed = 0;          // the dimension of qweight [K, O] whose numbers stand in words
  std::int64_t group = 0;  // columns; 0: a whole row

  /// The weight of MODULE.qweight. Refuses what is missing, and what is not as the storage asks.
  WeightInfo& add(Claims& claims, const TensorInfo& words) const;
  /// The tensors that add() reads as the weight; whether it has such weights.
  bool write(Wording& wording, const WeightInfo& weight) const;
};

inline constexpr std::string_view kInt4Codes = ".qweight";
/// Columns of a group as `key` of the configuration says it; 0 for -1, which is a whole row.
std::int64_t int4_group(const QuantConfig& config, const char* key);
/// What it says of a storage: 128, or -1 for a whole row.
std::int64_t int4_group_said(const Storage& storage);
/// Refuses weights in groups of other sizes.
void check_one_group(const Wording& wording);

}  // namespace stowage::dialects
