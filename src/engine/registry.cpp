// SPDX-License-Identifier: Apache-2.0
#include "engine/registry.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "engine/core.h"

namespace stowage::engine {
namespace {

struct Registry;
Registry& registry();

struct MappedRange {
  const std::byte *begin, *end;
  std::weak_ptr<Core> core;
  const Core* key;
  WeightId id, whole;  // the unit, and what it is a slice of
  bool formed;         // put in order, whole or in a part
};

// The only one of its kind, which never ends: engines may outlive the statics.
struct Registry {
  Registry() {  // in a forked child no lost thread must hold the mutex; it knows its owner by
                // number
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] { std::construct_at(&registry().mutex); });
  }
  std::shared_mutex mutex;
  std::vector<MappedRange> ranges;       // by begin
  std::vector<const std::byte*> begins;  // of these: what a search looks at lies together
  std::atomic<bool> any = false;

  void in_order() {
    std::ranges::sort(ranges, {}, &MappedRange::begin);
    begins.clear();
    for (const MappedRange& range : ranges) begins.push_back(range.begin);
    any = !ranges.empty();
  }
};

Registry& registry() {
  static auto* const made = new Registry;
  return *made;
}

struct Found {
  std::shared_ptr<Core> core;  // null: no living engine of this process has the byte
  WeightId id = 0, whole = -1;
};

// The unit of the byte; the whole weight where that is a slice with fewer than `bytes` from there.
Found find(const void* mapped, bool formed, std::uint64_t bytes) {
  Registry& all = registry();
  if (!all.any.load(std::memory_order_relaxed)) return {};
  Found found;
  {
    const std::shared_lock lock(all.mutex);
    const auto* const byte = static_cast<const std::byte*>(mapped);
    const auto after = std::ranges::upper_bound(all.begins, byte) - all.begins.begin();
    if (after == 0) return {};
    const MappedRange& range = all.ranges[static_cast<std::size_t>(after - 1)];
    if (byte >= range.end || (formed && !range.formed)) return {};
    found = {range.core.lock(), range.id, range.whole};
    const bool is_short = static_cast<std::uint64_t>(range.end - byte) < bytes;
    if (is_short && found.whole >= 0) found.id = std::exchange(found.whole, -1);
  }
  if (!found.core || found.core->forked()) return {};
  return found;
}

}  // namespace

void add_engine(const std::shared_ptr<Core>& core) {
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  const auto& units = core->units();
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (!units[i].comes) continue;
    for (const UnitPart& extent : units[i].extents)
      all.ranges.push_back({extent.mapped, extent.mapped + extent.bytes, core, core.get(),
                            static_cast<WeightId>(i), units[i].whole, !units[i].formed.empty()});
  }
  all.in_order();
}

void remove_engine(const Core* core) noexcept {
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  std::erase_if(all.ranges, [&](const MappedRange& range) { return range.key == core; });
  all.in_order();
}

std::optional<Lease> lease_at(const void* mapped, bool formed, std::uint64_t bytes) {
  const auto [core, id, whole] = find(mapped, formed, bytes);
  if (!core) return std::nullopt;  // the mapping serves
  try {
    return core->acquire(id);
  } catch (const Error&) {
    if (!core->stopped()) throw;
    return std::nullopt;  // ended while we waited, for one with another budget: the mapping serves
  }
}

std::optional<bool> want_at(std::span<const void* const> mapped,
                            std::span<const std::int64_t> slices, bool one_by_one, bool after) {
  std::shared_ptr<Core> engine;
  std::vector<std::pair<WeightId, WeightId>> stacks;  // the slice of the byte, and the end
  for (const void* const place : mapped) {
    const auto [core, id, whole] = find(place, false, 1);
    if (!core || (engine && core != engine)) continue;
    if (whole < 0) continue;
    engine = core;
    const SliceIds all = core->checked_unit(whole).slices;
    stacks.emplace_back(id, all.first + all.count);
    if (mapped.size() > 1) continue;
    for (WeightId next = core->behind(whole); next >= 0; next = core->behind(next)) {
      const SliceIds its = core->checked_unit(next).slices;
      stacks.emplace_back(its.first + (id - all.first), its.first + its.count);
    }
  }
  if (!engine) return std::nullopt;
  std::vector<WeightId> ids;
  ids.reserve(slices.size() * stacks.size());
  const auto add = [&](std::int64_t slice, const std::pair<WeightId, WeightId>& there) {
    if (slice >= 0 && slice < there.second - there.first)
      ids.push_back(there.first + static_cast<WeightId>(slice));
  };
  if (one_by_one) {
    for (const std::int64_t slice : slices)
      for (const auto& there : stacks) add(slice, there);
  } else {
    for (const auto& there : stacks)
      for (const std::int64_t slice : slices) add(slice, there);
  }
  return engine->want(ids, after);
}

void together(std::span<const void* const> mapped) {
  std::shared_ptr<Core> engine;
  std::vector<WeightId> wholes;
  for (const void* const place : mapped) {
    const auto [core, id, whole] = find(place, false, 1);
    if (!core || (engine && core != engine)) continue;
    if (whole < 0 || std::ranges::find(wholes, whole) != wholes.end()) continue;
    engine = core;
    wholes.push_back(whole);
  }
  if (engine) engine->set_behind(wholes);
}

}  // namespace stowage::engine
