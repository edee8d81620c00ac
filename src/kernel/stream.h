// SPDX-License-Identifier: Apache-2.0
// Writing results that are larger than the caches around them, and what is in these.
#pragma once
#include <algorithm>
#include <cstdint>

namespace stowage {

/// Outputs from this size on are streamed: they would not stay in the caches anyway, and a plain
/// store first reads the line that it overwrites. Smaller ones mostly go to new pages, which the
/// system has just zeroed in a cache: 32 MiB took 0.8 of the time of streaming.
inline constexpr std::int64_t kStreamBytes = std::int64_t{64} << 20;

/// The size of the buffer that results are made in before they are streamed. About what the core's
/// fill buffers hold, so that one piece drains while the next is computed: 2 KiB took 0.8 of the
/// time of 8 KiB.
inline constexpr std::int64_t kStageBytes = std::int64_t{2} << 10;

/// Copies to any place; whole lines of 64 bytes go around the caches. Call stream_done() before
/// another thread reads the result.
void stream_copy(void* to, const void* from, std::int64_t bytes) noexcept;
void stream_done() noexcept;
/// Asks for bytes that will be read soon, if there are any: computing between reads leaves the
/// hardware's own prefetcher behind. Never reads, so `from` may lie past the end of an array.
void fetch_ahead(const void* from, std::int64_t bytes) noexcept;

/// Whether the bytes are in no cache now; false where a program cannot see to that.
bool put_out_of_caches(const void* from, std::int64_t bytes) noexcept;

/// n results of `width` bytes by way of a buffer: make(begin, count, buffer) makes some. After the
/// first piece, pieces end where lines of `out` do.
template <class Make>
void stream_pieces(char* out, std::int64_t n, std::int64_t width, Make&& make) {
  alignas(64) char stage[kStageBytes];
  const auto past_line = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(out) % 64);
  std::int64_t count = (kStageBytes - past_line) / width;
  for (std::int64_t begin = 0; begin < n; begin += count, count = kStageBytes / width) {
    count = std::min(count, n - begin);
    make(begin, count, stage);
    stream_copy(out + begin * width, stage, count * width);
  }
}

}  // namespace stowage
