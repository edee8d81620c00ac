// SPDX-License-Identifier: Apache-2.0
#include "stowage/device_engine.h"

#include <utility>

#include "engine/core.h"
#include "engine/device_link.h"

namespace stowage {
inline namespace v0 {

DeviceLease::DeviceLease(Lease lease, std::shared_ptr<engine::DeviceLink> link, WeightId id,
                         Device::Stream stream)
    : lease_(std::move(lease)), link_(std::move(link)), id_(id), stream_(stream) {}

DeviceLease::~DeviceLease() {
  if (!link_ || link_->forked()) return;  // moved from, or of the parent's device
  try {
    link_->note_use(id_, stream_);
  } catch (const Error&) {  // a device that takes no work has none to wait for
  }
}

DeviceEngine::DeviceEngine(std::shared_ptr<Engine> host, std::shared_ptr<Device> device,
                           const DeviceOptions& options) {
  const File& file = host->file();
  std::vector<engine::Unit> units = engine::device_units_of(file);
  link_ = std::make_shared<engine::DeviceLink>(host, std::move(device), units.size(),
                                               host->core_->memory());
  core_ =
      engine::Core::make(file, std::move(units), link_,
                         engine::CoreOptions{.budget = options.memory, .workers = options.workers});
}
DeviceEngine::~DeviceEngine() { core_->stop(); }

DeviceLease DeviceEngine::acquire(WeightId id, Device::Stream stream) {
  return {core_->acquire(id), link_, id, stream};
}
std::uint64_t DeviceEngine::bytes(WeightId id) const { return core_->checked_unit(id).bytes; }
void DeviceEngine::expect(std::span<const WeightId> order) { core_->expect(order); }
void DeviceEngine::set_signature(std::uint64_t signature) { core_->set_signature(signature); }
EngineReport DeviceEngine::report() const { return core_->report(); }

}  // namespace v0
}  // namespace stowage
