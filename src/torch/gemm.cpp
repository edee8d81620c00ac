// SPDX-License-Identifier: Apache-2.0
// Tiles of dequantized weight handed to torch's GEMM, which runs on all of torch's threads. GEMMs
// of fixed size on one thread each would give the same bytes for any thread count, but oneDNN packs
// the weight again in each: 25 % slower in two pieces, 55 % in four (docs/decisions.md).
#include "torch/gemm.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "kernel/scratch.h"
#include "stowage/crossover.h"
#include "stowage/descriptor.h"
#include "stowage/info.h"
#include "stowage/quantize.h"
#include "torch/executor.h"

namespace stowage::door {
namespace {

constexpr std::int64_t kTileBytes = std::int64_t{4} << 20;

// Waking threads costs about as much as dequantizing this many elements.
constexpr std::int64_t kSerialElements = std::int64_t{1} << 18;

/// A tensor over memory that outlives it: [rows, columns] (columns only where rows is 0).
Tensor over(const void* data, Dtype dtype, std::int64_t rows, std::int64_t columns,
            std::int64_t stride) {
  const std::array<std::int64_t, 2> sizes{rows, columns}, strides{stride, 1};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      const_cast<void*>(data), 2, sizes.data(), strides.data(), 0, torch_dtype(dtype),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor over(const void* data, Dtype dtype, std::int64_t count) {
  const std::int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(
      const_cast<void*>(data), 1, &count, &stride, 0, torch_dtype(dtype),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

template <std::size_t n>
Owned call(const char* op, const char* overload, std::array<StableIValue, n> stack) {
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
  return take_tensor(stack[0]);
}

Owned aten_linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias) {
  using torch::stable::detail::from;
  return call<3>("aten::linear", "", {from(x), from(w), from(bias)});
}
void aten_linear_out(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                     const Tensor& out) {
  using torch::stable::detail::from;
  call<4>("aten::linear", "out", {from(x), from(w), from(bias), from(out)});
}
void aten_mm_out(const Tensor& a, const Tensor& b, const Tensor& out) {
  using torch::stable::detail::from;
  call<3>("aten::mm", "out", {from(a), from(b), from(out)});
}

std::int64_t bytes_of(Dtype dtype) { return bits(dtype) / 8; }

const void* element(const void* data, std::int64_t index, Dtype dtype) {
  return static_cast<const char*>(data) + index * bytes_of(dtype);
}

std::int64_t tile_rows(const Weight& weight, Dtype dtype) {
  const std::int64_t row_bytes = std::max<std::int64_t>(1, weight.row_elements() * bytes_of(dtype));
  const std::int64_t fit = std::max<std::int64_t>(1, kTileBytes / row_bytes);
  return fit >= weight.rows() ? weight.rows() : std::max<std::int64_t>(1, fit - fit % 32);
}

std::size_t scratch_bytes(const Weight& weight, std::int64_t rows, Dtype dtype) {
  return static_cast<std::size_t>(rows * weight.row_elements() * bytes_of(dtype));
}

/// A tile of the weight, in the compute dtype.
void widen(const Weight& weight, Range rows, Range columns, void* out, Dtype dtype) {
  const bool serial = (rows.end - rows.begin) * (columns.end - columns.begin) <= kSerialElements;
  dequantize(weight, rows, columns, out, dtype, serial ? &inline_executor() : &torch_executor());
}

/// Values of one dtype in another, by the core's plain casts.
void convert(const void* from, Dtype dtype, void* to, Dtype target, std::int64_t count,
             Executor& executor) {
  const Codes codes = dtype == Dtype::f32    ? Codes::f32
                      : dtype == Dtype::bf16 ? Codes::bf16
                                             : Codes::f16;
  const Weight plain(Storage{.codes = codes}, Shape{count}, std::span(&from, 1));
  dequantize(plain, {0, count}, to, target, &executor);
}

/// total += term, in fp32.
void add(float* total, const void* term, Dtype dtype, std::int64_t count) {
  constexpr std::int64_t kChunk = 4096;
  torch_executor().for_each((count + kChunk - 1) / kChunk, [&](std::int64_t chunk) {
    const std::int64_t first = chunk * kChunk, n = std::min(kChunk, count - first);
    std::array<float, kChunk> wide;
    convert(element(term, first, dtype), dtype, wide.data(), Dtype::f32, n, inline_executor());
    for (std::int64_t i = 0; i < n; ++i) total[first + i] += wide[static_cast<std::size_t>(i)];
  });
}

// The whole weight in `dtype`: as it rests, where it rests so and is aligned as torch aligns its
// own memory (products may round otherwise where it is not), else in scratch.
class Widened {
 public:
  Widened(const Weight& weight, Dtype dtype) : data_(weight.part(0)) {
    const Storage& storage = weight.storage();
    constexpr std::uintptr_t kTorchAligns = 64;
    if (is_cast(storage) && trait(storage.codes).disk == dtype &&
        reinterpret_cast<std::uintptr_t>(data_) % kTorchAligns == 0)
      return;
    scratch_.emplace(scratch_bytes(weight, weight.rows(), dtype));
    widen(weight, {0, weight.rows()}, {0, weight.row_elements()}, scratch_->memory(), dtype);
    data_ = scratch_->memory();
  }
  const void* data() const noexcept { return data_; }

 private:
  const void* data_;
  std::optional<Scratch> scratch_;
};

// Whether what multiplies bf16 is no slower a unit of the CPU than what torch has: not vectors
// where it has tiles (AMX).
bool multiplies_as_torch(const Product& p) {
  static const bool on_tiles = onednn_uses_amx();
  return p.dtype == Dtype::bf16 && (!on_tiles || crossover().own_matrices != 0);
}

std::int64_t most_rows_of_own_kernel(Dtype dtype) {
  const Crossover now = crossover();
  return dtype == Dtype::bf16 ? now.own_bf16 : now.own;
}

}  // namespace

bool own_linear_is_faster(const Product& p) {
  if (p.m <= most_rows_of_own_kernel(p.dtype)) return true;
  return multiplies_as_torch(p) && p.m <= most_rows_in_bf16(p.weight);
}

bool own_grad_is_faster(const Product& p) {
  if (p.m <= most_rows_of_own_kernel(p.dtype)) return true;
  return p.dtype == Dtype::bf16 && p.m <= most_gradient_rows_in_bf16(p.weight);
}

void tiled_linear(const Product& p) {
  const std::int64_t n = p.weight.rows(), k = p.weight.row_elements();
  const std::int64_t step = tile_rows(p.weight, p.dtype);
  const Scratch scratch(scratch_bytes(p.weight, step, p.dtype));
  const Tensor x = over(p.x, p.dtype, p.m, k, k);
  for (std::int64_t first = 0; first < n; first += step) {
    const std::int64_t rows = std::min(step, n - first);
    widen(p.weight, {first, first + rows}, {0, k}, scratch.memory(), p.dtype);
    std::optional<Tensor> bias;
    if (p.bias != nullptr) bias = over(element(p.bias, first, p.dtype), p.dtype, rows);
    aten_linear_out(x, over(scratch.memory(), p.dtype, rows, k, k), bias,
                    over(element(p.y, first, p.dtype), p.dtype, p.m, rows, n));
  }
}

namespace {

/// Columns of a tile that has all rows of the weight; 0 where so few would fit that tiles of rows
/// are better.
std::int64_t tile_columns(const Weight& weight, Dtype dtype) {
  constexpr std::int64_t kFewest = 64;  // also the common block, which a tile then does not cut
  const std::int64_t column_bytes = std::max<std::int64_t>(1, weight.rows() * bytes_of(dtype));
  const std::int64_t fit = kTileBytes / column_bytes;
  return fit >= weight.row_elements() ? weight.row_elements() : fit - fit % kFewest;
}

void grad_input_by_columns(const Product& p, std::int64_t step) {
  const std::int64_t n = p.weight.rows(), k = p.weight.row_elements();
  const Scratch scratch(static_cast<std::size_t>(n * step * bytes_of(p.dtype)));
  const Tensor g = over(p.x, p.dtype, p.m, n, n);
  for (std::int64_t first = 0; first < k; first += step) {
    const std::int64_t columns = std::min(step, k - first);
    widen(p.weight, {0, n}, {first, first + columns}, scratch.memory(), p.dtype);
    aten_mm_out(g, over(scratch.memory(), p.dtype, n, columns, columns),
                over(element(p.y, first, p.dtype), p.dtype, p.m, columns, k));
  }
}

/// Tiles of rows cut the sum of each element, so their terms are added in fp32 and rounded once
/// more.
void grad_input_by_rows(const Product& p) {
  const std::int64_t n = p.weight.rows(), k = p.weight.row_elements();
  const std::int64_t step = tile_rows(p.weight, p.dtype);
  const Scratch scratch(scratch_bytes(p.weight, step, p.dtype));
  const std::int64_t count = p.m * k;
  const Scratch total(static_cast<std::size_t>(count) * sizeof(float));
  const Scratch term(static_cast<std::size_t>(count * bytes_of(p.dtype)));
  std::memset(total.memory(), 0, static_cast<std::size_t>(count) * sizeof(float));
  for (std::int64_t first = 0; first < n; first += step) {
    const std::int64_t rows = std::min(step, n - first);
    widen(p.weight, {first, first + rows}, {0, k}, scratch.memory(), p.dtype);
    aten_mm_out(over(element(p.x, first, p.dtype), p.dtype, p.m, rows, n),
                over(scratch.memory(), p.dtype, rows, k, k),
                over(term.memory(), p.dtype, p.m, k, k));
    add(static_cast<float*>(total.memory()), term.memory(), p.dtype, count);
  }
  convert(total.memory(), Dtype::f32, p.y, p.dtype, count, torch_executor());
}

}  // namespace

void tiled_grad_input(const Product& p) {
  const std::int64_t columns = tile_columns(p.weight, p.dtype);
  if (columns == 0) return grad_input_by_rows(p);
  grad_input_by_columns(p, columns);
}

Owned exact_linear(AtenTensorHandle x, const Weight& weight, const std::optional<Tensor>& bias,
                   Dtype dtype) {
  const std::int64_t n = weight.rows(), k = weight.row_elements();
  const Widened wide(weight, dtype);
  AtenTensorHandle again = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(x, &again));
  return aten_linear(Tensor(again), over(wide.data(), dtype, n, k, k), bias);
}

void exact_grad_input(const Product& p) {
  const std::int64_t n = p.weight.rows(), k = p.weight.row_elements();
  const Widened wide(p.weight, p.dtype);
  aten_mm_out(over(p.x, p.dtype, p.m, n, n), over(wide.data(), p.dtype, n, k, k),
              over(p.y, p.dtype, p.m, k, k));
}

}  // namespace stowage::door
