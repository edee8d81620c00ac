// SPDX-License-Identifier: Apache-2.0
// Writing results that are larger than the caches around them.
#pragma once
#include <cstdint>

namespace stowage {

/// Outputs from this size on are streamed: they would not stay in the caches anyway, and a plain
/// store first reads the line that it overwrites.
inline constexpr std::int64_t kStreamBytes = std::int64_t{16} << 20;

/// Copies with stores that bypass the caches; `to` may be anything, whole lines of 64 bytes are
/// bypassed. Call stream_done() before another thread reads the result.
void stream_copy(void* to, const void* from, std::int64_t bytes) noexcept;
void stream_done() noexcept;

}  // namespace stowage
