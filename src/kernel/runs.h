// SPDX-License-Identifier: Apache-2.0
// Turns elements of a weight into Runs, which are all that kernels know of a storage.
#pragma once
#include <algorithm>
#include <cstdint>

#include "base/checked.h"
#include "format/legal.h"
#include "kernel/block_rows.h"
#include "kernel/kernels.h"
#include "stowage/descriptor.h"
#include "stowage/weight.h"

namespace stowage {

/// How many numbers dense codes become at a time, in a near cache, and how far beyond they reach.
inline constexpr std::int64_t kUnpacked = 2048, kUnpackedEnd = 8;

/// A view of a weight, which must outlive it.
class Runs {
 public:
  Runs(const Kernels& kernels, const Weight& weight);

  /// What the weight's storage says.
  const Descriptor& form() const noexcept { return form_; }
  /// Whether scales are expanded, kExpandedScales at a time; else a run is as long as can be.
  bool expands() const noexcept { return expand_ != nullptr; }

  /// Whether codes are unpacked, kUnpacked of them at a time at most, and by groups.
  bool unpacks() const noexcept { return unpack_ != nullptr; }

  /// Elements that share a scale.
  std::int64_t group() const noexcept { return group_; }

  /// Codes that stand for 0, one of each group, or null.
  const std::int8_t* zeros() const noexcept { return zeros_; }

  /// Whether cover_streams() can take rows of so many elements: scales are all that they have.
  bool expands_in_streams(std::int64_t columns) const noexcept {
    return expands() && row_ == 0 && groups_ == nullptr && form_.zero == Zero::none && !rounds_ &&
           columns % group_ == 0;
  }
  /// Calls body(run) with the scales of n elements each from kStreams places on, `apart` elements
  /// from one to the next, one after the other. Places and counts are numbers of groups. The run
  /// and its scales live as long as the call; its codes are the weight's, from the first.
  template <class Body>
  void cover_streams(std::int64_t first, std::int64_t apart, std::int64_t n, Body&& body) const {
    Expanded room;
    const std::int64_t each = n / group_;
    for (std::int64_t r = 0; r < kStreams; ++r) {
      const std::int64_t from = (first + r * apart) / group_;
      expand_(kept_, from, each, room.scales + r * each);
      ask_for_scales(from + each, each);
    }
    body(Run{codes_, 0, room.scales, group_, kStreams * n, values_});
  }

  /// Calls body(run) for runs that cover elements [begin, end) in order. A run and its scales live
  /// as long as the call.
  template <class Body>
  void cover(std::int64_t begin, std::int64_t end, Body&& body) const {
    if (unpack_ == nullptr) return cover_as_they_lie(begin, end, body);
    alignas(64) std::int8_t room[kUnpacked + kUnpackedEnd];
    cover_as_they_lie(begin, end, [&](const Run& run) {
      NamedGroups named;
      for (std::int64_t done = 0; done < run.n;) {
        const Run some = next_unpacked(run, done, room, named);
        body(some);
        done += some.n;
      }
    });
  }

  /// The same, and dense codes stay so.
  template <class Body>
  void cover_as_they_lie(std::int64_t begin, std::int64_t end, Body&& body) const {
    if (groups_ != nullptr) return cover_named(begin, end, body);
    if (expand_ != nullptr) return cover_expanded(begin, end, body);
    if (row_ == 0) {  // all of it is one run
      if (begin < end)
        body(Run{codes_, begin, scales_, group_, end - begin, values_, zeros_, nullptr, nullptr,
                 Dtype::unknown, form_.factor});
      return;
    }
    while (begin < end) {
      const Line line = line_of(begin, end);
      body(Run{line.codes, line.first, scales_ + line.scale, group_, line.n, values_,
               zeros_from(line.scale)});
      begin += line.n;
    }
  }

 private:
  struct OfRow {  // scales and zeros of a row whose columns have their groups by name
    float scales[kMostNamed];
    float zeros[kMostNamed];
    NamedGroups named;
  };
  union Expanded {
    alignas(64) float scales[2 * kExpandedScales];  // and offsets
    double values[16];
  };
  /// Elements [first, first + n) of `codes`, whose scales begin with number `scale`: those of one
  /// row, where groups restart at each.
  struct Line {
    const std::uint8_t* codes;
    std::int64_t first, n, scale;
  };
  Line line_of(std::int64_t begin, std::int64_t end) const noexcept {
    if (row_ == 0) return {codes_, begin, end - begin, 0};
    const std::int64_t row = begin / row_, first = begin - row * row_;
    const std::int64_t above = rows_.each() == 1 ? row : rows_.of(row);
    return {codes_ + row * row_ * bits_ / 8, first, std::min(end - begin, row_ - first),
            above * across_};
  }
  const std::int8_t* zeros_from(std::int64_t g) const noexcept {
    return zeros_ == nullptr ? nullptr : zeros_ + g;
  }
  template <class Body>
  void cover_expanded(std::int64_t begin, std::int64_t end, Body&& body) const {
    Expanded room;
    while (begin < end) {
      const Run run = exact_ ? next_doubles(begin, end, room.values)
                             : next_expanded(line_of(begin, end), room.scales);
      body(run);
      begin += run.n;
    }
  }
  template <class Body>
  void cover_named(std::int64_t begin, std::int64_t end, Body&& body) const {
    OfRow room;
    while (begin < end) {
      const Run run = next_named(begin, end, room);
      body(run);
      begin += run.n;
    }
  }
  // Inlined into the loop: rows of few groups are runs of few scales.
  Run next_expanded(const Line& line, float* scales) const noexcept {
    const std::int64_t from = line.first / group_ & begins_, last = line.first + line.n;
    const std::int64_t to = std::min(ceil_div(last, group_), from + kExpandedScales);
    expand_(kept_, line.scale + from, to - from, scales);
    ask_for_scales(line.scale + to, to - from);
    const std::int64_t skipped = from * group_;  // codes that fill bytes
    return {line.codes + skipped * bits_ / 8,
            line.first - skipped,
            scales,
            group_,
            std::min(last, to * group_) - line.first,
            rounds_ ? rounded_ : values_,
            zeros_from(line.scale + from),
            nullptr,
            beside_ ? scales + kExpandedScales : nullptr,
            form_.zero == Zero::rounded ? form_.scale.type : Dtype::unknown};
  }
  // Those of a later run: they are on their way while this one's codes are read.
  void ask_for_scales(std::int64_t first, std::int64_t n) const noexcept {
    const auto* from = static_cast<const char*>(kept_.parts[0]) + first * kept_sixteenths_ / 16;
    for (std::int64_t at = 0; at < n * kept_sixteenths_ / 16; at += 64)
      __builtin_prefetch(from + at, 0, 2);
  }
  Run next_doubles(std::int64_t begin, std::int64_t end, double* values) const noexcept;
  Run next_named(std::int64_t begin, std::int64_t end, OfRow& room) const noexcept;
  Run next_unpacked(const Run& run, std::int64_t done, std::int8_t* room,
                    NamedGroups& named) const noexcept;

  Descriptor form_;
  const std::uint8_t* codes_ = nullptr;
  const std::int8_t* zeros_ = nullptr;
  const float* scales_ = nullptr;  // where they are fp32 numbers
  KeptScales kept_;                // where they are not
  Expand expand_ = nullptr;
  std::int64_t kept_sixteenths_ = 16;     // of a byte, for each scale
  bool beside_ = false;                   // what is expanded has offsets
  const std::int32_t* groups_ = nullptr;  // of each column, where a part names it
  std::int64_t group_ = 1;
  std::int64_t begins_ = -1;       // bits of the numbers of groups that begin with a byte
  std::int64_t row_ = 0;           // elements of a row where groups restart at each row; else 0
  std::int64_t across_ = 0;        // groups of such a row, and those that its last record lacks
  BlockRows rows_;                 // which have the same scales
  int bits_ = 8;                   // of a code, where it has not bytes of its own
  UnpackKernel unpack_ = nullptr;  // dense codes
  const float* values_ = nullptr;  // of 4-bit codes, as the format has them
  bool rounds_ = false;            // the weight has its own:
  bool exact_ = false;             // doubles
  float rounded_[16];              // or these
};

}  // namespace stowage
