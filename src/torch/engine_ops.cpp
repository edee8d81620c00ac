// SPDX-License-Identifier: Apache-2.0
// Ops on engines. Weights whose parts were read from the engine's file need no op of their own:
// each op finds the engine by their addresses (Held).
#include "stowage/engine.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

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

// A JSON list of names of weights and tensors.
std::vector<std::string> names_of(const char* where, const std::string& text) {
  const json list = json::parse(text, nullptr, false);
  const auto is_text = [](const json& name) { return name.is_string(); };
  if (!list.is_array() || !std::ranges::all_of(list, is_text)) {
    throw Error(Code::invalid_argument,
                std::string(where) + ": names must be a JSON list of strings, got '" + text + "'");
  }
  return list;
}

// A JSON object: how many rows at a time weights come, by name.
std::vector<RowCut> cuts_of(const char* where, const std::string& text) {
  const json given = json::parse(text, nullptr, false);
  const auto is_number = [](const json& rows) { return rows.is_number_integer(); };
  if (!given.is_object() || !std::ranges::all_of(given, is_number)) {
    throw Error(
        Code::invalid_argument,
        std::string(where) + ": by_rows must be a JSON object of numbers, got '" + text + "'");
  }
  std::vector<RowCut> cuts;
  for (const auto& [name, rows] : given.items()) cuts.push_back({name, rows.get<std::int64_t>()});
  return cuts;
}

std::int64_t engine_open(std::int64_t file, std::int64_t ram, const std::string& reads,
                         std::int64_t workers, double timeout, bool lock,
                         const std::string& mapped_only, const std::string& by_rows) {
  constexpr const char* kWhere = "stowage::engine_open";
  if (ram < 0 || workers < 0 || workers > 256) {
    throw Error(Code::invalid_argument,
                std::string(kWhere) + ": ram must be >= 0 and workers 0 to 256, got " +
                    std::to_string(ram) + " and " + std::to_string(workers));
  }
  const EngineOptions options{.ram = static_cast<std::uint64_t>(ram),
                              .reads = reads_of(reads),
                              .workers = static_cast<int>(workers),
                              .timeout = timeout,
                              .lock = lock,
                              .mapped_only = names_of(kWhere, mapped_only),
                              .by_rows = cuts_of(kWhere, by_rows)};
  return engines().add(std::make_shared<Engine>(*file_of(kWhere, file), options));
}

// Of a slice's name, "w[3]", where w comes by rows.
std::optional<WeightId> find_slice(const Engine& engine, const std::string& name) {
  const std::size_t bracket = name.rfind('[');
  if (bracket == std::string::npos) return std::nullopt;
  const auto whole = engine.find(std::string_view(name).substr(0, bracket));
  if (!whole) return std::nullopt;
  const SliceIds slices = engine.slices(*whole);
  const long long index = std::strtoll(name.c_str() + bracket + 1, nullptr, 10);
  if (index < 0 || index >= slices.count) return std::nullopt;
  const auto id = slices.first + static_cast<WeightId>(index);
  return engine.name(id) == name ? std::optional(id) : std::nullopt;
}

// Names that the file does not have are left out.
std::vector<WeightId> ids_of(const Engine& engine, const std::vector<std::string>& names) {
  std::vector<WeightId> ids;
  for (const std::string& name : names)
    if (const auto id = engine.find(name)) ids.push_back(*id);
  return ids;
}

// The same, of slices too, and with the slices of weights that come by rows in the place of these.
std::vector<WeightId> units_of(const Engine& engine, const std::vector<std::string>& names) {
  std::vector<WeightId> units;
  for (const std::string& name : names) {
    auto id = engine.find(name);
    if (!id) id = find_slice(engine, name);
    if (!id) continue;
    const SliceIds slices = engine.slices(*id);
    if (slices.count == 0) units.push_back(*id);
    for (WeightId i = 0; i < slices.count; ++i) units.push_back(slices.first + i);
  }
  return units;
}

void engine_expect(std::int64_t handle, const std::string& names) {
  constexpr const char* kWhere = "stowage::engine_expect";
  const auto engine = engines().get(kWhere, handle);
  engine->expect(ids_of(*engine, names_of(kWhere, names)));
}

// Of `names`, the first that leave `ring` of the engine's `ram` bytes beside scratch, and room for
// the largest of the rest; returns how many. What is too large is passed over.
std::int64_t engine_keep(std::int64_t handle, const std::string& names, std::int64_t ram,
                         std::int64_t ring) {
  constexpr const char* kWhere = "stowage::engine_keep";
  const auto engine = engines().get(kWhere, handle);
  if (ram < 0 || ring < 0) {
    throw Error(Code::invalid_argument, std::string(kWhere) +
                                            ": ram and ring must be at least 0, got " +
                                            std::to_string(ram) + " and " + std::to_string(ring));
  }
  std::vector<WeightId> kept;  // of a weight that comes by rows: its slices
  std::int64_t left = ram - static_cast<std::int64_t>(engine->scratch()) - ring;
  const auto bytes = [&](WeightId id) { return static_cast<std::int64_t>(engine->bytes(id)); };
  for (const WeightId id : units_of(*engine, names_of(kWhere, names))) {
    if (bytes(id) > left || bytes(id) == 0) continue;
    left -= bytes(id);
    kept.push_back(id);
  }
  left += ring;
  std::vector<bool> stays(static_cast<std::size_t>(engine->size()));
  for (const WeightId id : kept) stays[static_cast<std::size_t>(id)] = true;
  std::int64_t largest = 0;  // of the rest
  for (WeightId id = 0; id < engine->size(); ++id)
    if (!stays[static_cast<std::size_t>(id)]) largest = std::max(largest, bytes(id));
  for (; !kept.empty() && left < largest; kept.pop_back()) {
    left += bytes(kept.back());
    largest = std::max(largest, bytes(kept.back()));
  }
  engine->keep(kept);
  return static_cast<std::int64_t>(kept.size());
}

// Advice: whether an engine has such codes, and some of those slices of them are not there yet.
bool engine_want(const std::vector<Tensor>& codes, const std::vector<std::int64_t>& slices,
                 bool one_by_one, bool after) {
  std::vector<const void*> mapped;
  for (const Tensor& of_one : codes) mapped.push_back(of_one.const_data_ptr());
  return Engine::want_at(mapped, slices, one_by_one, after).value_or(false);
}

void engine_together(const std::vector<Tensor>& codes) {
  std::vector<const void*> mapped;
  for (const Tensor& of_one : codes) mapped.push_back(of_one.const_data_ptr());
  Engine::together(mapped);
}

void engine_signature(std::int64_t handle, std::int64_t signature) {
  engines()
      .get("stowage::engine_signature", handle)
      ->set_signature(static_cast<std::uint64_t>(signature));
}

void add(WeightUses& sum, const WeightUses& more) {
  sum.hits += more.hits, sum.misses += more.misses, sum.late += more.late;
  sum.borrowed += more.borrowed, sum.ahead += more.ahead, sum.unused += more.unused;
  sum.stall += more.stall;
}

// What was used, by name: hits, misses, late, borrowed, ahead, unused, stall, all slices together,
// and how often each slice was used.
Tensor engine_uses(std::int64_t handle) {
  const auto engine = engines().get("stowage::engine_uses", handle);
  const std::vector<WeightUses> uses = engine->uses();
  const auto of = [&](WeightId id) { return uses[static_cast<std::size_t>(id)]; };
  json out = json::object();
  for (WeightId id = 0; id < engine->named(); ++id) {
    WeightUses sum = of(id);
    json by_slice = json::array();
    const SliceIds slices = engine->slices(id);
    for (WeightId i = 0; i < slices.count; ++i) {
      add(sum, of(slices.first + i));
      by_slice.push_back(of(slices.first + i).acquired());
    }
    if (sum.acquired() == 0 && sum.ahead == 0) continue;
    out[engine->name(id)] = {sum.hits,  sum.misses, sum.late,  sum.borrowed,
                             sum.ahead, sum.unused, sum.stall, std::move(by_slice)};
  }
  return text_bytes(out.dump());
}

// A JSON object: how often each slice of a weight was used, by name. Of weights that come as a
// whole here, nothing is made.
void engine_foresee(std::int64_t handle, const std::string& text) {
  constexpr const char* kWhere = "stowage::engine_foresee";
  const auto engine = engines().get(kWhere, handle);
  const json given = json::parse(text, nullptr, false);
  const auto are_counts = [](const json& list) {
    return list.is_array() && std::ranges::all_of(list, &json::is_number_unsigned);
  };
  if (!given.is_object() || !std::ranges::all_of(given, are_counts))
    throw Error(Code::invalid_argument,
                std::string(kWhere) + ": uses must be a JSON object of lists of counts, got '" +
                    text.substr(0, 80) + "'");
  std::vector<std::uint64_t> uses(static_cast<std::size_t>(engine->size()));
  for (const auto& [name, counts] : given.items()) {
    const auto id = engine->find(name);
    if (!id)
      throw Error(Code::invalid_argument, engine->file().paths().front() + ": must have " + name +
                                              ", whose uses are given");
    const SliceIds slices = engine->slices(*id);
    if (slices.count == 0) continue;
    if (counts.size() != static_cast<std::size_t>(slices.count))
      throw Error(Code::invalid_argument, engine->file().paths().front() + ": uses of " + name +
                                              " must be " + std::to_string(slices.count) +
                                              " counts, got " + std::to_string(counts.size()));
    for (std::size_t i = 0; i < counts.size(); ++i)
      uses[static_cast<std::size_t>(slices.first) + i] = counts[i].get<std::uint64_t>();
  }
  engine->foresee(uses);
}

std::uint64_t largest(const Engine& engine) {
  std::uint64_t most = 0;
  for (WeightId id = 0; id < engine.size(); ++id) most = std::max(most, engine.bytes(id));
  return most;
}

// {"reads": what automatic came to, "largest": bytes of a weight, and of scratch}.
Tensor engine_describe(std::int64_t handle) {
  const auto engine = engines().get("stowage::engine_describe", handle);
  const json out{{"reads", to_string(engine->report().reads)},
                 {"largest", largest(*engine) + engine->scratch()}};
  return text_bytes(out.dump());
}

using Count = std::int64_t;
// The numbers of EngineReport in their order. Not as a text: one is asked for after each pass.
std::tuple<Count, Count, Count, Count, Count, Count, Count, Count, Count, Count, Count, Count,
           double, double>
engine_counts(std::int64_t handle) {
  const EngineReport r = engines().get("stowage::engine_counts", handle)->report();
  const auto count = [](std::uint64_t number) { return static_cast<Count>(number); };
  return {count(r.acquired),
          count(r.hits),
          count(r.misses),
          count(r.late),
          count(r.borrowed),
          count(r.ahead),
          count(r.unused),
          count(r.evicted),
          count(r.bytes_read),
          count(r.bytes_formed),
          count(r.held),
          count(r.peak),
          r.stall,
          r.forming};
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
  m.impl("engine_keep", TORCH_BOX(&Door<&engine_keep>::call));
  m.impl("engine_want", TORCH_BOX(&Door<&engine_want>::call));
  m.impl("engine_together", TORCH_BOX(&Door<&engine_together>::call));
  m.impl("engine_signature", TORCH_BOX(&Door<&engine_signature>::call));
  m.impl("engine_uses", TORCH_BOX(&Door<&engine_uses>::call));
  m.impl("engine_foresee", TORCH_BOX(&Door<&engine_foresee>::call));
  m.impl("engine_counts", TORCH_BOX(&Door<&engine_counts>::call));
  m.impl("engine_describe", TORCH_BOX(&Door<&engine_describe>::call));
  m.impl("engine_close", TORCH_BOX(&Door<&engine_close>::call));
  m.impl("trace_start", TORCH_BOX(&Door<&trace_start>::call));
  m.impl("trace_stop", TORCH_BOX(&Door<&trace_stop>::call));
}
}  // namespace stowage::door
