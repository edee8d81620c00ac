// SPDX-License-Identifier: Apache-2.0
// What every function that reads a weight asks at its end: whether all that it read was there. The
// memory may be a mapped file that another process cut short meanwhile.
#pragma once
#include "base/map_guard.h"
#include "stowage/weight.h"

namespace stowage {

/// Throws bad_file if a part of the weight, or `values`, lies in a damaged mapping. One load where
/// none is damaged.
inline void check_read(const Weight& weight, const void* values = nullptr) {
  if (mappings_damaged() == 0) return;
  for (int i = 0; i < kMaxParts; ++i) check_memory(weight.part(i));
  check_memory(values);
}

}  // namespace stowage
