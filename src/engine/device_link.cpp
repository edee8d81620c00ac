// SPDX-License-Identifier: Apache-2.0
#include "engine/device_link.h"

#include <algorithm>
#include <utility>

#include "engine/arena.h"

namespace stowage::engine {
namespace {

constexpr std::uint64_t kAlign = 256;  // of a part, as CUDA's own allocations have it

constexpr std::uint64_t up(std::uint64_t n, std::uint64_t to) { return (n + to - 1) / to * to; }

}  // namespace

std::vector<Unit> device_units_of(const File& file) {
  std::vector<Unit> units = units_of(file);
  for (Unit& unit : units) {
    std::uint64_t bytes = 0, place = 0;
    for (Extent& extent : unit.extents) {
      extent.place = place;
      place = up(place + extent.bytes, kAlign);
      bytes += extent.bytes;
    }
    unit.bytes = up(place, kPage);
    unit.pieces.clear();
    if (bytes > 0) unit.pieces.push_back({0, 0, bytes, 0, bytes});
  }
  return units;
}

DeviceLink::DeviceLink(std::shared_ptr<Engine> host, std::shared_ptr<Device> device,
                       std::size_t units, std::span<std::byte> memory)
    : host_(std::move(host)), device_(std::move(device)), uses_(units) {
  if (!memory.empty() && device_->pin(memory.data(), memory.size())) pinned_ = memory.data();
}

DeviceLink::~DeviceLink() {
  if (pinned_ != nullptr) device_->unpin(pinned_);
  if (memory_ == nullptr) return;
  for (Events& events : uses_) left_.insert(left_.end(), events.begin(), events.end());
  for (const Device::Event event : left_) {
    try {
      device_->wait(event);
    } catch (const Error&) {  // whoever launched that work was told
    }
  }
  device_->free(memory_);
}

std::byte* DeviceLink::memory(std::uint64_t bytes) {
  if (bytes > 0) memory_ = device_->allocate(bytes);
  return static_cast<std::byte*>(memory_);
}

void DeviceLink::bring(std::span<const Transfer> run) {
  for (const Transfer& unit : run) bring(unit);
}

void DeviceLink::bring(const Transfer& unit) {
  const Lease lease = host_->acquire(unit.id);
  Events after;
  {
    const std::scoped_lock lock(mutex_);
    forget_done(left_);
    after = left_;
  }
  // The lease ends when the bytes are over there, and not before, even if a later copy is refused.
  struct Copied {
    Device& device;
    Device::Event last = 0;
    void wait() { device.wait(std::exchange(last, 0)); }
    ~Copied() {
      if (last == 0) return;
      try {
        wait();
      } catch (const Error&) {  // the first error is the one that is told
      }
    }
  } copied{*device_};
  for (const Extent& extent : unit.unit->extents) {
    copied.last = device_->copy_in(unit.memory + extent.place, lease.at(extent.mapped),
                                   extent.bytes, std::exchange(after, {}));
  }
  copied.wait();
}

void DeviceLink::leave(WeightId id) noexcept {
  const std::scoped_lock lock(mutex_);
  Events& events = uses_[static_cast<std::size_t>(id)];
  left_.insert(left_.end(), events.begin(), events.end());
  events.clear();
}

void DeviceLink::note_use(WeightId id, Device::Stream stream) {
  const Device::Event event = device_->record(stream);
  const std::scoped_lock lock(mutex_);
  Events& events = uses_[static_cast<std::size_t>(id)];
  forget_done(events);
  events.push_back(event);
}

void DeviceLink::forget_done(Events& events) {
  std::erase_if(events, [&](Device::Event event) { return device_->done(event); });
}

}  // namespace stowage::engine
