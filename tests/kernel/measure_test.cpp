// SPDX-License-Identifier: Apache-2.0
// The loss of a weight against a plain loop over the reference values.
#include <map>

#include "base/threads.h"
#include "expect_error.h"
#include "kernel/drivers.h"
#include "samples.h"

namespace stowage::measure_test {
namespace {

using namespace stowage::samples;
std::int64_t block_of(const Weight& weight, std::int64_t i) {
  const Scaling& scaling = weight.storage().scaling;
  const Shape& shape = weight.shape();
  const std::int64_t row = weight.row_elements();
  switch (scaling.kind) {
    case Scaling::Kind::row:
      return i / row;
    case Scaling::Kind::row2:
      return i / (row / shape[1]);
    case Scaling::Kind::block: {
      const std::int64_t block = scaling.block, blocks = (row + block - 1) / block;
      const bool flat = describe(weight.storage()).scale.group.kind == Group::Kind::flat;
      return flat ? i / block : i / row * blocks + i % row / block;
    }
    case Scaling::Kind::block2: {
      const std::int64_t columns = shape[shape.rank() - 1], rows = shape[shape.rank() - 2];
      const std::int64_t block = scaling.block, across = (columns + block - 1) / block;
      const std::int64_t each = scaling.rows, line = i / columns;
      const std::int64_t above = line / rows * ((rows + each - 1) / each) + line % rows / each;
      return above * across + i % columns / block;
    }
    case Scaling::Kind::column:
      return i / row % (shape[0] / scaling.block) * row + i % row;
    default:
      return 0;
  }
}

struct Worst {
  double error = 0;
  std::int64_t block = -1;
};

// By a plain loop; inputs are finite.
Worst worst_block(const Bytes& values, Dtype dtype, const Weight& weight) {
  std::map<std::int64_t, std::pair<double, double>> sums;
  for (std::int64_t i = 0; i < weight.shape().elements(); ++i) {
    const double x = reference::read(values.data(), dtype, i);
    const double error = x - static_cast<double>(reference::value_at(weight, i));
    auto& [error2, value2] = sums[block_of(weight, i)];
    error2 += error * error;
    value2 += x * x;
  }
  Worst worst;
  for (const auto& [block, sum] : sums) {
    if (sum.second == 0) continue;
    const double error = std::sqrt(sum.first / sum.second);
    if (worst.block < 0 || error > worst.error) worst = {error, block};
  }
  return worst;
}

STOWAGE_ON_EACH_ISA(Measure, FindsTheWorstBlock) {
  std::vector<std::string> names = storages();
  names.insert(names.end(), every_form().begin(), every_form().end());
  for (const char* of : {"nf4:torchao:block32:scaler4:f32", "int8:block128x128"})
    names.emplace_back(of);
  for (const std::string& name : names) {
    const Storage storage = parse_storage(name);
    for (const Shape& shape :
         std::vector<Shape>{{33, 128}, {30, 101}, {6, 5, 7}, {140, 1001}, {24, 1002}}) {
      if (storage.dialect != Dialect::standard && shape.elements() % 128 != 0) continue;
      if (storage.scaling.kind == Scaling::Kind::row2 && shape.rank() < 3) continue;
      if (!holds(storage, shape)) continue;
      const auto n = static_cast<std::size_t>(shape.elements());
      const Bytes values = as_type(numbers(Kind::normal, n), Dtype::f32);
      const Parts parts = reference_parts(values, Dtype::f32, shape, storage);
      const Weight weight = parts.weight(storage, shape);
      const Worst worst = kept(key_of(weight) + key_of(values.data(), values.size()),
                               [&] { return worst_block(values, Dtype::f32, weight); });
      const Loss loss = measure_with(table, values.data(), Dtype::f32, weight, *make_pool(2));
      EXPECT_EQ(loss.worst_block, worst.block) << name << to_string(shape);
      EXPECT_NEAR(loss.worst_block_error, worst.error, 1e-12 * worst.error) << name;
    }
  }
}

STOWAGE_ON_EACH_ISA(Measure, NamesTheFirstOfEqualBlocksAndNoneOfZeros) {
  std::vector<double> inputs(4 * 64, 0.0);  // block 1: zeros; 2 and 3 equal, with an error
  inputs[0] = 1;
  for (const std::size_t i : {128U, 192U}) inputs[i] = 1, inputs[i + 1] = 0.9;
  const Bytes values = as_type(inputs, Dtype::f32);
  const Storage storage = parse_storage("nf4");
  const Parts parts = reference_parts(values, Dtype::f32, {4, 64}, storage);
  const Weight weight = parts.weight(storage, {4, 64});
  const Loss loss = measure_with(table, values.data(), Dtype::f32, weight, inline_executor());
  EXPECT_EQ(loss.worst_block, 2);
  EXPECT_GT(loss.worst_block_error, loss.relative());
  const Bytes zeros = as_type(std::vector<double>(256, 0.0), Dtype::f32);
  const Parts none = reference_parts(zeros, Dtype::f32, {4, 64}, storage);
  const Loss nothing = measure_with(table, zeros.data(), Dtype::f32, none.weight(storage, {4, 64}),
                                    inline_executor());
  EXPECT_EQ(nothing.worst_block, -1);
  EXPECT_EQ(nothing.worst_block_error, 0);
}

STOWAGE_ON_EACH_ISA(Measure, AgreesWithAPlainLoop) {
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
      const Loss loss = measure_with(table, values.data(), in, weight, inline_executor());
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

STOWAGE_ON_EACH_ISA(Measure, CountsSaturatedAndNonfiniteInputs) {
  std::vector<double> inputs(100, 1.0);
  inputs[1] = 448.0, inputs[2] = 449.0, inputs[3] = -1e4;
  inputs[4] = std::numeric_limits<double>::infinity(), inputs[5] = -std::nan("");
  const Bytes values = as_type(inputs, Dtype::f32);
  const Parts parts = reference_parts(values, Dtype::f32, {100}, {Codes::f8_e4m3}, true);
  const Loss loss = measure_with(table, values.data(), Dtype::f32,
                                 parts.weight({Codes::f8_e4m3}, {100}), inline_executor());
  EXPECT_EQ(loss.elements, 100);
  EXPECT_EQ(loss.saturated, 2);
  EXPECT_EQ(loss.nonfinite, 2);
  EXPECT_EQ(loss.max_error, 1e4 - 448);
}

STOWAGE_ON_EACH_ISA(Measure, GivesTheSameFiguresForEveryNumberOfThreads) {
  const Shape shape{500, 1001};
  const Storage storage = parse_storage("nf4");
  const Bytes values = as_type(numbers(Kind::normal, 500500), Dtype::f32);
  const Parts parts = reference_parts(values, Dtype::f32, shape, storage);
  const Weight weight = parts.weight(storage, shape);
  const Loss one = measure_with(table, values.data(), Dtype::f32, weight, *make_pool(1));
  for (const int threads : {2, 3, 5}) {
    const Loss many = measure_with(table, values.data(), Dtype::f32, weight, *make_pool(threads));
    EXPECT_EQ(many.max_error, one.max_error);
    EXPECT_EQ(many.sum_error2, one.sum_error2);
    EXPECT_EQ(many.sum_value2, one.sum_value2);
    EXPECT_EQ(many.worst_block_error, one.worst_block_error);
    EXPECT_EQ(many.worst_block, one.worst_block);
  }
}

STOWAGE_ON_EACH_ISA(Measure, AddsTheFiguresOfInstructionSetsAlike) {
  const Shape shape{140, 1001};  // two pieces of work, rows and blocks cut by each
  for (const std::string& name : storages()) {
    const Storage storage = parse_storage(name);
    if (storage.scaling.kind == Scaling::Kind::row2) continue;
    const Bytes values = as_type(numbers(Kind::wide, 140140), Dtype::bf16);
    const Parts parts = reference_parts(values, Dtype::bf16, shape, storage);
    const Weight weight = parts.weight(storage, shape);
    const Loss here = measure_with(table, values.data(), Dtype::bf16, weight, *make_pool(3));
    const Loss there = kept(name, [&] {
      return measure_with(*runnable_kernels().front().kernels, values.data(), Dtype::bf16, weight,
                          inline_executor());
    });
    EXPECT_EQ(here.sum_error2, there.sum_error2) << name;
    EXPECT_EQ(here.worst_block_error, there.worst_block_error) << name;
    EXPECT_EQ(here.worst_block, there.worst_block) << name;
  }
}

TEST(MeasureEdges, SumsOfWeightsNameNoBlock) {
  const float values[4] = {1.0F, 0.3F, 2.0F, 0.7F};
  const Weight weight = quantize(values, Dtype::f32, {2, 2}, parse_storage("int8"));
  const Loss one = measure(values, Dtype::f32, weight);
  Loss two = one;
  two += one;
  EXPECT_EQ(two.elements, 8);
  EXPECT_EQ(two.sum_error2, 2 * one.sum_error2);
  EXPECT_EQ(two.max_error, one.max_error);
  EXPECT_EQ(two.worst_block_error, one.worst_block_error);
  EXPECT_GE(one.worst_block, 0);
  EXPECT_EQ(two.worst_block, -1);
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
}  // namespace stowage::measure_test
