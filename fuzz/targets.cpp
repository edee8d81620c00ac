// SPDX-License-Identifier: Apache-2.0
// The bodies of the fuzz targets. What a parser accepts must also survive its own printer, or keep
// the promises that its header makes; a broken promise ends the process so that the fuzzer sees it.
#include "fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "store/header.h"
#include "store/manifest.h"
#include "store/quant_state.h"
#include "store/shard_index.h"
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

}  // namespace

void file(Bytes bytes) {
  const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  if (fd < 0 || ::write(fd, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    std::abort();
  }
  attempt([&] {
    const File file = File::open("/proc/self/fd/" + std::to_string(fd));
    for (const WeightInfo& weight : file.weights()) promise(file.weight(weight.name).bytes() >= 0);
    for (const TensorInfo& tensor : file.tensors()) {
      promise(tensor.offset + tensor.bytes <= bytes.size());
      promise(file.find(tensor.name) == &tensor);
    }
    file.verify();
  });
  ::close(fd);
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
