// SPDX-License-Identifier: Apache-2.0
#include "engine/units.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "base/formatted.h"
#include "engine/arena.h"

namespace stowage::engine {
namespace {

constexpr std::uint64_t kPiece = 1 << 20;  // several reads of this size are in flight for one unit

constexpr std::uint64_t down(std::uint64_t n) { return n / kPage * kPage; }
constexpr std::uint64_t up(std::uint64_t n) { return (n + kPage - 1) / kPage * kPage; }

// A run of a shard that is read as one.
struct Pages {
  int shard;
  std::uint64_t begin, end;
};

void add_pieces(Unit& unit, const Pages& pages, std::uint64_t shard_bytes) {
  for (std::uint64_t at = pages.begin; at < pages.end; at += kPiece) {
    const std::uint64_t bytes = std::min(kPiece, pages.end - at);
    unit.pieces.push_back({pages.shard, at, bytes, unit.bytes + (at - pages.begin),
                           std::min(at + bytes, shard_bytes) - at});
  }
}

void lay_out(Unit& unit, const File& file, std::vector<const TensorInfo*> parts,
             const std::vector<std::uint64_t>& shard_bytes) {
  std::erase_if(parts, [](const TensorInfo* part) { return part->bytes == 0; });
  std::ranges::sort(parts, {}, [](const TensorInfo* t) { return std::tuple(t->shard, t->offset); });
  for (std::size_t i = 0; i < parts.size();) {
    Pages pages{parts[i]->shard, down(parts[i]->offset), 0};
    std::size_t last = i;
    for (; last < parts.size() && parts[last]->shard == pages.shard; ++last) {
      if (last > i && down(parts[last]->offset) > pages.end) break;  // pages of others between
      pages.end = std::max(pages.end, up(parts[last]->offset + parts[last]->bytes));
    }
    for (; i < last; ++i)
      unit.extents.push_back({file.bytes(*parts[i]).data(), parts[i]->bytes,
                              unit.bytes + (parts[i]->offset - pages.begin)});
    add_pieces(unit, pages, shard_bytes[static_cast<std::size_t>(pages.shard)]);
    unit.bytes += pages.end - pages.begin;
  }
  std::ranges::sort(unit.extents, {}, &UnitPart::mapped);
}

// Codes are read from the file straight to where they are multiplied.
void check_in_place(const File& file, const WeightInfo& weight) {
  if (weight.forms.empty() || weight.forms[0].is_whole()) return;
  throw Error(
      Code::unsupported,
      formatted("{}: weight '{}': codes must lie in the file as they rest to be read from it "
                "while a model works, {} has them in another order; save the model without "
                "dialect first",
                file.paths().front(), weight.name, file.dialect()));
}

}  // namespace

std::vector<Unit> units_of(const File& file) {
  std::vector<std::uint64_t> shard_bytes(file.paths().size());
  for (const TensorInfo& tensor : file.tensors()) {
    std::uint64_t& end = shard_bytes[static_cast<std::size_t>(tensor.shard)];
    end = std::max(end, tensor.offset + tensor.bytes);
  }
  std::vector<Unit> units;
  std::set<std::string_view> taken;
  for (const WeightInfo& weight : file.weights()) {
    check_in_place(file, weight);
    std::vector<const TensorInfo*> parts;
    for (const std::string& part : weight.parts) {
      parts.push_back(file.find(part));
      taken.insert(parts.back()->name);
    }
    Unit& unit = units.emplace_back(Unit{.name = weight.name, .is_weight = true});
    lay_out(unit, file, parts, shard_bytes);
  }
  for (const TensorInfo& tensor : file.tensors()) {
    if (taken.contains(tensor.name)) continue;
    lay_out(units.emplace_back(Unit{.name = tensor.name}), file, {&tensor}, shard_bytes);
  }
  std::ranges::sort(units, {}, &Unit::name);
  return units;
}

}  // namespace stowage::engine
