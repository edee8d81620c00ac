// SPDX-License-Identifier: Apache-2.0
// Non-temporal stores of SSE2, which every x86-64 has; plain copies elsewhere.
#include "kernel/stream.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace stowage {

#if defined(__SSE2__)
void stream_copy(void* to, const void* from, std::int64_t bytes) noexcept {
  constexpr std::int64_t kLine = 64;
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  const auto past_line = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(out) % kLine);
  std::int64_t i = std::min(bytes, (kLine - past_line) % kLine);
  std::memcpy(out, in, static_cast<std::size_t>(i));
  for (; i + kLine <= bytes; i += kLine)
    for (std::int64_t j = i; j < i + kLine; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + j)));
  std::memcpy(out + i, in + i, static_cast<std::size_t>(bytes - i));
}
void stream_done() noexcept { _mm_sfence(); }
bool put_out_of_caches(const void* from, std::int64_t bytes) noexcept {
  for (std::int64_t i = 0; i < bytes; i += 64) _mm_clflush(static_cast<const char*>(from) + i);
  if (bytes > 0) _mm_clflush(static_cast<const char*>(from) + bytes - 1);
  _mm_mfence();
  return true;
}
#else
void stream_copy(void* to, const void* from, std::int64_t bytes) noexcept {
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}
void stream_done() noexcept {}
bool put_out_of_caches(const void*, std::int64_t) noexcept { return false; }
#endif

void fetch_ahead(const void* from, std::int64_t bytes) noexcept {
  for (std::int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const char*>(from) + i);
}

}  // namespace stowage
