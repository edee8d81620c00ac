// SPDX-License-Identifier: Apache-2.0
// The bodies of the fuzz targets. What a parser accepts must also survive its own printer, or keep
// the promises that its header makes; a broken promise ends the process so that the fuzzer sees it.
#include "fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "store/header.h"
#include "store/manifest.h"
#include "store/part_form.h"
#include "store/quant_config.h"
#include "store/quant_state.h"
#include "store/shard_index.h"
#include "store/weights.h"
#include "stowage/descriptor.h"
#include "stowage/file.h"
#include "stowage/writer.h"

namespace stowage::fuzz {
namespace {

std::string_view text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void promise(bool kept) {
  if (!kept) std::abort();
}

// Runs a parser; an Error is an answer, anything else is a finding.
template <class Body>
void attempt(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    promise(error.what()[0] != '\0');
  }
}

void check_cover(const Header& header, std::uint64_t begin, std::uint64_t end) {
  for (const TensorInfo& tensor : header.tensors) {
    promise(tensor.offset == begin);
    begin += tensor.bytes;
  }
  promise(begin == end);
}

// Parts that are read past the mapping, piece by piece, are those that it has.
void check_read(const File& file, const WeightInfo& weight) {
  std::vector<std::vector<std::byte>> made;
  for (std::size_t i = 0; i < weight.parts.size(); ++i)
    made.emplace_back(file.part_bytes(weight, static_cast<int>(i)));
  const std::vector<std::span<std::byte>> places(made.begin(), made.end());
  file.read_parts(weight, {}, places);
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (!weight.forms.empty() && !weight.forms[i].is_whole())
      promise(file.formed_part(weight, static_cast<int>(i)) == made[i]);
    else if (!made[i].empty())
      promise(std::ranges::equal(file.bytes(*file.find(weight.parts[i])), made[i]));
  }
}

// Half of the rows are those of the whole.
void check_rows(const File& file, const WeightInfo& weight) {
  const std::int64_t last = weight.shape.rows() / 2;
  const int in_rows = parts_in_rows(weight.storage);
  for (int i = 0; i < in_rows; ++i) {
    const std::int64_t each = elements_of_part_row(weight.storage, i, weight.shape);
    if (each == 0 || last * weight.shape.row_elements() % each != 0) return;
  }
  const auto read = [&](std::int64_t end) {
    std::vector<std::vector<std::byte>> made;
    for (int i = 0; i < static_cast<int>(weight.parts.size()); ++i)
      made.emplace_back(file.rows_bytes(weight, i, 0, end));
    const std::vector<std::span<std::byte>> places(made.begin(), made.end());
    file.read_rows(weight, 0, end, {}, places);
    return made;
  };
  const auto whole = read(weight.shape.rows()), half = read(last);
  for (std::size_t i = 0; i < half.size(); ++i)
    promise(std::ranges::equal(half[i], std::span(whole[i]).first(half[i].size())));
}

// Parts in another form are the tensors of the file when they are put together again.
void check_again(const File& file, const WeightInfo& weight) {
  const Layout parts = layout(weight.storage, weight.shape);
  std::map<std::string, std::vector<std::byte>> again;
  for (std::size_t i = 0; i < weight.forms.size(); ++i) {
    if (weight.forms[i].is_whole() || weight.forms[i].rounded) continue;
    const auto part = file.formed_part(weight, static_cast<int>(i));
    const auto made = tensor_of_part(weight.forms[i], part, parts.parts[i].shape);
    auto& all = again[weight.parts[i]];
    all.resize(std::max(all.size(), made.size()));
    for (std::size_t at = 0; at < made.size(); ++at) all[at] |= made[at];
  }
  for (const auto& [name, made] : again)
    promise(std::ranges::equal(made, file.bytes(*file.find(name))));
}

}  // namespace

void file(Bytes bytes) {
  const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  if (fd < 0 || ::write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    std::abort();
  }
  attempt([&] {
    const File file = File::open("/proc/self/fd/" + std::to_string(fd));
    for (const WeightInfo& weight : file.weights()) {
      promise(file.weight(weight.name).bytes() >= 0);
      check_again(file, weight);
      check_read(file, weight);
      check_rows(file, weight);
    }
    for (const TensorInfo& tensor : file.tensors()) {
      promise(tensor.offset + tensor.bytes <= bytes.size());
      promise(file.find(tensor.name) == &tensor);
    }
    file.verify();
  });
  ::close(fd);
}

// Reads what a folder would hold, without one.
void dialect(Bytes bytes) {
  const std::string_view text = text_of(bytes);
  const std::size_t zero = text.find('\0');
  if (zero == std::string_view::npos || text.size() - zero - 1 < kHeaderPrefix) return;
  const std::string_view content = text.substr(zero + 1);
  attempt([&] {
    std::uint64_t length = 0;
    std::memcpy(&length, content.data(), sizeof length);
    check_header_length("f", length, content.size());
    Header header = parse_header(
        "f", content.substr(kHeaderPrefix, static_cast<std::size_t>(length)), content.size());
    std::ranges::sort(header.tensors, {}, &TensorInfo::name);
    const auto config = QuantConfig::parse("c", text.substr(0, zero));
    const TensorSource source{
        .paths = {"f"},
        .tensors = header.tensors,
        .read = [&](const TensorInfo& t) { return std::string(content.substr(t.offset, t.bytes)); },
        .metadata = {&header.metadata},
        .config = config ? &*config : nullptr};
    for (const WeightInfo& weight : find_weights(source).weights) {
      const Layout parts = layout(weight.storage, weight.shape);
      promise(weight.parts.size() == static_cast<std::size_t>(parts.count));
      promise(weight.forms.empty() || weight.forms.size() == weight.parts.size());
      for (std::size_t i = 0; i < weight.parts.size(); ++i) {
        const TensorInfo* const tensor = find_tensor(header.tensors, weight.parts[i]);
        promise(tensor != nullptr);
        if (weight.forms.empty() || weight.forms[i].is_whole()) continue;
        const Bytes data = bytes.last(content.size()).subspan(tensor->offset, tensor->bytes);
        const Part& part = parts.parts[i];
        const auto made =
            part_of_tensor(weight.forms[i], {{"f", tensor->name, {}}, std::as_bytes(data)},
                           part.shape, Dtype::bf16);
        promise(std::cmp_equal(made.size(), part.bytes));
        if (weight.forms[i].rounded) continue;
        const auto back = tensor_of_part(weight.forms[i], made, part.shape);
        promise(std::ranges::equal(back, std::as_bytes(data)));
      }
    }
  });
}

void header(Bytes bytes) {
  // The first two bytes choose how much data the file has.
  if (bytes.size() < 2) return;
  const std::uint64_t data = bytes[0] + (std::uint64_t{bytes[1]} << 8);
  const std::string_view json = text_of(bytes.subspan(2));
  const std::uint64_t start = kHeaderPrefix + json.size();
  attempt([&] { check_cover(parse_header("f", json, start + data), start, start + data); });
}

void shard_index(Bytes bytes) {
  attempt([&] {
    const ShardIndex index = parse_shard_index("f", text_of(bytes));
    for (const auto& [tensor, shard] : index.shard_of) {
      promise(!shard.empty() && shard[0] != '/' && shard.find("..") != 0);
    }
    const ShardIndex back = parse_shard_index("f", shard_index_text(index, 0));
    promise(back.shard_of == index.shard_of);
  });
}

void manifest(Bytes bytes) {
  attempt([&] {
    const std::string text = manifest_text(parse_manifest({"f", "", {}}, text_of(bytes)));
    promise(manifest_text(parse_manifest({"f", "", {}}, text)) == text);
  });
}

void quant_state(Bytes bytes) {
  attempt([&] {
    const QuantState state = parse_quant_state({"f", "t", 0}, text_of(bytes));
    const std::string text =
        stowage::quant_state(state.storage, state.shape, state.compute, state.nested_offset);
    const QuantState back = parse_quant_state({"f", "t", 0}, text);
    promise(back.storage == state.storage && back.shape == state.shape);
    promise(back.compute == state.compute && back.nested_offset == state.nested_offset);
  });
}

}  // namespace stowage::fuzz
