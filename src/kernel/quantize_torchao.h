// SPDX-License-Identifier: Apache-2.0
// Quantizing to nf4:torchao, a part of quantize_with().
#pragma once
#include <span>

#include "kernel/kernels.h"
#include "stowage/executor.h"

namespace stowage {

/// A storage that has its dtype, n elements in whole scaler blocks, parts as layout() has them.
struct TorchaoJob {
  const Kernels& kernels;
  const char* values;
  Dtype dtype;
  std::int64_t n;
  const Storage& storage;
  std::span<void* const> parts;
  Executor& executor;
};
/// The largest |x| as bits, or at least kInfinityBits where a value is not finite; then the parts
/// hold no meaning.
std::uint32_t quantize_torchao(const TorchaoJob& job);

}  // namespace stowage
