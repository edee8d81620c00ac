// SPDX-License-Identifier: Apache-2.0
// Counts what this test program asks of the system, and has the nth request fail: allocations.cpp
// puts names of the C library (the heap, threads, memory and file calls) ahead of it. Sanitized
// builds, whose heap and threads are their own, count nothing.
#pragma once
#include <cstdint>
#include <string>

namespace stowage::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kCountsAllocations = false;
#else
inline constexpr bool kCountsAllocations = true;
#endif

std::uint64_t allocations();  // calls so far, of all threads
std::int64_t held();          // allocations and mappings that were not given back yet
std::uint64_t madvised();     // calls of madvise so far

/// While one lives, requests of all threads are counted (only those of the name `of`, if one is
/// given), and the nth (from 0) fails as a system that has no more of it would.
class Shortage {
 public:
  explicit Shortage(std::int64_t nth, const char* of = nullptr);
  Shortage(const Shortage&) = delete;
  ~Shortage();
  static std::string failed();  // what the last one let fail; "" if it counted fewer
};

}  // namespace stowage::test
