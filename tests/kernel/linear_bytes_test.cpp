// SPDX-License-Identifier: Apache-2.0
// Products of weights of 4 bits, of a byte in short groups, or of dense codes, and few rows of x in
// integers, where an instruction set has them.
#include <bit>

#include "base/threads.h"
#include "kernel/fixed_point.h"

namespace stowage::linear_test {
namespace {

constexpr const char* kStorages[] = {"mxfp4",
                                     "nvfp4",
                                     "f4_e2m1:block16:e4m3_quotient",
                                     "nvfp4:row",
                                     "f4_e2m1:block16:e4m3_quotient:row",
                                     "f4_e2m1:row",
                                     "int4:block64",
                                     "int4:block32",
                                     "int4:block128:f16:zero",
                                     "int4:block32:zero",
                                     "int4:block16",
                                     "int4:tensor",
                                     "int4:row:bf16:zero",
                                     "int4:block64x64",
                                     "f4_e2m1:block192",
                                     "q4_k",
                                     "int4:block64:bf16:zero_sum",
                                     "int4:block32:f16:zero_sum",
                                     "uint4:block64:f16:zero_rounded",
                                     "uint4:block128:bf16:zero_rounded",
                                     "uint4:block32:f16:zero_rounded"};

/// Codes of a byte in short groups, and dense ones in any.
constexpr const char* kWhole[] = {"int8:block32:f16",
                                  "int8:block16",
                                  "mxint8",
                                  "int8:block32:zero",
                                  "int8:block16:f16:zero",
                                  "int6:block32:zero",
                                  "q6_k",
                                  "int5:block32:bf16",
                                  "int5:block16:zero",
                                  "int2:block64:f16",
                                  "int2:block16",
                                  "int2:tensor",
                                  "int3:block128:bf16",
                                  "int3:row:zero",
                                  "int6:block64x64",
                                  "int7:block32:f16",
                                  "int7:block192",
                                  "int7:row:bf16:zero"};

/// Codes that choose words.
constexpr const char* kWords[] = {
    "nf4",         "fp4",          "nf4:block64:nested", "nf4:block128",
    "fp4:block32", "nf4:block256", "fp4:block256:nested"};

/// The same table without products in integers.
Kernels without_bytes(const Kernels& table) {
  Kernels other = table;
  other.linear.bytes = {};
  return other;
}

/// The bound of docs/numbers.md, with what fixed point adds.
void expect_within(const Values& y, const Values& x, std::int64_t m, const Weight& weight,
                   const std::string& what) {
  const Exact& truth = exact(x, m, weight, nullptr);
  const std::vector<double>& more = eights(x, m, weight);
  const auto depth = static_cast<double>(weight.shape()[1] + 8);
  const Descriptor form = describe(weight.storage());
  double skipped = form.zero == Zero::rounded ? 2 * unit(form.scale.type) : 0;  // roundings
  if (form.codes == Codes::nf4) skipped = 0x1p-12;                              // of values
  for (std::size_t i = 0; i < truth.y.size(); ++i) {
    const double bound = unit(y.dtype) * std::abs(truth.y[i]) +
                         (depth * 0x1p-24 + unit(y.dtype) + skipped) * truth.magnitude[i] +
                         0x1p-14 * more[i] + (y.dtype == Dtype::f16 ? 0x1p-24 : 0x1p-133);
    ASSERT_LE(std::abs(y[static_cast<std::int64_t>(i)] - truth.y[i]), bound)
        << what << ", element " << i;
  }
}

Values filled(Dtype dtype, std::int64_t n, float (*number)(std::int64_t)) {
  Values values{dtype, std::vector<std::byte>(bytes_of(dtype, n))};
  for (std::int64_t i = 0; i < n; ++i) {
    const float x = number(i);
    const std::uint16_t half = dtype == Dtype::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
    std::memcpy(&values.bytes[bytes_of(dtype, i)], &half, 2);
  }
  return values;
}

STOWAGE_ON_EACH_ISA(LinearBytes, StayWithinTheBound) {
  std::vector<std::string> storages(std::begin(kStorages), std::end(kStorages));
  storages.insert(storages.end(), std::begin(kWhole), std::end(kWhole));
  storages.insert(storages.end(), std::begin(kWords), std::end(kWords));
  storages.insert(storages.end(), {"int8", "int8:row", "int8:block64"});
  constexpr Data kData[] = {Data::normal, Data::heavy, Data::adversarial};
  std::size_t next = 0;  // each storage meets all data, dtypes, rows and columns, though not in all
  for (const std::string& storage : storages)  // combinations
    for (const std::int64_t m : {1, 2, 3, 4, 7})
      for (const std::int64_t k : {64, 192, 768}) {
        if (!samples::holds(parse_storage(storage), {67, k})) continue;
        const Data data = kData[(next + next / 3) % 3];
        const Dtype dtype = next++ / 5 % 2 == 0 ? Dtype::bf16 : Dtype::f16;
        const Weight weight = make_weight(storage, {67, k}, data);
        const Values& x = make_values(dtype, m * k, data, 11);
        const Values y = run_linear(table, x, m, weight, nullptr, inline_executor());
        expect_within(y, x, m, weight, storage + " m " + std::to_string(m));
      }
}

// Scales are expanded 2048 at a time: longer rows come in pieces.
STOWAGE_ON_EACH_ISA(LinearBytes, TakeLongRowsInPieces) {
  for (const char* storage :
       {"q6_k", "int5:block32:bf16", "int7:block16:f16", "int8:block32:f16", "q4_k"})
    for (const std::int64_t m : {1, 3})
      for (const std::int64_t k : {8192, 8192 + 256, 9 * 8192 - 512}) {
        const Weight weight = make_weight(storage, {5, k}, Data::normal);
        const Values x = make_values(Dtype::bf16, m * k, Data::normal, 3);
        const Values y = run_linear(table, x, m, weight, nullptr, inline_executor());
        expect_within(y, x, m, weight, std::string(storage) + " k " + std::to_string(k));
      }
}

// Which storages and shapes: those whose groups blocks of 64 columns hold, or lie in.
TEST(LinearBytes, AreOfRowsThatGroupsDivide) {
  for (const NamedKernels& level : runnable_kernels()) {
    const auto arranges = [&](KindOfX kind) {
      return level.kernels->linear.bytes.arrange[kind][value_index(Dtype::bf16)] != nullptr;
    };
    const bool has = arranges(kForDigits);
    const bool arm = level.kernels->isa == Isa::neon;
    EXPECT_EQ(has, level.name != "scalar" && level.name != "neon") << level.name;
    EXPECT_EQ(arranges(kForBytes), has && level.name != "avx2" && level.name != "avx512")
        << level.name;
    const bool vbmi = level.kernels->isa >= Isa::avx512bf16 || level.name == "avx512+vbmi";
    EXPECT_EQ(arranges(kForIntegers), has && !vbmi && !arm) << level.name;
    const bool wide = level.kernels->linear.bytes.block[kForDigits] == 128;
    EXPECT_EQ(wide, has && level.kernels->isa >= Isa::avx512 && level.name != "avx512")
        << level.name;
    const std::int64_t most_whole = level.name == "avx2" ? 16 : 4;
    const auto reads = [&](const char* storage, std::int64_t columns, std::int64_t m = 1) {
      const Weight weight = make_weight(storage, {6, columns}, Data::normal);
      return LinearWeight(*level.kernels, weight, "linear").has_dot_bytes(m);
    };
    for (const char* storage : kStorages)
      EXPECT_EQ(reads(storage, 768), has && !(wide && storage == std::string("f4_e2m1:block192")))
          << storage;
    for (const char* storage : {"f4_e2m1:row", "int4:block64", "nvfp4", "int4:tensor"})
      EXPECT_EQ(reads(storage, 192), has) << storage;
    for (const char* storage : kWhole) {
      EXPECT_EQ(reads(storage, 768, most_whole), has) << storage;
      EXPECT_FALSE(reads(storage, 768, most_whole + 1)) << storage;
    }
    for (const char* storage : {"int8", "int8:block64"})
      EXPECT_EQ(reads(storage, 768), has && arm) << storage;
    EXPECT_FALSE(reads("int8:row:absmax", 768));
    for (const char* storage : {"int4:block128", "q4_k", "int4:block32"})
      EXPECT_FALSE(reads(storage, 96)) << storage;
    for (const char* storage : kWords) EXPECT_EQ(reads(storage, 768, 3), has) << storage;
    for (const char* storage :
         {"int4:block24", "int4:block512", "nf4:torchao:block64:scaler1:bf16"})
      EXPECT_FALSE(reads(storage, 768)) << storage;
    // In vectors of 512 bits fp32 is as quick for more rows beside integers of 256 bits, and pairs
    // and matrices of bf16 are, for such numbers.
    const bool beside = level.kernels->linear.matrices.multiply != nullptr;
    EXPECT_EQ(level.kernels->linear.bytes.most_bf16, beside ? 4 : 16) << level.name;
    const bool many = level.kernels->isa == Isa::avx2 || wide || arm;
    EXPECT_EQ(reads("nf4", 768, 16), has && many);
    EXPECT_EQ(reads("mxfp4", 768, 4), has);
    EXPECT_EQ(reads("mxfp4", 768, 16), has && many);
    EXPECT_FALSE(reads("mxfp4", 768, 17));
    for (const char* storage : {"int4:block64", "int4:block128:f16:zero", "f4_e2m1:row"}) {
      EXPECT_EQ(reads(storage, 768, 2), has && (many || beside)) << storage;
      EXPECT_EQ(reads(storage, 768, 5), has && many) << storage;
    }
  }
}

// Small integers and a scale of 1: every sum is exact in fp32, in any order.
STOWAGE_ON_EACH_ISA(LinearBytes, AreExactWhereFixedPointIs) {
  constexpr std::int64_t kRows = 16, kColumns = 128;
  for (const char* storage : {"f4_e2m1:block64", "int4:block64"}) {
    const Weight weight(parse_storage(storage), {kRows, kColumns}, [] {
      static std::vector<std::uint8_t> codes(kRows * kColumns / 2);
      static const std::vector<float> scales(kRows * kColumns / 64, 1.0f);
      for (std::size_t i = 0; i < codes.size(); ++i)  // row r: code r, or its neighbor
        codes[i] = static_cast<std::uint8_t>(i / 64 * 17 + (i % 5 == 0 ? i % 16 : 0));
      return std::vector<const void*>{codes.data(), scales.data()};
    }());
    for (const float most : {127.5f, -127.5f, 1.0f, 0.0f})
      for (const bool alike : {true, false}) {
        std::vector<float> x;
        for (std::int64_t k = 0; k < kColumns; ++k)
          x.push_back(alike || k % 3 == 0 ? most : static_cast<float>(k % 7) - 3.0f);
        Values half{Dtype::bf16, std::vector<std::byte>(bytes_of(Dtype::bf16, kColumns))};
        for (std::int64_t k = 0; k < kColumns; ++k) {
          const std::uint16_t bits = f32_to_bf16(x[static_cast<std::size_t>(k)]);
          std::memcpy(&half.bytes[bytes_of(Dtype::bf16, k)], &bits, 2);
        }
        const Values y = run_linear(table, half, 1, weight, nullptr, inline_executor());
        const Exact& truth = exact(half, 1, weight, nullptr);
        for (std::int64_t i = 0; i < kRows; ++i)
          ASSERT_EQ(y[i], double{bf16_to_f32(f32_to_bf16(
                              static_cast<float>(truth.y[static_cast<std::size_t>(i)])))})
              << storage << " row " << i << " most " << most;
      }
  }
}

// One huge value among small ones costs those beside it alone.
STOWAGE_ON_EACH_ISA(LinearBytes, OneHugeValueCostsItsNeighborsAlone) {
  constexpr std::int64_t kColumns = 256;
  const auto huge = [](std::int64_t i) {
    return i % kColumns == 77 ? 3e4f : 0.01f * static_cast<float>(i % 13 - 6);
  };
  for (const char* storage :
       {"mxfp4", "nvfp4", "int4:block64", "q4_k", "mxint8", "q6_k", "int3:block64"}) {
    const Weight weight = make_weight(storage, {33, kColumns}, Data::normal);
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
      const Values x = filled(dtype, 2 * kColumns, huge);
      expect_within(run_linear(table, x, 2, weight, nullptr, inline_executor()), x, 2, weight,
                    storage);
    }
  }
}

// Where fixed point holds x or a result in no way, the bytes are those of fp32 products.
STOWAGE_ON_EACH_ISA(LinearBytes, LeaveOtherNumbersToFp32) {
  constexpr std::int64_t kColumns = 256;
  using Number = float (*)(std::int64_t);
  const Number kinds[] = {[](std::int64_t i) { return i == 200 ? HUGE_VALF : 1.0f; },
                          [](std::int64_t i) { return i == 3 ? std::nanf("") : -1.0f; },
                          [](std::int64_t i) { return i / 8 == 5 ? 0x1p-130f : 2.0f; },
                          [](std::int64_t i) { return i / 8 == 31 ? 0x1p110f : 2.0f; }};
  for (const char* storage :
       {"mxfp4", "int4:block64", "q4_k", "int8:block16", "q6_k", "int2:block32"}) {
    const Weight weight = make_weight(storage, {70, kColumns}, Data::normal);
    for (const Number number : kinds) {
      const Values x = filled(Dtype::bf16, kColumns, number);
      EXPECT_EQ(run_linear(table, x, 1, weight, nullptr, inline_executor()).bytes,
                run_linear(without_bytes(table), x, 1, weight, nullptr, inline_executor()).bytes)
          << storage;
    }
  }
  const float scales[] = {1.0f, HUGE_VALF, std::nanf(""), 0x1p127f, -0.5f, 3e38f};
  std::vector<float> some;
  for (std::size_t i = 0; i < 70 * 4; ++i) some.push_back(i < 200 ? 1.0f : scales[i % 6]);
  const std::vector<std::uint8_t> codes(70 * kColumns / 2, 0x3B);
  const Weight weight(parse_storage("int4:block64"), {70, kColumns},
                      std::vector<const void*>{codes.data(), some.data()});
  const Values x = make_values(Dtype::bf16, kColumns, Data::normal, 4);
  EXPECT_EQ(run_linear(table, x, 1, weight, nullptr, inline_executor()).bytes,
            run_linear(without_bytes(table), x, 1, weight, nullptr, inline_executor()).bytes);
}

STOWAGE_ON_EACH_ISA(LinearBytes, AreTheSameOnAnyNumberOfThreads) {
  for (const char* storage :
       {"nvfp4", "int4:block128:f16:zero", "q4_k", "q6_k", "mxint8", "int5:block64:f16"}) {
    const Weight weight = make_weight(storage, {515, 1024}, Data::normal);
    for (const std::int64_t m : {1, 4}) {
      const Values x = make_values(Dtype::bf16, m * 1024, Data::normal, 5);
      const Values y = run_linear(table, x, m, weight, nullptr, inline_executor());
      for (const int threads : {2, 5}) {
        const auto pool = make_pool(threads);
        EXPECT_EQ(run_linear(table, x, m, weight, nullptr, *pool).bytes, y.bytes) << storage;
      }
    }
  }
}

}  // namespace
}  // namespace stowage::linear_test
