// SPDX-License-Identifier: Apache-2.0
// What the CPU can run, as far as the kernels ask. A feature counts only where the operating
// system also saves its registers.
#pragma once

namespace stowage {

struct CpuFeatures {
  bool avx2 = false, f16c = false, fma = false, avxvnni = false;
  bool avx512f = false, avx512bw = false, avx512vl = false, avx512dq = false;
  bool avx512vbmi = false, avx512vnni = false, avx512bf16 = false;
  bool amx_bf16 = false;     // tiles of bf16
  bool may_use_amx = false;  // and the system lets this process use them
  bool zen5 = false;         // AMD, of family 1Ah or a later one
  bool dotprod = false;      // AArch64: sums of four products of bytes,
  bool bf16 = false;         // and products of matrices of bf16

  /// What the avx2 and the avx512 files of kernel/cpu are compiled for.
  bool runs_avx2() const noexcept { return avx2 && f16c && fma; }
  bool runs_avx512() const noexcept {
    return runs_avx2() && avx512f && avx512bw && avx512vl && avx512dq;
  }
  bool runs_avx512bf16() const noexcept {
    return runs_avx512() && avx512vbmi && avx512vnni && avx512bf16;
  }
  bool runs_amx() const noexcept { return runs_avx512bf16() && amx_bf16 && may_use_amx; }
};

/// Looked up once; all false on architectures other than x86-64 and AArch64.
const CpuFeatures& cpu_features() noexcept;

}  // namespace stowage
