// SPDX-License-Identifier: Apache-2.0
#include "cli/bench.h"

#include <gtest/gtest.h>

#include <set>

#include "cli/bench_case.h"
#include "kernel/kernels.h"
#include "stowage/info.h"

namespace stowage::cli {
namespace {

const BenchOptions kFew{.quick = true, .threads = 2, .only = "nf4 -> bf16"};
const BenchSizes kSmall{.rows = 512,
                        .columns = 512,
                        .linear = 256,
                        .pool_bytes = 1 << 22,
                        .tile_rounds = 10,
                        .time = std::chrono::seconds(0)};

TEST(Bench, PutsEachKernelBesideALimitOfTheSameRunAndThreads) {
  const std::vector<BenchRow> rows = measure_bench(kFew, kSmall);
  std::set<std::string> limits;
  int found = 0;
  for (const BenchRow& row : rows) {
    EXPECT_GT(row.seconds, 0) << row.name;
    EXPECT_NEAR(row.ratio, row.gbps / row.limit_gbps, 1e-9) << row.name;
    EXPECT_EQ(row.isa, instruction_set());
    EXPECT_TRUE(row.threads == 1 || row.threads == 2) << row.threads;
    if (row.name == kFew.only) {
      ++found;
      EXPECT_EQ(row.limit_name, "memcpy");
      // 512 x 512: half a byte and 1/16 byte of scales read, two bytes written.
      EXPECT_EQ(row.bytes, (std::int64_t{1} << 18) * 41 / 16);
      EXPECT_NEAR(row.gbps, static_cast<double>(row.bytes) / row.seconds / 1e9, 1e-6);
    } else {
      limits.insert(row.limit_name);
      EXPECT_EQ(row.ratio, 1) << row.name;
    }
  }
  EXPECT_EQ(found, 2);
  const bool has_matrices = kernels().linear.matrices.multiply != nullptr;
  EXPECT_EQ(limits.size(), has_matrices ? 4u : 3u);
}

TEST(Bench, MeasuresOneThreadAlone) {
  BenchOptions options = kFew;
  options.threads = 1;
  for (const BenchRow& row : measure_bench(options, kSmall)) EXPECT_EQ(row.threads, 1);
}

TEST(Bench, DealsPartsToThreadsThatAreClaimed) {
  const BenchOptions options{.quick = true, .only = "linear int8:row, 512 rows", .schedule = 16};
  const std::vector<ScheduleRow> rows = measure_schedule(options, 512);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].threads, 4);
  EXPECT_EQ(rows[1].threads, 16);
  for (const ScheduleRow& row : rows) {
    EXPECT_GT(row.processor, 0.5);
    EXPECT_LT(row.processor, 2.0);
    EXPECT_GT(row.path, 0.5) << "less than an equal share";
    EXPECT_LT(row.path, row.threads / 2) << "as if nothing was shared";
  }
}

}  // namespace
}  // namespace stowage::cli
