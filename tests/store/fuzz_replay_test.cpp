// SPDX-License-Identifier: Apache-2.0
// Runs the bodies of the fuzz targets over the kept corpus, and over every cut and many small
// changes of it: what `make fuzz` once found stays found, with any compiler.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fuzz/targets.h"

namespace stowage::fuzz {
namespace {

struct Target {
  const char* name;
  void (*run)(Bytes);
};
constexpr std::array<Target, 6> kTargets{{{"dialect_fuzz", dialect},
                                          {"file_fuzz", file},
                                          {"header_fuzz", header},
                                          {"shard_index_fuzz", shard_index},
                                          {"manifest_fuzz", manifest},
                                          {"quant_state_fuzz", quant_state}}};

std::vector<std::string> corpus(const char* target) {
  std::vector<std::string> found;
  const auto folder = std::filesystem::path(STOWAGE_CORPUS) / target;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(entry.path(), std::ios::binary);
    found.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return found;
}

void run(const Target& target, const std::string& content) {
  target.run({reinterpret_cast<const std::uint8_t*>(content.data()), content.size()});
}

TEST(FuzzReplay, TheCorpusItself) {
  for (const Target& target : kTargets) {
    const auto contents = corpus(target.name);
    EXPECT_FALSE(contents.empty()) << target.name;
    for (const std::string& content : contents) run(target, content);
  }
}

TEST(FuzzReplay, EveryCutOfTheCorpus) {
  for (const Target& target : kTargets) {
    for (const std::string& content : corpus(target.name)) {
      const std::size_t step = content.size() / 400 + 1;
      for (std::size_t n = 0; n < content.size(); n += step) run(target, content.substr(0, n));
    }
  }
}

// Bytes that mean something to a parser, at every place in turn.
TEST(FuzzReplay, EveryPlaceChanged) {
  constexpr std::string_view kBytes("\0\"\\{}[],:019-e.x\x7f\x80\xff", 20);
  for (const Target& target : kTargets) {
    for (const std::string& content : corpus(target.name)) {
      const std::size_t step = content.size() / 100 + 1;
      for (std::size_t at = 0; at < content.size(); at += step) {
        std::string changed = content;
        for (const char byte : kBytes) {
          changed[at] = byte;
          run(target, changed);
        }
      }
    }
  }
}

using Json = nlohmann::json;

void add_places(const Json& value, const Json::json_pointer& at,
                std::vector<Json::json_pointer>& places) {
  places.push_back(at);
  for (const auto& [key, inner] : value.items())
    if (value.is_array())
      add_places(inner, at / std::stoul(key), places);
    else if (value.is_object())
      add_places(inner, at / key, places);
}

// The document with a value of each type in each place in turn.
std::vector<std::string> mistyped(const std::string& document) {
  static const Json others =
      Json::parse(R"([null, true, -1, 1.5, 300, "", "x", [], [[]], [1], {}, {"x": 1}])");
  const Json before = Json::parse(document);
  std::vector<Json::json_pointer> places;
  add_places(before, Json::json_pointer(), places);
  std::vector<std::string> made;
  for (const auto& place : places) {
    for (const Json& other : others) {
      Json changed = before;
      changed[place] = other;
      made.push_back(changed.dump());
    }
  }
  return made;
}

// What the configuration or the metadata of a header says, of every other type.
TEST(FuzzReplay, EveryValueOfADialectMistyped) {
  for (const std::string& content : corpus("dialect_fuzz")) {
    const std::size_t zero = content.find('\0');
    const std::string config = content.substr(0, zero), file = content.substr(zero + 1);
    for (const std::string& other : mistyped(config)) run(kTargets[0], other + '\0' + file);
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), sizeof length);
    const Json header = Json::parse(file.substr(sizeof length, length));
    const std::string data = file.substr(sizeof length + length);
    if (!header.contains("__metadata__")) continue;
    for (const auto& [key, text] : header["__metadata__"].items()) {
      for (const std::string& other : mistyped(text.get<std::string>())) {
        Json changed = header;
        changed["__metadata__"][key] = other;
        std::string made = changed.dump();
        length = made.size();
        made.insert(0, reinterpret_cast<const char*>(&length), sizeof length);
        run(kTargets[0], config + '\0' + made + data);
      }
    }
  }
}

}  // namespace
}  // namespace stowage::fuzz
