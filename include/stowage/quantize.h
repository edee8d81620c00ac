// SPDX-License-Identifier: Apache-2.0
// Arithmetic on resting weights. quantize, dequantize and embedding give the same bytes on every
// instruction set and thread count; linear's own kernels give the same bytes for any thread count.
#pragma once
#include <cstdint>

#include "stowage/executor.h"
#include "stowage/weight.h"

namespace stowage {
inline namespace v0 {

struct QuantizeOptions {
  bool keep_nonfinite = false;   // casts, nf4 and fp4 only: NaN and inf pass as the format has them
  Executor* executor = nullptr;  // null: default_executor()
};
/// Quantizes `values` (row-major, f64 f32 bf16 or f16) into caller memory: parts[i] receives part i
/// of layout(storage_for_values(storage, dtype), shape). Casts saturate; nf4:torchao:<D> first
/// casts values of another dtype to D. Throws invalid_argument on NaN or inf (naming the flat
/// index) unless kept, and then the parts hold no meaning.
STOWAGE_API void quantize_into(const void* values, Dtype dtype, const Shape& shape,
                               const Storage& storage, std::span<void* const> parts,
                               const QuantizeOptions& options = {});
/// The same into memory that the returned weight owns.
STOWAGE_API Weight quantize(const void* values, Dtype dtype, const Shape& shape,
                            const Storage& storage, const QuantizeOptions& options = {});

struct Range {
  std::int64_t begin = 0, end = 0;
};
/// out receives rows [begin, end) of dim 0: table value x scale in fp32, rounded once to `dtype`
/// (f64, f32, bf16, f16). Every NaN becomes the positive quiet one; a plain cast in its own dtype
/// is copied.
STOWAGE_API void dequantize(const Weight& weight, Range rows, void* out, Dtype dtype,
                            Executor* executor = nullptr);
/// The same for some of the elements below each index of dim 0: out is dense, [rows, columns].
STOWAGE_API void dequantize(const Weight& weight, Range rows, Range columns, void* out, Dtype dtype,
                            Executor* executor = nullptr);

/// How far a resting weight is from the values it was made from.
struct STOWAGE_API Loss {
  std::int64_t elements = 0, saturated = 0, nonfinite = 0;
  double max_error = 0;              // max |x - w|
  double sum_error2 = 0;             // sum (x - w)^2, fp64
  double sum_value2 = 0;             // sum x^2, fp64
  double worst_block_error = 0;      // the largest relative() of values that share a scale
  std::int64_t worst_block = -1;     // the first such scale, in the order of its part; -1: none
  double rms() const noexcept;       // sqrt(sum_error2 / elements)
  double relative() const noexcept;  // sqrt(sum_error2 / sum_value2); 0 for an all-zero weight
  Loss& operator+=(const Loss& other) noexcept;  // of several weights; worst_block becomes -1
};
/// `saturated` counts finite inputs of a plain cast beyond the format's largest value. Non-finite
/// elements are counted and left out of the sums. A plain cast is one block, like a weight with one
/// scale; blocks whose values are all 0 have no relative error and do not count.
STOWAGE_API Loss measure(const void* values, Dtype dtype, const Weight& weight,
                         Executor* executor = nullptr);

/// Row-major numbers of a value dtype (f64, f32, bf16, f16).
struct Values {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::int64_t count = 0;
};
/// out[i] = the largest |x| of arrays[i], in fp32, to which f64 is rounded first: 0 for no values,
/// the positive quiet NaN where there is one. Reads each value once, whatever the arrays' sizes.
STOWAGE_API void amax(std::span<const Values> arrays, float* out, Executor* executor = nullptr);

/// out[i] = row ids[i], for i < n, in `dtype`. Throws out_of_range for an id outside [0, rows).
STOWAGE_API void embedding(const Weight& weight, const std::int64_t* ids, std::int64_t n, void* out,
                           Dtype dtype, Executor* executor = nullptr);

/// y[m, N] = x[m, K] W^T + bias. W is [N, K]; x, bias and y are `dtype` (f32, bf16, f16); bias may
/// be null. Error bound: docs/numbers.md. Never holds more than one tile (<= 4 MiB) of widened
/// weight.
STOWAGE_API void linear(const void* x, std::int64_t m, Dtype dtype, const Weight& weight,
                        const void* bias, void* y, Executor* executor = nullptr);
/// Up to how many rows of x in bf16 linear() keeps up with a dense product that the CPU has
/// instructions for, since it multiplies in bf16 too (docs/numbers.md); 0 where it does not.
STOWAGE_API std::int64_t most_rows_in_bf16(const Weight& weight);
/// The same of linear_grad_input().
STOWAGE_API std::int64_t most_gradient_rows_in_bf16(const Weight& weight);
/// gx[m, K] = g[m, N] W.
STOWAGE_API void linear_grad_input(const void* g, std::int64_t m, Dtype dtype, const Weight& weight,
                                   void* gx, Executor* executor = nullptr);
/// fp32 linear in one fixed order of operations: the same bytes on every instruction set and thread
/// count. The oracle, and what reproducible programs use. Slower than linear().
STOWAGE_API void linear_fixed(const float* x, std::int64_t m, const Weight& weight,
                              const float* bias, float* y, Executor* executor = nullptr);

}  // namespace v0
}  // namespace stowage
