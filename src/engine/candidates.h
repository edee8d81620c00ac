// SPDX-License-Identifier: Apache-2.0
// The units that may go when room is needed, by when each is expected to be used next.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "stowage/engine.h"

namespace stowage::engine {

/// Units in memory that nobody uses. Nothing here allocates after the constructor.
class Candidates {
 public:
  explicit Candidates(std::size_t units);

  void add(WeightId id, std::uint64_t next_use);  // anew, if it is one already
  /// Of one that somebody uses now, or that has gone; others stay as they are.
  void remove(WeightId id) noexcept { entries_[static_cast<std::size_t>(id)] = 0; }

  /// Takes the one that was to be used first, if that was to be by `time`.
  std::optional<WeightId> take_overdue(std::uint64_t time);
  /// Of the few that are used last, and after `time`: takes the first that may go and fits, else
  /// the first that may go.
  template <class Fits, class MayGo>
  std::optional<WeightId> take_last(std::uint64_t time, Fits&& fits, MayGo&& may_go);

 private:
  struct Entry {
    std::uint64_t next_use, number;
    WeightId id;
  };
  static constexpr std::size_t kMostSpared = 16;  // passed over in search of one that fits

  bool is_current(const Entry& e) const noexcept {
    return entries_[static_cast<std::size_t>(e.id)] == e.number;
  }
  void make_space();
  void pop_last() noexcept;
  void push_last(const Entry& entry);

  std::vector<Entry> last_;             // heaps of the same: the one that is used last on top,
  std::vector<Entry> first_;            // and the one that is used first
  std::vector<Entry> spared_;           // room for take_last()
  std::vector<std::uint64_t> entries_;  // of each unit the number of its newest entry; 0: none
  std::uint64_t newest_ = 0;
};

template <class Fits, class MayGo>
std::optional<WeightId> Candidates::take_last(std::uint64_t time, Fits&& fits, MayGo&& may_go) {
  spared_.clear();
  std::optional<WeightId> chosen;
  while (!chosen && !last_.empty() && spared_.size() < kMostSpared) {
    const Entry top = last_.front();
    if (is_current(top) && top.next_use <= time) break;
    pop_last();
    if (!is_current(top)) continue;
    if (may_go(top.id) && fits(top.id)) {
      chosen = top.id;
    } else {
      spared_.push_back(top);
    }
  }
  for (const Entry& spared : spared_) {
    if (!chosen && may_go(spared.id)) {
      chosen = spared.id;
    } else {
      push_last(spared);
    }
  }
  if (chosen) remove(*chosen);
  return chosen;
}

}  // namespace stowage::engine
