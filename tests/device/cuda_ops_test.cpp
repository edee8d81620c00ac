// SPDX-License-Identifier: Apache-2.0
// The public door to CUDA devices, on a device that is the host.
#include "stowage/cuda.h"

#include "expect_error.h"
#include "kernel/linear_cases.h"
#include "scratch.h"

namespace stowage::linear_test {
namespace {

using samples::Bytes;
using samples::Parts;

CudaOps ops(const test::Scratch& scratch) {
  return CudaOps(0,
                 {.driver = FAKE_CUDA, .compilers = {FAKE_CUDA}, .folder = scratch.path("kept")});
}

class CudaOpsTest : public testing::Test {
 protected:
  test::Scratch scratch;
  CudaOps cuda = ops(scratch);
  const Storage storage = parse_storage("nf4");
  const Shape shape{8, 128};
  const Weight weight = make_weight("nf4", shape, Data::normal);
};

TEST_F(CudaOpsTest, GivesTheBytesOfTheCpu) {
  EXPECT_EQ(cuda.architecture(), 90);
  EXPECT_EQ(cuda.compiler(), "13.0");
  const Values& x = make_values(Dtype::bf16, shape.elements(), Data::heavy, 7);
  Parts ours(storage, shape), expected(storage, shape);
  Bytes working(CudaOps::working_bytes(storage, shape));
  cuda.quantize(nullptr, x.data(), x.dtype, shape, storage, ours.writable(), working.data());
  EXPECT_FALSE(cuda.refused(nullptr, working.data()));
  quantize_into(x.data(), x.dtype, shape, storage, expected.writable());
  EXPECT_EQ(ours.bytes, expected.bytes);

  Bytes values(bytes_of(Dtype::f16, shape.elements()));
  cuda.dequantize(nullptr, weight, values.data(), Dtype::f16);
  EXPECT_EQ(values, samples::reference_values(weight, Dtype::f16));

  float most[2] = {};
  const stowage::Values arrays[] = {{x.data(), x.dtype, shape.elements()}, {}};
  cuda.amax(nullptr, arrays, most);
  float wanted[2] = {};
  amax(arrays, wanted);
  EXPECT_EQ(most[0], wanted[0]);
  EXPECT_EQ(most[1], 0.0f);
  EXPECT_GT(cuda.compiled(), 0);
  CudaOps again = ops(scratch);
  again.dequantize(nullptr, weight, values.data(), Dtype::f16);
  EXPECT_EQ(again.compiled(), 0);
  EXPECT_EQ(again.found(), 1);
}

TEST_F(CudaOpsTest, RowsByIdsOfEitherWidthAndNoOthers) {
  const std::int64_t ids[] = {7, 0, 7};
  const std::int32_t short_ids[] = {7, 8, -1};
  const Bytes all = samples::reference_values(weight, Dtype::f32);
  const std::size_t row = bytes_of(Dtype::f32, shape[1]);
  Bytes out(3 * row);
  std::uint32_t word = 1;
  cuda.embedding(nullptr, weight, ids, true, 3, out.data(), Dtype::f32, &word);
  EXPECT_FALSE(cuda.refused(nullptr, &word));
  EXPECT_EQ(std::memcmp(out.data(), all.data() + 7 * row, row), 0);
  EXPECT_EQ(std::memcmp(out.data() + row, all.data(), row), 0);
  cuda.embedding(nullptr, weight, short_ids, false, 3, out.data(), Dtype::f32, &word);
  EXPECT_TRUE(cuda.refused(nullptr, &word));
  EXPECT_EQ(std::memcmp(out.data(), all.data() + 7 * row, row), 0);
}

TEST_F(CudaOpsTest, MultipliesRows) {
  EXPECT_EQ(cuda.most_rows(storage, shape, Dtype::bf16), 64);
  for (const std::int64_t rows : {1, 16, 64}) {
    const Values& x = make_values(Dtype::bf16, rows * shape[1], Data::normal, 3);
    Values y{x.dtype, std::vector<std::byte>(bytes_of(x.dtype, rows * shape[0]))};
    cuda.linear(nullptr, x.data(), rows, x.dtype, weight, nullptr, y.bytes.data());
    expect_within_bound(y, exact(x, rows, weight, nullptr), shape[1], std::to_string(rows));
  }
  EXPECT_STOWAGE_ERROR(cuda.linear(nullptr, nullptr, -1, Dtype::bf16, weight, nullptr, nullptr),
                       invalid_argument, "must be multiplied by rows, got [8, 128] and -1");
  EXPECT_STOWAGE_ERROR((void)cuda.most_rows(storage, {128}, Dtype::bf16), invalid_argument,
                       "the weight must be a matrix, got [128]");
}

TEST_F(CudaOpsTest, MultipliesByGroups) {
  const Weight experts = make_weight("nf4", {3, 8, 128}, Data::normal);
  const Values& x = make_values(Dtype::bf16, 5 * 128, Data::normal, 3);
  const std::int32_t ends[] = {2, 2, 4};
  Values y{x.dtype, std::vector<std::byte>(bytes_of(x.dtype, 5 * 8), std::byte{0xFF})};
  cuda.grouped_linear(nullptr, x.data(), 5, x.dtype, experts, ends, nullptr, y.bytes.data());
  const auto expert = [&](const std::int64_t which) {  // blocks of 64 do not cross matrices
    return Weight(storage, shape,
                  std::vector<const void*>{
                      static_cast<const std::byte*>(experts.part(0)) + which * 8 * 128 / 2,
                      static_cast<const float*>(experts.part(1)) + which * 8 * 128 / 64});
  };
  const auto rows_of = [](const Values& from, std::int64_t first, std::int64_t row) {
    const auto begin = from.bytes.begin() + static_cast<std::ptrdiff_t>(first * row * 2);
    return Values{from.dtype, {begin, begin + static_cast<std::ptrdiff_t>(2 * row * 2)}};
  };
  for (const std::int64_t which : {0, 2})
    expect_within_bound(rows_of(y, which, 8),
                        exact(rows_of(x, which, 128), 2, expert(which), nullptr), 128,
                        std::to_string(which));
  for (std::int64_t i = 4 * 8; i < 5 * 8; ++i) EXPECT_EQ(y[i], 0.0);
  EXPECT_STOWAGE_ERROR(
      cuda.grouped_linear(nullptr, nullptr, 1, Dtype::bf16, weight, ends, nullptr, nullptr),
      invalid_argument,
      "matrices [E, O, K] that lie so must be multiplied, got nf4:block64 [8, 128]");
}

TEST_F(CudaOpsTest, RefusesWhatIsNotFiniteAndWhatNoKernelServes) {
  const float values[64] = {1.0f, std::numeric_limits<float>::infinity()};
  const Shape row{1, 64};
  Parts parts(storage, row);
  Bytes working(CudaOps::working_bytes(storage, row));
  cuda.quantize(nullptr, values, Dtype::f32, row, storage, parts.writable(), working.data());
  EXPECT_TRUE(cuda.refused(nullptr, working.data()));
  const Storage doubles = parse_storage("nf4:torchao:block16:scaler1:f64");
  EXPECT_FALSE(CudaOps::serves(doubles));
  EXPECT_STOWAGE_ERROR(
      cuda.quantize(nullptr, values, Dtype::f64, row, doubles, parts.writable(), working.data()),
      unsupported, "CUDA kernels must serve the storage, got nf4:torchao:block16:scaler1:f64");
}

}  // namespace
}  // namespace stowage::linear_test
