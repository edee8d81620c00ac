// SPDX-License-Identifier: Apache-2.0
#include "store/json.h"

#include <gmock/gmock.h>

#include <vector>

#include "expect_error.h"

namespace stowage {
namespace {

using testing::ElementsAre;

// Writes down what the walk says, and where it stood.
class Recorder final : public JsonVisitor {
 public:
  explicit Recorder(std::uint64_t start = 0) : JsonVisitor({"f", "", start}) {}
  void open(JsonPath path, bool array) override {
    add(path, array ? "[" : "{");
    if (path.size() == 1 && path[0] == "stop") refuse_type(path, "wanted");
  }
  void leaf(JsonPath path, const JsonLeaf& value) override {
    add(path, value.kind == JsonLeaf::Kind::string  ? value.text
              : value.kind == JsonLeaf::Kind::whole ? std::to_string(value.whole)
                                                    : std::to_string(value.number));
  }
  void close(JsonPath path) override { add(path, "end"); }
  std::vector<std::string> said;

 private:
  void add(JsonPath path, const std::string& what) {
    said.push_back(std::to_string(*place().byte) + " " + to_string(path) + " " + what);
  }
};

std::vector<std::string> walk(std::string_view text, std::uint64_t start = 0) {
  Recorder recorder(start);
  walk_json(text, recorder);
  return recorder.said;
}

TEST(WalkJson, TellsPathsValuesAndBytes) {
  EXPECT_THAT(walk(R"({"a":{"b":"x"},"c":[7]})"),
              ElementsAre("1 '' {", "6 'a' {", "13 'a.b' x", "14 'a' end", "20 'c' [",
                          "22 'c.[]' 7", "22 'c' end", "23 '' end"));
  EXPECT_THAT(walk("  {}  ", 100), ElementsAre("103 '' {", "104 '' end"));
}

TEST(WalkJson, KeepsWholeNumbersOf64BitsApartFromOthers) {
  EXPECT_EQ(walk(R"({"a":18446744073709551615})")[1].substr(3), "'a' 18446744073709551615");
  EXPECT_THAT(walk(R"({"a":-1})")[1], testing::EndsWith("-1.000000"));
  EXPECT_THAT(walk(R"({"a":1.5})")[1], testing::EndsWith("1.500000"));
  EXPECT_THAT(walk(R"({"a":1e2})")[1], testing::EndsWith("100.000000"));
}

TEST(WalkJson, RefusalsCarryTheByteWhereTheWalkStood) {
  EXPECT_STOWAGE_ERROR(walk(R"({"a":1,"stop":[]})", 8), bad_file,
                       "f: byte 23: a value must have the type that the format asks for, got "
                       "'stop' that is not wanted [wrong_type]");
  EXPECT_STOWAGE_ERROR(walk("[]"), bad_file, "f: byte 1: the text must be one JSON object");
  EXPECT_STOWAGE_ERROR(walk("7"), bad_file, "a bare value");
  EXPECT_STOWAGE_ERROR(walk(""), bad_file, "[json_syntax]");
}

TEST(WalkJson, TheSameKeyMayComeInAnotherObject) {
  EXPECT_EQ(walk(R"({"a":{"a":1},"b":{"a":1}})").size(), 8U);
  EXPECT_STOWAGE_ERROR(walk(R"({"a":{"a":1},"a":1})"), bad_file, "'a' again");
}

TEST(JsonString, EscapesAndRefusesBadUtf8) {
  EXPECT_EQ(json_string("a\"b\\\n\x01"), R"("a\"b\\\n\u0001")");
  EXPECT_EQ(json_string("f\xc3\xbcr"), "\"f\xc3\xbcr\"");
  EXPECT_STOWAGE_ERROR(json_string("\xff"), invalid_argument, "must be valid UTF-8");
}

}  // namespace
}  // namespace stowage
