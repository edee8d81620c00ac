// SPDX-License-Identifier: Apache-2.0
// How work is cut for an Executor: by sizes of the shape alone, never by the number of threads, so
// that results that depend on the cut are the same for every number of threads.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "kernel/float_mode.h"
#include "stowage/executor.h"

namespace stowage {

/// Elements that are worth a task of their own: some 20 us of work. A multiple of every 4-bit
/// block.
inline constexpr std::int64_t kChunkElements = std::int64_t{1} << 17;

/// Calls body(begin, end) for chunks of [0, n) in exact floating-point mode; one chunk runs on the
/// calling thread.
template <class Body>
void for_each_chunk(Executor& executor, std::int64_t n, std::int64_t chunk, Body&& body) {
  const auto task = [&](std::int64_t i) {
    const ExactFloats exact;
    body(i * chunk, std::min(n, (i + 1) * chunk));
  };
  const std::int64_t count = ceil_div(n, chunk);
  if (count == 1) return task(0);
  executor.for_each(count, task);
}

inline Executor& or_default(Executor* executor) {
  return executor != nullptr ? *executor : default_executor();
}

}  // namespace stowage
