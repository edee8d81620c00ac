// SPDX-License-Identifier: Apache-2.0
// Lines of the nearest cache that are written whole, past the caches: a part is far larger than
// what these hold, and a line that is written whole need not be read before.
#pragma once
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace stowage {

inline constexpr std::int64_t kLine = 64;  // bytes
/// Lines one after another that memory takes as fast as any number of them; a line alone, far from
/// the one before, takes it more than three times as long.
inline constexpr std::int64_t kLinesBeside = 4;
using Line = std::array<std::uint32_t, kLine / 4>;

#ifdef __SSE2__
inline void stream_line(const void* line, std::byte* to) {
  const auto* const from = static_cast<const __m128i*>(line);
  for (std::size_t i = 0; i < kLine / sizeof(__m128i); ++i)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, _mm_loadu_si128(from + i));
}
#endif
/// What is written so is seen by other threads after finish_lines().
inline void put_line(const void* line, std::byte* to) {
#ifdef __SSE2__
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(__m128i) == 0) return stream_line(line, to);
#endif
  std::memcpy(to, line, kLine);
}
inline void finish_lines() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

/// Bytes one after another.
inline void put_lines(const std::byte* from, std::byte* to, std::int64_t bytes) {
  std::int64_t i = 0;
#ifdef __SSE2__
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(__m128i) == 0)
    for (; i + kLine <= bytes; i += kLine) stream_line(from + i, to + i);
#endif
  if (i < bytes) std::memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

}  // namespace stowage
