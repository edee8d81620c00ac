// SPDX-License-Identifier: Apache-2.0
// Dequantizing rows of a weight, whole or in part.
#include <cstring>
#include <string>
#include <vector>

#include "kernel/check_read.h"
#include "kernel/chunks.h"
#include "kernel/decode.h"
#include "kernel/drivers.h"
#include "kernel/runs.h"
#include "kernel/stream.h"
#include "kernel/transposed.h"

namespace stowage {
namespace {

void check(const char* what, Range range, std::int64_t count) {
  if (range.begin < 0 || range.end < range.begin || range.end > count)
    throw Error(Code::invalid_argument, std::string("dequantize: ") + what + " must lie in [0, " +
                                            std::to_string(count) + "), got [" +
                                            std::to_string(range.begin) + ", " +
                                            std::to_string(range.end) + ")");
}

void check(const Weight& weight, Range rows, Range columns, const void* out, Dtype dtype) {
  if (!is_value_dtype(dtype))
    throw Error(Code::invalid_argument, "dequantize: dtype must be f64, f32, bf16 or f16, got " +
                                            std::string(disk_name(dtype)));
  check("rows", rows, weight.rows());
  check("columns", columns, weight.row_elements());
  if (out == nullptr && rows.begin != rows.end && columns.begin != columns.end)
    throw Error(Code::invalid_argument, "dequantize: out must not be null");
}

void stream_run(const Decode& decode, const Run& run, std::int64_t width, int code_bits,
                char* out) {
  stream_pieces(out, run.n, width, [&](std::int64_t begin, std::int64_t count, void* stage) {
    decode(run.part(begin, count), stage);
    const std::int64_t next = run.first + begin + count;
    const std::int64_t ahead = std::min(count, run.n - begin - count);
    fetch_ahead(static_cast<const char*>(run.codes) + next * code_bits / 8, ahead * code_bits / 8);
  });
}

// Some columns of matrices that are turned whole, one at a time.
void cut_transposed(const Kernels& kernels, const Weight& weight, Range rows, Range columns,
                    void* out, Dtype dtype, Executor& executor) {
  const std::int64_t width = bits(dtype) / 8;
  const auto bytes = static_cast<std::size_t>((columns.end - columns.begin) * width);
  std::vector<char> whole(static_cast<std::size_t>(weight.row_elements() * width));
  char* place = static_cast<char*>(out);
  for (std::int64_t i = rows.begin; i < rows.end; ++i, place += bytes) {
    decode_transposed(kernels, weight, nullptr, i, 1, whole.data(), dtype, executor);
    std::memcpy(place, whole.data() + columns.begin * width, bytes);
  }
}

}  // namespace

void dequantize_with(const Kernels& kernels, const Weight& weight, Range rows, void* out,
                     Dtype dtype, Executor& executor) {
  check(weight, rows, {0, weight.row_elements()}, out, dtype);
  if (is_transposed(weight))
    return decode_transposed(kernels, weight, nullptr, rows.begin, rows.end - rows.begin, out,
                             dtype, executor);
  const Runs runs(kernels, weight);
  const Decode decode(kernels.dequantize, runs.form(), dtype);
  const std::int64_t width = bits(dtype) / 8, begin = rows.begin * weight.row_elements(),
                     n = (rows.end - rows.begin) * weight.row_elements();
  const int code_bits = runs.unpacks() ? 0 : trait(weight.storage().codes).bits;
  const bool stream = n * width >= kStreamBytes;
  for_each_chunk(executor, n, kChunkElements, [&](std::int64_t from, std::int64_t to) {
    char* place = static_cast<char*>(out) + from * width;
    runs.cover(begin + from, begin + to, [&](const Run& run) {
      if (stream)
        stream_run(decode, run, width, code_bits, place);
      else
        decode(run, place);
      place += run.n * width;
    });
    if (stream) stream_done();
  });
}

void dequantize_with(const Kernels& kernels, const Weight& weight, Range rows, Range columns,
                     void* out, Dtype dtype, Executor& executor) {
  const std::int64_t row = weight.row_elements(), n = columns.end - columns.begin;
  if (columns.begin == 0 && n == row)
    return dequantize_with(kernels, weight, rows, out, dtype, executor);
  check(weight, rows, columns, out, dtype);
  if (n == 0) return;
  if (is_transposed(weight))
    return cut_transposed(kernels, weight, rows, columns, out, dtype, executor);
  const Runs runs(kernels, weight);
  const Decode decode(kernels.dequantize, runs.form(), dtype);
  const std::int64_t width = bits(dtype) / 8;
  const std::int64_t chunk = std::max<std::int64_t>(1, kChunkElements / n);
  for_each_chunk(executor, rows.end - rows.begin, chunk, [&](std::int64_t from, std::int64_t to) {
    char* place = static_cast<char*>(out) + from * n * width;
    for (std::int64_t i = rows.begin + from; i < rows.begin + to; ++i) {
      runs.cover(i * row + columns.begin, i * row + columns.end, [&](const Run& run) {
        decode(run, place);
        place += run.n * width;
      });
    }
  });
}

inline namespace v0 {

void dequantize(const Weight& weight, Range rows, void* out, Dtype dtype, Executor* executor) {
  dequantize_with(kernels(), weight, rows, out, dtype, or_default(executor));
  check_read(weight);
}

void dequantize(const Weight& weight, Range rows, Range columns, void* out, Dtype dtype,
                Executor* executor) {
  dequantize_with(kernels(), weight, rows, columns, out, dtype, or_default(executor));
  check_read(weight);
}

}  // namespace v0
}  // namespace stowage
