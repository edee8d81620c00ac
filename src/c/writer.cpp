// SPDX-License-Identifier: Apache-2.0
// Writers of the C interface: what is declared is gathered, and the first write reserves the space.
#include "stowage/writer.h"

#include <algorithm>
#include <iterator>
#include <memory>

#include "c/handles.h"

using namespace stowage;
using namespace stowage::c;

struct stowage_writer {
  std::string path;
  WriterOptions options = {};
  std::vector<Declaration> tensors = {};  // those of no weight
  std::unique_ptr<Writer> writer = {};

  Writer& begun() {
    if (!writer) {
      std::vector<Declaration> every = tensors;
      for (const WeightInfo& weight : options.weights)
        std::ranges::move(disk_layout(weight.name, weight.storage, weight.shape),
                          std::back_inserter(every));
      writer = std::make_unique<Writer>(path, std::move(every), options);
    }
    return *writer;
  }
};

namespace {

void declares(const char* function, const stowage_writer* writer, const char* name) {
  not_null(function, "writer", writer);
  not_null(function, "name", name);
  if (writer->writer)
    refuse(function,
           "all must be declared before the first write, got '" + std::string(name) + "' after it");
}

}  // namespace

stowage_status stowage_writer_new(const char* path, const stowage_writer_options* options,
                                  stowage_writer** writer) {
  return call(__func__, [&](const char* here) {
    not_null(here, "path", path);
    not_null(here, "writer", writer);
    auto made = std::make_unique<stowage_writer>(stowage_writer{path});
    if (options != nullptr) {
      const stowage_writer_options given = taken(here, options, kWriterOptions);
      made->options.shard_bytes = given.shard_bytes;
      made->options.checksums = given.no_checksums == 0;
    }
    *writer = made.release();
  });
}

void stowage_writer_free(stowage_writer* writer) { delete writer; }

stowage_status stowage_writer_set_metadata(stowage_writer* writer, const char* key,
                                           const char* value) {
  return call(__func__, [&](const char* here) {
    not_null(here, "key", key);
    declares(here, writer, key);
    not_null(here, "value", value);
    writer->options.metadata[key] = value;
  });
}

stowage_status stowage_writer_declare_weight(stowage_writer* writer, const char* name,
                                             const char* storage, const int64_t* shape,
                                             int32_t rank, stowage_dtype compute) {
  return call(__func__, [&](const char* here) {
    declares(here, writer, name);
    not_null(here, "storage", storage);
    const Dtype asked = checked_dtype(here, "compute", compute, true);
    WeightInfo weight{.name = name,
                      .storage = parse_storage(storage),
                      .shape = checked_shape(here, shape, rank),
                      .parts = {},
                      .compute = {}};
    if (asked != Dtype::unknown) weight.compute = asked;
    (void)disk_layout(name, weight.storage, weight.shape);  // refuses what has none
    writer->options.weights.push_back(std::move(weight));
  });
}

stowage_status stowage_writer_declare_tensor(stowage_writer* writer, const char* name,
                                             stowage_dtype dtype, const int64_t* shape,
                                             int32_t rank) {
  return call(__func__, [&](const char* here) {
    declares(here, writer, name);
    writer->tensors.push_back({.name = name,
                               .dtype = checked_dtype(here, "dtype", dtype),
                               .shape = checked_shape(here, shape, rank),
                               .dtype_name = {}});
  });
}

stowage_status stowage_writer_write_weight(stowage_writer* writer, const char* name,
                                           const stowage_weight* weight) {
  return call(__func__, [&](const char* here) {
    not_null(here, "writer", writer);
    not_null(here, "name", name);
    not_null(here, "weight", weight);
    writer->begun().write_weight(name, weight->weight);
  });
}

stowage_status stowage_writer_write_tensor(stowage_writer* writer, const char* name,
                                           const void* data, uint64_t bytes) {
  return call(__func__, [&](const char* here) {
    not_null(here, "writer", writer);
    not_null(here, "name", name);
    if (bytes > 0) not_null(here, "data", data);
    writer->begun().write(name, {static_cast<const std::byte*>(data), bytes});
  });
}

stowage_status stowage_writer_finish(stowage_writer* writer) {
  return call(__func__, [&](const char* here) {
    not_null(here, "writer", writer);
    writer->begun().finish();
  });
}
