// SPDX-License-Identifier: Apache-2.0
// Runs the bodies of the fuzz targets over the kept corpus, and over every cut and many small
// changes of it: what `make fuzz` once found stays found, with any compiler.
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
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

}  // namespace
}  // namespace stowage::fuzz
