// SPDX-License-Identifier: Apache-2.0
// Engines and leases of the C interface.
#include "stowage/engine.h"

#include "c/handles.h"

using namespace stowage;
using namespace stowage::c;

namespace {

static_assert(STOWAGE_READS_AUTOMATIC == static_cast<int>(Reads::automatic));
static_assert(STOWAGE_READS_MAPPED == static_cast<int>(Reads::mapped));
static_assert(STOWAGE_READS_BUFFERED == static_cast<int>(Reads::buffered));
static_assert(STOWAGE_READS_DIRECT == static_cast<int>(Reads::direct));

constexpr int kNoWorkers = -1;

EngineOptions engine_options(const char* function, const stowage_engine_options* given) {
  not_null(function, "options", given);
  const stowage_engine_options options = taken(function, given, kEngineOptions);
  if (options.reads < STOWAGE_READS_AUTOMATIC || options.reads > STOWAGE_READS_DIRECT)
    refuse(function,
           "options.reads must be one of STOWAGE_READS_*, got " + std::to_string(options.reads));
  EngineOptions made;
  made.ram = options.ram;
  made.timeout = options.timeout;
  made.reads = static_cast<Reads>(options.reads);
  made.lock = options.lock != 0;
  if (options.workers != 0) made.workers = options.workers == kNoWorkers ? 0 : options.workers;
  for (const char* name : checked_list(function, "options.mapped_only", options.mapped_only,
                                       options.mapped_only_count)) {
    not_null(function, "a name of options.mapped_only", name);
    made.mapped_only.emplace_back(name);
  }
  for (const char* name :
       checked_list(function, "options.by_rows", options.by_rows, options.by_rows_count)) {
    not_null(function, "a name of options.by_rows", name);
    made.by_rows.push_back({.name = name});
  }
  return made;
}

}  // namespace

stowage_status stowage_engine_new(const stowage_file* file, const stowage_engine_options* options,
                                  stowage_engine** engine) {
  return call(__func__, [&](const char* here) {
    not_null(here, "file", file);
    not_null(here, "engine", engine);
    *engine = new stowage_engine{Engine(file->file, engine_options(here, options))};
  });
}

void stowage_engine_free(stowage_engine* engine) { delete engine; }

stowage_status stowage_engine_count(const stowage_engine* engine, int32_t* count) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    not_null(here, "count", count);
    *count = engine->engine.size();
  });
}

stowage_status stowage_engine_find(const stowage_engine* engine, const char* name, int32_t* id) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    not_null(here, "name", name);
    not_null(here, "id", id);
    *id = engine->engine.find(name).value_or(-1);
  });
}

stowage_status stowage_engine_name(const stowage_engine* engine, int32_t id, const char** name) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    not_null(here, "name", name);
    *name = engine->engine.name(id).c_str();
  });
}

stowage_status stowage_engine_bytes(const stowage_engine* engine, int32_t id, uint64_t* bytes) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    not_null(here, "bytes", bytes);
    *bytes = engine->engine.bytes(id);
  });
}

stowage_status stowage_engine_slices(const stowage_engine* engine, int32_t id, int32_t* first,
                                     int32_t* count) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    not_null(here, "first", first);
    not_null(here, "count", count);
    const SliceIds slices = engine->engine.slices(id);
    *first = slices.first;
    *count = slices.count;
  });
}

stowage_status stowage_engine_keep(stowage_engine* engine, const int32_t* ids, int64_t count) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    engine->engine.keep(checked_list(here, "ids", ids, count));
  });
}

stowage_status stowage_engine_expect(stowage_engine* engine, const int32_t* ids, int64_t count) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    engine->engine.expect(checked_list(here, "ids", ids, count));
  });
}

stowage_status stowage_engine_want(stowage_engine* engine, const int32_t* ids, int64_t count) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    engine->engine.want(checked_list(here, "ids", ids, count));
  });
}

stowage_status stowage_engine_acquire(stowage_engine* engine, int32_t id, stowage_lease** lease) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    not_null(here, "lease", lease);
    const std::string& name = engine->engine.name(id);
    const WeightInfo* const info = engine->engine.file().find_weight(name);
    const Dtype compute = info == nullptr ? Dtype::unknown : info->compute.value_or(Dtype::unknown);
    *lease = new stowage_lease{engine->engine.acquire(id), name, compute};
  });
}

stowage_status stowage_engine_cancel(stowage_engine* engine) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    engine->engine.cancel();
  });
}

stowage_status stowage_engine_describe(const stowage_engine* engine,
                                       stowage_engine_report* report) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    const EngineReport now = engine->engine.report();
    give(here, "report", report, kEngineReport,
         stowage_engine_report{.size = sizeof(stowage_engine_report),
                               .acquired = now.acquired,
                               .hits = now.hits,
                               .misses = now.misses,
                               .late = now.late,
                               .borrowed = now.borrowed,
                               .ahead = now.ahead,
                               .evicted = now.evicted,
                               .bytes_read = now.bytes_read,
                               .bytes_formed = now.bytes_formed,
                               .held = now.held,
                               .peak = now.peak,
                               .stall = now.stall,
                               .forming = now.forming,
                               .reads = static_cast<std::int32_t>(now.reads),
                               .unused = now.unused});
  });
}

stowage_status stowage_engine_uses(const stowage_engine* engine, int32_t id, stowage_uses* uses) {
  return call(__func__, [&](const char* here) {
    not_null(here, "engine", engine);
    const WeightUses now = engine->engine.uses(id);
    give(here, "uses", uses, kUses,
         stowage_uses{.size = sizeof(stowage_uses),
                      .hits = now.hits,
                      .misses = now.misses,
                      .late = now.late,
                      .borrowed = now.borrowed,
                      .ahead = now.ahead,
                      .unused = now.unused,
                      .stall = now.stall});
  });
}

void stowage_lease_free(stowage_lease* lease) { delete lease; }

stowage_status stowage_lease_weight(stowage_lease* lease, const stowage_weight** weight) {
  return call(__func__, [&](const char* here) {
    not_null(here, "lease", lease);
    not_null(here, "weight", weight);
    if (!lease->weight) lease->weight.emplace(lease->lease.weight(), lease->name, lease->compute);
    *weight = &*lease->weight;
  });
}

stowage_status stowage_lease_at(const stowage_lease* lease, const void* mapped, const void** at) {
  return call(__func__, [&](const char* here) {
    not_null(here, "lease", lease);
    not_null(here, "mapped", mapped);
    not_null(here, "at", at);
    *at = lease->lease.at(mapped);
  });
}
