// SPDX-License-Identifier: Apache-2.0
// What man and shells read: every command, every option, and nothing that they would misread.
#include <cstdlib>
#include <sstream>

#include "cli/program.h"

namespace stowage::cli {
namespace {

using testing::HasSubstr;

class Manual : public Program {
 protected:
  // What bash offers for a line that ends where the cursor is.
  std::string offered(const std::string& words) {
    write_text(path("completion"), expect_ok({"completion", "bash"}));
    const std::string script = ". " + path("completion").string() + "; COMP_WORDS=(" + words +
                               "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _stowage; " +
                               "echo \"${COMPREPLY[@]}\" > " + path("offered").string();
    write_text(path("script"), script);
    EXPECT_EQ(std::system(("bash " + path("script").string()).c_str()), 0);
    std::stringstream text;
    text << std::ifstream(path("offered")).rdbuf();
    return text.str();
  }
};

TEST_F(Manual, APageHasEveryCommandAndOption) {
  const std::string page = expect_ok({"manual"});
  for (const char* part :
       {".TH STOWAGE 1", ".SH \"stowage pack\"", "\\-\\-storage", "\\-\\-shard\\-size",
        ".SH \"stowage doctor\"", "Exit codes: 0 ok", "nf4:torchao"})
    EXPECT_THAT(page, HasSubstr(part));
  std::stringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] != '.') continue;
    EXPECT_TRUE(line.starts_with(".TH ") || line.starts_with(".SH ") || line == ".TP" ||
                line == ".PP" || line == ".nf" || line == ".fi")
        << line;
  }
}

TEST_F(Manual, ShellsAreOfferedCommandsAndOptions) {
  EXPECT_EQ(offered("stowage un"), "unpack\n");
  EXPECT_EQ(offered("stowage pack --sh"), "--shard-size\n");
  EXPECT_EQ(offered("stowage pack mod"), "\n");  // a file
  EXPECT_THAT(offered("stowage ''"), HasSubstr("inspect pack convert"));
  EXPECT_THAT(expect_ok({"completion", "zsh"}), HasSubstr("bashcompinit"));
  const std::string fish = expect_ok({"completion", "fish"});
  EXPECT_THAT(fish, HasSubstr("__fish_use_subcommand -a verify -d"));
  EXPECT_THAT(fish, HasSubstr("'__fish_seen_subcommand_from pack' -l storage -r -d"));
  EXPECT_THAT(fish, HasSubstr("'__fish_seen_subcommand_from pack' -l json -d"));
}

TEST_F(Manual, OtherShellsAreRefused) {
  EXPECT_THAT(expect_failure(2, {"completion", "tcsh"}), HasSubstr("got 'tcsh'"));
}

}  // namespace
}  // namespace stowage::cli
