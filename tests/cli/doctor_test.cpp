// SPDX-License-Identifier: Apache-2.0
// `stowage doctor`: what it finds, and what it says where something is wrong.
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "stowage/info.h"

namespace stowage::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class Doctor : public Program {
 protected:
  json check(const std::string& name, std::vector<std::string> more = {}) {
    more.insert(more.begin(), "doctor");
    more.emplace_back("--json");
    for (const json& each : json::parse(expect_ok(more)))
      if (each["name"] == name) return each;
    ADD_FAILURE() << "no check " << name;
    return {};
  }
};

struct Set {  // a variable, for a while
  Set(const char* which, const char* value) : name(which) { setenv(which, value, 1); }
  ~Set() { unsetenv(name); }
  Set(const Set&) = delete;
  Set& operator=(const Set&) = delete;
  const char* name;
};

TEST_F(Doctor, SaysWhatItFinds) {
  const std::string text = expect_ok({"doctor"});
  for (const char* part : {"version", "cpu", "threads", "memory", "huge pages", "locked memory",
                           "rates", "environment", commit()})
    EXPECT_THAT(text, HasSubstr(part));
  EXPECT_THAT(check("cpu")["found"], HasSubstr(instruction_set()));
  EXPECT_THAT(check("threads")["found"], HasSubstr(std::to_string(thread_count())));
  EXPECT_THAT(check("memory")["found"], HasSubstr("GiB"));
  EXPECT_EQ(check("version"),
            json({{"name", "version"},
                  {"found", std::string(version()) + " (commit " + commit() + ")"},
                  {"ok", true},
                  {"costs", ""}}));
}

TEST_F(Doctor, NamesVariablesThatNothingReads) {
  const Set misspelt("STOWAGE_THREAD", "1"), known("STOWAGE_LINKS", "/nowhere/links.json");
  const json found = check("environment");
  EXPECT_EQ(found["ok"], false);
  EXPECT_THAT(found["found"], HasSubstr("STOWAGE_LINKS"));
  EXPECT_EQ(found["costs"], "STOWAGE_THREAD: not read by anything; misspelt?");
}

TEST_F(Doctor, KnowsWhetherRatesCanBeKept) {
  {
    const Set there("STOWAGE_LINKS", path("links.json").c_str());
    EXPECT_THAT(check("rates")["costs"], HasSubstr("stowage bench --links"));
    write_text(path("links.json"), "{}");
    EXPECT_EQ(check("rates")["ok"], true);
  }
  const Set nowhere("STOWAGE_LINKS", "/dev/null/links.json");
  EXPECT_THAT(check("rates")["costs"], HasSubstr("STOWAGE_LINKS"));
}

TEST_F(Doctor, OpensAModel) {
  write_model(path("m.safetensors"), small_model());
  const json sound = check("model", {"m.safetensors"});
  EXPECT_EQ(sound["ok"], true);
  EXPECT_THAT(sound["found"], HasSubstr("7 tensors"));
  write_text(path("broken.safetensors"), "no model");
  const json broken = check("model", {"broken.safetensors"});
  EXPECT_EQ(broken["ok"], false);
  EXPECT_THAT(broken["costs"], HasSubstr("broken.safetensors"));
  EXPECT_THAT(expect_ok({"doctor", "broken.safetensors"}), HasSubstr("\nmodel: "));
}

}  // namespace
}  // namespace stowage::cli
