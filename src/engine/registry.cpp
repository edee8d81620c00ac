// SPDX-License-Identifier: Apache-2.0
#include "engine/registry.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
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
  WeightId id;
  bool formed;  // put in order, whole or in a part
};

// The only one of its kind, which never ends: engines may outlive the statics.
struct Registry {
  Registry() {  // in a forked child no lost thread must hold the mutex; it knows its owner by
                // number
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] { std::construct_at(&registry().mutex); });
  }
  std::shared_mutex mutex;
  std::vector<MappedRange> ranges;  // by begin
  std::atomic<bool> any = false;
};

Registry& registry() {
  static auto* const made = new Registry;
  return *made;
}

struct Found {
  std::shared_ptr<Core> core;  // null: no living engine of this process has the byte
  WeightId id = 0;
};

// The unit of the byte; the whole weight where that is a slice with fewer than `bytes` from there.
Found find(const void* mapped, bool formed, std::uint64_t bytes) {
  Registry& all = registry();
  if (!all.any.load(std::memory_order_relaxed)) return {};
  Found found;
  std::uint64_t left = 0;
  {
    const std::shared_lock lock(all.mutex);
    const auto* const byte = static_cast<const std::byte*>(mapped);
    auto after = std::ranges::upper_bound(all.ranges, byte, {}, &MappedRange::begin);
    if (after == all.ranges.begin()) return {};
    const MappedRange& range = *--after;
    if (byte >= range.end || (formed && !range.formed)) return {};
    found = {range.core.lock(), range.id};
    left = static_cast<std::uint64_t>(range.end - byte);
  }
  if (!found.core || found.core->forked()) return {};
  const WeightId whole = found.core->checked_unit(found.id).whole;
  if (whole >= 0 && left < bytes) found.id = whole;
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
                            static_cast<WeightId>(i), !units[i].formed.empty()});
  }
  std::ranges::sort(all.ranges, {}, &MappedRange::begin);
  all.any = true;
}

void remove_engine(const Core* core) noexcept {
  Registry& all = registry();
  const std::unique_lock lock(all.mutex);
  std::erase_if(all.ranges, [&](const MappedRange& range) { return range.key == core; });
  all.any = !all.ranges.empty();
}

std::optional<Lease> lease_at(const void* mapped, bool formed, std::uint64_t bytes) {
  const auto [core, id] = find(mapped, formed, bytes);
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
    const auto [core, id] = find(place, false, 1);
    if (!core || (engine && core != engine)) continue;
    const WeightId whole = core->checked_unit(id).whole;
    if (whole < 0) continue;
    engine = core;
    const SliceIds all = core->checked_unit(whole).slices;
    stacks.emplace_back(id, all.first + all.count);
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

}  // namespace stowage::engine
