// SPDX-License-Identifier: Apache-2.0
// How far ahead rows of weight are asked for that come together from far apart.
#pragma once
#include "kernel/linear.h"

namespace stowage {
namespace {

/// Bytes from codes of a stream, `apart` rows from the next one, to those that will be read soon:
/// of the same one, or, where it ends soon, of that which takes its place.
constexpr std::int64_t ahead_in_streams(std::int64_t apart, std::int64_t row_bytes) {
  constexpr std::int64_t kFarRows = 4;
  return apart >= kFarRows ? kStreamAhead : kStreams * apart * row_bytes;
}

}  // namespace
}  // namespace stowage
