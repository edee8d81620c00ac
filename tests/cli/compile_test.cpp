// SPDX-License-Identifier: Apache-2.0
// `stowage compile`, by a library that looks like NVRTC and gives back the text of a program.
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace stowage::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class Compile : public Program {
 protected:
  std::vector<std::string> command(std::vector<std::string> more) const {
    std::vector<std::string> all{"compile", "--compiler", FAKE_CUDA, "--to", path("kept").string()};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

TEST_F(Compile, KeepsProgramsAndFindsThemAgain) {
  const auto ask = command({"--arch", "75,90", "--storage", "nf4", "--rows", "1,8", "--json"});
  const json first = json::parse(expect_ok(ask));
  // To and from values on each; products with 1 and 8 rows; on tensor cores those of 90 alone, and
  // there by groups of 8.
  EXPECT_EQ(first.size(), 2u * 2 + 2 * 2 + 3);
  for (const json& one : first) {
    EXPECT_EQ(one["storage"], "nf4:block64");
    EXPECT_EQ(one["found"], false);
    EXPECT_EQ(fs::file_size(one["path"].get<std::string>()), one["bytes"].get<std::size_t>() + 8);
  }
  for (const json& one : json::parse(expect_ok(ask))) EXPECT_EQ(one["found"], true);
  EXPECT_THAT(expect_ok(command({"--arch", "90", "--storage", "nf4"})), HasSubstr("programs, "));
}

TEST_F(Compile, PrintsWhatWouldBeCompiled) {
  const std::string text =
      expect_ok(command({"--arch", "90", "--storage", "int8:row", "--rows", "1", "--ptx"}));
  EXPECT_THAT(text, HasSubstr("constexpr Form form{"));
  EXPECT_THAT(text, HasSubstr("kernel/cuda/linear.cuh"));
  EXPECT_FALSE(fs::exists(path("kept")));
}

TEST_F(Compile, SaysWhatIsWrong) {
  EXPECT_THAT(expect_failure(2, command({"--arch", "90", "--storage", "nf4:torchao:f64"})),
              HasSubstr("CUDA kernels must serve it, got nf4:torchao:f64"));
  EXPECT_THAT(expect_failure(2, command({"--arch", "90", "--storage", "nf4", "--dtype", "f8"})),
              HasSubstr("--dtype: must be f32, bf16 or f16, got f8"));
  EXPECT_THAT(expect_failure(1, command({"--arch", "50", "--storage", "nf4"})),
              HasSubstr("devices must be of 75 or newer"));
  EXPECT_THAT(
      expect_failure(1, {"compile", "--arch", "90", "--storage", "nf4", "--compiler", "libno.so"}),
      HasSubstr("NVRTC must be there, got libno.so"));
}

}  // namespace
}  // namespace stowage::cli
