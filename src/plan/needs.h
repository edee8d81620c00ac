// SPDX-License-Identifier: Apache-2.0
// What a plan needs at the least, by term, and the refusal where a limit is below it.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace stowage::planning {

struct Term {
  std::string what;
  std::uint64_t bytes;
};

/// What one tier needs.
class Needs {
 public:
  void add(std::string what, std::uint64_t bytes) { terms_.push_back({std::move(what), bytes}); }
  std::uint64_t sum() const noexcept;
  /// Why `limit` bytes of `tier` are too few, with the three largest terms; empty if they suffice.
  std::string refusal(const std::string& tier, std::uint64_t limit) const;

 private:
  std::vector<Term> terms_;
};

}  // namespace stowage::planning
