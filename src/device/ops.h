// SPDX-License-Identifier: Apache-2.0
// The ops on weights as launches of a device's kernels (kernel/cuda), one after the other: which of
// them, over how much, with what. Memory is the caller's and the device's; nothing here waits.
#pragma once
#include <cstddef>
#include <span>
#include <string_view>

#include "device/form.h"
#include "stowage/quantize.h"

namespace stowage::device {

/// Runs kernels in order, as a stream of a device does.
class Stream {
 public:
  virtual ~Stream() = default;
  /// A kernel of the program for a form, on at least so many threads: each takes the next place of
  /// its own until all are done. `elements`: the most that a place counts.
  virtual void launch(const cuda::Form& form, std::string_view kernel, std::int64_t threads,
                      std::int64_t elements, std::span<const void* const> arguments) = 0;
  virtual void clear(void* memory, std::size_t bytes) = 0;
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;
};

/// As stowage::dequantize_into.
void dequantize(Stream& stream, const Storage& storage, const Shape& shape,
                std::span<void* const> parts, void* out, Dtype dtype);

/// out [count, row]: rows of a weight by ids of i64 or i32. Ids outside of its rows raise *refused,
/// which must be 0 before.
void embedding(Stream& stream, const Storage& storage, const Shape& shape,
               std::span<void* const> parts, const void* ids, bool are_long, std::int64_t count,
               void* out, Dtype dtype, std::uint32_t* refused);

/// The most rows of x that a program takes at a time.
inline constexpr int kMostTogether = 16;
/// What of a device decides how it multiplies.
struct Facts {
  int architecture, processors;
};
/// Whether such products, of whole pieces, are made on tensor cores: those of bf16 came with
/// architecture 80; one row gains by them where its weights are looked up in tables.
bool on_tensor_cores(const cuda::Form& form, const Facts& facts) noexcept;
/// Rows of x, what is added to their products, and where those go. All of the dtype of x.
struct Factor {
  Dtype dtype;
  std::int64_t rows;
  const void *x, *bias;  // no bias: null
  void* y;
};
/// As stowage::linear, of a matrix w [O, K]: y [rows, O] = x [rows, K] w^T + bias. On tensor cores
/// where the device has those of bf16 and pieces are whole. The same bytes each time, on each
/// device that has as many processors.
void linear(Stream& stream, const Storage& storage, const Shape& shape,
            std::span<void* const> parts, const Factor& factor, const Facts& facts);
/// With so many rows of x linear() takes less time than dequantizing does, by the instructions and
/// bytes of both (docs/cuda.md): each 16 rows decode the weight once more, and read it from a
/// cache.
int most_rows(const Storage& storage, Dtype dtype, const Shape& shape, const Facts& facts);
/// The same of w [E, O, K] and bias [E, O], for any number of rows: those before ends[0] of x by
/// matrix 0, those from there to ends[1] by matrix 1, and so on; of rows from the last end on y is
/// 0. No other matrix is read. Ends, which the device has, must ascend; of others the wrong rows
/// are taken, but none outside of x.
void grouped_linear(Stream& stream, const Storage& storage, const Shape& shape,
                    std::span<void* const> parts, const Factor& factor, const std::int32_t* ends,
                    const Facts& facts);
/// Rows that a program takes at a time where it has groups: by fused multiply-add, and on tensor
/// cores.
inline constexpr int kFusedRows = 4, kTileRows[] = {8, 16};

/// Bytes that quantize() works with, beside the parts.
std::size_t working_bytes(const Storage& storage, const Shape& shape);
/// As stowage::quantize_into, for values of a storage that values alone make. The first word of
/// `working` is then at least 0x7F800000 where values, or the scales of such, are not finite.
void quantize(Stream& stream, const void* values, Dtype dtype, const Shape& shape,
              const Storage& storage, std::span<void* const> parts, void* working);

/// most[i]: the largest |x| of array i, NaN where it has one.
void amax(Stream& stream, std::span<const Values> arrays, float* most);

}  // namespace stowage::device
