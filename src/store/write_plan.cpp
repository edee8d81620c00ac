// SPDX-License-Identifier: Apache-2.0
#include "store/write_plan.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "base/file.h"
#include "base/formatted.h"
#include "store/gguf.h"
#include "store/header.h"
#include "store/json.h"
#include "store/model_path.h"

namespace stowage {
namespace {

[[noreturn]] void refuse_plan(std::string_view tensor, const std::string& text) {
  throw Error(Code::invalid_argument, "writer: tensor " + in_quotes(tensor) + ": " + text);
}

std::uint64_t bytes_of(const Declaration& tensor) {
  if (tensor.dtype == Dtype::unknown) {
    if (tensor.dtype_name.empty()) refuse_plan(tensor.name, "an unknown dtype must have a name");
    return tensor.bytes;
  }
  const auto count = checked_mul<std::int64_t>(tensor.shape.elements(), bits(tensor.dtype));
  if (!count || *count % 8 != 0) {
    refuse_plan(tensor.name, "must fill whole bytes and fit 63 bits, got " +
                                 std::string(disk_name(tensor.dtype)) + " " +
                                 to_string(tensor.shape));
  }
  return static_cast<std::uint64_t>(*count / 8);
}

void check_names(const std::vector<Declaration>& tensors) {
  std::set<std::string_view> seen;
  for (const Declaration& tensor : tensors) {
    if (tensor.name.empty()) refuse_plan("", "a name must not be empty, got one that is");
    if (tensor.name == kMetadataKey) refuse_plan(tensor.name, "the name is taken by the format");
    if (!seen.insert(tensor.name).second)
      refuse_plan(tensor.name, "must be declared once, got two");
    (void)json_string(tensor.name);  // refuses what is not UTF-8
  }
}

// What the manifest says must be what is declared, or our own reader would refuse the file.
void check_weights(const std::vector<Declaration>& tensors,
                   const std::vector<WeightInfo>& weights) {
  std::map<std::string_view, const Declaration*> declared;
  for (const Declaration& tensor : tensors) declared.emplace(tensor.name, &tensor);
  for (const WeightInfo& weight : weights) {
    for (const Declaration& part : disk_layout(weight.name, weight.storage, weight.shape)) {
      const auto at = declared.find(part.name);
      if (at != declared.end() && at->second->dtype == part.dtype &&
          at->second->shape == part.shape) {
        continue;
      }
      refuse_plan(part.name, formatted("weight {} as {} must have it declared as {} {}, got {}",
                                       in_quotes(weight.name), to_string(weight.storage),
                                       disk_name(part.dtype), to_string(part.shape),
                                       at == declared.end() ? "none" : "another"));
    }
  }
}

std::uint64_t sum_of_bytes(const PlannedShard& shard) {
  std::uint64_t sum = 0;
  for (const PlannedTensor& tensor : shard.tensors) {
    const auto end = checked_add(sum, tensor.bytes);
    if (!end || !checked_cast<std::int64_t>(*end)) {
      refuse_plan(tensor.declaration.name, "the file must fit 63 bits, got more");
    }
    sum = *end;
  }
  return sum;
}

// Big elements first, as safetensors orders them: each tensor then begins at a multiple of its
// element size. Where data begins at a page, tensors of whole pages go ahead of all others, so that
// each begins at a page too: the format has no room for holes. Names break ties, so that the order
// of declaration leaves no trace in the bytes.
void lay_out(PlannedShard& shard) {
  const bool paged = data_alignment(sum_of_bytes(shard)) == kPage;
  std::ranges::sort(shard.tensors, {}, [paged](const PlannedTensor& t) {
    const bool whole = paged && t.bytes % kPage == 0;
    return std::tuple(!whole, whole ? 0 : -bits(t.declaration.dtype),
                      std::string_view(t.declaration.name));
  });
  for (PlannedTensor& tensor : shard.tensors) {
    tensor.offset = shard.data_bytes;
    shard.data_bytes += tensor.bytes;
  }
}

// Fills shards in the order of declaration. The tensors of one weight stay together, so that a
// shard can be opened by itself; a weight larger than the limit gets a shard of its own.
class Distribution {
 public:
  Distribution(const WriterOptions& options, const std::vector<Declaration>& tensors)
      : limit_(options.shard_bytes) {
    for (const WeightInfo& weight : options.weights) {
      for (const Declaration& part : disk_layout(weight.name, weight.storage, weight.shape)) {
        owner_.emplace(part.name, weight.name);
      }
    }
    for (const Declaration& tensor : tensors) group_bytes_[group(tensor.name)] += bytes_of(tensor);
  }

  void add(Declaration tensor) {
    const std::string key = group(tensor.name);
    const auto [at, is_new] = shard_of_.emplace(key, shards_.size());
    if (is_new) {
      const std::uint64_t bytes = group_bytes_[key];
      const bool full =
          limit_ != 0 && filled_ != 0 && (filled_ > limit_ || bytes > limit_ - filled_);
      if (shards_.empty() || full) {
        shards_.emplace_back();
        filled_ = 0;
      }
      filled_ += bytes;
      at->second = shards_.size() - 1;
    }
    const std::uint64_t bytes = bytes_of(tensor);
    shards_[at->second].tensors.push_back({std::move(tensor), 0, bytes});
  }
  std::vector<PlannedShard> take() {
    if (shards_.empty()) shards_.emplace_back();
    return std::move(shards_);
  }
  std::size_t shard(const std::string& name) const { return shard_of_.at(group(name)); }

 private:
  std::string group(const std::string& tensor) const {
    const auto at = owner_.find(tensor);
    return at == owner_.end() ? tensor : at->second;
  }

  std::uint64_t limit_, filled_ = 0;
  std::map<std::string, std::string> owner_;  // tensor -> its weight
  std::map<std::string, std::uint64_t> group_bytes_;
  std::map<std::string, std::size_t> shard_of_;
  std::vector<PlannedShard> shards_;
};

std::string entry_text(const PlannedTensor& tensor) {
  const Declaration& d = tensor.declaration;
  const std::string dtype = d.dtype == Dtype::unknown ? json_string(d.dtype_name)
                                                      : formatted("\"{}\"", disk_name(d.dtype));
  return formatted(R"(,{}:{{"dtype":{},"shape":{},"data_offsets":[{},{}]}})", json_string(d.name),
                   dtype, json_array(d.shape.sizes()), tensor.offset, tensor.offset + tensor.bytes);
}

}  // namespace

std::vector<PlannedShard> plan_shards(const std::string& path, std::vector<Declaration> tensors,
                                      const WriterOptions& options) {
  check_path(path);
  if (!path.ends_with(kFileEnding)) {
    throw Error(Code::invalid_argument,
                "writer: the path must end in .safetensors, got " + in_quotes(path));
  }
  check_names(tensors);
  check_weights(tensors, options.weights);
  Distribution distribution(options, tensors);
  for (Declaration& tensor : tensors) distribution.add(std::move(tensor));
  std::vector<PlannedShard> shards = distribution.take();
  for (const WeightInfo& weight : options.weights) {
    shards[distribution.shard(weight.name)].manifest.weights.emplace(
        weight.name, ManifestWeight{weight.storage, weight.shape, weight.compute});
  }
  const std::string stem = path.substr(0, path.size() - kFileEnding.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    PlannedShard& shard = shards[i];
    shard.path = shards.size() == 1
                     ? path
                     : formatted("{}-{:05}-of-{:05}{}", stem, i + 1, shards.size(), kFileEnding);
    lay_out(shard);
    shard.ours = options.manifest;
    if (shards.size() > 1 && shard.ours) shard.manifest.set = hex(0);
    if (!options.checksums || !shard.ours) continue;
    for (const PlannedTensor& t : shard.tensors) shard.manifest.checksums[t.declaration.name] = 0;
  }
  return shards;
}

std::vector<PlannedShard> plan_shards_like(const std::string& path,
                                           const std::vector<FileImage>& like) {
  check_path(path);
  std::vector<PlannedShard> shards;
  for (const FileImage& form : like) {
    PlannedShard shard{.path = folder_of(path) + "/" + form.name, .tensors = {}, .manifest = {}};
    const std::uint64_t length = form.header.size();
    const auto bytes = std::as_bytes(std::span(form.header));
    if (!is_gguf(bytes)) shard.header.assign(reinterpret_cast<const char*>(&length), sizeof length);
    shard.header += form.header;
    const std::uint64_t start = shard.header.size();
    if (form.bytes < start)
      throw Error(Code::bad_file, shard.path + ": must hold its header, got fewer bytes");
    Header header = is_gguf(bytes) ? parse_gguf(shard.path, bytes, form.bytes)
                                   : parse_header(shard.path, form.header, form.bytes);
    for (TensorInfo& t : header.tensors)
      shard.tensors.push_back({{std::move(t.name), t.dtype, t.shape, std::move(t.dtype_name)},
                               t.offset - start,
                               t.bytes});
    shard.data_bytes = form.bytes - start;
    shards.push_back(std::move(shard));
  }
  return shards;
}

std::string header_text(const PlannedShard& shard,
                        const std::map<std::string, std::string>& metadata) {
  if (!shard.header.empty()) return shard.header;
  std::map<std::string, std::string> all = metadata;
  all.emplace("format", "pt");
  all.erase(std::string(kManifestKey));
  if (shard.ours) all[std::string(kManifestKey)] = manifest_text(shard.manifest);
  std::string json = formatted("{{\"{}\":{{", kMetadataKey);
  const char* comma = "";
  for (const auto& [key, value] : all) {
    json += formatted("{}{}:{}", std::exchange(comma, ","), json_string(key), json_string(value));
  }
  json += "}";
  for (const PlannedTensor& tensor : shard.tensors) json += entry_text(tensor);
  json += "}";
  const std::uint64_t used = kHeaderPrefix + json.size();
  const std::uint64_t alignment = data_alignment(shard.data_bytes);
  json.append(ceil_div(used, alignment) * alignment - used, ' ');
  if (json.size() > kMaxHeader) {
    throw Error(Code::invalid_argument,
                formatted("{}: the header must have at most {} bytes, got {}", shard.path,
                          kMaxHeader, json.size()));
  }
  const std::uint64_t length = json.size();
  std::string text(kHeaderPrefix, '\0');
  std::memcpy(text.data(), &length, sizeof length);
  return text + json;
}

std::string index_path(const std::string& path) { return path + ".index.json"; }

}  // namespace stowage
