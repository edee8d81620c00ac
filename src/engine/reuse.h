// SPDX-License-Identifier: Apache-2.0
// Which slices were used often and lately, where what "lately" means is learnt. A use counts half
// as much after a half-life (LRFU: Lee et al., IEEE Transactions on Computers 50, 2001). The best
// one depends on who routes: by repeats of the token before it is short, by lasting preferences
// long. So a few are tried side by side, each on a list of what it would hold in the room that
// slices have (of many slices: a part of them), and the one is followed that would have read least
// of late.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace stowage::engine {

class Reuse {
 public:
  /// `bytes` of each slice. Nothing here allocates after the constructor.
  explicit Reuse(std::vector<std::uint64_t> bytes);

  /// A use of a slice. Whether another half-life counts from now on, so that all ranks have
  /// changed.
  bool note(std::size_t slice);
  /// The bytes that slices have when one of them must go.
  void set_room(std::uint64_t bytes) noexcept;
  /// How often each was used elsewhere: as if these uses had come again and again until now.
  void foresee(std::span<const std::uint64_t> uses);

  /// What has the higher one was used more often and lately; at least 0.
  double rank(std::size_t slice) const noexcept;
  /// Uses of any slices after which one counts half as much.
  double half_life() const noexcept { return tries_[chosen_].half_life; }

 private:
  static constexpr std::size_t kTries = 5;
  // By each half-life how often a slice was used, as of its last use, and its rank.
  struct Slice {
    std::uint64_t used = 0;  // when, in uses of any; 0: never
    std::uint64_t bytes = 0;
    std::array<double, kTries> often{}, ranks{};
    std::array<bool, kTries> held{};
    bool tried = false;  // it is on the lists
  };
  struct Entry {
    double rank;
    std::size_t slice;
    bool operator>(const Entry& other) const noexcept { return rank > other.rank; }
  };
  // A half-life, and what it would hold.
  struct Try {
    double half_life = 1, missed = 0;  // bytes that it would have read, late ones counting more
    std::uint64_t bytes = 0;           // held
    std::vector<Entry> heap;           // of each that is held one entry, its rank of then or now
  };

  double weight() noexcept;
  void hold(std::size_t n, std::size_t slice, double weight);
  void drop_least(std::size_t n) noexcept;
  bool choose() noexcept;

  std::vector<Slice> slices_;
  std::uint64_t bytes_ = 0, tried_bytes_ = 0;  // of all, and of those on the lists
  std::array<Try, kTries> tries_;
  std::size_t chosen_ = 1;
  std::uint64_t clock_ = 0, unit_ = 0;  // uses; when a miss weighed 1
  std::uint64_t room_ = std::numeric_limits<std::uint64_t>::max();
};

}  // namespace stowage::engine
