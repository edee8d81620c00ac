// SPDX-License-Identifier: Apache-2.0
// Weights of the C interface, and arithmetic on them.
#include "stowage/weight.h"

#include "c/handles.h"
#include "stowage/quantize.h"

using namespace stowage;
using namespace stowage::c;

stowage_weight::stowage_weight(Weight made, std::string its_name, Dtype computes)
    : weight(std::move(made)),
      name(std::move(its_name)),
      storage(to_string(weight.storage())),
      compute(computes) {}

namespace stowage::c {
namespace {

// [rows, columns], row_elements() of them: what products need, said before memory is touched.
std::int64_t elements(const char* function, const char* name, std::int64_t rows,
                      std::int64_t columns) {
  if (rows < 0)
    refuse(function, std::string(name) + " must not be negative, got " + std::to_string(rows));
  return Shape({rows, columns}).elements();
}

// W [N, K] of a product, x [m, K] and y [m, N].
void check_product(const char* function, const stowage_weight* weight, const void* x,
                   std::int64_t m, const void* y) {
  not_null(function, "weight", weight);
  const Weight& w = weight->weight;
  if (elements(function, "m", m, w.row_elements()) > 0) not_null(function, "x", x);
  if (elements(function, "m", m, w.rows()) > 0) not_null(function, "y", y);
}

}  // namespace

stowage_weight_info weight_info(const std::string& name, const std::string& storage, Dtype compute,
                                const Storage& what, const Shape& shape) {
  stowage_weight_info info{.size = sizeof(stowage_weight_info),
                           .name = name.c_str(),
                           .storage = storage.c_str(),
                           .compute = c_dtype(compute),
                           .rank = shape.rank(),
                           .shape = {},
                           .bytes = static_cast<std::uint64_t>(layout(what, shape).bytes())};
  std::ranges::copy(shape.sizes(), info.shape);
  return info;
}

stowage_tensor_info tensor_info(const char* name, const char* dtype_name, Dtype dtype,
                                const Shape& shape, std::uint64_t bytes, const void* data) {
  stowage_tensor_info info{.size = sizeof(stowage_tensor_info),
                           .name = name,
                           .dtype_name = dtype_name,
                           .dtype = c_dtype(dtype),
                           .rank = shape.rank(),
                           .shape = {},
                           .bytes = bytes,
                           .data = data};
  std::ranges::copy(shape.sizes(), info.shape);
  return info;
}

}  // namespace stowage::c

stowage_status stowage_quantize(const void* values, stowage_dtype dtype, const int64_t* shape,
                                int32_t rank, const char* storage, stowage_weight** weight) {
  return call(__func__, [&](const char* here) {
    const Shape sizes = checked_shape(here, shape, rank);
    if (sizes.elements() > 0) not_null(here, "values", values);
    not_null(here, "storage", storage);
    not_null(here, "weight", weight);
    *weight = new stowage_weight(
        quantize(values, checked_dtype(here, "dtype", dtype), sizes, parse_storage(storage)));
  });
}

stowage_status stowage_weight_of_parts(const char* storage, const int64_t* shape, int32_t rank,
                                       const void* const* parts, int32_t count,
                                       stowage_weight** weight) {
  return call(__func__, [&](const char* here) {
    not_null(here, "storage", storage);
    const Shape sizes = checked_shape(here, shape, rank);
    not_null(here, "weight", weight);
    *weight = new stowage_weight(
        Weight(parse_storage(storage), sizes, checked_list(here, "parts", parts, count)));
  });
}

void stowage_weight_free(stowage_weight* weight) { delete weight; }

stowage_status stowage_weight_describe(const stowage_weight* weight, stowage_weight_info* info) {
  return call(__func__, [&](const char* here) {
    not_null(here, "weight", weight);
    give(here, "info", info, kWeightInfo,
         weight_info(weight->name, weight->storage, weight->compute, weight->weight.storage(),
                     weight->weight.shape()));
  });
}

stowage_status stowage_weight_part_count(const stowage_weight* weight, int32_t* count) {
  return call(__func__, [&](const char* here) {
    not_null(here, "weight", weight);
    not_null(here, "count", count);
    *count = layout(weight->weight.storage(), weight->weight.shape()).count;
  });
}

stowage_status stowage_weight_describe_part(const stowage_weight* weight, int32_t part,
                                            stowage_tensor_info* info) {
  return call(__func__, [&](const char* here) {
    not_null(here, "weight", weight);
    const Layout made = layout(weight->weight.storage(), weight->weight.shape());
    const std::size_t i = checked_index(here, "part", part, static_cast<std::size_t>(made.count));
    const Part& told = made.parts[i];
    // Both texts are literals of a table, which end with 0.
    give(here, "info", info, kTensorInfo,
         tensor_info(told.name.data(), disk_name(told.dtype).data(), told.dtype, told.shape,
                     static_cast<std::uint64_t>(told.bytes), weight->weight.part(part)));
  });
}

stowage_status stowage_dequantize(const stowage_weight* weight, int64_t begin, int64_t end,
                                  void* out, stowage_dtype dtype) {
  return call(__func__, [&](const char* here) {
    not_null(here, "weight", weight);
    dequantize(weight->weight, {begin, end}, out, checked_dtype(here, "dtype", dtype));
  });
}

stowage_status stowage_embedding(const stowage_weight* weight, const int64_t* ids, int64_t n,
                                 void* out, stowage_dtype dtype) {
  return call(__func__, [&](const char* here) {
    not_null(here, "weight", weight);
    (void)checked_list(here, "ids", ids, n);
    embedding(weight->weight, ids, n, out, checked_dtype(here, "dtype", dtype));
  });
}

stowage_status stowage_linear(const stowage_weight* weight, const void* x, int64_t m,
                              stowage_dtype dtype, const void* bias, void* y) {
  return call(__func__, [&](const char* here) {
    check_product(here, weight, x, m, y);
    linear(x, m, checked_dtype(here, "dtype", dtype), weight->weight, bias, y);
  });
}

stowage_status stowage_linear_fixed(const stowage_weight* weight, const float* x, int64_t m,
                                    const float* bias, float* y) {
  return call(__func__, [&](const char* here) {
    check_product(here, weight, x, m, y);
    linear_fixed(x, m, weight->weight, bias, y);
  });
}
