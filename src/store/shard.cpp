// SPDX-License-Identifier: Apache-2.0
#include "store/shard.h"

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "base/formatted.h"
#include "store/gguf.h"
#include "store/shard_index.h"
#include "stowage/error.h"

namespace stowage {
namespace {

std::string read_text(const MappedFile& file, std::uint64_t offset, std::uint64_t bytes) {
  std::string text(bytes, '\0');
  file.read(offset, std::as_writable_bytes(std::span(text)));
  return text;
}

std::string read_header(const MappedFile& file) {
  if (file.size() < kHeaderPrefix + 2) {
    refuse(Refusal::too_short, {file.path(), "", 0}, std::to_string(file.size()));
  }
  static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");
  std::uint64_t length = 0;
  file.read(0, std::as_writable_bytes(std::span(&length, 1)));
  return read_text(file, kHeaderPrefix, check_header_length(file.path(), length, file.size()));
}

// A writing that was cut short may leave new shards beside old ones of the same names. An index of
// other tools has no id; the shards must then agree among themselves.
void check_set(const ShardIndex& index, const std::vector<Shard>& shards) {
  const std::string& set = index.set.empty() ? shards.front().manifest.set : index.set;
  for (const Shard& shard : shards) {
    if (shard.manifest.set == set) continue;
    refuse(Refusal::mixed_shards, {shard.map.path(), "", {}},
           in_quotes(shard.manifest.set) + " for " + in_quotes(set));
  }
}

// Tensors that several shards hold, and tensors that the index and a shard disagree about.
void check_against(const ShardIndex& index, const std::string& path, const std::string& folder,
                   const std::vector<Shard>& shards) {
  std::set<std::pair<std::string, std::string>> held;
  for (const Shard& shard : shards) {
    const std::string relative = shard.map.path().substr(folder.size());
    for (const TensorInfo& tensor : shard.header.tensors) {
      const Place place{shard.map.path(), tensor.name, tensor.offset};
      const auto said = index.shard_of.find(tensor.name);
      if (said == index.shard_of.end()) refuse(Refusal::not_in_index, place, "one it omits");
      held.emplace(tensor.name, relative);
      if (said->second == relative) continue;
      // The index names another shard. If that one has it too, the tensor is there twice.
      const auto other = std::ranges::find_if(shards, [&](const Shard& candidate) {
        return candidate.map.path().substr(folder.size()) == said->second;
      });
      const bool twice = std::ranges::find(other->header.tensors, tensor.name, &TensorInfo::name) !=
                         other->header.tensors.end();
      refuse(twice ? Refusal::duplicate_tensor : Refusal::not_in_index, place,
             "an index that puts it into " + in_quotes(said->second));
    }
  }
  for (const auto& [tensor, shard] : index.shard_of) {
    if (!held.contains({tensor, shard})) {
      refuse(Refusal::not_in_shard, {path, tensor, {}}, in_quotes(shard) + " without it");
    }
  }
}

// Nanoseconds since 1970 in seconds.
std::string seconds(std::int64_t time) {
  constexpr std::int64_t kSecond = 1'000'000'000;
  return formatted("{}.{:09}", time / kSecond, time % kSecond);
}

void check_size(const MappedFile& file, const FileIdentity& now) {
  if (now.size == file.size()) return;
  refuse(Refusal::size_changed, {file.path(), "", std::min(now.size, file.size())},
         formatted("{} bytes for {}", now.size, file.size()));
}

}  // namespace

void check_size(const MappedFile& file) { check_size(file, file.identity_now()); }

void check_unchanged(const MappedFile& file) {
  const FileIdentity &then = file.identity(), now = file.identity_now();
  check_size(file, now);
  if (now != then) {
    refuse(
        Refusal::file_changed, {file.path(), "", {}},
        formatted("a write at {} s for one at {} s", seconds(now.changed), seconds(then.changed)));
  }
  file.check_damage();
}

Shard open_shard(const std::string& path) {
  MappedFile map(path);
  const std::span mapped(map.data(), map.size());
  if (is_gguf(mapped)) {
    Header header = parse_gguf(path, mapped, map.size());
    map.check_damage();
    return {std::move(map), std::move(header), {}};
  }
  const std::string json = read_header(map);
  Header header = parse_header(path, json, map.size());
  Manifest manifest;
  if (const auto text = header.metadata.find(std::string(kManifestKey));
      text != header.metadata.end()) {
    manifest = parse_manifest({path + ": metadata 'stowage'", "", {}}, text->second);
  }
  return {std::move(map), std::move(header), std::move(manifest)};
}

std::vector<Shard> open_shard_set(const std::string& path) {
  const MappedFile file(path);
  if (file.size() > kMaxHeader) {
    refuse(Refusal::header_too_long, {path, "", 0}, std::to_string(file.size()) + " bytes");
  }
  const ShardIndex index = parse_shard_index(path, read_text(file, 0, file.size()));
  const std::string folder = path.find('/') == std::string::npos ? "" : folder_of(path) + "/";
  std::set<std::string> names;
  for (const auto& [tensor, shard] : index.shard_of) names.insert(shard);
  std::vector<Shard> shards;
  for (const std::string& name : names) {
    try {
      shards.push_back(open_shard(folder + name));
    } catch (const Error& error) {
      if (error.code() != Code::io) throw;
      refuse(Refusal::shard_missing, {path, "", {}}, in_quotes(error.what()));
    }
  }
  if (shards.empty()) refuse(Refusal::missing_key, {path, "", {}}, "an index of no shard");
  check_set(index, shards);
  check_against(index, path, folder, shards);
  return shards;
}

}  // namespace stowage
