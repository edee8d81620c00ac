// SPDX-License-Identifier: Apache-2.0
// Units that the page cache holds in small pages, as whoever wrote or read the file first made
// them: to map such a unit and give it back so often costs more in the end than reading it, once,
// into large ones.
#pragma once
#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "engine/units.h"

namespace stowage::engine {

class SmallPages {
 public:
  /// A mapping of so many bytes, all of which lay in the page cache, took so long.
  void note(WeightId id, std::uint64_t bytes, double seconds) noexcept;
  /// Whether there is something to note about a unit of so many bytes.
  bool is_asked(WeightId id, std::uint64_t bytes) const noexcept;
  /// A unit of so many bytes is given back. Whether it had better leave the page cache, so that its
  /// next read makes large pages: true once, after visits that took as long. One unit is tried,
  /// and others follow when it has become quick; where it has not, none does.
  bool leaves(WeightId id, std::uint64_t bytes) noexcept;
  /// Whether it takes next to nothing to map, as long as it stays in the page cache.
  bool is_quick(WeightId id) const noexcept;
  /// A mapping of all bytes of such a unit took so long: it may have become another.
  void note_quick(WeightId id, std::uint64_t bytes, double seconds) noexcept;
  /// Whether it left and is not back yet.
  bool is_away(WeightId id) const noexcept;
  void is_back(WeightId id) noexcept;

 private:
  enum class Known : std::uint8_t { nothing, quick, away, renewed };
  struct State {
    std::uint64_t bytes = 0;  // since it was given back last
    double seconds = 0;
    double lost = 0;  // seconds of each page, of all visits
    Known known = Known::nothing;
  };
  enum class Trial : std::uint8_t { none, runs, helps, fails };

  mutable std::mutex mutex_;
  std::unordered_map<WeightId, State> units_;
  Trial trial_ = Trial::none;
  WeightId tried_ = -1;
  double tried_seconds_ = 0;  // of a page, before
  int visits_ = 0;            // since
};

}  // namespace stowage::engine
