// SPDX-License-Identifier: Apache-2.0
// The compiler's own detection is the oracle.
#include "base/cpu.h"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

namespace stowage {
namespace {

#if defined(__x86_64__)
TEST(Cpu, HasTilesWhereTheSystemSaysSo) {
  std::ifstream file("/proc/cpuinfo");
  const std::string said((std::istreambuf_iterator<char>(file)), {});
  EXPECT_EQ(cpu_features().amx_bf16, said.find(" amx_bf16") != std::string::npos);
}

TEST(Cpu, AgreesWithTheCompilersDetection) {
  const CpuFeatures& cpu = cpu_features();
  EXPECT_EQ(cpu.avx2, __builtin_cpu_supports("avx2") != 0);
  EXPECT_EQ(cpu.fma, __builtin_cpu_supports("fma") != 0);
  EXPECT_EQ(cpu.avx512f, __builtin_cpu_supports("avx512f") != 0);
  EXPECT_EQ(cpu.avx512bw, __builtin_cpu_supports("avx512bw") != 0);
  EXPECT_EQ(cpu.avx512vl, __builtin_cpu_supports("avx512vl") != 0);
  EXPECT_EQ(cpu.avx512dq, __builtin_cpu_supports("avx512dq") != 0);
  EXPECT_EQ(cpu.avx512vbmi, __builtin_cpu_supports("avx512vbmi") != 0);
  EXPECT_EQ(cpu.avx512vnni, __builtin_cpu_supports("avx512vnni") != 0);
  EXPECT_EQ(cpu.avx512bf16, __builtin_cpu_supports("avx512bf16") != 0);
}
#endif

TEST(Cpu, AWiderSetIncludesTheNarrowerOne) {
  CpuFeatures cpu{.avx512f = true, .avx512bw = true, .avx512vl = true, .avx512dq = true};
  EXPECT_FALSE(cpu.runs_avx512());
  cpu.avx2 = cpu.f16c = cpu.fma = true;
  EXPECT_TRUE(cpu.runs_avx2());
  EXPECT_TRUE(cpu.runs_avx512());
  EXPECT_FALSE(cpu.runs_avx512bf16());
  cpu.avx512vbmi = cpu.avx512bf16 = true;
  EXPECT_FALSE(cpu.runs_avx512bf16());
  cpu.avx512vnni = true;
  EXPECT_TRUE(cpu.runs_avx512bf16());
  EXPECT_FALSE(cpu.runs_amx());
  cpu.amx_bf16 = true;
  EXPECT_FALSE(cpu.runs_amx());
  cpu.may_use_amx = true;
  EXPECT_TRUE(cpu.runs_amx());
  cpu.avx512bw = false;
  EXPECT_FALSE(cpu.runs_avx512());
}

}  // namespace
}  // namespace stowage
