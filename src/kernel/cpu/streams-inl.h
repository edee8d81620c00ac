// SPDX-License-Identifier: Apache-2.0
// How far ahead rows of weight are asked for that come together from far apart, and where to.
#pragma once
#include "kernel/linear.h"

namespace stowage {
namespace {

/// Bytes from codes to those that go on to the L1 cache: what pairs of bf16 take from the L2 cache
/// at once would hold them up.
constexpr std::int64_t kNearAhead = 512;

/// Of row i of a stream, which has `apart` rows, how many rows further those lie that will be read
/// soon: in the same stream, or, where it ends before, in that which takes its place.
constexpr std::int64_t rows_ahead(std::int64_t i, std::int64_t apart, std::int64_t row_bytes) {
  const std::int64_t far = row_bytes < 1 ? kStreamAhead : (kStreamAhead - 1) / row_bytes + 1;
  const std::int64_t some = far < apart ? far : apart;
  return i + some < apart ? some : some + (kStreams - 1) * apart;
}

/// The same in bytes, from a code of that row, of which so many are read. Into the L1 cache no more
/// than needs to be, where what follows a row is the next one.
template <bool kNear>
constexpr std::int64_t bytes_ahead(std::int64_t i, std::int64_t apart, std::int64_t row_bytes,
                                   std::int64_t read_bytes) {
  const bool follow = read_bytes == row_bytes && i + 1 < apart;
  if (kNear && follow && row_bytes > kStreamAhead) return kStreamAhead;
  return rows_ahead(i, apart, row_bytes) * row_bytes;
}

/// How many scales further those lie that are read with rows so much further, if they lie in the
/// weight and a row has lines of them; else 0.
constexpr std::int64_t kScalesOfLine = 16;
inline std::int64_t scales_ahead(const BytesDotTask& task, std::int64_t rows) {
  const std::int64_t of_row = task.columns / task.run.group;
  return task.in_place && of_row >= kScalesOfLine ? rows * of_row : 0;
}

/// Whether tables have kernels that ask for codes into the L1 cache.
constexpr bool kHasNear = kWidth == 16;

/// Most CPUs have room for many lines on their way to the L2 cache and for few on their way to the
/// L1 cache; on others the second way is the quicker one.
template <bool kNear>
[[gnu::always_inline]] inline void ask_for_line(const void* from) {
  __builtin_prefetch(from, 0, kNear ? 3 : 2);
}

}  // namespace
}  // namespace stowage
