// SPDX-License-Identifier: Apache-2.0
#include "engine/candidates.h"

#include <algorithm>

namespace stowage::engine {

Candidates::Candidates(std::size_t units) : entries_(units) {
  last_.reserve(4 * units + 4);
  first_.reserve(4 * units + 4);
  spared_.reserve(kMostSpared);
}

void Candidates::add(WeightId id, std::uint64_t next_use) {
  if (last_.size() == last_.capacity() || first_.size() == first_.capacity()) make_space();
  const Entry made{next_use, ++newest_, id};
  entries_[static_cast<std::size_t>(id)] = made.number;
  push_last(made);
  first_.push_back(made);
  std::ranges::push_heap(first_, std::greater{}, &Entry::next_use);
}

// Each unit has one entry that is current at most, so three quarters go at least.
void Candidates::make_space() {
  const auto stale = [&](const Entry& entry) { return !is_current(entry); };
  std::erase_if(last_, stale);
  std::erase_if(first_, stale);
  std::ranges::make_heap(last_, {}, &Entry::next_use);
  std::ranges::make_heap(first_, std::greater{}, &Entry::next_use);
}

std::optional<WeightId> Candidates::take_overdue(std::uint64_t time) {
  while (!first_.empty()) {
    const Entry top = first_.front();
    const bool current = is_current(top);
    if (current && top.next_use > time) return std::nullopt;
    std::ranges::pop_heap(first_, std::greater{}, &Entry::next_use);
    first_.pop_back();
    if (!current) continue;
    remove(top.id);
    return top.id;
  }
  return std::nullopt;
}

void Candidates::pop_last() noexcept {
  std::ranges::pop_heap(last_, {}, &Entry::next_use);
  last_.pop_back();
}

void Candidates::push_last(const Entry& entry) {
  last_.push_back(entry);
  std::ranges::push_heap(last_, {}, &Entry::next_use);
}

}  // namespace stowage::engine
