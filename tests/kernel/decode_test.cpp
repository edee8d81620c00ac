// SPDX-License-Identifier: Apache-2.0
// Weights whose values are rounded to a dtype of their own first (nf4:torchao), through every
// family of kernels.
#include "kernel/decode.h"

#include "base/threads.h"
#include "kernel/drivers.h"
#include "samples.h"

namespace stowage::decode_test {
namespace {

using namespace stowage::samples;
constexpr const char* kOwn[] = {"nf4:torchao:f32",
                                "nf4:torchao:bf16",
                                "nf4:torchao:f16",
                                "nf4:torchao:f64",
                                "nf4:torchao:block32:scaler1:bf16",
                                "nf4:torchao:block16:scaler2:f32",
                                "nf4:torchao:block16:scaler1:bf16",
                                "nf4:torchao:block128:scaler4:f64"};
// Rows of odd length cut blocks and bytes.
const Shape kShapes[] = {{128, 384}, {16384, 3}, {49152}};
constexpr std::size_t kElements = 49152;

struct Held {
  Parts parts;
  Weight weight;
  Held(const char* name, const Shape& shape, Kind kind = Kind::normal)
      : parts(reference_parts(as_type(numbers(kind, kElements), Dtype::f64), Dtype::f64, shape,
                              parse_storage(name))),
        weight(parts.weight(parse_storage(name), shape)) {}
};

STOWAGE_ON_EACH_ISA(Decoding, EveryDtypeToEveryDtype) {
  for (const char* name : kOwn)
    for (const Shape& shape : kShapes)
      for (const Kind kind : {Kind::normal, Kind::tiny}) {
        const Held held(name, shape, kind);
        for (const Dtype out : kValueTypes) {
          const Bytes expected = reference_values(held.weight, out);
          Bytes got(expected.size());
          dequantize_with(table, held.weight, {0, shape.rows()}, got.data(), out,
                          inline_executor());
          EXPECT_TRUE(got == expected) << name << to_string(shape) << " to " << disk_name(out);
        }
      }
}

STOWAGE_ON_EACH_ISA(Decoding, SomeRowsAndRowsById) {
  for (const char* name : kOwn)
    for (const Shape& shape : kShapes) {
      const Held held(name, shape);
      for (const Dtype out : kValueTypes) {
        const Bytes all = reference_values(held.weight, out);
        const auto row = static_cast<std::size_t>(shape.row_elements()) * width(out);
        const std::vector<std::int64_t> ids{5, 6, 127, 0};
        Bytes some(2 * row), chosen(ids.size() * row);
        dequantize_with(table, held.weight, {5, 7}, some.data(), out, inline_executor());
        EXPECT_EQ(std::memcmp(some.data(), all.data() + 5 * row, some.size()), 0) << name;
        embedding_with(table, held.weight, ids.data(), 4, chosen.data(), out, inline_executor());
        for (std::size_t i = 0; i < ids.size(); ++i)
          EXPECT_EQ(std::memcmp(chosen.data() + i * row,
                                all.data() + static_cast<std::size_t>(ids[i]) * row, row),
                    0)
              << name << to_string(shape) << " to " << disk_name(out) << " row " << ids[i];
      }
    }
}

STOWAGE_ON_EACH_ISA(Decoding, TheSameBytesForEveryNumberOfThreads) {
  const Held held("nf4:torchao:bf16", {128, 384});
  const Bytes expected = reference_values(held.weight, Dtype::f32);
  for (const int threads : {2, 3}) {
    Bytes got(expected.size());
    dequantize_with(table, held.weight, {0, 128}, got.data(), Dtype::f32, *make_pool(threads));
    EXPECT_TRUE(got == expected) << threads;
  }
}

// |y - y*| <= (K + 8) 2^-24 sum |x w| and half a step of y, for w as dequantize gives it in fp32.
STOWAGE_ON_EACH_ISA(Decoding, ProductsKeepTheBound) {
  const Shape shape{128, 384};
  for (const char* name : kOwn) {
    const Held held(name, shape);
    const Bytes wide = reference_values(held.weight, Dtype::f32);
    std::vector<float> w(kElements);
    std::memcpy(w.data(), wide.data(), wide.size());
    for (const std::int64_t m : {1, 5, 40}) {
      std::vector<float> x, y(static_cast<std::size_t>(m * 128));
      for (const double v : numbers(Kind::normal, static_cast<std::size_t>(m * 384), 9))
        x.push_back(static_cast<float>(v));
      std::vector<float> fixed(y.size()), gx(x.size());
      linear_with(table, x.data(), m, Dtype::f32, held.weight, nullptr, y.data(),
                  inline_executor());
      linear_fixed_with(table, x.data(), m, held.weight, nullptr, fixed.data(), inline_executor());
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < 128; ++j) {
          double sum = 0, size = 0;
          for (std::int64_t k = 0; k < 384; ++k) {
            const double p = double{x[static_cast<std::size_t>(i * 384 + k)]} *
                             double{w[static_cast<std::size_t>(j * 384 + k)]};
            sum += p;
            size += std::fabs(p);
          }
          const double bound = (384 + 8) * 0x1p-24 * size + 0x1p-24 * std::fabs(sum);
          const auto at = static_cast<std::size_t>(i * 128 + j);
          ASSERT_LE(std::fabs(double{y[at]} - sum), bound) << name << " m " << m;
          ASSERT_LE(std::fabs(double{fixed[at]} - sum), bound) << name << " m " << m;
        }
      linear_grad_input_with(table, y.data(), m, Dtype::f32, held.weight, gx.data(),
                             inline_executor());
      for (std::int64_t k = 0; k < 384; ++k) {
        double sum = 0, size = 0;
        for (std::int64_t j = 0; j < 128; ++j) {
          const double p = double{y[static_cast<std::size_t>(j)]} *
                           double{w[static_cast<std::size_t>(j * 384 + k)]};
          sum += p;
          size += std::fabs(p);
        }
        ASSERT_LE(std::fabs(double{gx[static_cast<std::size_t>(k)]} - sum),
                  (128 + 8) * 0x1p-24 * size + 0x1p-24 * std::fabs(sum))
            << name << " m " << m;
      }
    }
  }
}

STOWAGE_ON_EACH_ISA(Decoding, MeasureSeesTheValues) {
  for (const char* name : kOwn) {
    const Held held(name, {128, 384});
    const Bytes values = reference_values(held.weight, Dtype::f64);
    const Loss loss =
        measure_with(table, values.data(), Dtype::f64, held.weight, inline_executor());
    EXPECT_EQ(loss.max_error, 0) << name;
    EXPECT_EQ(loss.nonfinite, 0) << name;
  }
}

}  // namespace
}  // namespace stowage::decode_test
