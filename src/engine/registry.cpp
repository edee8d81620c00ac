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

std::optional<Lease> lease_at(const void* mapped, bool formed) {
  Registry& all = registry();
  if (!all.any.load(std::memory_order_relaxed)) return std::nullopt;
  std::shared_ptr<Core> core;
  WeightId id = 0;
  {
    const std::shared_lock lock(all.mutex);
    const auto* const byte = static_cast<const std::byte*>(mapped);
    auto after = std::ranges::upper_bound(all.ranges, byte, {}, &MappedRange::begin);
    if (after == all.ranges.begin()) return std::nullopt;
    const MappedRange& range = *--after;
    if (byte >= range.end || (formed && !range.formed)) return std::nullopt;
    core = range.core.lock();
    id = range.id;
  }
  if (!core || core->forked()) return std::nullopt;  // the mapping serves
  try {
    return core->acquire(id);
  } catch (const Error&) {
    if (!core->stopped()) throw;
    return std::nullopt;  // ended while we waited, for one with another budget: the mapping serves
  }
}

}  // namespace stowage::engine
