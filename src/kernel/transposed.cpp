// SPDX-License-Identifier: Apache-2.0
#include "kernel/transposed.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/checked.h"
#include "kernel/chunks.h"
#include "kernel/decode.h"
#include "kernel/runs.h"

namespace stowage {
namespace {

// Of a tile that is turned on the stack: rows of what is read, each a stretch of columns.
constexpr std::int64_t kTileRows = 16, kTileColumns = 256;

// out[c * stride + r] = in[r * in_stride + c], for r < rows and c < columns.
template <class Bits>
void turn(const Bits* in, std::int64_t in_stride, std::int64_t rows, std::int64_t columns,
          char* out, std::int64_t stride) noexcept {
  std::array<Bits, kTileRows> line;
  for (std::int64_t c = 0; c < columns; ++c) {
    for (std::int64_t r = 0; r < rows; ++r)
      line[static_cast<std::size_t>(r)] = in[r * in_stride + c];
    std::memcpy(out + c * stride * static_cast<std::int64_t>(sizeof(Bits)), line.data(),
                static_cast<std::size_t>(rows) * sizeof(Bits));
  }
}

template <class Body>
void with_bits(std::int64_t width, Body&& body) {
  if (width == 2) return body(std::uint16_t{});
  if (width == 4) return body(std::uint32_t{});
  body(std::uint64_t{});
}

// Calls body(matrix, row) for each strip of kTileRows rows of n matrices.
template <class Body>
void for_each_strip(Executor& executor, std::int64_t n, std::int64_t rows, std::int64_t columns,
                    Body&& body) {
  const std::int64_t strips = ceil_div(rows, kTileRows);
  const std::int64_t chunk = std::max<std::int64_t>(1, kChunkElements / (kTileRows * columns));
  for_each_chunk(executor, n * strips, chunk, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t i = from; i < to; ++i) body(i / strips, i % strips * kTileRows);
  });
}

}  // namespace

Weight lying(const Weight& weight) {
  const Storage& storage = weight.storage();
  std::array<const void*, kMaxParts> parts{};
  const auto count = static_cast<std::size_t>(layout(storage, weight.shape()).count);
  for (std::size_t i = 0; i < count; ++i) parts[i] = weight.part(static_cast<int>(i));
  return {lying(storage), lying(storage, weight.shape()), std::span(parts).first(count)};
}

void transpose_matrix(const void* values, std::int64_t rows, std::int64_t columns,
                      std::int64_t width, void* out, Executor& executor) {
  if (rows == 0 || columns == 0) return;
  with_bits(width, [&]<class Bits>(Bits) {
    for_each_strip(executor, 1, rows, columns, [&](std::int64_t, std::int64_t row) {
      const std::int64_t count = std::min(kTileRows, rows - row);
      std::array<Bits, static_cast<std::size_t>(kTileRows * kTileColumns)> tile;
      for (std::int64_t c = 0; c < columns; c += kTileColumns) {
        const std::int64_t some = std::min(kTileColumns, columns - c);
        for (std::int64_t r = 0; r < count; ++r)
          std::memcpy(tile.data() + r * kTileColumns,
                      static_cast<const char*>(values) + ((row + r) * columns + c) * width,
                      static_cast<std::size_t>(some * width));
        turn(tile.data(), kTileColumns, count, some,
             static_cast<char*>(out) + (c * rows + row) * width, rows);
      }
    });
  });
}

void decode_transposed(const Kernels& kernels, const Weight& weight, const std::int64_t* ids,
                       std::int64_t first, std::int64_t n, void* out, Dtype dtype,
                       Executor& executor) {
  const Weight lies = lying(weight);
  const std::int64_t rows = lies.shape()[1], columns = lies.shape()[2], width = bits(dtype) / 8;
  if (n == 0 || rows == 0 || columns == 0) return;
  const Runs runs(kernels, lies);
  const Decode decode(kernels.dequantize, runs.form(), dtype);
  with_bits(width, [&]<class Bits>(Bits) {
    for_each_strip(executor, n, rows, columns, [&](std::int64_t i, std::int64_t row) {
      const std::int64_t count = std::min(kTileRows, rows - row);
      const std::int64_t matrix = ids == nullptr ? first + i : ids[i];
      char* const to = static_cast<char*>(out) + i * rows * columns * width;
      alignas(64) std::array<Bits, static_cast<std::size_t>(kTileRows * kTileColumns)> tile;
      for (std::int64_t c = 0; c < columns; c += kTileColumns) {
        const std::int64_t some = std::min(kTileColumns, columns - c);
        for (std::int64_t r = 0; r < count; ++r) {
          const std::int64_t begin = (matrix * rows + row + r) * columns + c;
          Bits* place = tile.data() + r * kTileColumns;
          runs.cover(begin, begin + some, [&](const Run& run) {
            decode(run, place);
            place += run.n;
          });
        }
        turn(tile.data(), kTileColumns, count, some, to + (c * rows + row) * width, rows);
      }
    });
  });
}

}  // namespace stowage
