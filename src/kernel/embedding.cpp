// SPDX-License-Identifier: Apache-2.0
// Looking up rows of a weight: each is a run of its own.
#include <string>

#include "kernel/check_read.h"
#include "kernel/chunks.h"
#include "kernel/decode.h"
#include "kernel/drivers.h"
#include "kernel/runs.h"
#include "kernel/transposed.h"

namespace stowage {
namespace {

void check(const Weight& weight, const std::int64_t* ids, std::int64_t n, const void* out,
           Dtype dtype) {
  if (!is_value_dtype(dtype))
    throw Error(Code::invalid_argument, "embedding: dtype must be f64, f32, bf16 or f16, got " +
                                            std::string(disk_name(dtype)));
  if (n < 0 || (n > 0 && ids == nullptr))
    throw Error(Code::invalid_argument,
                "embedding: ids must be n numbers, got n = " + std::to_string(n) +
                    (ids == nullptr ? " and null" : ""));
  for (std::int64_t i = 0; i < n; ++i)
    if (ids[i] < 0 || ids[i] >= weight.rows())
      throw Error(Code::out_of_range, "embedding: ids must lie in [0, " +
                                          std::to_string(weight.rows()) + "), got " +
                                          std::to_string(ids[i]) + " at " + std::to_string(i));
  if (out == nullptr && n != 0 && weight.row_elements() != 0)
    throw Error(Code::invalid_argument, "embedding: out must not be null");
}

}  // namespace

void embedding_with(const Kernels& kernels, const Weight& weight, const std::int64_t* ids,
                    std::int64_t n, void* out, Dtype dtype, Executor& executor) {
  check(weight, ids, n, out, dtype);
  if (is_transposed(weight))
    return decode_transposed(kernels, weight, ids, 0, n, out, dtype, executor);
  const Runs runs(kernels, weight);
  const Decode decode(kernels.dequantize, runs.form(), dtype);
  const std::int64_t width = bits(dtype) / 8, row = weight.row_elements();
  if (row == 0) return;
  const std::int64_t chunk = std::max<std::int64_t>(1, kChunkElements / row);
  for_each_chunk(executor, n, chunk, [&](std::int64_t from, std::int64_t to) {
    char* place = static_cast<char*>(out) + from * row * width;
    for (std::int64_t i = from; i < to; ++i) {
      runs.cover(ids[i] * row, (ids[i] + 1) * row, [&](const Run& run) {
        decode(run, place);
        place += run.n * width;
      });
    }
  });
}

inline namespace v0 {

void embedding(const Weight& weight, const std::int64_t* ids, std::int64_t n, void* out,
               Dtype dtype, Executor* executor) {
  embedding_with(kernels(), weight, ids, n, out, dtype, or_default(executor));
  check_read(weight);
}

}  // namespace v0
}  // namespace stowage
