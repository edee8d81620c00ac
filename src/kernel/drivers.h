// SPDX-License-Identifier: Apache-2.0
// The public functions of stowage/quantize.h with the kernels given, so that tests and benchmarks
// can run any table; the public ones pass kernels().
#pragma once
#include "kernel/kernels.h"
#include "stowage/quantize.h"

namespace stowage {
void quantize_with(const Kernels& kernels, const void* values, Dtype dtype, const Shape& shape,
                   const Storage& storage, std::span<void* const> parts,
                   const QuantizeOptions& options);
void dequantize_with(const Kernels& kernels, const Weight& weight, Range rows, void* out,
                     Dtype dtype, Executor& executor);
void dequantize_with(const Kernels& kernels, const Weight& weight, Range rows, Range columns,
                     void* out, Dtype dtype, Executor& executor);
void embedding_with(const Kernels& kernels, const Weight& weight, const std::int64_t* ids,
                    std::int64_t n, void* out, Dtype dtype, Executor& executor);
void amax_with(const Kernels& kernels, std::span<const Values> arrays, float* out,
               Executor& executor);
Loss measure_with(const Kernels& kernels, const void* values, Dtype dtype, const Weight& weight,
                  Executor& executor);
void linear_with(const Kernels& kernels, const void* x, std::int64_t m, Dtype dtype,
                 const Weight& weight, const void* bias, void* y, Executor& executor);
void linear_grad_input_with(const Kernels& kernels, const void* g, std::int64_t m, Dtype dtype,
                            const Weight& weight, void* gx, Executor& executor);
void linear_fixed_with(const Kernels& kernels, const float* x, std::int64_t m, const Weight& weight,
                       const float* bias, float* y, Executor& executor);
}  // namespace stowage
