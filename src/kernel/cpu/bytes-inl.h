// SPDX-License-Identifier: Apache-2.0
// Registers of bytes and words as wide as F: what looks them up and multiplies them into lanes of
// 32 bits, and numbers of groups in the lanes of their columns.
#pragma once
#if defined(__aarch64__)
#include "kernel/cpu/bytes_neon-inl.h"
#elif defined(__AVX512VNNI__)
#include "kernel/cpu/bytes_avx512-inl.h"
#else
#include "kernel/cpu/bytes_avx2-inl.h"
#endif

namespace stowage {
namespace {

static_assert(sizeof(Bytes) == sizeof(F));

/// What the low four bits of bytes choose in a table that is there in each 16 bytes, and the high
/// ones.
inline void look_up_both(Bytes table, Bytes pairs, Bytes& low, Bytes& high) {
#if defined(__AVX512VBMI__)  // six bits choose
  low = _mm512_permutexvar_epi8(pairs, table);
  high = _mm512_permutexvar_epi8(_mm512_srli_epi16(pairs, 4), table);
#else
  low = look_up(table, low_nibbles(pairs));
  high = look_up(table, high_nibbles(pairs));
#endif
}

/// spread() of a block that ends after its first half: no more numbers are read.
template <int kGroups, class T>
F spread_half(const T* numbers) {
  T some[kGroups < 1 ? 1 : kGroups] = {};
  __builtin_memcpy(some, numbers, sizeof(T) * (kGroups < 2 ? 1 : kGroups / 2));
  return spread<kGroups>(some);
}

}  // namespace
}  // namespace stowage
