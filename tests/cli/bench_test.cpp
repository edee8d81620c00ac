// SPDX-License-Identifier: Apache-2.0
#include "cli/bench.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "stowage/info.h"

namespace stowage::cli {
namespace {

const BenchOptions kFew{.json = true, .quick = true, .threads = 2, .only = "nf4 -> bf16"};

TEST(Bench, PutsEachKernelBesideALimitOfTheSameRunAndThreads) {
  const std::vector<BenchRow> rows = measure_bench(kFew);
  std::set<std::string> limits;
  int kernels = 0;
  for (const BenchRow& row : rows) {
    EXPECT_GT(row.seconds, 0) << row.name;
    EXPECT_NEAR(row.ratio, row.gbps / row.limit_gbps, 1e-9) << row.name;
    EXPECT_EQ(row.isa, instruction_set());
    EXPECT_TRUE(row.threads == 1 || row.threads == 2) << row.threads;
    if (row.name == kFew.only) {
      ++kernels;
      EXPECT_EQ(row.limit_name, "memcpy");
      // 4096 x 4096: half a byte and 1/16 byte of scales read, two bytes written.
      EXPECT_EQ(row.bytes, (std::int64_t{1} << 24) * 41 / 16);
      EXPECT_NEAR(row.gbps, static_cast<double>(row.bytes) / row.seconds / 1e9, 1e-6);
    } else {
      limits.insert(row.limit_name);
      EXPECT_EQ(row.ratio, 1) << row.name;
    }
  }
  EXPECT_EQ(kernels, 2);
  EXPECT_EQ(limits.size(), 3u);
}

TEST(Bench, MeasuresOneThreadAlone) {
  BenchOptions options = kFew;
  options.threads = 1;
  for (const BenchRow& row : measure_bench(options)) EXPECT_EQ(row.threads, 1);
}

TEST(Bench, WritesJsonWithTheDocumentedKeys) {
  testing::internal::CaptureStdout();
  bench(kFew);
  const auto list = nlohmann::json::parse(testing::internal::GetCapturedStdout());
  ASSERT_TRUE(list.is_array());
  const std::set<std::string> keys = {"name",       "bytes", "seconds", "gbps", "limit_name",
                                      "limit_gbps", "ratio", "threads", "isa"};
  for (const auto& row : list) {
    std::set<std::string> found;
    for (const auto& [key, value] : row.items()) found.insert(key);
    EXPECT_EQ(found, keys);
  }
}

}  // namespace
}  // namespace stowage::cli
