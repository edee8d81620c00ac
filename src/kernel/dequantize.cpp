// SPDX-License-Identifier: Apache-2.0
// Dequantizing rows of a weight.
#include <string>

#include "kernel/chunks.h"
#include "kernel/drivers.h"
#include "kernel/runs.h"
#include "kernel/stream.h"

namespace stowage {
namespace {

void check(const Weight& weight, Range rows, const void* out, Dtype dtype) {
  if (!is_value_dtype(dtype))
    throw Error(Code::invalid_argument, "dequantize: dtype must be f64, f32, bf16 or f16, got " +
                                            std::string(disk_name(dtype)));
  if (rows.begin < 0 || rows.end < rows.begin || rows.end > weight.rows())
    throw Error(Code::invalid_argument,
                "dequantize: rows must lie in [0, " + std::to_string(weight.rows()) + "), got [" +
                    std::to_string(rows.begin) + ", " + std::to_string(rows.end) + ")");
  if (out == nullptr && rows.begin != rows.end && weight.row_elements() != 0)
    throw Error(Code::invalid_argument, "dequantize: out must not be null");
}

void stream_run(DequantizeKernel kernel, const Run& run, std::int64_t width, int code_bits,
                char* out) {
  stream_pieces(out, run.n, width, [&](std::int64_t begin, std::int64_t count, void* stage) {
    kernel({run.codes, run.first + begin, run.scales, run.group, count}, stage);
    const std::int64_t next = run.first + begin + count;
    const std::int64_t ahead = std::min(count, run.n - begin - count);
    fetch_ahead(static_cast<const char*>(run.codes) + next * code_bits / 8, ahead * code_bits / 8);
  });
}

}  // namespace

void dequantize_with(const Kernels& kernels, const Weight& weight, Range rows, void* out,
                     Dtype dtype, Executor& executor) {
  check(weight, rows, out, dtype);
  const Runs runs(weight);
  const auto codes = static_cast<std::size_t>(weight.storage().codes);
  const DequantizeKernel kernel = kernels.dequantize.to[codes][value_index(dtype)];
  const std::int64_t width = bits(dtype) / 8, begin = rows.begin * weight.row_elements(),
                     n = (rows.end - rows.begin) * weight.row_elements();
  const int code_bits = trait(weight.storage().codes).bits;
  const bool stream = n * width >= kStreamBytes;
  for_each_chunk(executor, n, kChunkElements, [&](std::int64_t from, std::int64_t to) {
    char* place = static_cast<char*>(out) + from * width;
    runs.cover(begin + from, begin + to, [&](const Run& run) {
      if (stream)
        stream_run(kernel, run, width, code_bits, place);
      else
        kernel(run, place);
      place += run.n * width;
    });
    if (stream) stream_done();
  });
}

inline namespace v0 {

void dequantize(const Weight& weight, Range rows, void* out, Dtype dtype, Executor* executor) {
  dequantize_with(kernels(), weight, rows, out, dtype, or_default(executor));
}

}  // namespace v0
}  // namespace stowage
