// SPDX-License-Identifier: Apache-2.0
// Ops on engines. Weights whose parts were read from the engine's file need no op of their own:
// each op finds the engine by their addresses (Held).
#include "stowage/engine.h"

#include <nlohmann/json.hpp>

#include "stowage/trace.h"
#include "torch/arguments.h"
#include "torch/files.h"
#include "torch/handles.h"

namespace stowage::door {
namespace {
using nlohmann::json;

Handles<Engine>& engines() {
  static Handles<Engine> made("engine");
  return made;
}

Reads reads_of(const std::string& name) {
  for (const Reads reads : {Reads::automatic, Reads::mapped, Reads::buffered, Reads::direct})
    if (name == to_string(reads)) return reads;
  throw Error(Code::invalid_argument,
              "stowage::engine_open: reads must be automatic, mapped, buffered or direct, got '" +
                  name + "'");
}

std::int64_t engine_open(std::int64_t file, std::int64_t ram, const std::string& reads,
                         std::int64_t workers) {
  constexpr const char* kWhere = "stowage::engine_open";
  if (ram < 0 || workers < 0 || workers > 256) {
    throw Error(Code::invalid_argument,
                std::string(kWhere) + ": ram must be >= 0 and workers 0 to 256, got " +
                    std::to_string(ram) + " and " + std::to_string(workers));
  }
  const EngineOptions options{.ram = static_cast<std::uint64_t>(ram),
                              .reads = reads_of(reads),
                              .workers = static_cast<int>(workers)};
  return engines().add(std::make_shared<Engine>(*file_of(kWhere, file), options));
}

// `names`: a JSON list of weights and tensors, those that the file does not have are left out.
void engine_expect(std::int64_t handle, const std::string& names) {
  const auto engine = engines().get("stowage::engine_expect", handle);
  std::vector<WeightId> order;
  for (const json& name : json::parse(names))
    if (const auto id = engine->find(name.get<std::string>())) order.push_back(*id);
  engine->expect(order);
}

void engine_signature(std::int64_t handle, std::int64_t signature) {
  engines()
      .get("stowage::engine_signature", handle)
      ->set_signature(static_cast<std::uint64_t>(signature));
}

// {"reads", "acquired", ..., "stall"}: EngineReport by its names.
Tensor engine_describe(std::int64_t handle) {
  const EngineReport r = engines().get("stowage::engine_describe", handle)->report();
  const json out{{"reads", to_string(r.reads)},
                 {"acquired", r.acquired},
                 {"hits", r.hits},
                 {"misses", r.misses},
                 {"late", r.late},
                 {"borrowed", r.borrowed},
                 {"ahead", r.ahead},
                 {"evicted", r.evicted},
                 {"bytes_read", r.bytes_read},
                 {"held", r.held},
                 {"peak", r.peak},
                 {"stall", r.stall}};
  return text_bytes(out.dump());
}

void engine_close(std::int64_t handle) { engines().take("stowage::engine_close", handle); }

void trace_start(std::int64_t most_events) {
  if (most_events < 0) {
    throw Error(Code::invalid_argument, "stowage::trace_start: most_events must be >= 0, got " +
                                            std::to_string(most_events));
  }
  start_trace(static_cast<std::size_t>(most_events));
}

Tensor trace_stop() { return text_bytes(stop_trace()); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stowage, CompositeExplicitAutograd, m) {
  m.impl("engine_open", TORCH_BOX(&Door<&engine_open>::call));
  m.impl("engine_expect", TORCH_BOX(&Door<&engine_expect>::call));
  m.impl("engine_signature", TORCH_BOX(&Door<&engine_signature>::call));
  m.impl("engine_describe", TORCH_BOX(&Door<&engine_describe>::call));
  m.impl("engine_close", TORCH_BOX(&Door<&engine_close>::call));
  m.impl("trace_start", TORCH_BOX(&Door<&trace_start>::call));
  m.impl("trace_stop", TORCH_BOX(&Door<&trace_stop>::call));
}
}  // namespace stowage::door
