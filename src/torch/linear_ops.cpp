// SPDX-License-Identifier: Apache-2.0
// Ops that multiply: linear and its gradient to the input. Few rows go to our kernels, many to
// torch's own product on tiles of dequantized weight.
#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "stowage/descriptor.h"
#include "stowage/quantize.h"
#include "torch/arguments.h"
#include "torch/executor.h"
#include "torch/gemm.h"
#include "torch/slices.h"

namespace stowage::door {
namespace {

// The left factor: f32, bf16 or f16, contiguous, [..., columns].
Argument factor(const char* where, const char* name, AtenTensorHandle given) {
  Argument x(where, name, given);
  const Dtype dtype = x.dtype();
  if (dtype != Dtype::bf16 && dtype != Dtype::f32 && dtype != Dtype::f16) {
    fail(Code::invalid_argument, std::string(where) + ": " + name +
                                     " must be float32, bfloat16 or float16, got " +
                                     dtype_text(dtype));
  }
  if (x.sizes().empty()) {
    fail(Code::invalid_argument,
         std::string(where) + ": " + name + " must have at least 1 dimension, got 0");
  }
  return x;
}

// Codes that do not run on across rows have the weight's, so a wrong x can be told from wrong
// codes.
void check_columns(const char* where, const char* name, std::span<const std::int64_t> sizes,
                   AtenTensorHandle codes, std::size_t dim, std::int64_t key) {
  const Storage storage = storage_from_key(key);
  if (runs_across_rows(storage)) return;
  const auto shape = sizes_of(codes);
  if (shape.size() != 2) {
    fail(Code::invalid_argument, std::string(where) + ": codes must have 2 dimensions, got " +
                                     std::to_string(shape.size()));
  }
  const std::int64_t wanted = dim == 1 ? elements_of(storage, shape[dim]) : shape[dim];
  if (sizes.back() != wanted) {
    fail(Code::invalid_argument, std::string(where) + ": " + name + " must be [..., " +
                                     std::to_string(wanted) + "], got " + sizes_text(sizes));
  }
}

Argument bias_of(const char* where, AtenTensorHandle given, Dtype dtype, std::int64_t rows) {
  Argument bias(where, "bias", given);
  if (bias.dtype() != dtype) {
    fail(Code::invalid_argument, std::string(where) + ": bias must be " + dtype_text(dtype) +
                                     " like x, got " + dtype_text(bias.dtype()));
  }
  if (bias.sizes().size() != 1 || bias.sizes()[0] != rows) {
    fail(Code::invalid_argument, std::string(where) + ": bias must be [" + std::to_string(rows) +
                                     "], got " + sizes_text(bias.sizes()));
  }
  return bias;
}

Owned result(std::span<const std::int64_t> like, std::int64_t last, Dtype dtype) {
  Sizes sizes(like.size());
  std::ranges::copy(like, sizes.span().begin());
  sizes.span().back() = last;
  return empty(sizes.span(), dtype);
}

std::int64_t leading(const char* where, std::span<const std::int64_t> sizes) {
  return product(where, sizes.first(sizes.size() - 1));
}

// The arguments that the products share, off the stack: x, codes, scales, storage.
struct Operands {
  Operands(const char* where, const StableIValue* stack)
      : x(take_tensor(stack[0])),
        codes(take_tensor(stack[1])),
        scales(take_list(where, stack[2])) {}
  Owned x, codes;
  TensorList scales;
  std::span<const Owned> scale_span() const {
    return std::span(scales.tensors).first(scales.count);
  }
};

template <class T>
T plain(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

struct LinearArguments {
  AtenTensorHandle x, codes;
  std::span<const Owned> scales;
  std::int64_t key, rows;
  const std::optional<Tensor>& bias;
  bool exact;
};

Owned multiply(const LinearArguments& call) {
  constexpr const char* kWhere = "stowage::linear";
  const Argument x = factor(kWhere, "x", call.x);
  const auto sizes = x.sizes();
  check_columns(kWhere, "x", sizes, call.codes, 1, call.key);
  const Held held(kWhere, call.codes, call.scales, call.key, Shape{call.rows, sizes.back()});
  std::optional<Argument> bias;
  if (call.bias) bias = bias_of(kWhere, call.bias->get(), x.dtype(), call.rows);
  if (call.exact) return exact_linear(call.x, held.weight(), call.bias, x.dtype());
  Owned y = result(sizes, call.rows, x.dtype());
  const Product product{x.data(),      leading(kWhere, sizes),        x.dtype(),
                        held.weight(), bias ? bias->data() : nullptr, memory(y)};
  if (own_linear_is_faster(product)) {
    linear(product.x, product.m, product.dtype, product.weight, product.bias, product.y,
           &torch_executor());
  } else {
    tiled_linear(product);
  }
  return y;
}

Owned linear_op(StableIValue* stack) {
  const auto bias = plain<std::optional<Tensor>>(stack[5]);
  const Operands given("stowage::linear", stack);
  return multiply({given.x.get(), given.codes.get(), given.scale_span(),
                   plain<std::int64_t>(stack[3]), plain<std::int64_t>(stack[4]), bias,
                   plain<bool>(stack[6])});
}

// The spelling that costs least to call, for weights with one scale tensor:
// _tensor/products/linear.py.
Owned linear_direct_op(StableIValue* stack) {
  const Owned x = take_tensor(stack[0]), codes = take_tensor(stack[1]);
  const std::array<Owned, 1> scales{take_tensor(stack[2])};
  const auto bias = plain<std::optional<Tensor>>(stack[5]);
  return multiply({x.get(), codes.get(), scales, plain<std::int64_t>(stack[3]),
                   plain<std::int64_t>(stack[4]), bias, false});
}

Owned linear_grad_input_op(StableIValue* stack) {
  constexpr const char* kWhere = "stowage::linear_grad_input";
  const Operands given(kWhere, stack);
  const auto key = plain<std::int64_t>(stack[3]), columns = plain<std::int64_t>(stack[4]);
  const Argument g = factor(kWhere, "g", given.x.get());
  const auto sizes = g.sizes();
  check_columns(kWhere, "g", sizes, given.codes.get(), 0, key);
  const Held held(kWhere, given.codes.get(), given.scale_span(), key, Shape{sizes.back(), columns});
  Owned gx = result(sizes, columns, g.dtype());
  const Product product{g.data(),  leading(kWhere, sizes), g.dtype(), held.weight(), nullptr,
                        memory(gx)};
  if (plain<bool>(stack[5])) {
    exact_grad_input(product);
  } else if (own_grad_is_faster(product)) {
    linear_grad_input(product.x, product.m, product.dtype, product.weight, product.y,
                      &torch_executor());
  } else {
    tiled_grad_input(product);
  }
  return gx;
}

// --- matrices of a stack, each by rows of its own ---

void multiply_rows(const Product& product, bool transposed) {
  if (!transposed && !own_grad_is_faster(product)) return tiled_grad_input(product);
  if (transposed && !own_linear_is_faster(product)) return tiled_linear(product);
  if (transposed) {
    linear(product.x, product.m, product.dtype, product.weight, nullptr, product.y,
           &torch_executor());
  } else {
    linear_grad_input(product.x, product.m, product.dtype, product.weight, product.y,
                      &torch_executor());
  }
}

// Where rows of each end, as slices of them do: ends that do not ascend are no rows.
std::vector<std::int64_t> reached(std::span<const std::int64_t> ends, std::int64_t rows) {
  std::vector<std::int64_t> found;
  found.reserve(ends.size());
  std::int64_t before = 0;
  for (const std::int64_t end : ends) found.push_back(before = std::clamp(end, before, rows));
  return found;
}

// x W^T or x W: rows up to ends[0] times the first matrix, those up to ends[1] times the next; what
// is behind the last end is zeros.
Tensor grouped_rows_op(const Tensor& given, const Tensor& codes, const std::vector<Tensor>& scales,
                       std::int64_t key, const std::vector<std::int64_t>& sizes,
                       const std::vector<std::int64_t>& given_ends, bool transposed) {
  constexpr const char* kWhere = "stowage::grouped_rows";
  const Argument x = factor(kWhere, "x", given.get());
  const Shape shape(sizes);
  const auto from = x.sizes();
  if (from.size() != 2 || shape.rank() != 3 || from[1] != shape[transposed ? 2 : 1] ||
      static_cast<std::int64_t>(given_ends.size()) != shape[0]) {
    fail(Code::invalid_argument,
         std::string(kWhere) +
             ": x [S, K], ends [E] and a weight [E, O, K] or [E, K, O] must fit, " + "got " +
             sizes_text(from) + ", " + std::to_string(given_ends.size()) + " ends and " +
             sizes_text(sizes));
  }
  const std::vector<std::int64_t> ends = reached(given_ends, from[0]);
  const auto begin = [&](std::size_t i) { return i == 0 ? 0 : ends[i - 1]; };
  std::vector<std::int64_t> experts;
  for (std::size_t i = 0; i < ends.size(); ++i)
    if (begin(i) < ends[i]) experts.push_back(static_cast<std::int64_t>(i));
  const Held stack(kWhere, codes, scales, key, shape, Reach::slices);
  const std::array to{from[0], shape[transposed ? 1 : 2]};
  const Tensor y = boxed(empty(to, x.dtype()));
  const auto* const in = static_cast<const std::byte*>(x.data());
  auto* const out = static_cast<std::byte*>(y.mutable_data_ptr());
  const std::int64_t width = bits(x.dtype()) / 8, each = from[1] * width, made = to[1] * width;
  if (experts.size() > 1) Engine::want_at(std::array{stack.weight().part(0)}, experts);
  for (const std::int64_t expert : experts) {
    const auto at = static_cast<std::size_t>(expert);
    const std::int64_t first = begin(at);
    const Slice slice(stack.weight(), expert);
    const std::optional<Weight> matrix = slice.weight().matrix(slice.row());
    if (!matrix) {
      fail(Code::invalid_argument, std::string(kWhere) + ": matrices of " +
                                       to_string(stack.weight().storage()) + " " +
                                       sizes_text(sizes) + " do not rest by themselves");
    }
    multiply_rows(
        {in + first * each, ends[at] - first, x.dtype(), *matrix, nullptr, out + first * made},
        transposed);
  }
  const std::int64_t last = ends.empty() ? 0 : ends.back();
  std::fill_n(out + last * made, (from[0] - last) * made, std::byte{0});
  return y;
}

// As Door, for an op that takes its arguments off the stack by itself.
template <auto op>
void by_hand(StableIValue* stack, std::uint64_t, std::uint64_t) {
  stack[0] = torch::stable::detail::from(Door<op>::call(stack).release());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stowage, CPU, m) {
  m.impl("linear", &by_hand<&linear_op>);
  m.impl("_linear", &by_hand<&linear_direct_op>);
  m.impl("linear_grad_input", &by_hand<&linear_grad_input_op>);
  m.impl("grouped_rows", TORCH_BOX(&Door<&grouped_rows_op>::call));
}
}  // namespace stowage::door
