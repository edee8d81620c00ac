// SPDX-License-Identifier: Apache-2.0
#include "stowage/engine.h"

#include <algorithm>
#include <utility>

#include "engine/core.h"
#include "engine/registry.h"

namespace stowage {
inline namespace v0 {

const char* to_string(Reads reads) noexcept {
  constexpr const char* kNames[] = {"automatic", "mapped", "buffered", "direct"};
  return kNames[static_cast<std::size_t>(reads)];
}

Lease::Lease(std::shared_ptr<engine::Desk> desk, WeightId id, engine::Hold hold) noexcept
    : desk_(std::move(desk)), id_(id), hold_(hold) {}
Lease::Lease(Lease&& other) noexcept = default;
Lease::~Lease() {
  if (desk_) desk_->core->release(*desk_, id_, hold_);
}
Weight Lease::weight() const { return desk_->core->weight(id_, hold_); }
const void* Lease::at(const void* mapped) const noexcept {
  return desk_->core->at(id_, hold_, mapped);
}

Engine::Engine(File file, const EngineOptions& options)
    : core_(std::make_shared<engine::Core>(std::move(file), options)) {
  engine::add_engine(core_);
}
Engine::~Engine() {
  engine::remove_engine(core_.get());
  core_->stop();
}

const File& Engine::file() const noexcept { return core_->file(); }
WeightId Engine::size() const noexcept { return static_cast<WeightId>(core_->units().size()); }

std::optional<WeightId> Engine::find(std::string_view name) const {
  const auto& units = core_->units();
  const auto found = std::ranges::lower_bound(units, name, {}, &engine::Unit::name);
  if (found == units.end() || found->name != name) return std::nullopt;
  return static_cast<WeightId>(found - units.begin());
}

const std::string& Engine::name(WeightId id) const {
  return core_->units().at(static_cast<std::size_t>(id)).name;
}
std::uint64_t Engine::bytes(WeightId id) const {
  return core_->units().at(static_cast<std::size_t>(id)).bytes;
}
Lease Engine::acquire(WeightId id) { return core_->acquire(id); }
void Engine::cancel() noexcept { core_->cancel(); }
void Engine::expect(std::span<const WeightId> order) { core_->expect(order); }
void Engine::set_signature(std::uint64_t signature) { core_->set_signature(signature); }
EngineReport Engine::report() const { return core_->report(); }
std::optional<Lease> Engine::lease_at(const void* mapped) { return engine::lease_at(mapped); }

}  // namespace v0
}  // namespace stowage
