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
#elif defined(__aarch64__)
  // FPCR:  26 AHP | 25 DN | 24 FZ | 23-22 rounding | 19 FZ16 | 15-8 traps | 1 AH, 0 FIZ
  ExactFloats() noexcept {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    if (saved_ != 0) set(0);
  }
  ~ExactFloats() {
    if (saved_ != 0) set(saved_);
  }

 private:
  static void set(std::uint64_t mode) noexcept { __asm__ volatile("msr fpcr, %0" ::"r"(mode)); }
  std::uint64_t saved_ = 0;

 public:
#else
  ExactFloats() noexcept = default;
#endif
  ExactFloats(const ExactFloats&) = delete;
  ExactFloats& operator=(const ExactFloats&) = delete;
};

}  // namespace stowage
