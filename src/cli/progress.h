// SPDX-License-Identifier: Apache-2.0
// One line on the terminal that says how far a long command is; silent elsewhere.
#pragma once
#include <chrono>
#include <cstdint>
#include <string_view>

namespace stowage::cli {

class Progress {
 public:
  Progress(std::string_view verb, std::uint64_t total_bytes);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// Shows the tensor that is worked on.
  void at(std::string_view name);
  void done(std::uint64_t bytes) { done_ += bytes; }

 private:
  std::string_view verb_;
  std::uint64_t total_, done_ = 0;
  bool terminal_, shown_ = false;
  std::chrono::steady_clock::time_point next_;
};

}  // namespace stowage::cli
