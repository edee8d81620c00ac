// SPDX-License-Identifier: Apache-2.0
#include "plan/pass.h"

#include <algorithm>

namespace stowage::planning {

void Pass::Ring::restart(std::uint64_t bytes) {
  taken.clear();
  first = 0;
  held = 0;
  size = bytes;
}

double Pass::Ring::room_for(std::uint64_t bytes) {
  double since = 0;
  for (; first < taken.size() && held + bytes > size; ++first) {
    since = std::max(since, taken[first].given);
    held -= taken[first].bytes;
  }
  held += bytes;
  return since;
}

// The work of a unit waits for that of the one before, so all that this needs to know of the future
// of a ring is when the units before this one are done.
void Pass::step(const Step& step, Moments& m) {
  double there = 0;  // when its bytes are where the work is
  if (step.read > 0) {
    m.ram_taken = std::max(disk_free_, ram_.room_for(step.bytes));
    disk_free_ = there = m.ram_taken + step.read;
  }
  if (step.copy > 0) {
    const auto a = static_cast<std::size_t>(step.accelerator);
    m.taken = std::max({link_free_[a], there, rings_[a].room_for(step.bytes)});
    link_free_[a] = there = m.taken + step.copy;
    m.ram_given = there;
  }
  m.begun = std::max(worked_, there);
  worked_ = m.begun + step.compute;
  if (step.copy > 0) {
    m.given = worked_;
    rings_[static_cast<std::size_t>(step.accelerator)].taken.push_back({step.bytes, worked_});
  } else {
    m.ram_given = worked_;
  }
  if (step.read > 0) ram_.taken.push_back({step.bytes, m.ram_given});
}

double Pass::seconds(std::span<const Step> steps, const Rings& rings,
                     std::vector<Moments>* moments) {
  ram_.restart(rings.ram);
  for (std::size_t a = 0; a < rings_.size(); ++a) rings_[a].restart(rings.accelerators[a]);
  disk_free_ = worked_ = 0;
  link_free_.fill(0);
  double before = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    before = worked_;
    const bool keep = moments != nullptr && pass + 1 == kPasses;
    if (keep) moments->clear();
    for (const Step& one : steps) {
      Moments m;
      step(one, m);
      if (keep) moments->push_back(m);
    }
  }
  return worked_ - before;
}

}  // namespace stowage::planning
