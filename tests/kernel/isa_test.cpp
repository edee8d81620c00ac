// SPDX-License-Identifier: Apache-2.0
// The choice of an instruction set: each is the one asked for, refusals say why, and no two tables
// share a function, so that a test of one tests that one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>

#include "base/cpu.h"
#include "expect_error.h"
#include "format/legal.h"
#include "kernel/kernels.h"
#include "stowage/info.h"

namespace stowage::isa_test {
namespace {

std::vector<const void*> functions(const DequantizeKernels& kernels) {
  std::vector<const void*> all;
  for (const auto& row : kernels.to)
    for (const DequantizeKernel kernel : row)
      if (kernel != nullptr) all.push_back(reinterpret_cast<const void*>(kernel));
  all.push_back(reinterpret_cast<const void*>(kernels.unpack));
  return all;
}
std::vector<const void*> functions(const QuantizeKernels& kernels) {
  std::vector<const void*> all;
  const auto add = [&](auto kernel) {
    if (kernel != nullptr) all.push_back(reinterpret_cast<const void*>(kernel));
  };
  for (const AmaxKernel kernel : kernels.amax) add(kernel);
  for (const AmaxesKernel kernel : kernels.amaxes) add(kernel);
  for (const ExtremesKernel kernel : kernels.reach) add(kernel);
  for (const ReachKernel kernel : kernels.reach_each) add(kernel);
  for (const EncodeWithinKernel kernel : kernels.within) add(kernel);
  add(kernels.pack);
  for (int codes = 0; codes < kCodesCount; ++codes) {
    for (int in = 0; in < kValueDtypes; ++in) {
      add(kernels.encode[codes][in]);
      add(kernels.divide[codes][in]);
      add(kernels.encode_from[codes][in]);
      add(kernels.cast[codes][in]);
      add(kernels.blocks[codes][in]);
    }
  }
  return all;
}

#if defined(__aarch64__)
constexpr bool kIsArm = true;
constexpr const char* kLevels[] = {"scalar", "neon", "neon+dotprod", "neon+bf16"};
#else
constexpr bool kIsArm = false;
constexpr const char* kLevels[] = {"scalar",      "avx2",        "avx2+vnni",  "avx512",
                                   "avx512+vnni", "avx512+vbmi", "avx512bf16", "avx512bf16+pairs",
                                   "amx"};
#endif

TEST(Isa, EveryNameGivesItsTableOrSaysThatThisCpuCannot) {
  const CpuFeatures& cpu = cpu_features();
  const std::pair<Isa, bool> sets[] = {{Isa::scalar, true},
                                       {Isa::neon, kIsArm},
                                       {Isa::avx2, cpu.runs_avx2()},
                                       {Isa::avx512, cpu.runs_avx512()},
                                       {Isa::avx512bf16, cpu.runs_avx512bf16()},
                                       {Isa::amx, cpu.runs_amx()}};
  for (const auto& [isa, runs_here] : sets) {
    if (runs_here) {
      EXPECT_EQ(kernels_named(to_string(isa)).isa, isa);
    } else {
      EXPECT_STOWAGE_ERROR(kernels_named(to_string(isa)), unsupported,
                           "must be a set that this CPU");
    }
  }
}

// Suites run on the tables that this CPU runs; the others are named in the count of what was
// skipped.
class EveryLevel : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Isa, EveryLevel, ::testing::ValuesIn(kLevels), [](const auto& level) {
  std::string name(level.param);
  std::ranges::replace(name, '+', '_');
  return name;
});

TEST_P(EveryLevel, IsAmongTheTablesThatAreTested) {
  const std::vector<NamedKernels> tables = runnable_kernels();
  EXPECT_LE(tables.size(), std::size(kLevels)) << "a level that is not listed here";
  if (std::ranges::find(tables, GetParam(), &NamedKernels::name) == tables.end())
    GTEST_SKIP() << "this CPU lacks " << GetParam() << ": its kernels are not tested here";
}

TEST(Isa, TheBestTableIsTheDefault) {
  const std::vector<NamedKernels> tables = runnable_kernels();
  EXPECT_EQ(tables.front().name, "scalar");
  EXPECT_EQ(&kernels_named(""), tables.back().kernels);
  for (std::size_t i = 1; i < tables.size(); ++i)
    EXPECT_LE(tables[i - 1].kernels->isa, tables[i].kernels->isa);
}

TEST(Isa, OtherNamesAreRefused) {
  EXPECT_STOWAGE_ERROR(kernels_named("composite"), unsupported, "lives in the Python package");
  EXPECT_STOWAGE_ERROR(kernels_named("avx1024"), invalid_argument,
                       "STOWAGE_FORCE_ISA=avx1024: must be scalar, neon, avx2, avx512");
  EXPECT_STOWAGE_ERROR(kernels_named("AVX2"), invalid_argument, "must be scalar");
}

TEST(Isa, NoTwoTablesShareAFunction) {
  std::set<const void*> dequantize, quantize;
  std::size_t dequantize_count = 0, quantize_count = 0, read = 0;
  std::size_t expected = 5;  // amax, amaxes, reach, reach_each, within
  for (const FormRow& row : form_rows()) {
    if (row.dialect != Dialect::standard || row.packing == Packing::dense) continue;
    ++read;
    expected += (row.legal.kinds & 1 << static_cast<int>(Scaling::Kind::none)) != 0 ? 1 : 0;
    expected += row.codec == Codec::cast ? 0 : 1;             // encode or blocks
    expected += row.legal.product ? 1 : 0;                    // divide
    expected += row.legal.zero || row.legal.rounded ? 1 : 0;  // encode_from
  }
  for (const NamedKernels& table : runnable_kernels()) {
    if (table.kernels->isa >= Isa::avx512bf16 || table.name.ends_with("+vnni") ||
        (kIsArm && table.name.find('+') != std::string_view::npos))
      continue;  // add products
    const auto some = functions(table.kernels->dequantize);
    EXPECT_EQ(some.size(), read * kValueDtypes + 1);  // unpack
    dequantize.insert(some.begin(), some.end());
    dequantize_count += some.size();
    if (table.name == "avx512+vbmi") continue;  // takes the other families from avx512
    const auto others = functions(table.kernels->quantize);
    EXPECT_EQ(others.size(), kValueDtypes * expected + 1);  // pack
    quantize.insert(others.begin(), others.end());
    quantize_count += others.size();
  }
  EXPECT_EQ(dequantize.size(), dequantize_count);
  EXPECT_EQ(quantize.size(), quantize_count);
  EXPECT_FALSE(dequantize.contains(nullptr));
}

TEST(IsaDeathTest, TheEnvironmentForcesASet) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process that has not chosen yet
  for (const NamedKernels& table : runnable_kernels()) {
    const std::string name(to_string(table.kernels->isa));
    EXPECT_EXIT(
        {
          ::setenv("STOWAGE_FORCE_ISA", name.c_str(), 1);
          std::exit(kernels().isa == table.kernels->isa && instruction_set() == name ? 0 : 1);
        },
        ::testing::ExitedWithCode(0), "");
  }
}

TEST(Isa, OnednnUsesTilesWhereItMay) {
  constexpr const char *kName = "ONEDNN_MAX_CPU_ISA", *kOlder = "DNNL_MAX_CPU_ISA";
  const bool has_them = cpu_features().amx_bf16;
  ::unsetenv(kName);
  ::unsetenv(kOlder);
  EXPECT_EQ(onednn_uses_amx(), has_them);
  for (const char* const name : {kOlder, kName}) {
    for (const char* const said :
         {"", "ALL", "default", "made up", "AVX512_CORE_AMX", "avx512_core_amx_fp16"}) {
      ::setenv(name, said, 1);
      EXPECT_EQ(onednn_uses_amx(), has_them) << name << " " << said;
    }
    for (const char* const said : {"SSE41", "AVX2", "avx512_core_bf16", "AVX512_CORE_FP16"}) {
      ::setenv(name, said, 1);
      EXPECT_FALSE(onednn_uses_amx()) << name << " " << said;
    }
    ::unsetenv(name);
  }
  ::setenv(kOlder, "AVX2", 1);
  ::setenv(kName, "", 1);  // the older one speaks
  EXPECT_FALSE(onednn_uses_amx());
  ::setenv(kName, "ALL", 1);
  EXPECT_EQ(onednn_uses_amx(), has_them);
  ::unsetenv(kName);
  ::unsetenv(kOlder);
}

}  // namespace
}  // namespace stowage::isa_test
