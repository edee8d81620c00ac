// SPDX-License-Identifier: Apache-2.0
// Ops on files that are read. A tensor from file_read lies in the mapping itself and keeps it.
#include "stowage/file.h"

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "stowage/private_map.h"
#include "torch/arguments.h"
#include "torch/executor.h"
#include "torch/files.h"
#include "torch/handles.h"

namespace stowage::door {
namespace {
using nlohmann::json;

Handles<const File>& files() {
  static Handles<const File> made("file");
  return made;
}

std::int64_t file_open(const std::string& path) {
  return files().add(std::make_shared<const File>(File::open(path)));
}

json tensor_json(const TensorInfo& tensor) {
  return {{"name", tensor.name},   {"dtype", tensor.dtype_name}, {"shape", tensor.shape.sizes()},
          {"shard", tensor.shard}, {"offset", tensor.offset},    {"bytes", tensor.bytes}};
}

json weight_json(const WeightInfo& weight) {
  json out = {{"name", weight.name},           {"storage", to_string(weight.storage)},
              {"shape", weight.shape.sizes()}, {"parts", weight.parts},
              {"beside", weight.beside},       {"nested_offset", weight.nested_offset},
              {"forms", json::array()},        {"compute", nullptr}};
  if (weight.compute) out["compute"] = disk_name(*weight.compute);
  for (const PartForm& form : weight.forms) out["forms"].push_back(form_key(form));
  return out;
}

// {"paths": [..], "index": "", "metadata": {..}, "tensors": [{name, dtype, shape, shard, offset,
// bytes}],
//  "weights": [{name, storage, shape, parts, beside, nested_offset, forms, compute}],
//  "unreadable": {name: neighbour}, "dialect": "", "markers": [..]}
Tensor file_describe(std::int64_t handle) {
  const auto file = files().get("stowage::file_describe", handle);
  json tensors = json::array(), weights = json::array();
  for (const TensorInfo& tensor : file->tensors()) tensors.push_back(tensor_json(tensor));
  for (const WeightInfo& weight : file->weights()) weights.push_back(weight_json(weight));
  const json out = {{"paths", file->paths()},        {"index", file->index()},
                    {"metadata", file->metadata()},  {"tensors", std::move(tensors)},
                    {"weights", std::move(weights)}, {"unreadable", file->unreadable()},
                    {"dialect", file->dialect()},    {"markers", file->markers()}};
  // Paths may hold bytes that are not UTF-8.
  return text_bytes(out.dump(-1, ' ', false, json::error_handler_t::replace));
}

// `tensors`: [{name, dtype, shape, bytes}]; `values`: the bytes of each of them that has at most
// 64 KiB, else none. Gives "weights" and "unreadable" as file_describe does.
Tensor state_describe(const std::string& where, const std::string& tensors,
                      const std::vector<Tensor>& values) {
  constexpr const char* kWhere = "stowage::state_describe";
  std::vector<TensorInfo> infos;
  try {
    for (const json& tensor : json::parse(tensors)) {
      TensorInfo info;
      info.name = tensor.at("name").get<std::string>();
      info.dtype_name = tensor.at("dtype").get<std::string>();
      info.dtype = dtype_from_disk_name(info.dtype_name);
      info.shape = Shape(tensor.at("shape").get<std::vector<std::int64_t>>());
      info.bytes = tensor.at("bytes").get<std::uint64_t>();
      infos.push_back(std::move(info));
    }
  } catch (const json::exception& e) {
    fail(Code::invalid_argument, std::string(kWhere) +
                                     ": tensors must be JSON of the documented "
                                     "form, got: " +
                                     e.what());
  }
  if (values.size() != infos.size()) {
    fail(Code::invalid_argument, std::string(kWhere) +
                                     ": there must be values for each tensor, "
                                     "got " +
                                     std::to_string(values.size()) + " for " +
                                     std::to_string(infos.size()));
  }
  std::map<std::string, std::size_t> place;
  for (std::size_t i = 0; i < infos.size(); ++i) place.emplace(infos[i].name, i);
  const FoundWeights found = weights_among(where, infos, [&](const TensorInfo& tensor) {
    const Argument bytes(kWhere, tensor.name.c_str(), values[place.at(tensor.name)].get());
    if (static_cast<std::uint64_t>(bytes.elements()) != tensor.bytes) {
      fail(Code::invalid_argument, where + ": tensor '" + tensor.name + "': must hold values");
    }
    return std::string(static_cast<const char*>(bytes.data()), tensor.bytes);
  });
  json weights = json::array();
  for (const WeightInfo& weight : found.weights) weights.push_back(weight_json(weight));
  return text_bytes(
      json({{"weights", std::move(weights)}, {"unreadable", found.unreadable}}).dump());
}

const TensorInfo& tensor_of(const char* where, const File& file, const std::string& name) {
  const TensorInfo* const found = file.find(name);
  if (found == nullptr) {
    fail(Code::invalid_argument, std::string(where) + ": " + file.paths().front() +
                                     ": must hold the tensor, got '" + name + "'");
  }
  return *found;
}

// Memory of a file, which it keeps.
Tensor octets_at(const std::byte* at, std::uint64_t bytes, std::shared_ptr<const File> file) {
  const auto count = static_cast<std::int64_t>(bytes);
  if (count == 0) return boxed(empty({&count, 1}, Dtype::u8));
  const std::int64_t stride = 1;
  // torch has no read-only tensors: the Python layer guards against writing into the mapping.
  return torch::stable::from_blob(const_cast<std::byte*>(at), {&count, 1}, {&stride, 1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  torch::headeronly::ScalarType::Byte,
                                  [file = std::move(file)](void*) {});
}

Tensor file_read(std::int64_t handle, const std::string& name) {
  constexpr const char* kWhere = "stowage::file_read";
  const auto file = files().get(kWhere, handle);
  const auto bytes = file->bytes(tensor_of(kWhere, *file, name));
  return octets_at(bytes.data(), bytes.size(), file);
}

// `stacks`: [{name, storage (its key), shape, matrices: [[names] of each index]}]. The same file
// with these, by a handle of its own.
std::int64_t file_stacks(std::int64_t handle, const std::string& stacks) {
  constexpr const char* kWhere = "stowage::file_stacks";
  const auto file = files().get(kWhere, handle);
  std::vector<StackInfo> infos;
  try {
    for (const json& stack : json::parse(stacks))
      infos.push_back({stack.at("name").get<std::string>(),
                       storage_from_key(stack.at("storage").get<std::int64_t>()),
                       Shape(stack.at("shape").get<std::vector<std::int64_t>>()),
                       stack.at("matrices").get<std::vector<std::vector<std::string>>>()});
  } catch (const json::exception& e) {
    fail(Code::invalid_argument,
         std::string(kWhere) + ": stacks must be JSON of the documented form, got: " + e.what());
  }
  return files().add(std::make_shared<const File>(file->with_stacks(std::move(infos))));
}

// A part of a stack, whose bytes are made when they are touched.
Tensor file_stack_part(std::int64_t handle, const std::string& name, std::int64_t part) {
  constexpr const char* kWhere = "stowage::file_stack_part";
  const auto file = files().get(kWhere, handle);
  const Weight stack = file->stack(name);
  const Layout made = layout(stack.storage(), stack.shape());
  if (part < 0 || part >= made.count)
    fail(Code::out_of_range, std::string(kWhere) + ": part must be from 0 to " +
                                 std::to_string(made.count - 1) + ", got " + std::to_string(part));
  const auto* const at = static_cast<const std::byte*>(stack.part(static_cast<int>(part)));
  const std::int64_t bytes = made.parts[static_cast<std::size_t>(part)].bytes;
  return octets_at(at, static_cast<std::uint64_t>(bytes), file);
}

std::span<std::byte> bytes_of(const Owned& tensor, std::uint64_t count) {
  return {static_cast<std::byte*>(memory(tensor)), count};
}

void check_has(const char* where, const TensorInfo& tensor, std::int64_t begin,
               std::int64_t count) {
  if (begin < 0 || count < 0 || std::cmp_greater(begin, tensor.bytes) ||
      std::cmp_greater(count, tensor.bytes - static_cast<std::uint64_t>(begin)))
    fail(Code::out_of_range, std::string(where) + ": must be asked for bytes of the tensor");
}

// The same from a byte on in memory of torch's; of -1 bytes all that follow.
Tensor file_copy(std::int64_t handle, const std::string& name, std::int64_t begin,
                 std::int64_t bytes) {
  constexpr const char* kWhere = "stowage::file_copy";
  const auto file = files().get(kWhere, handle);
  const TensorInfo& tensor = tensor_of(kWhere, *file, name);
  const std::int64_t all = static_cast<std::int64_t>(tensor.bytes);
  check_has(kWhere, tensor, begin, bytes == -1 ? 0 : bytes);
  const std::int64_t count = bytes == -1 ? all - begin : bytes;
  Owned made = empty({&count, 1}, Dtype::u8);
  if (count != 0) {
    file->read(tensor, static_cast<std::uint64_t>(begin),
               bytes_of(made, static_cast<std::uint64_t>(count)));
  }
  return boxed(std::move(made));
}

// Bytes of a tensor as memory that may be written, which the file never sees.
Tensor file_map(std::int64_t handle, const std::string& name, std::int64_t begin,
                std::int64_t count) {
  constexpr const char* kWhere = "stowage::file_map";
  const auto file = files().get(kWhere, handle);
  TensorInfo some = tensor_of(kWhere, *file, name);
  check_has(kWhere, some, begin, count);
  if (count == 0) return boxed(empty({&count, 1}, Dtype::u8));
  some.offset += static_cast<std::uint64_t>(begin);
  some.bytes = static_cast<std::uint64_t>(count);
  const std::int64_t stride = 1;
  const auto bytes = map_private(*file, some);
  return torch::stable::from_blob(bytes.get(), {&count, 1}, {&stride, 1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  torch::headeronly::ScalarType::Byte, [bytes](void*) {});
}

// Their memory: codes are large.
Tensor octets_of(std::vector<std::byte> made) {
  const auto count = static_cast<std::int64_t>(made.size());
  if (count == 0) return boxed(empty({&count, 1}, Dtype::u8));
  const std::int64_t stride = 1;
  const auto bytes = std::make_shared<std::vector<std::byte>>(std::move(made));
  return torch::stable::from_blob(bytes->data(), {&count, 1}, {&stride, 1},
                                  torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  torch::headeronly::ScalarType::Byte, [bytes](void*) {});
}

// A part of a weight that its tensor becomes in another form: now, or, where it has an address for
// that, when it is touched.
Tensor file_part(std::int64_t handle, const std::string& weight, std::int64_t part,
                 const std::string& compute, bool touched) {
  constexpr const char* kWhere = "stowage::file_part";
  const auto file = files().get(kWhere, handle);
  const WeightInfo* const info = file->find_weight(weight);
  const Dtype dtype = dtype_from_disk_name(compute);
  const bool formed = info != nullptr && part >= 0 && std::cmp_less(part, info->forms.size());
  if (!formed || !is_value_dtype(dtype))
    fail(Code::invalid_argument,
         std::string(kWhere) + ": must be asked for a part that has a form, in a value dtype");
  const int at = static_cast<int>(part);
  const std::byte* const place = touched ? file->formed_place(*info, at) : nullptr;
  const std::uint64_t bytes = file->part_bytes(*info, at);
  if (place != nullptr) return octets_at(place, bytes, file);
  // Of a weight that stays in the file, though: no write has made it torch's.
  if (touched) return octets_of(file->formed_part(*info, at, dtype));
  const auto count = static_cast<std::int64_t>(bytes);
  Owned made = empty({&count, 1}, Dtype::u8);
  std::vector<std::span<std::byte>> places(info->parts.size());
  places[static_cast<std::size_t>(at)] = bytes_of(made, bytes);
  file->read_parts(*info, dtype, places);
  return boxed(std::move(made));
}

// A weight of the file, in a value dtype.
struct Asked {
  std::shared_ptr<const File> file;
  const WeightInfo* weight;
  Dtype compute;
};
Asked asked(const char* where, std::int64_t handle, const std::string& weight,
            const std::string& compute) {
  auto file = files().get(where, handle);
  const WeightInfo* const info = file->find_weight(weight);
  const Dtype dtype = dtype_from_disk_name(compute);
  if (info == nullptr || !is_value_dtype(dtype))
    fail(Code::invalid_argument,
         std::string(where) + ": must be asked for a weight of the file, in a value dtype");
  return {std::move(file), info, dtype};
}

// Memory of torch's for all its parts, of so many bytes each, which `read` fills.
std::vector<Tensor> filled(const WeightInfo& weight, auto bytes_of_part, auto read) {
  std::vector<Owned> made;
  std::vector<std::span<std::byte>> places;
  for (int i = 0; std::cmp_less(i, weight.parts.size()); ++i) {
    const std::uint64_t bytes = bytes_of_part(i);
    const auto count = static_cast<std::int64_t>(bytes);
    made.push_back(empty({&count, 1}, Dtype::u8));
    places.push_back(bytes_of(made.back(), bytes));
  }
  read(places);
  std::vector<Tensor> all;
  for (Owned& one : made) all.push_back(boxed(std::move(one)));
  return all;
}

// All parts of a weight in memory of torch's: the bytes of the tensors of those that are whole,
// and of the others, formed, those of the layout. None for the offset of nested scales.
std::vector<Tensor> file_parts(std::int64_t handle, const std::string& weight,
                               const std::string& compute) {
  const Asked of = asked("stowage::file_parts", handle, weight, compute);
  return filled(
      *of.weight, [&](int i) { return of.file->part_bytes(*of.weight, i); },
      [&](const auto& places) { of.file->read_parts(*of.weight, of.compute, places); });
}

// Rows [first, last) of a weight: as file_parts() gives them, but that parts which are whole in the
// file have theirs only.
std::vector<Tensor> file_rows(std::int64_t handle, const std::string& weight, std::int64_t first,
                              std::int64_t last, const std::string& compute) {
  const Asked of = asked("stowage::file_rows", handle, weight, compute);
  return filled(
      *of.weight, [&](int i) { return of.file->rows_bytes(*of.weight, i, first, last); },
      [&](const auto& places) { of.file->read_rows(*of.weight, first, last, of.compute, places); });
}

// The way back. The part has the shape that it has in memory.
Tensor tensor_of_part_op(const Tensor& part, std::int64_t form) {
  const Argument given("stowage::tensor_of_part", "part", part.get());
  const PartForm known = form_from_key(form);
  const Shape shape(given.sizes());
  if (bits(given.dtype()) < 8)
    fail(Code::invalid_argument, "stowage::tensor_of_part: part must be of a type of storages");
  const auto count = static_cast<std::size_t>(given.elements() * bits(given.dtype()) / 8);
  const std::span bytes(static_cast<const std::byte*>(given.data()), count);
  return octets_of(tensor_of_part(known, bytes, shape));
}

Tensor file_header(std::int64_t handle, std::int64_t shard) {
  constexpr const char* kWhere = "stowage::file_header";
  const auto file = files().get(kWhere, handle);
  if (shard < 0 || std::cmp_greater_equal(shard, file->paths().size()))
    fail(Code::out_of_range, std::string(kWhere) + ": must be asked for a shard of the file");
  return text_bytes(file->header(static_cast<int>(shard)));
}

void file_populate(std::int64_t handle, const std::string& name, std::int64_t begin,
                   std::int64_t bytes, bool mapped) {
  constexpr const char* kWhere = "stowage::file_populate";
  const auto file = files().get(kWhere, handle);
  const TensorInfo& tensor = tensor_of(kWhere, *file, name);
  if (begin < 0 || bytes < 0) {
    throw Error(Code::invalid_argument,
                std::string(kWhere) + ": begin and bytes must be at least " + "0, got " +
                    std::to_string(begin) + " and " + std::to_string(bytes));
  }
  const auto first = static_cast<std::uint64_t>(begin), count = static_cast<std::uint64_t>(bytes);
  if (mapped)
    file->populate(tensor, first, count);
  else
    file->expect(tensor, first, count);
}

void file_drop(std::int64_t handle, const std::string& name) {
  constexpr const char* kWhere = "stowage::file_drop";
  const auto file = files().get(kWhere, handle);
  file->drop(tensor_of(kWhere, *file, name));
}

// The pages of a tensor that the ops of this thread read go as they are read, each some of them:
// an empty name ends that.
void file_drop_behind(std::int64_t handle, const std::string& name) {
  constexpr const char* kWhere = "stowage::file_drop_behind";
  if (name.empty()) return after_each_task({});
  const auto file = files().get(kWhere, handle);
  const TensorInfo& tensor = tensor_of(kWhere, *file, name);
  const auto read = std::make_shared<std::atomic<std::int64_t>>(0);
  after_each_task([file, &tensor, read](double part) {
    constexpr std::int64_t kSome = std::int64_t{2} << 20;
    const auto bytes = static_cast<std::int64_t>(part * static_cast<double>(tensor.bytes));
    if (read->fetch_add(bytes) + bytes < kSome) return;
    read->store(0);
    file->drop(tensor);
  });
}

std::int64_t file_verify(std::int64_t handle) {
  return files().get("stowage::file_verify", handle)->verify();
}

void file_check(std::int64_t handle) { files().get("stowage::file_check", handle)->check(); }

void file_close(std::int64_t handle) { files().take("stowage::file_close", handle); }

}  // namespace

std::shared_ptr<const File> file_of(const char* where, std::int64_t handle) {
  return files().get(where, handle);
}

STABLE_TORCH_LIBRARY_IMPL(stowage, CompositeExplicitAutograd, m) {
  m.impl("file_open", TORCH_BOX(&Door<&file_open>::call));
  m.impl("file_describe", TORCH_BOX(&Door<&file_describe>::call));
  m.impl("state_describe", TORCH_BOX(&Door<&state_describe>::call));
  m.impl("file_read", TORCH_BOX(&Door<&file_read>::call));
  m.impl("file_map", TORCH_BOX(&Door<&file_map>::call));
  m.impl("file_copy", TORCH_BOX(&Door<&file_copy>::call));
  m.impl("file_stacks", TORCH_BOX(&Door<&file_stacks>::call));
  m.impl("file_stack_part", TORCH_BOX(&Door<&file_stack_part>::call));
  m.impl("file_parts", TORCH_BOX(&Door<&file_parts>::call));
  m.impl("file_rows", TORCH_BOX(&Door<&file_rows>::call));
  m.impl("file_part", TORCH_BOX(&Door<&file_part>::call));
  m.impl("tensor_of_part", TORCH_BOX(&Door<&tensor_of_part_op>::call));
  m.impl("file_header", TORCH_BOX(&Door<&file_header>::call));
  m.impl("file_populate", TORCH_BOX(&Door<&file_populate>::call));
  m.impl("file_drop", TORCH_BOX(&Door<&file_drop>::call));
  m.impl("file_drop_behind", TORCH_BOX(&Door<&file_drop_behind>::call));
  m.impl("file_verify", TORCH_BOX(&Door<&file_verify>::call));
  m.impl("file_check", TORCH_BOX(&Door<&file_check>::call));
  m.impl("file_close", TORCH_BOX(&Door<&file_close>::call));
}
}  // namespace stowage::door
