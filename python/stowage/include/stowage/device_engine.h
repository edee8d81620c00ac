// SPDX-License-Identifier: Apache-2.0
// The weights of an engine on a device: copied in when they are used, ahead of the work that needs
// them, within a budget of the device's bytes.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "stowage/device.h"
#include "stowage/engine.h"

namespace stowage {

namespace engine {
class DeviceLink;
}

inline namespace v0 {

struct DeviceOptions {
  std::uint64_t memory = 0;  // the most bytes held on the device; at least the largest weight's
  int workers = 1;           // threads that copy ahead; 0 copies only what is asked for
};

/// A weight on the device for as long as this lives, and for the work that its stream was given
/// until then. Ends on the thread that acquired it.
class STOWAGE_API DeviceLease {
 public:
  DeviceLease(DeviceLease&& other) noexcept = default;
  DeviceLease& operator=(DeviceLease&&) = delete;
  ~DeviceLease();

  /// The weight, its parts in the device's memory: for work on the lease's stream. Must not outlive
  /// the lease. Throws invalid_argument for a plain tensor.
  Weight weight() const { return lease_.weight(); }
  const void* at(const void* mapped) const noexcept { return lease_.at(mapped); }

 private:
  friend class DeviceEngine;
  DeviceLease(Lease lease, std::shared_ptr<engine::DeviceLink> link, WeightId id,
              Device::Stream stream);
  Lease lease_;  // in the device's memory
  std::shared_ptr<engine::DeviceLink> link_;
  WeightId id_;
  Device::Stream stream_;
};

/// Holds at most `memory` bytes of an engine's weights on a device, and behaves as that engine
/// does: it learns the order of use, copies ahead, evicts what is needed last. Memory is given to
/// the next weight when all work that was given its last weight is done: the copy waits for that on
/// the device, the host does not. A thread that holds a lease and finds no room gets an error
/// (out_of_memory): nothing stands in for the device's memory.
class STOWAGE_API DeviceEngine {
 public:
  /// Throws invalid_argument (naming the budget that the largest weight needs), out_of_memory,
  /// cuda.
  DeviceEngine(std::shared_ptr<Engine> host, std::shared_ptr<Device> device,
               const DeviceOptions& options);
  ~DeviceEngine();  // waits for its copies; leases stay good

  /// The weight's bytes on the device, for work that `stream` is given while the lease lives.
  /// Throws what the host's acquire() and the device's copies do.
  DeviceLease acquire(WeightId id, Device::Stream stream = nullptr);
  std::uint64_t bytes(WeightId id) const;  // that it takes on the device
  void expect(std::span<const WeightId> order);
  void set_signature(std::uint64_t signature);
  /// `bytes_read` and the others, of the link to the device; `held` and `peak` of its memory.
  EngineReport report() const;

 private:
  std::shared_ptr<engine::DeviceLink> link_;
  std::shared_ptr<engine::Core> core_;
};

}  // namespace v0
}  // namespace stowage
