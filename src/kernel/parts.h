// SPDX-License-Identifier: Apache-2.0
// How products with many rows of x are cut: the weight into parts, and x into rows of which one
// widened stretch of weight is multiplied with all.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernel/float_mode.h"
#include "kernel/linear_weight.h"

namespace stowage {

inline constexpr std::int64_t kTurned = 16;  // rows or columns that are turned at a time
inline constexpr std::int64_t kMoves = 16;   // products that take as long as a number that is moved

/// How the rows or columns of a weight are cut into stretches, one for each part of the work.
struct Parts {
  std::int64_t count, each;

  std::int64_t number() const noexcept { return ceil_div(count, each); }
  /// What the last thread to end does, where all take turns.
  std::int64_t longest(std::int64_t threads) const noexcept {
    return ceil_div(number(), threads) * each;
  }
};

/// Long stretches, up to `most`, use what is shared more often; but no thread may wait long for the
/// last one: each has several. None is shorter than `fewest`.
inline Parts parts_of(std::int64_t count, std::int64_t most, std::int64_t threads,
                      std::int64_t fewest = kTurned, std::int64_t several = 4) {
  most = std::min(most, padded(count));
  Parts best{count, most};
  if (threads == 1) return best;
  const std::int64_t ideal = ceil_div(count, threads);
  for (std::int64_t each = most; each >= fewest; each -= kTurned) {
    const Parts now{count, each};
    if (now.longest(threads) < best.longest(threads)) best = now;
    if (now.number() >= several * threads && now.longest(threads) * 16 <= ideal * 17) return now;
  }
  return best;
}

/// Rows of x or g that are multiplied at a time.
struct Rows {
  std::int64_t begin, count;
};

/// Calls body(rows) for as many at a time as may be widened, in shares as alike as can be.
template <class Body>
void for_each_rows(const LinearCall& call, std::int64_t depth, std::int64_t most, Body&& body) {
  constexpr std::int64_t kSharedBytes = std::int64_t{3} << 20;  // of what multiplies the weight
  constexpr std::int64_t kFewestShared = 64;  // rows of it, even if these take more
  const std::int64_t each =
      std::max<std::int64_t>(1, depth) * static_cast<std::int64_t>(sizeof(float));
  most = std::clamp(kSharedBytes / each / kTurned * kTurned, kFewestShared, most);
  std::int64_t left = ceil_div(call.m, most);
  for (std::int64_t begin = 0; begin < call.m; --left) {
    const std::int64_t count = std::min(padded(ceil_div(call.m - begin, left)), call.m - begin);
    body(Rows{begin, count});
    begin += count;
  }
}

/// body(i) for i < count, on threads where so many products are worth it.
template <class Body>
void for_each_part(const LinearCall& call, std::int64_t count, std::int64_t products, Body&& body) {
  constexpr std::int64_t kParallelProducts = std::int64_t{1} << 20;
  Executor& executor = products < kParallelProducts ? inline_executor() : *call.executor;
  executor.for_each(count, [&](std::int64_t i) {
    const ExactFloats exact;
    body(i);
  });
}

}  // namespace stowage
