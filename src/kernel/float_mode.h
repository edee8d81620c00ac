// SPDX-License-Identifier: Apache-2.0
// The floating-point mode that exact results need, for as long as one task runs.
#pragma once
#include <cstdint>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace stowage {

/// Round to nearest, keep subnormals, raise nothing; the caller's mode comes back at the end of the
/// scope. Every task that computes values opens one, since the mode belongs to the thread.
class ExactFloats {
 public:
#if defined(__SSE__)
  // MXCSR:  15 FTZ | 14-13 rounding | 12-7 exception masks | 6 DAZ | 5-0 flags
  ExactFloats() noexcept : saved_(_mm_getcsr()) {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(kDefault | (saved_ & kFlags));
  }
  ~ExactFloats() {
    if ((saved_ & ~kFlags) != kDefault) _mm_setcsr(saved_);
  }

 private:
  static constexpr std::uint32_t kFlags = 0x003F, kDefault = 0x1F80;
  std::uint32_t saved_;

 public:
#else
  ExactFloats() noexcept = default;
#endif
  ExactFloats(const ExactFloats&) = delete;
  ExactFloats& operator=(const ExactFloats&) = delete;
};

}  // namespace stowage
