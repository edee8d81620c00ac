// SPDX-License-Identifier: Apache-2.0
// Writer: plan, reserve, take tensors, then make everything durable and only then rename.
#include "stowage/writer.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <utility>

#include "base/file.h"
#include "base/file_error.h"
#include "store/checksum.h"
#include "store/header.h"
#include "store/quant_state.h"
#include "store/shard_index.h"
#include "store/write_plan.h"

namespace stowage {
namespace {

struct Target {  // where one tensor goes
  std::size_t shard;
  std::uint64_t offset, bytes;  // offset from the start of the file
  std::uint64_t checksum = 0;
  bool written = false;
};

struct OpenShard {  // one shard on its way to the disk
  PlannedShard plan;
  StagedFile file;
};

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Found out now, not by the rename after hours of work.
void check_no_folder(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_directory(path, error)) return;
  throw Error(Code::io, path + ": must be free for a file, got a folder of that name");
}

bool exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

// The other form of the same model would make the folder ambiguous. Returns whether there was one.
bool remove_other_form(const std::string& path) {
  if (::unlink(path.c_str()) == 0) return true;
  if (errno != ENOENT) throw_errno(path, "must go, or the folder holds two models");
  return false;
}

// After a failure: what was new goes again. The failure itself is the one to tell.
void remove_created(const std::vector<std::string>& names, const std::string& folder) noexcept try {
  for (const std::string& name : names) ::unlink(name.c_str());
  if (!names.empty()) sync_folder(folder);
} catch (...) {
}

}  // namespace

struct Writer::State {
  std::string path;
  std::map<std::string, std::string> metadata;
  std::map<std::string, Dtype> computes;  // of the weights that say one
  std::string index;                      // the text of one that is written again
  bool checksums = true, done = false;
  std::vector<OpenShard> outputs;
  std::map<std::string, Target, std::less<>> targets;

  bool sharded() const { return outputs.size() > 1; }
  bool has_index() const { return sharded() || !index.empty(); }
  void open(std::vector<PlannedShard> shards);
  std::string set_id() const;
  void seal();
  std::string index_text() const;
  void publish_all();
};

// Two passes: a full disk must show before the first file is made.
void Writer::State::open(std::vector<PlannedShard> shards) {
  std::vector<std::uint64_t> header_bytes;
  std::uint64_t total = 0;
  for (const PlannedShard& shard : shards) {
    header_bytes.push_back(header_text(shard, metadata).size());
    total += header_bytes.back() + shard.data_bytes;
  }
  check_space(folder_of(path), total);
  for (const PlannedShard& shard : shards) check_no_folder(shard.path);
  if (shards.size() > 1 || !index.empty()) check_no_folder(index_path(path));
  outputs.reserve(shards.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (const PlannedTensor& t : shards[i].tensors) {
      targets.emplace(t.declaration.name, Target{i, header_bytes[i] + t.offset, t.bytes});
    }
    StagedFile file(shards[i].path, header_bytes[i] + shards[i].data_bytes);
    outputs.push_back({std::move(shards[i]), std::move(file)});
  }
}

// Of all that the shards say and hold, so that files of two writings have one id only where they
// are the same; whether or not the manifests tell the checksums.
std::string Writer::State::set_id() const {
  Checksum set;
  for (const OpenShard& output : outputs) {
    PlannedShard said = output.plan;
    for (const PlannedTensor& t : said.tensors)
      said.manifest.checksums[t.declaration.name] =
          targets.find(t.declaration.name)->second.checksum;
    const std::string text = header_text(said, metadata);
    set.add(bytes_of(text));
  }
  return hex(set.value());
}

// Writes the headers, now that every checksum is known, and waits for the disk.
void Writer::State::seal() {
  if (sharded()) {
    const std::string set = set_id();
    for (OpenShard& output : outputs)
      if (output.plan.ours) output.plan.manifest.set = set;
  }
  for (OpenShard& output : outputs) {
    output.file.write(0, bytes_of(header_text(output.plan, metadata)));
    output.file.sync();
  }
}

std::string Writer::State::index_text() const {
  ShardIndex made;
  std::uint64_t total = 0;
  for (const OpenShard& output : outputs) {
    const std::size_t slash = output.plan.path.rfind('/');
    const std::string name = output.plan.path.substr(slash == std::string::npos ? 0 : slash + 1);
    for (const PlannedTensor& t : output.plan.tensors) made.shard_of[t.declaration.name] = name;
    total += output.plan.data_bytes;
    made.set = output.plan.manifest.set;
  }
  return shard_index_text(made, total);
}

// Only renames are left to do, each of them on the disk before the next step relies on it. When one
// fails, files that were not there before are taken away again; a mixture of old and new shards is
// refused by the reader (mixed_shards).
void Writer::State::publish_all() {
  const std::string folder = folder_of(path), its_index = index_path(path);
  std::vector<StagedFile> index_file;
  if (has_index()) {
    const std::string text = index.empty() ? index_text() : index;
    index_file.emplace_back(its_index, text.size());
    index_file[0].write(0, bytes_of(text));
    index_file[0].sync();
  }
  std::vector<std::string> created;
  const auto publish = [&](StagedFile& file) {
    const bool is_new = !exists(file.target());
    file.publish();
    if (is_new) created.push_back(file.target());
  };
  bool removed = false;
  try {
    for (OpenShard& output : outputs) publish(output.file);
    sync_folder(folder);
    if (has_index()) {
      publish(index_file[0]);
      sync_folder(folder);
    }
    removed = remove_other_form(has_index() ? path : its_index);
  } catch (...) {
    remove_created(created, folder);
    throw;
  }
  if (removed) sync_folder(folder);
}

inline namespace v0 {

Writer::Writer(const std::string& path, std::vector<Declaration> tensors,
               const WriterOptions& options)
    : state_(std::make_unique<State>()) {
  state_->path = path;
  state_->metadata = options.metadata;
  state_->checksums = options.checksums && options.manifest && options.like.empty();
  for (const WeightInfo& weight : options.weights) {
    if (weight.compute) state_->computes.emplace(weight.name, *weight.compute);
  }
  state_->index = options.index;
  state_->open(options.like.empty() ? plan_shards(path, std::move(tensors), options)
                                    : plan_shards_like(path, options.like));
}

Writer::Writer(Writer&&) noexcept = default;
Writer& Writer::operator=(Writer&&) noexcept = default;
Writer::~Writer() = default;

void Writer::write(std::string_view name, std::span<const std::byte> bytes) {
  const auto fail = [&](const std::string& text) {
    throw Error(Code::invalid_argument, state_->path + ": tensor " + in_quotes(name) + ": " + text);
  };
  if (state_->done) fail("must be written before finish(), got a finished file");
  const auto at = state_->targets.find(name);
  if (at == state_->targets.end()) fail("must be declared, got a name that is not");
  Target& target = at->second;
  if (target.written) fail("must be written once, got it twice");
  if (bytes.size() != target.bytes) {
    fail("must have " + std::to_string(target.bytes) + " bytes, got " +
         std::to_string(bytes.size()));
  }
  OpenShard& output = state_->outputs[target.shard];
  // Before the write: of memory that a mapping lost the system only says "Bad address".
  if (state_->checksums || state_->sharded()) target.checksum = checksum_of(bytes);
  if (state_->checksums) output.plan.manifest.checksums[at->first] = target.checksum;
  check_memory(bytes.data());
  output.file.write(target.offset, bytes);
  target.written = true;
}

void Writer::write_weight(std::string_view name, const Weight& weight) {
  const Storage& storage = weight.storage();
  const Layout made = layout(storage, weight.shape());
  const auto declared = disk_layout(name, storage, weight.shape());
  for (int i = 0; i < made.count; ++i) {
    const Part& part = made.parts[static_cast<std::size_t>(i)];
    if (part.name == "nested_offset") continue;
    write(declared[static_cast<std::size_t>(i)].name,
          {static_cast<const std::byte*>(weight.part(i)), static_cast<std::size_t>(part.bytes)});
  }
  if (!has_quant_state(storage)) return;
  float offset = 0;
  if (storage.scaling.nested) std::memcpy(&offset, weight.part(made.count - 1), sizeof offset);
  const auto compute = state_->computes.find(std::string(name));
  const Dtype dtype = compute == state_->computes.end() ? Dtype::bf16 : compute->second;
  write(declared[declared.size() - 2].name,
        bytes_of(quant_state(storage, weight.shape(), dtype, offset)));
  write(declared.back().name, std::as_bytes(trait(storage.codes).values));
}

void Writer::finish() {
  State& state = *state_;
  if (state.done) {
    throw Error(Code::invalid_argument, state.path + ": must be finished once, got it twice");
  }
  for (const auto& [name, target] : state.targets) {
    if (target.written) continue;
    throw Error(Code::invalid_argument, state.path + ": tensor " + in_quotes(name) +
                                            ": must be written before finish(), got none");
  }
  state.done = true;
  try {
    state.seal();
    state.publish_all();
  } catch (...) {
    state.outputs.clear();  // removes what has no name yet
    throw;
  }
}

}  // namespace v0
}  // namespace stowage
