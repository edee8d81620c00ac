// SPDX-License-Identifier: Apache-2.0
#include "stowage/engine.h"

#include <algorithm>
#include <utility>

#include "engine/core.h"
#include "engine/disk_link.h"
#include "engine/registry.h"

namespace stowage {
namespace {

// Bytes of values that a product may copy: as many as it takes of any weight (torch/gemm.cpp).
constexpr std::uint64_t kMostCopied = std::uint64_t{4} << 20;

}  // namespace

std::shared_ptr<engine::Core> engine::core_on_disk(File file, const EngineOptions& options,
                                                   Reader& reader) {
  if (options.lock && options.reads == Reads::mapped) {
    throw Error(Code::invalid_argument,
                "engine: reads must be automatic, buffered or direct, got mapped with lock");
  }
  std::vector<Unit> units = units_of(file, options.by_rows);
  const auto named = std::span(units).first(named_units(units));
  for (const std::string& name : options.mapped_only) {
    const auto found = find_unit(named, name);
    if (!found) throw Error(Code::invalid_argument, file.paths().front() + ": must have " + name);
    Unit& unit = units[static_cast<std::size_t>(*found)];
    unit.comes = false;
    for (WeightId i = 0; i < unit.slices.count; ++i)
      units[static_cast<std::size_t>(unit.slices.first + i)].comes = false;
  }
  const bool forms = std::ranges::any_of(
      units, [](const Unit& unit) { return unit.comes && !unit.formed.empty(); });
  if (forms && options.reads == Reads::mapped) {
    const std::string& who = file.dialect().empty() ? file.paths().front() : file.dialect();
    throw Error(Code::invalid_argument,
                "engine: reads must be automatic, buffered or direct, got mapped for codes that " +
                    who + " has in another order");
  }
  // Products of values that stay where they are mapped would copy them, beside the budget.
  const bool copied = std::ranges::any_of(units, [](const Unit& unit) {
    return unit.comes && unit.down != 0 && unit.extents.front().bytes > kMostCopied;
  });
  const bool may_map = !options.lock && !forms && !copied;
  auto link = std::make_unique<DiskLink>(file, options.reads, may_map, reader);
  return Core::make(std::move(file), std::move(units), std::move(link),
                    CoreOptions{.budget = options.ram,
                                .workers = options.workers,
                                .timeout = options.timeout,
                                .lock = options.lock});
}

inline namespace v0 {

const char* to_string(Reads reads) noexcept {
  constexpr const char* kNames[] = {"automatic", "mapped", "buffered", "direct"};
  return kNames[static_cast<std::size_t>(reads)];
}

Lease::Lease(std::shared_ptr<engine::Session> session, WeightId id, engine::Hold hold,
             Time begun) noexcept
    : session_(std::move(session)), id_(id), hold_(hold), begun_(begun) {}
Lease::Lease(Lease&& other) noexcept = default;
Lease::~Lease() {
  if (session_) session_->core->release(*session_, id_, hold_, begun_);
}
Weight Lease::weight() const { return session_->core->weight(id_, hold_); }
const void* Lease::at(const void* mapped) const noexcept {
  return session_->core->at(id_, hold_, mapped);
}

Engine::Engine(File file, const EngineOptions& options)
    : core_(engine::core_on_disk(std::move(file), options)) {
  engine::add_engine(core_);
}
Engine::~Engine() {
  engine::remove_engine(core_.get());
  core_->stop();
}

const File& Engine::file() const noexcept { return core_->file(); }
WeightId Engine::size() const noexcept { return static_cast<WeightId>(core_->units().size()); }

WeightId Engine::named() const noexcept {
  return static_cast<WeightId>(engine::named_units(core_->units()));
}

std::optional<WeightId> Engine::find(std::string_view name) const {
  const std::span<const engine::Unit> units = core_->units();
  return engine::find_unit(units.first(engine::named_units(units)), name);
}

const std::string& Engine::name(WeightId id) const { return core_->checked_unit(id).name; }
std::uint64_t Engine::bytes(WeightId id) const {
  const engine::Unit& unit = core_->checked_unit(id);
  return unit.comes ? unit.bytes : 0;
}
SliceIds Engine::slices(WeightId id) const { return core_->checked_unit(id).slices; }
std::uint64_t Engine::scratch() const noexcept { return core_->scratch(); }
Lease Engine::acquire(WeightId id) { return core_->acquire(id); }
bool Engine::want(std::span<const WeightId> ids, bool after) { return core_->want(ids, after); }
void Engine::cancel() noexcept { core_->cancel(); }
void Engine::keep(std::span<const WeightId> ids) { core_->keep(ids); }
void Engine::expect(std::span<const WeightId> order) { core_->expect(order); }
void Engine::set_signature(std::uint64_t signature) { core_->set_signature(signature); }
EngineReport Engine::report() const { return core_->report(); }
std::vector<WeightUses> Engine::uses() const { return core_->uses(); }
WeightUses Engine::uses(WeightId id) const { return core_->uses(id); }
void Engine::foresee(std::span<const std::uint64_t> uses) { core_->foresee(uses); }
std::optional<Lease> Engine::lease_at(const void* mapped, bool formed, std::uint64_t bytes) {
  return engine::lease_at(mapped, formed, bytes);
}
std::optional<bool> Engine::want_at(std::span<const void* const> mapped,
                                    std::span<const std::int64_t> slices, bool one_by_one,
                                    bool after) {
  return engine::want_at(mapped, slices, one_by_one, after);
}
void Engine::together(std::span<const void* const> mapped) { engine::together(mapped); }

}  // namespace v0
}  // namespace stowage
