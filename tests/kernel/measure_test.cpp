// SPDX-License-Identifier: Apache-2.0
// The loss of a weight against a plain loop over the reference values.
#include "base/threads.h"
#include "expect_error.h"
#include "kernel/drivers.h"
#include "samples.h"

namespace stowage {
namespace {

using namespace stowage::samples;
using Measure = EachIsa;
STOWAGE_FOR_EACH_ISA(Measure);

TEST_P(Measure, AgreesWithAPlainLoop) {
  const Shape shape{30, 101};
  const std::vector<double> inputs = numbers(Kind::normal, 3030);
  for (const std::string& name : storages()) {
    const Storage storage = parse_storage(name);
    for (const Dtype in : kValueTypes) {
      const Bytes values = as_type(inputs, in);
      const Parts parts = reference_parts(values, in, shape, storage);
      const Weight weight = parts.weight(storage, shape);
      double most = 0, error2 = 0, value2 = 0;
      for (std::int64_t i = 0; i < 3030; ++i) {
        const double x = reference::read(values.data(), in, i);
        const double error = std::fabs(x - static_cast<double>(reference::value_at(weight, i)));
        most = std::max(most, error);
        error2 += error * error;
        value2 += x * x;
      }
      const Loss loss = measure_with(table(), values.data(), in, weight, inline_executor());
      EXPECT_EQ(loss.elements, 3030);
      EXPECT_EQ(loss.nonfinite + loss.saturated, 0);
      EXPECT_EQ(loss.max_error, most) << name;
      EXPECT_NEAR(loss.sum_error2, error2, 1e-12 * error2) << name;
      EXPECT_NEAR(loss.sum_value2, value2, 1e-12 * value2) << name;
      EXPECT_DOUBLE_EQ(loss.rms(), std::sqrt(loss.sum_error2 / 3030));
      EXPECT_DOUBLE_EQ(loss.relative(), std::sqrt(loss.sum_error2 / loss.sum_value2));
    }
  }
}

TEST_P(Measure, CountsSaturatedAndNonfiniteInputs) {
  std::vector<double> inputs(100, 1.0);
  inputs[1] = 448.0, inputs[2] = 449.0, inputs[3] = -1e4;
  inputs[4] = std::numeric_limits<double>::infinity(), inputs[5] = -std::nan("");
  const Bytes values = as_type(inputs, Dtype::f32);
  const Parts parts = reference_parts(values, Dtype::f32, {100}, {Codes::f8_e4m3}, true);
  const Loss loss = measure_with(table(), values.data(), Dtype::f32,
                                 parts.weight({Codes::f8_e4m3}, {100}), inline_executor());
  EXPECT_EQ(loss.elements, 100);
  EXPECT_EQ(loss.saturated, 2);
  EXPECT_EQ(loss.nonfinite, 2);
  EXPECT_EQ(loss.max_error, 1e4 - 448);
}

TEST_P(Measure, GivesTheSameFiguresForEveryNumberOfThreads) {
  const Shape shape{500, 1001};
  const Storage storage = parse_storage("nf4");
  const Bytes values = as_type(numbers(Kind::normal, 500500), Dtype::f32);
  const Parts parts = reference_parts(values, Dtype::f32, shape, storage);
  const Weight weight = parts.weight(storage, shape);
  const Loss one = measure_with(table(), values.data(), Dtype::f32, weight, *make_pool(1));
  for (const int threads : {2, 3, 5}) {
    const Loss many = measure_with(table(), values.data(), Dtype::f32, weight, *make_pool(threads));
    EXPECT_EQ(many.max_error, one.max_error);
    EXPECT_EQ(many.sum_error2, one.sum_error2);
    EXPECT_EQ(many.sum_value2, one.sum_value2);
  }
}

TEST(MeasureEdges, EmptyAndZeroWeightsHaveNoLoss) {
  const float zeros[4] = {};
  const Weight weight = quantize(zeros, Dtype::f32, {2, 2}, parse_storage("int8"));
  EXPECT_EQ(measure(zeros, Dtype::f32, weight).relative(), 0);
  const Weight none = quantize(nullptr, Dtype::f32, {0, 2}, parse_storage("int8"));
  EXPECT_EQ(measure(nullptr, Dtype::f32, none).rms(), 0);
  EXPECT_STOWAGE_ERROR(measure(nullptr, Dtype::f32, weight), invalid_argument, "null");
  EXPECT_STOWAGE_ERROR(measure(zeros, Dtype::u8, weight), invalid_argument, "got U8");
}

}  // namespace
}  // namespace stowage
