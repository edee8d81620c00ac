// SPDX-License-Identifier: Apache-2.0
// File: an opened model. All of it is read-only after open(), so threads may share one.
#include "stowage/file.h"

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <utility>

#include "base/checked.h"
#include "base/formatted.h"
#include "store/checksum.h"
#include "store/formed_view.h"
#include "store/header.h"
#include "store/model_path.h"
#include "store/part_form.h"
#include "store/part_pieces.h"
#include "store/part_rows.h"
#include "store/quant_config.h"
#include "store/refusal.h"
#include "store/shard.h"
#include "store/weights.h"
#include "stowage/descriptor.h"

namespace stowage {

struct File::State {
  std::vector<std::string> paths;
  std::string index;
  std::vector<Shard> shards;
  std::vector<TensorInfo> tensors;
  FoundWeights found;
  // Made when they are first asked for: by weight, and its parts that have views, in their order.
  mutable std::once_flag viewed;
  mutable std::vector<std::size_t> first_view;
  mutable std::unique_ptr<FormedViews> views;

  const MappedFile& map(const TensorInfo& tensor) const {
    return shards[static_cast<std::size_t>(tensor.shard)].map;
  }
  const std::byte* data(const TensorInfo& tensor) const {
    return map(tensor).data() + tensor.offset;
  }
  const TensorInfo& tensor(const WeightInfo& weight, std::size_t part) const {
    return *find_tensor(tensors, weight.parts[part]);
  }
  Place place(const TensorInfo& tensor) const {
    return {paths[static_cast<std::size_t>(tensor.shard)], tensor.name, tensor.offset};
  }
  void make_views() const {
    std::vector<ViewedPart> all;
    first_view.clear();
    for (const WeightInfo& weight : found.weights) {
      first_view.push_back(all.size());
      const Layout made = layout(weight.storage, weight.shape);
      for (std::size_t i = 0; i < weight.forms.size(); ++i) {
        if (!has_view(weight.forms[i])) continue;
        const TensorInfo& from = tensor(weight, i);
        const auto bytes = static_cast<std::uint64_t>(made.parts[i].bytes);
        all.push_back({bytes,
                       {{&map(from), from.offset, from.bytes, place(from), weight.forms[i],
                         made.parts[i].shape, 0, bytes}}});
      }
    }
    if (!all.empty()) views = std::make_unique<FormedViews>(std::move(all));
  }
};

namespace {

std::string read_tensor(const MappedFile& map, const TensorInfo& tensor) {
  std::string text(tensor.bytes, '\0');
  map.read(tensor.offset, std::as_writable_bytes(std::span(text)));
  return text;
}

// Parts that a file does not hold at an address their element type allows are copied; the writer
// of this library leaves none, other tools may.
struct Owner {
  std::shared_ptr<const void> file;
  std::vector<std::unique_ptr<std::byte[]>> copies;

  const void* keep(std::span<const std::byte> bytes) {
    copies.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes.size()));
    std::ranges::copy(bytes, copies.back().get());
    return copies.back().get();
  }
  const void* aligned(std::span<const std::byte> bytes, Dtype dtype) {
    const auto need = static_cast<std::uintptr_t>(std::max(bits(dtype) / 8, 1));
    return reinterpret_cast<std::uintptr_t>(bytes.data()) % need == 0 ? bytes.data() : keep(bytes);
  }
};

void check_checksum(const MappedFile& map, const TensorInfo& tensor, std::uint64_t expected) {
  Checksum checksum;
  std::vector<std::byte> buffer(std::min<std::uint64_t>(tensor.bytes, std::uint64_t{1} << 20));
  for (std::uint64_t done = 0; done < tensor.bytes;) {
    const std::uint64_t n = std::min<std::uint64_t>(buffer.size(), tensor.bytes - done);
    const auto piece = std::span(buffer).first(n);
    map.read(tensor.offset + done, piece);
    checksum.add(piece);
    done += n;
  }
  if (checksum.value() == expected) return;
  refuse(Refusal::checksum, {map.path(), tensor.name, tensor.offset},
         hex(checksum.value()) + " for " + hex(expected));
}

// Of its part, as that of rows of the weight.
PartRows rows_of_part(const WeightInfo& weight, int part, const PartRows& rows,
                      const Shape& of_part) {
  const Shape& shape = weight.shape;
  if (rows.first < 0 || rows.first > rows.last || rows.last > shape.rows())
    throw Error(Code::invalid_argument,
                formatted("weight {}: rows must lie in {}, got {} to {}", in_quotes(weight.name),
                          to_string(shape), rows.first, rows.last));
  const std::int64_t each = elements_of_part_row(weight.storage, part, shape);
  if (part >= parts_in_rows(weight.storage) || each == 0) return {0, of_part.rows()};
  const std::int64_t first = rows.first * shape.row_elements();
  const std::int64_t last = rows.last * shape.row_elements();
  if (first % each != 0 || (last % each != 0 && rows.last != shape.rows()))
    throw Error(
        Code::invalid_argument,
        formatted("weight {}: rows must end where blocks of {} elements do, got {} to {} of "
                  "{}",
                  in_quotes(weight.name), each, rows.first, rows.last, to_string(shape)));
  return {first / each, ceil_div(last, each)};
}

}  // namespace

inline namespace v0 {

File File::open(const std::string& path) {
  check_path(path);
  const ModelPath model = find_model(path);
  auto state = std::make_shared<State>();
  if (model.is_index) {
    state->index = model.path;
    state->shards = open_shard_set(model.path);
  } else {
    state->shards.push_back(open_shard(model.path));
  }
  for (std::size_t i = 0; i < state->shards.size(); ++i) {
    Shard& shard = state->shards[i];
    state->paths.push_back(shard.map.path());
    for (TensorInfo& tensor : shard.header.tensors) {
      tensor.shard = static_cast<int>(i);
      state->tensors.push_back(tensor);
    }
  }
  std::ranges::sort(state->tensors, {}, &TensorInfo::name);
  const auto read = [&](const TensorInfo& tensor) {
    return read_tensor(state->map(tensor), tensor);
  };
  TensorSource source{.paths = state->paths, .tensors = state->tensors, .read = read};
  for (Shard& shard : state->shards) {
    source.said.merge(std::move(shard.manifest.weights));
    source.metadata.push_back(&shard.header.metadata);
    source.is_gguf |= shard.header.is_gguf;
    source.is_ours |=
        !shard.header.is_gguf && shard.header.metadata.contains(std::string(kManifestKey));
  }
  // A file that is named by itself is what its header says; beside it may lie anything.
  std::optional<QuantConfig> config;
  if (model.path != path || model.is_index) config = QuantConfig::in_folder(folder_of(model.path));
  if (config) source.config = &*config;
  state->found = find_weights(source);
  File file;
  file.state_ = std::move(state);
  return file;
}

std::span<const Shard> OpenShards::of(const File& file) noexcept { return file.state_->shards; }

const std::vector<std::string>& File::paths() const noexcept { return state_->paths; }
const std::string& File::index() const noexcept { return state_->index; }
const std::map<std::string, std::string>& File::metadata() const noexcept {
  return state_->shards.front().header.metadata;
}
const std::vector<TensorInfo>& File::tensors() const noexcept { return state_->tensors; }
const std::vector<WeightInfo>& File::weights() const noexcept { return state_->found.weights; }
const std::map<std::string, std::string>& File::unreadable() const noexcept {
  return state_->found.unreadable;
}

const std::string& File::dialect() const noexcept { return state_->found.dialect; }
const std::vector<std::string>& File::markers() const noexcept { return state_->found.markers; }

const TensorInfo* File::find(std::string_view name) const noexcept {
  return find_tensor(state_->tensors, name);
}

const WeightInfo* File::find_weight(std::string_view name) const noexcept {
  const auto& infos = state_->found.weights;
  const auto at = std::ranges::lower_bound(infos, name, {}, &WeightInfo::name);
  return at != infos.end() && at->name == name ? &*at : nullptr;
}

std::span<const std::byte> File::bytes(const TensorInfo& tensor) const noexcept {
  return {state_->data(tensor), tensor.bytes};
}

void File::read(const TensorInfo& tensor, std::span<std::byte> out) const {
  state_->map(tensor).read(tensor.offset, out);
}

void File::read(const TensorInfo& tensor, std::uint64_t begin, std::span<std::byte> out) const {
  if (begin > tensor.bytes || out.size() > tensor.bytes - begin)
    throw Error(Code::out_of_range,
                formatted("tensor {} must have the bytes that are read, it has "
                          "{}, got {} from {} on",
                          in_quotes(tensor.name), tensor.bytes, out.size(), begin));
  state_->map(tensor).read(tensor.offset + begin, out);
}

std::uint64_t File::part_bytes(const WeightInfo& weight, int i) const {
  const auto at = static_cast<std::size_t>(i);
  if (!weight.forms.empty() && !weight.forms[at].is_whole())
    return static_cast<std::uint64_t>(layout(weight.storage, weight.shape).parts[at].bytes);
  const TensorInfo* const tensor = find(weight.parts[at]);
  return tensor == nullptr ? 0 : tensor->bytes;
}

void File::read_parts(const WeightInfo& weight, std::optional<Dtype> compute,
                      std::span<const std::span<std::byte>> out) const {
  const Layout made = layout(weight.storage, weight.shape);
  std::map<std::string_view, std::vector<PartPlace>> formed;  // by tensor
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (weight.forms.empty() || weight.forms[i].is_whole()) {
      if (!out[i].empty()) read(*find(weight.parts[i]), out[i]);
      continue;
    }
    if (out[i].empty() && made.parts[i].bytes != 0) continue;
    formed[weight.parts[i]].push_back({&weight.forms[i], made.parts[i].shape, out[i]});
  }
  const Dtype dtype = compute.value_or(weight.compute.value_or(Dtype::bf16));
  for (const auto& [name, parts] : formed) {
    const TensorInfo& tensor = *find(name);
    form_parts(parts, state_->place(tensor), tensor.bytes, dtype,
               [&](std::uint64_t offset, std::span<std::byte> bytes) {
                 state_->map(tensor).read(tensor.offset + offset, bytes);
               });
  }
}

std::uint64_t File::rows_bytes(const WeightInfo& weight, int i, std::int64_t first,
                               std::int64_t last) const {
  const Shape shape = layout(weight.storage, weight.shape).parts[static_cast<std::size_t>(i)].shape;
  const PartRows rows = rows_of_part(weight, i, {first, last}, shape);
  const auto all = static_cast<std::uint64_t>(shape.rows());
  const auto count = static_cast<std::uint64_t>(rows.last - rows.first);
  const std::uint64_t bytes = part_bytes(weight, i);
  return count == all ? bytes : bytes / all * count;
}

std::uint64_t File::read_rows(const WeightInfo& weight, std::int64_t first, std::int64_t last,
                              std::optional<Dtype> compute,
                              std::span<const std::span<std::byte>> out) const {
  const Layout made = layout(weight.storage, weight.shape);
  const Dtype dtype = compute.value_or(weight.compute.value_or(Dtype::bf16));
  static constexpr PartForm kWhole;
  std::map<std::string_view, std::vector<RowsPlace>> read;  // by tensor
  for (std::size_t i = 0; i < out.size(); ++i) {
    const int part = static_cast<int>(i);
    const std::uint64_t bytes = rows_bytes(weight, part, first, last);
    if (out[i].size() != bytes)
      throw Error(Code::invalid_argument,
                  formatted("weight {}: part {} of rows {} to {} must get memory for {} bytes, got "
                            "{}",
                            in_quotes(weight.name), part, first, last, bytes, out[i].size()));
    if (bytes == 0) continue;
    const PartForm& form = weight.forms.empty() ? kWhole : weight.forms[i];
    const Shape& shape = made.parts[i].shape;
    const PartRows rows = rows_of_part(weight, part, {first, last}, shape);
    read[weight.parts[i]].push_back({&form, shape, rows, out[i]});
  }
  std::uint64_t count = 0;
  for (const auto& [name, parts] : read) {
    const TensorInfo& tensor = *find(name);
    count += form_rows(parts, state_->place(tensor), tensor.bytes, dtype,
                       [&](std::uint64_t offset, std::span<std::byte> bytes) {
                         state_->map(tensor).read(tensor.offset + offset, bytes);
                       });
  }
  return count;
}

std::vector<std::byte> File::formed_part(const WeightInfo& weight, int i,
                                         std::optional<Dtype> compute) const {
  const auto at = static_cast<std::size_t>(i);
  const TensorInfo& tensor = *find(weight.parts[at]);
  const auto held = bytes(tensor);
  const Layout parts = layout(weight.storage, weight.shape);
  const Place place = state_->place(tensor);
  auto made = part_of_tensor(weight.forms[at], {place, held}, parts.parts[at].shape,
                             compute.value_or(weight.compute.value_or(Dtype::bf16)));
  check_memory(held.data());
  return made;
}

void File::form_part(const WeightInfo& weight, int i, std::span<const std::byte> tensor,
                     std::span<std::byte> out) const {
  const auto at = static_cast<std::size_t>(i);
  const Place place = state_->place(*find(weight.parts[at]));
  const Layout parts = layout(weight.storage, weight.shape);
  stowage::form_part(weight.forms[at], {place, tensor}, parts.parts[at].shape,
                     weight.compute.value_or(Dtype::bf16), out);
}

const std::byte* File::formed_place(const WeightInfo& weight, int i) const {
  const auto at = static_cast<std::size_t>(i);
  if (weight.forms.empty() || !has_view(weight.forms[at])) return nullptr;
  std::call_once(state_->viewed, [this] { state_->make_views(); });
  const auto& all = state_->found.weights;
  const auto index = static_cast<std::size_t>(find_weight(weight.name) - all.data());
  const auto before = std::count_if(weight.forms.begin(), weight.forms.begin() + i, has_view);
  return state_->views->address(state_->first_view[index] + static_cast<std::size_t>(before));
}

std::string File::header(int shard) const {
  const auto& [map, header, manifest] = state_->shards[static_cast<std::size_t>(shard)];
  const std::uint64_t begin = header.is_gguf ? 0 : kHeaderPrefix;
  std::string text(header.data_start - begin, '\0');
  map.read(begin, std::as_writable_bytes(std::span(text)));
  return text;
}

Weight File::weight(std::string_view name, std::optional<Dtype> compute, bool touched) const {
  const WeightInfo* const info = find_weight(name);
  if (info == nullptr) {
    throw Error(Code::invalid_argument, state_->paths.front() + ": weight " + in_quotes(name) +
                                            ": must be one of the file's weights, got none");
  }
  const Layout made = layout(info->storage, info->shape);
  auto owner = std::make_shared<Owner>();
  owner->file = state_;
  std::array<const void*, kMaxParts> parts{};
  for (std::size_t i = 0; i < info->parts.size(); ++i) {
    if (made.parts[i].name == "nested_offset") {
      parts[i] = &info->nested_offset;
    } else if (!info->forms.empty() && !info->forms[i].is_whole()) {
      const int part = static_cast<int>(i);
      parts[i] = touched ? formed_place(*info, part) : nullptr;
      if (parts[i] == nullptr) parts[i] = owner->keep(formed_part(*info, part, compute));
    } else {
      parts[i] = owner->aligned(bytes(*find(info->parts[i])), made.parts[i].dtype);
      check_memory(bytes(*find(info->parts[i])).data());  // which may have been copied
    }
  }
  return Weight(info->storage, info->shape, std::span(parts).first(info->parts.size()),
                std::move(owner));
}

void File::populate(const TensorInfo& tensor, std::uint64_t begin,
                    std::uint64_t bytes) const noexcept {
  if (begin >= tensor.bytes) return;
  (void)state_->map(tensor).populate(tensor.offset + begin, std::min(bytes, tensor.bytes - begin));
}

void File::expect(const TensorInfo& tensor, std::uint64_t begin,
                  std::uint64_t bytes) const noexcept {
  if (begin >= tensor.bytes) return;
  state_->map(tensor).expect(tensor.offset + begin, std::min(bytes, tensor.bytes - begin));
}

void File::drop(const TensorInfo& tensor) const noexcept {
  state_->map(tensor).drop(tensor.offset, tensor.bytes);
}

void File::check() const {
  for (const Shard& shard : state_->shards) check_unchanged(shard.map);
}

std::int64_t File::verify() const {
  std::int64_t checked = 0;
  for (const Shard& shard : state_->shards) {
    check_size(shard.map);
    for (const auto& [name, expected] : shard.manifest.checksums) {
      const TensorInfo* const tensor = find(name);
      if (tensor == nullptr) {
        refuse(Refusal::manifest_part, {shard.map.path(), name, {}}, "a checksum of no tensor");
      }
      check_checksum(state_->map(*tensor), *tensor, expected);
      ++checked;
    }
  }
  check();  // after the checksums, which name the tensor
  return checked;
}

}  // namespace v0
}  // namespace stowage
