// SPDX-License-Identifier: Apache-2.0
// Ops between values and resting weights: quantize, dequantize, embedding, amax, measure.
#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "stowage/engine.h"
#include "stowage/quantize.h"
#include "torch/arguments.h"
#include "torch/executor.h"
#include "torch/slices.h"

namespace stowage::door {
namespace {
using torch::headeronly::ScalarType;

Argument values_of(const char* where, const Tensor& given) {
  Argument x(where, "x", given.get());
  if (!is_value_dtype(x.dtype())) {
    fail(Code::invalid_argument, std::string(where) +
                                     ": x must be float64, float32, bfloat16 or float16, got " +
                                     dtype_text(x.dtype()));
  }
  return x;
}

Dtype out_dtype(const char* where, ScalarType out) {
  switch (out) {
    case ScalarType::BFloat16:
      return Dtype::bf16;
    case ScalarType::Float:
      return Dtype::f32;
    case ScalarType::Half:
      return Dtype::f16;
    case ScalarType::Double:
      return Dtype::f64;
    default:
      fail(Code::invalid_argument, std::string(where) +
                                       ": out must be float64, float32, bfloat16 or float16, got " +
                                       torch::headeronly::toString(out));
  }
}

std::vector<Tensor> quantize_op(const Tensor& given, std::int64_t key, bool keep_nonfinite) {
  const Argument x = values_of("stowage::quantize", given);
  const Storage storage = storage_for_values(storage_from_key(key), x.dtype());
  const Shape shape(x.sizes());
  const Layout parts = layout(storage, shape);
  std::vector<Tensor> made;
  std::array<void*, kMaxParts> pointers{};
  for (std::size_t i = 0; i < static_cast<std::size_t>(parts.count); ++i) {
    made.push_back(boxed(empty(parts.parts[i].shape.sizes(), parts.parts[i].dtype)));
    pointers[i] = made.back().mutable_data_ptr();
  }
  quantize_into(x.data(), x.dtype(), shape, storage,
                std::span<void* const>(pointers).first(made.size()),
                {.keep_nonfinite = keep_nonfinite, .executor = &torch_executor()});
  return made;
}

Tensor dequantize_op(const Tensor& codes, const std::vector<Tensor>& scales, std::int64_t key,
                     const std::vector<std::int64_t>& sizes, ScalarType out) {
  constexpr const char* kWhere = "stowage::dequantize";
  const Dtype dtype = out_dtype(kWhere, out);
  const Shape shape(sizes);
  const Held held(kWhere, codes, scales, key, shape);
  const Tensor values = boxed(empty(sizes, dtype));
  dequantize(held.weight(), {0, shape.rows()}, values.mutable_data_ptr(), dtype, &torch_executor());
  return values;
}

std::vector<std::int64_t> widened(const Argument& ids) {
  const auto* narrow = static_cast<const std::int32_t*>(ids.data());
  return {narrow, narrow + ids.elements()};
}

// Of a stack [E, O, K] that an engine has by its matrices: each from where it lies in memory, once;
// false where none has it so, or a number is not one of them.
bool embed_slices(const Weight& stack, std::span<const std::int64_t> ids, void* out, Dtype dtype) {
  const std::int64_t count = stack.rows();
  const auto is_one = [&](std::int64_t id) { return id >= 0 && id < count; };
  if (ids.empty() || !std::ranges::all_of(ids, is_one)) return false;
  std::vector<std::int64_t> used(ids.begin(), ids.end());
  std::ranges::sort(used);
  used.erase(std::unique(used.begin(), used.end()), used.end());
  if (!Engine::want_at(std::array{stack.part(0)}, used)) return false;
  const auto bytes = static_cast<std::size_t>(stack.row_elements() * (bits(dtype) / 8));
  auto* const to = static_cast<std::byte*>(out);
  for (const std::int64_t id : used) {
    const Slice slice(stack, id);
    const auto first = std::ranges::find(ids, id);
    std::byte* const made = to + static_cast<std::size_t>(first - ids.begin()) * bytes;
    dequantize(slice.weight(), {slice.row(), slice.row() + 1}, made, dtype, &torch_executor());
    for (auto next = std::find(first + 1, ids.end(), id); next != ids.end();
         next = std::find(next + 1, ids.end(), id))
      std::copy_n(made, bytes, to + static_cast<std::size_t>(next - ids.begin()) * bytes);
  }
  return true;
}

// `tile`: the rows are a piece of all, which are used next.
Tensor embedding_op(const Tensor& given, const Tensor& codes, const std::vector<Tensor>& scales,
                    std::int64_t key, const std::vector<std::int64_t>& sizes, ScalarType out,
                    bool tile) {
  constexpr const char* kWhere = "stowage::embedding";
  const Argument ids(kWhere, "ids", given.get());
  const Dtype kind = ids.dtype();
  if (kind != Dtype::i64 && kind != Dtype::i32) {
    fail(Code::invalid_argument,
         std::string(kWhere) + ": ids must be int64 or int32, got " + dtype_text(kind));
  }
  if (sizes.empty()) {
    fail(Code::invalid_argument,
         std::string(kWhere) + ": a table must have at least 1 dimension, got 0");
  }
  const Dtype dtype = out_dtype(kWhere, out);
  const auto outer = ids.sizes();
  std::vector<std::int64_t> result(outer.begin(), outer.end());
  result.insert(result.end(), sizes.begin() + 1, sizes.end());
  const Tensor values = boxed(empty(result, dtype));
  const auto wide = kind == Dtype::i32 ? widened(ids) : std::vector<std::int64_t>();
  const auto* rows =
      kind == Dtype::i32 ? wide.data() : static_cast<const std::int64_t*>(ids.data());
  const auto count = static_cast<std::size_t>(ids.elements());
  if (sizes.size() == 3) {
    const Held stack(kWhere, codes, scales, key, Shape(sizes), Reach::slices);
    if (embed_slices(stack.weight(), {rows, count}, values.mutable_data_ptr(), dtype))
      return values;
  }
  const Held held(kWhere, codes, scales, key, Shape(sizes), tile ? Reach::whole : Reach::rows);
  embedding(held.weight(), rows, ids.elements(), values.mutable_data_ptr(), dtype,
            &torch_executor());
  return values;
}

Tensor amax_op(const std::vector<Tensor>& given) {
  std::vector<Argument> held;  // copies too, of those that are not contiguous
  std::vector<Values> arrays;
  held.reserve(given.size());
  arrays.reserve(given.size());
  for (const Tensor& one : given) {
    const Argument& x = held.emplace_back(values_of("stowage::amax", one));
    arrays.push_back({x.data(), x.dtype(), x.elements()});
  }
  const auto count = static_cast<std::int64_t>(arrays.size());
  const Tensor out = boxed(empty({&count, 1}, Dtype::f32));
  amax(arrays, static_cast<float*>(out.mutable_data_ptr()), &torch_executor());
  return out;
}

Tensor measure_op(const Tensor& given, const Tensor& codes, const std::vector<Tensor>& scales,
                  std::int64_t key) {
  constexpr const char* kWhere = "stowage::measure";
  const Argument x = values_of(kWhere, given);
  const Held held(kWhere, codes, scales, key, Shape(x.sizes()));
  const Loss loss = measure(x.data(), x.dtype(), held.weight(), &torch_executor());
  const std::int64_t count = 8;
  const Tensor out = boxed(empty({&count, 1}, Dtype::f64));
  auto* to = static_cast<double*>(out.mutable_data_ptr());
  to[0] = static_cast<double>(loss.elements);
  to[1] = static_cast<double>(loss.saturated);
  to[2] = static_cast<double>(loss.nonfinite);
  to[3] = loss.max_error;
  to[4] = loss.sum_error2;
  to[5] = loss.sum_value2;
  to[6] = loss.worst_block_error;
  to[7] = static_cast<double>(loss.worst_block);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stowage, CPU, m) {
  m.impl("quantize", TORCH_BOX(&Door<&quantize_op>::call));
  m.impl("dequantize", TORCH_BOX(&Door<&dequantize_op>::call));
  m.impl("embedding", TORCH_BOX(&Door<&embedding_op>::call));
  m.impl("amax", TORCH_BOX(&Door<&amax_op>::call));
  m.impl("measure", TORCH_BOX(&Door<&measure_op>::call));
}
}  // namespace stowage::door
