// SPDX-License-Identifier: Apache-2.0
// The program as a user meets it: help, version, inspect, verify.
#include "cli/program.h"

#include <nlohmann/json.hpp>

#include "stowage/info.h"

namespace stowage::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

TEST_F(Program, HelpShowsCommandsExamplesAndExitCodes) {
  const std::string help = expect_ok({"--help"});
  for (const char* word :
       {"inspect", "pack", "unpack", "verify", "bench", "Examples:", "Exit codes: 0 ok"})
    EXPECT_THAT(help, HasSubstr(word));
  for (const char* command : {"inspect", "pack", "unpack", "verify", "bench"})
    EXPECT_THAT(expect_ok({command, "--help"}), HasSubstr("Example")) << command;
  EXPECT_THAT(expect_ok({"pack", "--help"}), HasSubstr("nf4:torchao"));
}

TEST_F(Program, VersionNamesTheBuildAndTheMachine) {
  EXPECT_EQ(expect_ok({"--version"}), std::string("stowage ") + version() + " (commit " + commit() +
                                          ", " + instruction_set() + ", " +
                                          std::to_string(thread_count()) + " threads)\n");
}

TEST_F(Program, InspectShowsWhatAModelIsMadeOf) {
  write_model(path("m.safetensors"), small_model());
  EXPECT_EQ(expect_ok({"inspect", "m.safetensors"}),
            R"(m.safetensors: 7 tensors in 1 file

tensor                  storage  shape        bytes  f8_e4m3:row  int8:row  nf4:block64  nf4:block64:nested
embed.weight            f32      [8, 64]   2.00 KiB        544 B     544 B        288 B            1.27 KiB
layers.0.linear.bias    f32      [16]          64 B            -         -            -                   -
layers.0.linear.weight  f32      [16, 64]  4.00 KiB     1.06 KiB  1.06 KiB        576 B            1.52 KiB
layers.0.norm.weight    f32      [64]         256 B            -         -            -                   -
lm_head.weight          f32      [8, 64]   2.00 KiB            -         -            -                   -
mask                    f32      [2, 2]        16 B            -         -            -                   -
steps                   I64      [2]           16 B            -         -            -                   -

all tensors as         bytes
they are            8.34 KiB
bf16                5.34 KiB
f8_e4m3             3.84 KiB
f8_e4m3:row         3.94 KiB
int8:row            3.94 KiB
nf4:block64         3.19 KiB
nf4:block64:nested  5.13 KiB
fp4:block64         3.19 KiB
)");
}

TEST_F(Program, InspectJsonHasTheDocumentedKeys) {
  write_model(path("m.safetensors"), small_model());
  expect_ok({"pack", "m.safetensors", "p.safetensors", "--storage", "nf4", "--compute", "bf16"});
  const json shown = json::parse(expect_ok({"inspect", "p.safetensors", "--json"}));
  EXPECT_EQ(shown["files"], json({"p.safetensors"}));
  EXPECT_EQ(shown["metadata"], json({{"format", "pt"}}));
  std::uint64_t bytes = 0;
  for (const json& tensor : shown["tensors"]) {
    EXPECT_EQ(tensor.size(), 6u);
    bytes += tensor["bytes"].get<std::uint64_t>();
  }
  EXPECT_EQ(shown["bytes"], bytes);
  const json& weight = shown["weights"][1];
  EXPECT_EQ(weight["name"], "layers.0.linear.bias");
  EXPECT_EQ(weight["would_cost"], nullptr);
  const json& packed = shown["weights"][2];
  EXPECT_EQ(packed["name"], "layers.0.linear.weight");
  EXPECT_EQ(packed["storage"], "nf4:block64");
  EXPECT_EQ(packed["shape"], json({16, 64}));
  EXPECT_EQ(packed["compute"], "bf16");
  EXPECT_EQ(packed["parts"], json({"layers.0.linear.weight", "layers.0.linear.weight.absmax"}));
  EXPECT_EQ(packed["would_cost"]["int8:row"], 16 * 64 + 16 * 4);
  EXPECT_EQ(shown["would_cost"].size(), 7u);
}

TEST_F(Program, VerifyChecksEveryChecksum) {
  write_model(path("m.safetensors"), small_model());
  EXPECT_EQ(expect_ok({"verify", "m.safetensors"}),
            "m.safetensors: the structure is sound; 7 tensors, 6 weights; no checksums are "
            "stored\n");
  expect_ok({"pack", "m.safetensors", "p.safetensors", "--storage", "int8"});
  EXPECT_EQ(expect_ok({"verify", "p.safetensors"}),
            "p.safetensors: the structure is sound; 9 tensors, 6 weights; 9 checksums agree\n");
  EXPECT_EQ(json::parse(expect_ok({"verify", "p.safetensors", "--json"})),
            json::parse(R"({"model": "p.safetensors", "dialect": "", "tensors": 9, "weights": 6,
                            "checksums": 9, "without_checksum": 0})"));
  std::string bytes = read_text(path("p.safetensors"));
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_text(path("p.safetensors"), bytes);
  const std::string error = expect_failure(1, {"verify", "p.safetensors"});
  EXPECT_THAT(error, HasSubstr("p.safetensors"));
}

TEST_F(Program, BenchJsonHasTheDocumentedKeys) {
  const json rows =
      json::parse(expect_ok({"bench", "--quick", "--only", "memcpy", "--threads", "1", "--json"}));
  ASSERT_FALSE(rows.empty());
  for (const json& row : rows) {
    std::set<std::string> keys;
    for (const auto& [key, value] : row.items()) keys.insert(key);
    EXPECT_EQ(keys, (std::set<std::string>{"name", "bytes", "seconds", "gbps", "limit_name",
                                           "limit_gbps", "ratio", "threads", "isa"}));
    EXPECT_GT(row["seconds"], 0);
    EXPECT_EQ(row["threads"], 1);
    EXPECT_EQ(row["isa"], instruction_set());
  }
}

}  // namespace
}  // namespace stowage::cli
