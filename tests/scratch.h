// SPDX-License-Identifier: Apache-2.0
// A folder that lives as long as a test, and whole files in one call.
#pragma once
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <string_view>

namespace stowage::test {

class Scratch {
 public:
  Scratch() {
    std::string pattern = testing::TempDir() + "stowage-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = pattern;
  }
  Scratch(const Scratch&) = delete;
  ~Scratch() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  std::string path(std::string_view name = "") const {
    return name.empty() ? path_ : path_ + "/" + std::string(name);
  }
  std::string write(std::string_view name, std::string_view content) const {
    std::filesystem::create_directories(std::filesystem::path(path(name)).parent_path());
    std::ofstream(path(name), std::ios::binary) << content;
    return path(name);
  }
  std::string read(std::string_view name) const {
    std::ifstream in(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::set<std::string> names() const {  // hidden ones included
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      found.insert(entry.path().filename().string());
    }
    return found;
  }

 private:
  std::string path_;
};

/// A safetensors file by hand: the length of `json`, then `json`, then `data`.
inline std::string safetensors(std::string_view json, std::string_view data = "") {
  const std::uint64_t length = json.size();
  std::string text(reinterpret_cast<const char*>(&length), sizeof length);
  return text.append(json).append(data);
}

}  // namespace stowage::test
