// SPDX-License-Identifier: Apache-2.0
#include "plan/needs.h"

#include <algorithm>
#include <functional>

#include "base/table.h"

namespace stowage::planning {
namespace {
constexpr std::size_t kNamed = 3;  // terms in a refusal
}

std::uint64_t Needs::sum() const noexcept {
  std::uint64_t bytes = 0;
  for (const Term& term : terms_) bytes += term.bytes;
  return bytes;
}

std::string Needs::refusal(const std::string& tier, std::uint64_t limit) const {
  const std::uint64_t needed = sum();
  if (needed <= limit) return "";
  std::vector<Term> largest = terms_;
  std::erase_if(largest, [](const Term& term) { return term.bytes == 0; });
  std::ranges::stable_sort(largest, std::greater{}, &Term::bytes);
  if (largest.size() > kNamed) largest.resize(kNamed);
  std::string text = tier + " must be at least " + std::to_string(needed) + " bytes (" +
                     size_text(needed) + "), got " + std::to_string(limit) + "; it has to hold ";
  for (std::size_t i = 0; i < largest.size(); ++i) {
    if (i > 0) text += i + 1 == largest.size() ? " and " : ", ";
    text += largest[i].what + " (" + size_text(largest[i].bytes) + ")";
  }
  return text;
}

}  // namespace stowage::planning
