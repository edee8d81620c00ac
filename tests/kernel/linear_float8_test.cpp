// SPDX-License-Identifier: Apache-2.0
// Products of fp8 weights and few rows of x, where the bits of codes move to those of fp32.
#include <cmath>

#include "base/threads.h"
#include "kernel/linear_cases.h"
#include "kernel/linear_weight.h"

namespace stowage::linear_test {
namespace {

constexpr const char* kFloat8[] = {"f8_e4m3",
                                   "f8_e4m3:tensor",
                                   "f8_e4m3:row",
                                   "f8_e4m3:block64",
                                   "f8_e4m3:block32",
                                   "f8_e4m3:block16:bf16",
                                   "f8_e4m3:block32:e8m0",
                                   "f8_e4m3:block64:e8m0",
                                   "f8_e4m3:block16:e8m0",
                                   "f8_e4m3:block128:e8m0",
                                   "f8_e4m3:block128",
                                   "f8_e4m3:block32x64",
                                   "f8_e4m3:block8x32",
                                   "f8_e4m3:block128x64:bf16",
                                   "f8_e5m2",
                                   "f8_e5m2:row",
                                   "f8_e5m2:block32:e8m0",
                                   "f8_e5m2:block64x64"};

/// Whether codes move, and the same tables with it always or never.
bool moves(const Kernels& table) {
  return table.linear.bytes.dot[static_cast<std::size_t>(Codes::f8_e4m3)] != nullptr;
}
Kernels with_float8(const Kernels& table, std::int64_t most) {
  Kernels other = table;
  if (moves(table)) other.linear.bytes.most_float8 = most;
  return other;
}

STOWAGE_ON_EACH_ISA(LinearFloat8, StayWithinTheBound) {
  const Kernels always = with_float8(table, kMostBytesRows);
  constexpr Data kData[] = {Data::normal, Data::heavy, Data::adversarial};
  constexpr Dtype kDtypes[] = {Dtype::bf16, Dtype::f16, Dtype::f32};
  std::size_t next = 0;
  for (const char* storage : kFloat8)
    for (const std::int64_t m : {1, 2, 3, 4, 7})
      for (const std::int64_t k : {64, 192, 256, 768}) {
        if (!samples::holds(parse_storage(storage), {67, k})) continue;
        const Data data = kData[(next + next / 3) % 3];
        const Dtype dtype = kDtypes[next++ / 5 % 3];
        const Weight weight = make_weight(storage, {67, k}, data);
        const Values& x = make_values(dtype, m * k, data, 12);
        const Values y = run_linear(always, x, m, weight, nullptr, inline_executor());
        expect_within_bound(y, exact(x, m, weight, nullptr), k,
                            storage + std::string(" m ") + std::to_string(m));
      }
}

// Those whose groups are 16, 32 or whole blocks of 64 columns, of rows or of several.
TEST(LinearFloat8, IsOfGroupsThatRowsHold) {
  for (const NamedKernels& level : runnable_kernels()) {
    const Kernels always = with_float8(*level.kernels, 4);
    const bool has = moves(always);
    EXPECT_EQ(has, level.name != "scalar" && level.name != "avx512+vbmi" &&
                       level.kernels->isa < Isa::avx512bf16 && level.kernels->isa != Isa::neon)
        << level.name;
    const auto reads = [&](const char* storage, std::int64_t columns, std::int64_t m = 1) {
      const Weight weight = make_weight(storage, {6, columns}, Data::normal);
      return LinearWeight(always, weight, "linear").has_dot_bytes(m);
    };
    for (const char* storage : kFloat8) EXPECT_EQ(reads(storage, 768, 4), has) << storage;
    EXPECT_FALSE(reads("f8_e4m3:row", 768, 5));
    EXPECT_FALSE(reads("f8_e4m3:row", 96));
    for (const char* storage : {"f8_e4m3:block24", "f8_e4m3:block512"})
      EXPECT_FALSE(reads(storage, 768)) << storage;
  }
}

// Each code by each exponent of x: one product each, so exact in fp32.
STOWAGE_ON_EACH_ISA(LinearFloat8, EachCodeIsItsValue) {
  constexpr std::int64_t kRows = 256, kColumns = 64;
  const Kernels always = with_float8(table, 4);
  for (const char* storage : {"f8_e4m3", "f8_e5m2"}) {
    std::vector<std::uint8_t> codes(kRows * kColumns);
    for (std::size_t i = 0; i < codes.size(); ++i)
      codes[i] = static_cast<std::uint8_t>(i / kColumns);  // row c: code c
    const Weight weight(parse_storage(storage), {kRows, kColumns},
                        std::vector<const void*>{codes.data()});
    std::vector<float> values(kRows * kColumns);
    reference::dequantize(weight, values.data(), Dtype::f32);
    for (const float number : {1.0f, -1.5f, 0x1p-87f, 0x1p36f, 0x1p-120f, 0x1p100f})
      for (const std::int64_t column : {0, 7, 8, 21, 31, 32, 63}) {
        Values x{Dtype::f32, std::vector<std::byte>(bytes_of(Dtype::f32, kColumns))};
        std::memcpy(&x.bytes[bytes_of(Dtype::f32, column)], &number, sizeof number);
        const Values y = run_linear(always, x, 1, weight, nullptr, inline_executor());
        for (std::int64_t c = 0; c < kRows; ++c) {
          const float value = values[static_cast<std::size_t>(c * kColumns)];
          const double product = std::isfinite(value) ? double{value * number} : std::nan("");
          if (std::isnan(product))
            ASSERT_FALSE(std::isfinite(y[c])) << storage << " " << c;
          else
            ASSERT_EQ(y[c], product) << storage << " " << c << " " << number;
        }
      }
  }
}

// What products would lose or codes have no number for: the bytes are those of the other way.
STOWAGE_ON_EACH_ISA(LinearFloat8, LeaveOtherNumbers) {
  constexpr std::int64_t kColumns = 256;
  const Kernels always = with_float8(table, 4), never = with_float8(table, 0);
  const auto expect_same = [&](const Weight& weight, const Values& x, const char* what) {
    EXPECT_EQ(run_linear(always, x, 1, weight, nullptr, inline_executor()).bytes,
              run_linear(never, x, 1, weight, nullptr, inline_executor()).bytes)
        << what;
  };
  const Weight usual = make_weight("f8_e4m3:row", {70, kColumns}, Data::normal);
  const Values normal = make_values(Dtype::f32, kColumns, Data::normal, 4);
  for (const float odd : {HUGE_VALF, std::nanf(""), 0x1p-130f, 0x1p-88f, 0x1p37f, -0x1p110f}) {
    Values x = normal;
    std::memcpy(&x.bytes[bytes_of(Dtype::f32, 201)], &odd, sizeof odd);
    expect_same(usual, x, std::to_string(odd).c_str());
  }
  std::vector<std::uint8_t> codes(70 * kColumns, 0x3B), exponents(70 * kColumns / 32, 120);
  const Weight powers(parse_storage("f8_e4m3:block32:e8m0"), {70, kColumns},
                      std::vector<const void*>{codes.data(), exponents.data()});
  for (const int exponent : {255, 254}) {
    exponents[333] = static_cast<std::uint8_t>(exponent);
    expect_same(powers, normal, "exponent");
  }
  exponents[333] = 120;
  for (const char* storage : {"f8_e4m3", "f8_e5m2"}) {
    const Weight weight(parse_storage(storage), {70, kColumns},
                        std::vector<const void*>{codes.data()});
    for (const int code : {0x7F, 0xFF, 0x7C, 0xFC, 0x7D}) {
      codes[9999] = static_cast<std::uint8_t>(code);
      if (code % 128 == 0x7F || storage[5] == '5') expect_same(weight, normal, storage);
    }
    codes[9999] = 0x3B;
  }
}

// A group whose exponent is 0 counts 2^-127, which is no normal number.
STOWAGE_ON_EACH_ISA(LinearFloat8, TheLeastScaleIsExact) {
  constexpr std::int64_t kColumns = 64;
  const std::vector<std::uint8_t> codes(8 * kColumns, 0x38), exponents(8 * kColumns / 32, 0);
  const Weight weight(parse_storage("f8_e4m3:block32:e8m0"), {8, kColumns},
                      std::vector<const void*>{codes.data(), exponents.data()});
  Values x{Dtype::f32, std::vector<std::byte>(bytes_of(Dtype::f32, kColumns))};
  const float number = 0x1p30f;
  std::memcpy(&x.bytes[bytes_of(Dtype::f32, 40)], &number, sizeof number);
  const Values y = run_linear(with_float8(table, 4), x, 1, weight, nullptr, inline_executor());
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_EQ(y[i], 0x1p-97);
}

STOWAGE_ON_EACH_ISA(LinearFloat8, AreTheSameOnAnyNumberOfThreads) {
  const Kernels always = with_float8(table, 4);
  for (const char* storage : {"f8_e4m3", "f8_e4m3:row", "f8_e4m3:block128x128",
                              "f8_e4m3:block32:e8m0", "f8_e4m3:block32:bf16"})
    for (const std::int64_t m : {1, 2, 4}) {
      const Weight weight = make_weight(storage, {515, 1024}, Data::normal);
      const Values x = make_values(Dtype::bf16, m * 1024, Data::normal, 5);
      const Values y = run_linear(always, x, m, weight, nullptr, inline_executor());
      for (const int threads : {2, 5}) {
        const auto pool = make_pool(threads);
        EXPECT_EQ(run_linear(always, x, m, weight, nullptr, *pool).bytes, y.bytes) << storage;
      }
    }
}

}  // namespace
}  // namespace stowage::linear_test
