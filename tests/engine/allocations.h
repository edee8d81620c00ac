// SPDX-License-Identifier: Apache-2.0
// Counts what this test program takes from the heap: allocations.cpp puts malloc's names ahead of
// the C library's. Sanitized builds, whose heap is their own, count nothing.
#pragma once
#include <cstdint>

namespace stowage::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kCountsAllocations = false;
#else
inline constexpr bool kCountsAllocations = true;
#endif

std::uint64_t allocations();  // calls so far, of all threads

}  // namespace stowage::test
