// SPDX-License-Identifier: Apache-2.0
// Every refusal: one line on stderr, its exit code, and nothing left behind (expect_failure).
#include "cli/program.h"

namespace stowage::cli {
namespace {

using testing::HasSubstr;

struct Row {
  int code;
  std::vector<std::string> arguments;
  const char* words;
};

class Refusals : public Program {
 protected:
  Refusals() {
    write_model(path("m.safetensors"), small_model());
    fs::create_directories(path("in"));
    fs::create_directories(path("full"));
    fs::create_directories(path("gpt"));
    for (const char* folder : {"in", "gpt"})
      fs::copy(path("m.safetensors"), path(folder) / "model.safetensors");
    write_text(path("gpt/config.json"), R"({"model_type": "gpt2"})");
    write_text(path("full/notes.txt"), "mine");
    write_text(path("bad.safetensors"), "not a model");
  }
  void expect(const std::vector<Row>& rows) const {
    for (const Row& row : rows) {
      std::string command;
      for (const std::string& argument : row.arguments) command += argument + " ";
      SCOPED_TRACE(command);
      EXPECT_THAT(expect_failure(row.code, row.arguments), HasSubstr(row.words));
    }
  }
};

TEST_F(Refusals, OfUsageAreCode2) {
  expect({
      {2, {}, "must be given a command"},
      {2, {"bogus"}, "bogus"},
      {2, {"inspect"}, "MODEL is required"},
      {2, {"inspect", "m.safetensors", "--yaml"}, "--yaml"},
      {2, {"pack", "m.safetensors"}, "OUT is required"},
      {2, {"pack", "m.safetensors", "o"}, "must be given --storage, --rule or --policy"},
      {2, {"pack", "m.safetensors", "o", "--storage", "nf5"}, "must be one of f32, bf16"},
      {2, {"pack", "m.safetensors", "o", "--storage", "int8:none"}, "got 'int8:none'"},
      {2, {"pack", "m.safetensors", "o", "--rule", "nf4"}, "rule: must be GLOB=STORAGE"},
      {2, {"pack", "m.safetensors", "o", "--rule", "*=nf5"}, "got 'nf5'"},
      {2, {"pack", "m.safetensors", "o", "--rule", "*.mpl.*=nf4"}, "rule '*.mpl.*': must match"},
      {2,
       {"pack", "m.safetensors", "o", "--storage", "nf4", "--skip", "*.mpl.*"},
       "skip '*.mpl.*': must match"},
      {2,
       {"pack", "m.safetensors", "o", "--storage", "nf4", "--policy", "p.json"},
       "--policy: must come without"},
      {2,
       {"pack", "m.safetensors", "o", "--storage", "nf4", "--compute", "f64"},
       "--compute: must be f32, bf16 or f16, got 'f64'"},
      {2,
       {"unpack", "m.safetensors", "o", "--compute", "int8"},
       "must be f64, f32, bf16 or f16, got 'int8'"},
      {2, {"pack", "m.safetensors", "o", "--storage", "nf4", "--shard-size", "big"}, "size: must"},
      {2,
       {"pack", "m.safetensors", "o", "--storage", "nf4", "--for", "torchao"},
       "--for: must be bitsandbytes, got 'torchao'"},
      {2,
       {"pack", "in", "o", "--storage", "int8", "--for", "bitsandbytes"},
       "storages must be nf4 or fp4, got layers.0.linear.weight as int8:row"},
      {2,
       {"pack", "in", "o", "--storage", "nf4", "--rule", "embed=nf4", "--for", "bitsandbytes"},
       "must pack weights of Linear modules, got embed.weight"},
      {2,
       {"pack", "in", "o", "--storage", "nf4", "--rule", "lm_head=fp4", "--for", "bitsandbytes"},
       "must be all nf4 or all fp4"},
      {2, {"pack", "in", "o", "--rule", "*=plain", "--for", "bitsandbytes"}, "must pack a weight"},
      {2,
       {"pack", "in", "o.safetensors", "--storage", "nf4", "--for", "bitsandbytes"},
       "OUT must be a folder"},
  });
}

TEST_F(Refusals, OfFilesAreCode1) {
  expect({
      {1, {"inspect", "absent"}, "absent"},
      {1, {"inspect", "bad.safetensors"}, "bad.safetensors"},
      {1, {"verify", "bad.safetensors"}, "bad.safetensors"},
      {1, {"inspect", "full"}, "full"},
      {1, {"pack", "absent", "o", "--storage", "nf4"}, "absent"},
      {1, {"pack", "bad.safetensors", "o", "--storage", "nf4"}, "bad.safetensors"},
      {1,
       {"pack", "m.safetensors", "full", "--storage", "nf4"},
       "full: must be a new or empty folder, or end in .safetensors"},
      {1, {"pack", "m.safetensors", "m.safetensors", "--storage", "nf4"}, "must not exist yet"},
      {1, {"unpack", "m.safetensors", "m.safetensors"}, "must not exist yet"},
      {1, {"pack", "m.safetensors", "no/such/o.safetensors", "--storage", "nf4"}, "no/such"},
      {1, {"pack", "m.safetensors", "bad.safetensors/o", "--storage", "nf4"}, "bad.safetensors/o"},
      {1,
       {"pack", "m.safetensors", "o", "--storage", "nf4:torchao"},
       "must have at most 2 dimensions and a multiple of 16384 elements"},
      {1,
       {"pack", "m.safetensors", "o", "--rule", "lm_head=f8_e4m3:block32", "--rule",
        "mask=int8:row"},
       "m.safetensors: mask: "},
      {1,
       {"pack", "in", "o", "--storage", "nf4", "--for", "bitsandbytes"},
       "in/config.json: must exist"},
      {1, {"pack", "gpt", "o", "--storage", "nf4", "--for", "bitsandbytes"}, "got gpt2"},
  });
}

TEST_F(Refusals, OfABrokenConfigNameItsByte) {
  write_text(path("in/config.json"), "{\"a\": ");
  EXPECT_THAT(expect_failure(1, {"pack", "in", "o", "--storage", "nf4"}),
              HasSubstr("in/config.json: must be JSON, byte "));
  write_text(path("in/config.json"), "[]");
  EXPECT_THAT(expect_failure(1, {"unpack", "in", "o"}), HasSubstr("must be a JSON object"));
}

TEST_F(Refusals, OfSkippedModulesThatWouldSkipPackedOnes) {
  write_model(path("in/model.safetensors"),
              {f32_tensor("dense.weight", {4, 64}, 1), f32_tensor("a.dense.weight", {4, 64}, 2)});
  write_text(path("in/config.json"), "{}");
  EXPECT_THAT(expect_failure(1, {"pack", "in", "o", "--storage", "nf4", "--rule", "dense=plain",
                                 "--for", "bitsandbytes"}),
              HasSubstr("cannot name 'dense' without 'a.dense'"));
}

TEST_F(Refusals, OfTheEnvironment) {
  EXPECT_EQ(run({"--version"}, {.variables = {"STOWAGE_THREADS=none"}}).code, 1);
  const Result result = run({"pack", "m.safetensors", "o", "--storage", "nf4"},
                            {.variables = {"STOWAGE_FORCE_ISA=composite"}});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("STOWAGE_FORCE_ISA"));
  EXPECT_FALSE(fs::exists(path("o")));
}

TEST_F(Refusals, AFullStdoutIsAnError) {
  const Result result = run({"inspect", "m.safetensors"}, {.stdout_path = "/dev/full"});
  EXPECT_EQ(result.code, 1);
  EXPECT_THAT(result.err, HasSubstr("stowage: stdout: "));
}

TEST_F(Refusals, AnInterruptLeavesAWholeResultOrNothing) {
  std::vector<Tensor> tensors;
  for (int i = 0; i < 24; ++i)
    tensors.push_back(f32_tensor("t" + std::to_string(i) + ".weight", {256, 1024}, 1));
  write_model(path("big.safetensors"), tensors);
  const std::set<std::string> before = names();
  int stopped = 0;
  for (int us = 1000; us < 60000 && stopped < 3; us += 3000) {
    const Result result =
        run({"pack", "big.safetensors", "o", "--storage", "nf4"}, {.interrupt_after_us = us});
    if (result.code == 0) {
      expect_ok({"verify", "o"});
      fs::remove_all(path("o"));
      continue;
    }
    EXPECT_EQ(result.code, -SIGINT);
    EXPECT_EQ(names(), before);
    if (result.err.empty()) continue;  // it was not yet up to catching the signal
    EXPECT_EQ(result.err, "stowage: interrupted; nothing was written\n");
    ++stopped;
  }
}

TEST_F(Refusals, NamesFromAFileCannotSpeakToTheTerminal) {
  write_model(path("evil.safetensors"), {f32_tensor("a\x1b[31m.weight", {2, 2}, 1)});
  EXPECT_THAT(expect_ok({"inspect", "evil.safetensors"}), HasSubstr("a\\x1b[31m.weight"));
}

}  // namespace
}  // namespace stowage::cli
