// SPDX-License-Identifier: Apache-2.0
// linear and its gradient: checks, and the choice of a path.
#include <string>

#include "kernel/check_read.h"
#include "kernel/linear_drivers.h"
#include "kernel/linear_paths.h"

namespace stowage {
namespace {

void check(const char* where, const void* x, std::int64_t depth, std::int64_t m, Dtype dtype,
           const void* y) {
  const std::string prefix(where);
  if (dtype != Dtype::f32 && dtype != Dtype::bf16 && dtype != Dtype::f16)
    throw Error(Code::invalid_argument,
                prefix + ": dtype must be f32, bf16 or f16, got " + std::string(disk_name(dtype)));
  if (m < 0)
    throw Error(Code::invalid_argument,
                prefix + ": rows of x must not be negative, got " + std::to_string(m));
  if ((x == nullptr && depth != 0) || y == nullptr)
    throw Error(Code::invalid_argument, prefix + ": x and y must not be null");
}

}  // namespace

void linear_with(const Kernels& kernels, const void* x, std::int64_t m, Dtype dtype,
                 const Weight& weight, const void* bias, void* y, Executor& executor) {
  const LinearWeight rows(kernels, weight, "linear");
  if (m == 0 || rows.rows() == 0) return;
  check("linear", x, rows.columns(), m, dtype, y);
  const LinearCall call{&kernels.linear, &rows, x, m, dtype, bias, y, &executor};
  if (fits_tiny(call)) return linear_tiny(call);
  if (fits_bf16(call)) return linear_bf16(call);
  if (fits_rows(call)) return linear_rows(call);
  linear_tiles(call);
}

void linear_grad_input_with(const Kernels& kernels, const void* g, std::int64_t m, Dtype dtype,
                            const Weight& weight, void* gx, Executor& executor) {
  const LinearWeight rows(kernels, weight, "linear_grad_input");
  if (m == 0 || rows.columns() == 0) return;
  check("linear_grad_input", g, rows.rows(), m, dtype, gx);
  linear_grad_tiles({&kernels.linear, &rows, g, m, dtype, nullptr, gx, &executor});
}

inline namespace v0 {

void linear(const void* x, std::int64_t m, Dtype dtype, const Weight& weight, const void* bias,
            void* y, Executor* executor) {
  linear_with(kernels(), x, m, dtype, weight, bias, y, or_default(executor));
  check_read(weight);
}

bool multiplies_in_bf16(const Weight& weight) {
  return LinearWeight(kernels(), weight, "linear").has_dot_bf16();
}

void linear_grad_input(const void* g, std::int64_t m, Dtype dtype, const Weight& weight, void* gx,
                       Executor* executor) {
  linear_grad_input_with(kernels(), g, m, dtype, weight, gx, or_default(executor));
  check_read(weight);
}

}  // namespace v0
}  // namespace stowage
