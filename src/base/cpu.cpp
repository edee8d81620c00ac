// SPDX-License-Identifier: Apache-2.0
// CPUID and XGETBV, and what a process must ask for. Bit positions: Intel SDM volume 2A, CPUID
// leaves 1 and 7; XCR0 in volume 1, chapter 13. On AArch64 the system says what there is.
#include "base/cpu.h"

#include <cstddef>

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace stowage {
namespace {

#if defined(__x86_64__)
constexpr bool bit(std::uint32_t word, int i) { return (word >> i & 1u) != 0; }

std::uint64_t enabled_registers() noexcept {  // XCR0, by the opcode: the intrinsic needs -mxsave
  std::uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

// Tiles make a thread's saved state larger, so that a process must ask (Documentation/arch/x86/
// xstate.rst of the kernel); threads that begin later have what it got.
bool may_use_tiles() noexcept {
#if defined(__linux__)
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, the bit of XCR0
  return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
#else
  return false;
#endif
}

// AMD's family 1Ah and later ones. The family: bits 11 to 8 of leaf 1, and,
// where they are 15, bits 27 to 20 more.
bool is_zen5(std::uint32_t leaf1) noexcept {
  std::uint32_t most = 0, b = 0, c = 0, d = 0;
  const bool amd = __get_cpuid(0, &most, &b, &c, &d) != 0 && b == signature_AMD_ebx;
  return amd && (leaf1 >> 8 & 15u) + (leaf1 >> 20 & 255u) >= 0x1A;
}

CpuFeatures detect() noexcept {
  CpuFeatures found;
  std::uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  const bool osxsave = bit(c, 27), avx = bit(c, 28);
  if (!osxsave || !avx) return found;
  // XCR0: bits 1 and 2 are SSE and AVX state; 5, 6 and 7 the mask and upper ZMM registers.
  const std::uint64_t registers = enabled_registers();
  if ((registers & 0x06) != 0x06) return found;
  found.fma = bit(c, 12);
  found.zen5 = is_zen5(a);
  found.f16c = bit(c, 29);
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  found.avx2 = bit(b, 5);
  std::uint32_t more = 0, unused = 0;
  if (a >= 1) __get_cpuid_count(7, 1, &more, &unused, &unused, &unused);
  found.avxvnni = bit(more, 4);
  if ((registers & 0xe6) != 0xe6) return found;
  found.avx512f = bit(b, 16);
  found.avx512dq = bit(b, 17);
  found.avx512bw = bit(b, 30);
  found.avx512vl = bit(b, 31);
  found.avx512vbmi = bit(c, 1);
  found.avx512vnni = bit(c, 11);
  found.avx512bf16 = bit(more, 5);
  // XCR0: bits 17 and 18 are what tiles are and what they hold; processes ask for them by
  // arch_prctl.
  const bool has_tiles = bit(d, 24) && (registers & 0x60000) == 0x60000;
  found.amx_bf16 = has_tiles && bit(d, 22);
  found.may_use_amx = found.amx_bf16 && may_use_tiles();
  return found;
}
#elif defined(__aarch64__) && defined(__linux__)
CpuFeatures detect() noexcept {
  constexpr unsigned long kDotProduct = 1ul << 20, kBf16 = 1ul << 14;  // HWCAP_ASIMDDP, HWCAP2_BF16
  CpuFeatures found;
  found.dotprod = (getauxval(AT_HWCAP) & kDotProduct) != 0;
  found.bf16 = (getauxval(AT_HWCAP2) & kBf16) != 0;
  return found;
}
#elif defined(__aarch64__) && defined(__APPLE__)
bool system_has(const char* feature) noexcept {
  int has = 0;
  std::size_t size = sizeof has;
  return sysctlbyname(feature, &has, &size, nullptr, 0) == 0 && has != 0;
}
CpuFeatures detect() noexcept {
  CpuFeatures found;
  found.dotprod = system_has("hw.optional.arm.FEAT_DotProd");
  found.bf16 = system_has("hw.optional.arm.FEAT_BF16");
  return found;
}
#else
CpuFeatures detect() noexcept { return {}; }
#endif

}  // namespace

const CpuFeatures& cpu_features() noexcept {
  static const CpuFeatures found = detect();
  return found;
}

}  // namespace stowage
