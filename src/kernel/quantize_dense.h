// SPDX-License-Identifier: Apache-2.0
// Codes that lie densely: integers of a byte first, a piece at a time, which are then packed.
#pragma once
#include "kernel/quantize_job.h"
#include "stowage/descriptor.h"

namespace stowage {

/// The codes of elements [i, i + n), whole eights, in groups of so many from i on. r has a number
/// for each group, and so has zero where it is not null.
void encode_dense(const QuantizeJob& job, const CodeRange& range, std::int64_t i, std::int64_t n,
                  std::int64_t group, const float* r, const float* zero) noexcept;

}  // namespace stowage
