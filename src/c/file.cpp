// SPDX-License-Identifier: Apache-2.0
// Files of the C interface.
#include "stowage/file.h"

#include <algorithm>

#include "c/handles.h"

using namespace stowage;
using namespace stowage::c;

stowage_file::stowage_file(File opened) : file(std::move(opened)) {
  for (const WeightInfo& weight : file.weights()) storages.push_back(to_string(weight.storage));
}

namespace {

void not_null_file(const char* function, const stowage_file* file, const char* name,
                   const void* argument) {
  not_null(function, "file", file);
  not_null(function, name, argument);
}

// Where a name stands among those that are sorted by it, or -1.
template <class Named>
std::int64_t place_of(const std::vector<Named>& sorted, const char* name) {
  const auto found = std::ranges::lower_bound(sorted, std::string_view(name), {}, &Named::name);
  return found == sorted.end() || found->name != name ? -1 : found - sorted.begin();
}

}  // namespace

stowage_status stowage_file_open(const char* path, stowage_file** file) {
  return call(__func__, [&](const char* here) {
    not_null(here, "path", path);
    not_null(here, "file", file);
    *file = new stowage_file(File::open(path));
  });
}

void stowage_file_free(stowage_file* file) { delete file; }

stowage_status stowage_file_dialect(const stowage_file* file, const char** dialect) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "dialect", dialect);
    *dialect = file->file.dialect().c_str();
  });
}

stowage_status stowage_file_metadata(const stowage_file* file, const char* key,
                                     const char** value) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "key", key);
    not_null(here, "value", value);
    const auto found = file->file.metadata().find(key);
    *value = found == file->file.metadata().end() ? nullptr : found->second.c_str();
  });
}

stowage_status stowage_file_weight_count(const stowage_file* file, int64_t* count) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "count", count);
    *count = static_cast<std::int64_t>(file->file.weights().size());
  });
}

stowage_status stowage_file_find_weight(const stowage_file* file, const char* name,
                                        int64_t* index) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "name", name);
    not_null(here, "index", index);
    *index = place_of(file->file.weights(), name);
  });
}

stowage_status stowage_file_describe_weight(const stowage_file* file, int64_t index,
                                            stowage_weight_info* info) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "info", info);
    const std::size_t i = checked_index(here, "index", index, file->storages.size());
    const WeightInfo& weight = file->file.weights()[i];
    give(here, "info", info, kWeightInfo,
         weight_info(weight.name, file->storages[i], weight.compute.value_or(Dtype::unknown),
                     weight.storage, weight.shape));
  });
}

stowage_status stowage_file_tensor_count(const stowage_file* file, int64_t* count) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "count", count);
    *count = static_cast<std::int64_t>(file->file.tensors().size());
  });
}

stowage_status stowage_file_find_tensor(const stowage_file* file, const char* name,
                                        int64_t* index) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "name", name);
    not_null(here, "index", index);
    *index = place_of(file->file.tensors(), name);
  });
}

stowage_status stowage_file_describe_tensor(const stowage_file* file, int64_t index,
                                            stowage_tensor_info* info) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "info", info);
    const auto& tensors = file->file.tensors();
    const TensorInfo& tensor = tensors[checked_index(here, "index", index, tensors.size())];
    give(here, "info", info, kTensorInfo,
         tensor_info(tensor.name.c_str(), tensor.dtype_name.c_str(), tensor.dtype, tensor.shape,
                     tensor.bytes, file->file.bytes(tensor).data()));
  });
}

stowage_status stowage_file_weight(const stowage_file* file, int64_t index, stowage_dtype compute,
                                   stowage_weight** weight) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "weight", weight);
    const std::size_t i = checked_index(here, "index", index, file->storages.size());
    const WeightInfo& info = file->file.weights()[i];
    std::optional<Dtype> asked = checked_dtype(here, "compute", compute, true);
    if (asked == Dtype::unknown) asked = {};
    *weight = new stowage_weight(file->file.weight(info.name, asked), info.name,
                                 asked.value_or(info.compute.value_or(Dtype::unknown)));
  });
}

stowage_status stowage_file_check(const stowage_file* file) {
  return call(__func__, [&](const char* here) {
    not_null(here, "file", file);
    file->file.check();
  });
}

stowage_status stowage_file_verify(const stowage_file* file, int64_t* compared) {
  return call(__func__, [&](const char* here) {
    not_null_file(here, file, "compared", compared);
    *compared = file->file.verify();
  });
}
