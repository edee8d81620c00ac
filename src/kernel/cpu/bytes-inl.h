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

/// The same of a block that ends after its first half: no more numbers are read.
template <int kGroups, class T>
F spread_half(const T* numbers) {
  T some[kGroups < 1 ? 1 : kGroups] = {};
  __builtin_memcpy(some, numbers, sizeof(T) * (kGroups < 2 ? 1 : kGroups / 2));
  return spread<kGroups>(some);
}

}  // namespace
}  // namespace stowage
