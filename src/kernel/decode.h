// SPDX-License-Identifier: Apache-2.0
// How runs of a weight become values of a dtype: by one kernel, or, where the values are first
// rounded to a dtype of the weight's own (nf4:torchao), by two.
#pragma once
#include "kernel/dequantize.h"
#include "stowage/descriptor.h"

namespace stowage {

class Decode {
 public:
  /// `out` is a value dtype.
  Decode(const DequantizeKernels& kernels, const Descriptor& form, Dtype out) noexcept;

  void operator()(const Run& run, void* out) const noexcept {
    if (then_ == nullptr) return first_(run, out);
    by_two(run, static_cast<char*>(out));
  }

 private:
  void by_two(const Run& run, char* out) const noexcept;

  DequantizeKernel first_, then_ = nullptr;
  std::int64_t out_bytes_;  // of an element
};

}  // namespace stowage
