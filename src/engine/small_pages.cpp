// SPDX-License-Identifier: Apache-2.0
#include "engine/small_pages.h"

#include <new>

#include "base/file.h"

namespace stowage::engine {
namespace {

// Of 4 KiB. Small ones take 0.2 to 0.6 us to come, those of some more 0.02, large ones 0.003 to
// 0.007, and reading one 1.6.
constexpr double kQuick = 0.012e-6, kRead = 1.6e-6;
constexpr int kVisits = 4;  // that a trial has
constexpr std::uint64_t kLarge = std::uint64_t{2} << 20;

double of_page(std::uint64_t bytes, double seconds) noexcept {
  return seconds * static_cast<double>(kPage) / static_cast<double>(bytes);
}

}  // namespace

bool SmallPages::is_asked(WeightId id, std::uint64_t bytes) const noexcept {
  if (bytes < 2 * kLarge) return false;
  const std::scoped_lock lock(mutex_);
  if (trial_ == Trial::fails) return false;
  const auto found = units_.find(id);
  if (found == units_.end()) return true;
  const Known known = found->second.known;
  return known == Known::nothing || (known == Known::renewed && trial_ != Trial::none);
}

bool SmallPages::is_quick(WeightId id) const noexcept {
  const std::scoped_lock lock(mutex_);
  const auto found = units_.find(id);
  if (found == units_.end()) return false;
  return found->second.known == Known::quick;
}

void SmallPages::note_quick(WeightId id, std::uint64_t bytes, double seconds) noexcept {
  if (of_page(bytes, seconds) <= 2 * kQuick) return;
  const std::scoped_lock lock(mutex_);
  const auto found = units_.find(id);  // it came again in other pages
  if (found != units_.end() && found->second.known == Known::quick) found->second = {};
}

void SmallPages::note(WeightId id, std::uint64_t bytes, double seconds) noexcept {
  const std::scoped_lock lock(mutex_);
  try {
    State& s = units_[id];
    s.bytes += bytes;
    s.seconds += seconds;
  } catch (const std::bad_alloc&) {  // then it stays unknown
  }
}

bool SmallPages::leaves(WeightId id, std::uint64_t bytes) noexcept {
  const std::scoped_lock lock(mutex_);
  const auto found = units_.find(id);
  if (found == units_.end()) return false;
  State& s = found->second;
  const bool whole = 8 * s.bytes >= 7 * bytes;  // or some of it came from the disk
  const double seconds = of_page(bytes, s.seconds);
  s.bytes = 0, s.seconds = 0;
  if (!whole) return false;
  if (id == tried_ && trial_ == Trial::runs) {  // pages shared with a neighbor wait for that
    if (seconds < 0.75 * tried_seconds_) trial_ = Trial::helps;
    if (++visits_ == kVisits && trial_ == Trial::runs) trial_ = Trial::fails;
  }
  if (seconds <= kQuick) s.known = Known::quick;
  if (s.known != Known::nothing) return false;
  s.lost += seconds;
  if (s.lost < kRead || trial_ == Trial::runs || trial_ == Trial::fails) return false;
  if (trial_ == Trial::none) trial_ = Trial::runs, tried_ = id, tried_seconds_ = seconds;
  s.known = Known::away;
  return true;
}

bool SmallPages::is_away(WeightId id) const noexcept {
  const std::scoped_lock lock(mutex_);
  const auto found = units_.find(id);
  return found != units_.end() && found->second.known == Known::away;
}

void SmallPages::is_back(WeightId id) noexcept {
  const std::scoped_lock lock(mutex_);
  if (const auto found = units_.find(id); found != units_.end())
    found->second.known = Known::renewed;
}

}  // namespace stowage::engine
