// SPDX-License-Identifier: Apache-2.0
#include "engine/reuse.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <numeric>
#include <utility>

namespace stowage::engine {
namespace {

constexpr double kShortest = 1.0 / 32;  // of the number of slices: a token of one expert in 32
constexpr double kStep = 4;             // from each half-life to the next
constexpr double kMemory = 2;  // times as many uses as slices: what was missed before counts half
constexpr double kBetter = 0.97;  // less than that of what is chosen is missed by a better one
constexpr std::uint64_t kBetween = 32;  // uses from one choice to the next
constexpr double kMostWeight = 1e30;
constexpr double kRarest = 64;         // log2 of uses that are foreseen, below which all are alike
constexpr std::size_t kListed = 1024;  // about so many are on the lists, where there are more

// Whichever: one in `step`, by a multiplicative hash.
bool is_listed(std::size_t slice, std::size_t step) {
  return ((slice * 0x9E3779B97F4A7C15u) >> 40) % step == 0;
}

}  // namespace

Reuse::Reuse(std::vector<std::uint64_t> bytes) : slices_(bytes.size()) {
  const std::size_t step = std::max<std::size_t>(1, bytes.size() / kListed);
  std::size_t listed = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    slices_[i].bytes = bytes[i];
    slices_[i].tried = is_listed(i, step);
    bytes_ += bytes[i];
    if (!slices_[i].tried) continue;
    tried_bytes_ += bytes[i];
    ++listed;
  }
  double half_life = std::max(1.0, kShortest * static_cast<double>(bytes.size()));
  for (Try& t : tries_) {
    t.half_life = std::exchange(half_life, half_life * kStep);
    t.heap.reserve(listed + 1);
  }
}

void Reuse::set_room(std::uint64_t bytes) noexcept {
  if (bytes_ == 0) return;
  const double part = static_cast<double>(tried_bytes_) / static_cast<double>(bytes_);
  room_ = static_cast<std::uint64_t>(part * static_cast<double>(bytes));
}

double Reuse::rank(std::size_t slice) const noexcept {
  return std::max(0.0, slices_[slice].ranks[chosen_] + kRarest * half_life());
}

// Later misses weigh more, in place of making the earlier ones less.
double Reuse::weight() noexcept {
  const double uses = kMemory * static_cast<double>(slices_.size());
  const double weight = std::exp2(static_cast<double>(clock_ - unit_) / uses);
  if (weight <= kMostWeight) return weight;
  for (Try& t : tries_) t.missed /= weight;
  unit_ = clock_;
  return 1;
}

// The rank of a slice is the time at which a single use would count as much as all of its own do
// now, so it stays as it is while the slice is not used.
bool Reuse::note(std::size_t slice) {
  Slice& s = slices_[slice];
  const auto since = static_cast<double>(++clock_ - s.used);
  s.used = clock_;
  const double now = s.tried ? weight() : 0;
  for (std::size_t n = 0; n < kTries; ++n) {
    const double half_life = tries_[n].half_life;
    s.often[n] = s.often[n] * std::exp2(-since / half_life) + 1;
    s.ranks[n] = static_cast<double>(clock_) + half_life * std::log2(s.often[n]);
    if (s.tried && !s.held[n]) hold(n, slice, now);
  }
  return clock_ % kBetween == 0 && choose();
}

void Reuse::hold(std::size_t n, std::size_t slice, double weight) {
  Try& t = tries_[n];
  Slice& s = slices_[slice];
  t.missed += weight * static_cast<double>(s.bytes);
  while (!t.heap.empty() && t.bytes + s.bytes > room_) drop_least(n);
  s.held[n] = true;
  t.bytes += s.bytes;
  t.heap.push_back({s.ranks[n], slice});
  std::ranges::push_heap(t.heap, std::greater<>{});
}

// Ranks rise only: an entry with an old one goes back in with the new one.
void Reuse::drop_least(std::size_t n) noexcept {
  Try& t = tries_[n];
  for (;;) {
    std::ranges::pop_heap(t.heap, std::greater<>{});
    Entry& least = t.heap.back();
    const double now = slices_[least.slice].ranks[n];
    if (least.rank >= now) break;
    least.rank = now;
    std::ranges::push_heap(t.heap, std::greater<>{});
  }
  Slice& gone = slices_[t.heap.back().slice];
  t.heap.pop_back();
  gone.held[n] = false;
  t.bytes -= gone.bytes;
}

bool Reuse::choose() noexcept {
  const auto best = std::ranges::min_element(tries_, {}, &Try::missed);
  if (best->missed >= kBetter * tries_[chosen_].missed) return false;
  chosen_ = static_cast<std::size_t>(best - tries_.begin());
  return true;
}

// A slice with a part p of all uses has p h / ln 2 where these come again and again: the sum of
// 2^(-age / h) over them.
void Reuse::foresee(std::span<const std::uint64_t> uses) {
  const auto sum = static_cast<double>(std::accumulate(uses.begin(), uses.end(), std::uint64_t{0}));
  for (std::size_t i = 0; i < uses.size(); ++i)
    for (std::size_t n = 0; n < kTries && uses[i] != 0; ++n) {
      const double half_life = tries_[n].half_life;
      const double often = static_cast<double>(uses[i]) / sum * half_life / std::numbers::ln2;
      slices_[i].often[n] = often;
      slices_[i].ranks[n] = static_cast<double>(clock_) + half_life * std::log2(often);
    }
}

}  // namespace stowage::engine
