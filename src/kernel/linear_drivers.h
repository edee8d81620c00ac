// SPDX-License-Identifier: Apache-2.0
// The public linear functions with the kernels given, so that tests and benchmarks can run any
// table; the public ones pass kernels().
#pragma once
#include "kernel/kernels.h"
#include "stowage/quantize.h"

namespace stowage {
void linear_with(const Kernels& kernels, const void* x, std::int64_t m, Dtype dtype,
                 const Weight& weight, const void* bias, void* y, Executor& executor);
void linear_grad_input_with(const Kernels& kernels, const void* g, std::int64_t m, Dtype dtype,
                            const Weight& weight, void* gx, Executor& executor);
void linear_fixed_with(const Kernels& kernels, const float* x, std::int64_t m, const Weight& weight,
                       const float* bias, float* y, Executor& executor);
}  // namespace stowage
