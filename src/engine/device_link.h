// SPDX-License-Identifier: Apache-2.0
// From an engine's memory to a device's, beside what the device computes.
#pragma once
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/fork.h"
#include "engine/link.h"
#include "stowage/device.h"

namespace stowage::engine {

/// The units of `file` as a device holds them: their parts one behind the other, one piece each.
std::vector<Unit> device_units_of(const File& file);

class DeviceLink : public Link {
 public:
  /// `memory` is where the host's engine has its weights: pinned for as long as this lives, unless
  /// it is already. Empty where they stay mapped.
  DeviceLink(std::shared_ptr<Engine> host, std::shared_ptr<Device> device, std::size_t units,
             std::span<std::byte> memory);
  ~DeviceLink() override;

  Reads reads() const noexcept override { return host_->report().reads; }
  bool moves() const noexcept override { return true; }
  bool can_borrow() const noexcept override { return false; }
  std::byte* memory(std::uint64_t bytes) override;
  void bring(std::span<const Transfer> run) override;
  void drop(const Unit&) noexcept override {}
  void leave(WeightId id) noexcept override;
  /// Work that the stream was given so far reads the unit: its memory is not written before.
  void note_use(WeightId id, Device::Stream stream);
  bool forked() const noexcept { return process_ != process_generation(); }

 private:
  using Events = std::vector<Device::Event>;
  void bring(const Transfer& unit);
  void forget_done(Events& events);

  const std::shared_ptr<Engine> host_;
  const std::shared_ptr<Device> device_;
  void* pinned_ = nullptr;  // of the host
  void* memory_ = nullptr;  // of the device
  const std::uint64_t process_ = process_generation();
  std::mutex mutex_;
  std::vector<Events> uses_;  // of each unit, those that may be open
  Events left_;               // of units that gave up their memory
};

}  // namespace stowage::engine
