// SPDX-License-Identifier: Apache-2.0
// Opens every bad file of the table and looks for path, rule and row's words in the error.
#include "store/refusal.h"

#include <gmock/gmock.h>

#include <set>

#include "store/refusal_rows.h"
#include "stowage/file.h"

namespace stowage::test {
namespace {

using testing::HasSubstr;

TEST(Refusal, EveryBadFileIsRefusedByItsRule) {
  for (const Row& row : all_rows()) {
    SCOPED_TRACE(std::string(name(row.why)) + ": " + row.label);
    const Scratch folder;
    row.make(folder);
    try {
      File::open(folder.path());
      ADD_FAILURE() << "opened";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::bad_file) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(folder.path()));
      EXPECT_THAT(error.what(), HasSubstr(rule(row.why)));
      EXPECT_THAT(error.what(), HasSubstr("[" + std::string(name(row.why)) + "]"));
      for (const std::string& word : row.words) EXPECT_THAT(error.what(), HasSubstr(word));
    }
  }
}

// The tensor that was read before is not to blame.
TEST(Refusal, NamesNoTensorWhereNoneIsMeant) {
  const Scratch folder;
  const std::string path = folder.write(
      "m.safetensors",
      safetensors("{" + tensor("a", "U8", "[0]", 0, 0) + ",\"__metadata__\":{\"k\":1}}"));
  try {
    File::open(path);
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::Not(HasSubstr("tensor 'a'")));
    EXPECT_THAT(error.what(), HasSubstr("'__metadata__.k' that is not a string"));
  }
}

TEST(Refusal, EveryRuleHasARow) {
  // These show only after a file was opened: file_test.cpp has them.
  std::set<Refusal> missing{Refusal::checksum, Refusal::size_changed, Refusal::file_changed};
  for (const Row& row : all_rows()) missing.insert(row.why);
  EXPECT_EQ(missing.size(), kRefusalCount);
}

TEST(Refusal, RulesAndNamesAreDistinct) {
  std::set<std::string_view> names, rules;
  for (std::size_t i = 0; i < kRefusalCount; ++i) {
    names.insert(name(static_cast<Refusal>(i)));
    rules.insert(rule(static_cast<Refusal>(i)));
  }
  EXPECT_EQ(names.size(), kRefusalCount);
  EXPECT_EQ(rules.size(), kRefusalCount);
}

TEST(Refusal, NamesFromFilesAreSafeToPrint) {
  EXPECT_EQ(in_quotes("layer.weight"), "'layer.weight'");
  EXPECT_EQ(in_quotes("\x1b[2J\n\x7f"), "'\\x1b[2J\\x0a\\x7f'");
  EXPECT_EQ(in_quotes("f\xc3\xbcr"), "'f\xc3\xbcr'");
  EXPECT_EQ(in_quotes(std::string(1000, 'x')).size(), 165U);
}

}  // namespace
}  // namespace stowage::test
