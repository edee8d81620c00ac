// SPDX-License-Identifier: Apache-2.0
#include "engine/small_pages.h"

#include <new>

#include "base/file.h"

namespace stowage::engine {
namespace {

// Of 4 KiB. Small ones take 0.2 to 0.6 us to come, those of some more 0.02, large ones 0.002.
constexpr double kSlow = 0.08e-6;
constexpr int kVisits = 4;  // of slow ones; reading 4 KiB takes as long as two to ten
constexpr std::uint64_t kLarge = std::uint64_t{2} << 20;

}  // namespace

bool SmallPages::is_asked(WeightId id, std::uint64_t bytes) const noexcept {
  if (bytes < 2 * kLarge) return false;
  const std::scoped_lock lock(mutex_);
  if (trial_ == Trial::fails) return false;
  const auto found = units_.find(id);
  if (found == units_.end()) return true;
  return found->second.known == Known::nothing || (id == tried_ && trial_ == Trial::runs);
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
  const double seconds = s.seconds * static_cast<double>(kPage) / static_cast<double>(bytes);
  s.bytes = 0, s.seconds = 0;
  if (!whole) return false;
  if (id == tried_ && trial_ == Trial::runs) {  // pages that neighbors share stay as they were
    if (seconds < tried_seconds_ / 2) trial_ = Trial::helps;
    if (++s.slow == kVisits && trial_ == Trial::runs) trial_ = Trial::fails;
    return false;
  }
  if (s.known != Known::nothing) return false;
  s.slow = seconds > kSlow ? s.slow + 1 : 0;
  if (s.slow == 0) s.known = Known::quick;
  if (s.slow < kVisits || trial_ == Trial::runs || trial_ == Trial::fails) return false;
  if (trial_ == Trial::none) trial_ = Trial::runs, tried_ = id, tried_seconds_ = seconds;
  s.known = Known::away;
  s.slow = 0;
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
