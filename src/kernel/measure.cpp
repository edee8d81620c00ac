// SPDX-License-Identifier: Apache-2.0
// How far a weight is from the values it was made from: fp64 sums over pieces whose size is fixed,
// added in order, so that every number of threads gives the same figures.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernel/check_read.h"
#include "kernel/chunks.h"
#include "kernel/decode.h"
#include "kernel/drivers.h"
#include "kernel/runs.h"

namespace stowage {
namespace {

constexpr std::int64_t kPiece = 1024;  // elements that are widened to fp64 at a time

void check(const void* values, Dtype dtype, const Weight& weight) {
  if (!is_value_dtype(dtype))
    throw Error(Code::invalid_argument, "measure: values must be f64, f32, bf16 or f16, got " +
                                            std::string(disk_name(dtype)));
  if (values == nullptr && weight.shape().elements() != 0)
    throw Error(Code::invalid_argument, "measure: values must not be null");
}

Codes codes_of(Dtype dtype) {
  return dtype == Dtype::bf16 ? Codes::bf16 : dtype == Dtype::f16 ? Codes::f16 : Codes::f32;
}

struct Comparison {
  const DequantizeKernels& kernels;
  const char* values;
  Dtype dtype;
  Runs runs;
  Decode decode;
  double largest;  // of a plain cast; else infinity

  void widen_values(std::int64_t begin, std::int64_t end, double* room) const {
    if (dtype == Dtype::f64) {
      std::memcpy(room, values + begin * 8, static_cast<std::size_t>(end - begin) * 8);
      return;
    }
    const Run run{values, begin, nullptr, 1, end - begin};
    kernels.to[static_cast<int>(codes_of(dtype))][value_index(Dtype::f64)](run, room);
  }

  void add_piece(std::int64_t begin, std::int64_t end, Loss& loss) const {
    double x[kPiece], w[kPiece];
    widen_values(begin, end, x);
    double* place = w;
    runs.cover(begin, end, [&](const Run& run) {
      decode(run, place);
      place += run.n;
    });
    for (std::int64_t i = 0; i < end - begin; ++i) {
      if (!std::isfinite(x[i]) || !std::isfinite(w[i])) {
        ++loss.nonfinite;
        continue;
      }
      const double error = std::fabs(x[i] - w[i]);
      loss.saturated += std::fabs(x[i]) > largest ? 1 : 0;
      loss.max_error = std::max(loss.max_error, error);
      loss.sum_error2 += error * error;
      loss.sum_value2 += x[i] * x[i];
    }
  }
};

}  // namespace

Loss measure_with(const Kernels& kernels, const void* values, Dtype dtype, const Weight& weight,
                  Executor& executor) {
  check(values, dtype, weight);
  const std::int64_t n = weight.shape().elements();
  const Storage& storage = weight.storage();
  const bool cast = storage.scaling.kind == Scaling::Kind::none;
  const Comparison comparison{
      kernels.dequantize,
      static_cast<const char*>(values),
      dtype,
      Runs(weight),
      Decode(kernels.dequantize, storage, Dtype::f64),
      cast ? double{trait(storage.codes).largest} : std::numeric_limits<double>::infinity()};
  std::vector<Loss> losses(static_cast<std::size_t>(ceil_div(n, kChunkElements)));
  for_each_chunk(executor, n, kChunkElements, [&](std::int64_t begin, std::int64_t end) {
    Loss& loss = losses[static_cast<std::size_t>(begin / kChunkElements)];
    for (std::int64_t at = begin; at < end; at += kPiece)
      comparison.add_piece(at, std::min(at + kPiece, end), loss);
  });
  Loss total;
  total.elements = n;
  for (const Loss& loss : losses) {
    total.saturated += loss.saturated;
    total.nonfinite += loss.nonfinite;
    total.max_error = std::max(total.max_error, loss.max_error);
    total.sum_error2 += loss.sum_error2;
    total.sum_value2 += loss.sum_value2;
  }
  return total;
}

inline namespace v0 {

double Loss::rms() const noexcept {
  return elements == 0 ? 0 : std::sqrt(sum_error2 / static_cast<double>(elements));
}

double Loss::relative() const noexcept {
  return sum_value2 == 0 ? 0 : std::sqrt(sum_error2 / sum_value2);
}

Loss measure(const void* values, Dtype dtype, const Weight& weight, Executor* executor) {
  const Loss loss = measure_with(kernels(), values, dtype, weight, or_default(executor));
  check_read(weight, values);
  return loss;
}

}  // namespace v0
}  // namespace stowage
