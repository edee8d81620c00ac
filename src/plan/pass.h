// SPDX-License-Identifier: Apache-2.0
// One pass over a model's units, simulated: every link fetches one unit after the other into a ring
// of its tier, as far ahead as the ring has room, and the work goes on as its unit is there.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace stowage::planning {

inline constexpr int kMostAccelerators = 16;

/// What a unit does in a pass.
struct Step {
  std::uint64_t bytes = 0;
  double read = 0;     // seconds from the disk into the ring in RAM; 0: does not come from there
  double copy = 0;     // seconds into the ring of its accelerator; 0: is not copied
  double compute = 0;  // seconds of work
  std::int32_t accelerator = -1;
};

struct Rings {
  std::uint64_t ram = 0;
  std::array<std::uint64_t, kMostAccelerators> accelerators{};
};

/// When a unit took room in a ring, gave it back, and began to work; seconds.
struct Moments {
  double ram_taken = -1, ram_given = -1, taken = -1, given = -1, begun = 0;
};

class Pass {
 public:
  static constexpr int kPasses = 3;  // until one is like the one before

  /// Seconds from the end of one pass to that of the next, when passes repeat. Every unit that
  /// moves fits its rings. `moments` receives one entry for each step of the last pass.
  double seconds(std::span<const Step> steps, const Rings& rings,
                 std::vector<Moments>* moments = nullptr);

 private:
  struct Room {
    std::uint64_t bytes;
    double given;
  };
  // A ring: what was taken first is given first.
  struct Ring {
    std::vector<Room> taken;
    std::size_t first = 0;
    std::uint64_t held = 0, size = 0;
    void restart(std::uint64_t bytes);
    double room_for(std::uint64_t bytes);  // since when there is
  };
  void step(const Step& step, Moments& moments);

  Ring ram_;
  std::array<Ring, kMostAccelerators> rings_;
  double disk_free_ = 0, worked_ = 0;
  std::array<double, kMostAccelerators> link_free_{};
};

}  // namespace stowage::planning
