// SPDX-License-Identifier: Apache-2.0
// The group of each column of a matrix, where a tensor names it (GPTQ's act order): I32 [K].
#pragma once
#include <string>

#include "store/dialects/dialects.h"

namespace stowage::dialects {

/// Takes the tensor of that name, if there is one. Columns in the order of their groups, as the
/// storage of the weight has them, need it no more, nor do those that have -1 throughout, which is
/// compressed-tensors' for the same; others make it a part of the weight. Refuses a group that the
/// weight has not.
void add_groups(Claims& claims, WeightInfo& weight, const std::string& name);
/// Refuses a group that a weight with so many has not.
void check_groups(const Claims& claims, Refusal why, const TensorInfo& tensor, std::int64_t count);
/// Whether a weight has such a part.
bool has_groups(const Wording& wording);

}  // namespace stowage::dialects
