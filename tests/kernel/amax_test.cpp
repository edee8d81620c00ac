// SPDX-License-Identifier: Apache-2.0
// The largest magnitudes of many arrays against a plain loop over the reference's values, bit for
// bit.
#include <bit>

#include "base/threads.h"
#include "expect_error.h"
#include "fenced.h"
#include "kernel/chunks.h"
#include "kernel/drivers.h"
#include "samples.h"

namespace stowage::amax_test {
namespace {

using namespace stowage::samples;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::uint32_t expected(const Values& array) {
  float most = 0;
  for (std::int64_t i = 0; i < array.count; ++i) {
    const auto x = std::fabs(static_cast<float>(reference::read(array.data, array.dtype, i)));
    if (std::isnan(x)) return 0x7FC00000;
    most = std::max(most, x);
  }
  return std::bit_cast<std::uint32_t>(most);
}

std::vector<std::uint32_t> expected(const std::vector<Values>& arrays) {
  std::vector<std::uint32_t> all;
  for (const Values& array : arrays) all.push_back(expected(array));
  return all;
}

std::vector<std::uint32_t> found(const Kernels& table, const std::vector<Values>& arrays,
                                 Executor& executor = inline_executor()) {
  std::vector<std::uint32_t> out(arrays.size(), 0xA5A5A5A5);
  amax_with(table, arrays, reinterpret_cast<float*>(out.data()), executor);
  return out;
}

STOWAGE_ON_EACH_ISA(Amax, EveryHalfAlone) {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    std::vector<Values> arrays;
    for (const std::uint16_t& half : halves) arrays.push_back({&half, dtype, 1});
    EXPECT_TRUE(found(table, arrays) == expected(arrays)) << disk_name(dtype);
  }
}

STOWAGE_ON_EACH_ISA(Amax, EveryLengthWithTheLargestAtEachPlace) {
  constexpr std::size_t kLongest = 3 * 64 + 1;
  for (const Dtype dtype : kValueTypes) {
    const Fenced memory(kLongest * width(dtype));
    for (std::size_t n = 0; n <= kLongest; ++n) {
      std::vector<double> numbers = samples::numbers(Kind::wide, n, static_cast<unsigned>(n));
      if (n > 0) numbers[n * 7 % n] = n % 2 == 0 ? -5000.0 : 5000.0;
      if (n > 2) numbers[(n * 5 + 1) % n] = n % 3 == 0 ? kNan : 6000.0;
      const Bytes bytes = as_type(numbers, dtype);
      for (const auto against : {Fenced::Against::end, Fenced::Against::begin}) {
        const std::vector<Values> one{
            {memory.piece(bytes, against), dtype, static_cast<std::int64_t>(n)}};
        ASSERT_EQ(found(table, one), expected(one)) << disk_name(dtype) << " n " << n;
      }
    }
  }
}

STOWAGE_ON_EACH_ISA(Amax, WhatIsNotOrdinary) {
  const std::vector<std::vector<double>> cases{
      {},         {-0.0, 0.0},         {0x1p-149, -0x1p-148}, {-0x1p-133, 0x1p-134},
      {kInf, 1},  {1, -kInf},          {kInf, -kNan},         {kNan, 1},
      {1e300, 1}, {0x1.ffffffp127, 1}, {0x1p-160, 0}};
  for (const Dtype dtype : kValueTypes) {
    std::vector<Bytes> memory;
    std::vector<Values> arrays;
    for (const auto& numbers : cases) {
      memory.push_back(as_type(numbers, dtype));
      arrays.push_back({memory.back().data(), dtype, static_cast<std::int64_t>(numbers.size())});
    }
    EXPECT_EQ(found(table, arrays), expected(arrays)) << disk_name(dtype);
  }
}

// Arrays that share a chunk, that span several, and none at all, of several types together.
STOWAGE_ON_EACH_ISA(Amax, ArraysAreToldApartForEveryNumberOfThreads) {
  std::vector<Bytes> memory;
  std::vector<Values> arrays{{nullptr, Dtype::f32, 0}};
  unsigned seed = 0;
  for (const std::int64_t n : {std::int64_t{1}, kChunkElements - 1, std::int64_t{0},
                               2 * kChunkElements + 3, std::int64_t{700}, kChunkElements})
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      memory.push_back(as_type(numbers(Kind::normal, static_cast<std::size_t>(n), ++seed), dtype));
      arrays.push_back({memory.back().data(), dtype, n});
    }
  arrays.push_back({nullptr, Dtype::f16, 0});
  const auto wanted = expected(arrays);
  for (const int threads : {1, 2, 3, 5}) {
    const auto pool = make_pool(threads);
    EXPECT_EQ(found(table, arrays, *pool), wanted) << threads << " threads";
  }
}

TEST(AmaxOwn, NothingIsAskedOfNoArrays) { amax({}, nullptr); }

TEST(AmaxOwn, RefusesWhatItCannotRead) {
  const float x = 1;
  float out = 0;
  const Values bytes[]{{&x, Dtype::f32, 1}, {&x, Dtype::u8, 1}}, gone[]{{nullptr, Dtype::f32, 1}};
  EXPECT_STOWAGE_ERROR(amax(bytes, &out), invalid_argument, "amax: values must be f64, f32,");
  EXPECT_STOWAGE_ERROR(amax(gone, &out), invalid_argument, "amax: values must not be null");
}

}  // namespace
}  // namespace stowage::amax_test
