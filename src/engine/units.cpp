// SPDX-License-Identifier: Apache-2.0
#include "engine/units.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

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

void add_pieces(Unit& unit, const Pages& pages, std::uint64_t shard_bytes, bool to_scratch) {
  const std::uint64_t place = to_scratch ? unit.scratch : unit.bytes;
  for (std::uint64_t at = pages.begin; at < pages.end; at += kPiece) {
    const std::uint64_t bytes = std::min(kPiece, pages.end - at);
    unit.pieces.push_back({pages.shard, at, bytes, place + (at - pages.begin),
                           std::min(at + bytes, shard_bytes) - at, to_scratch});
  }
}

using Places = std::map<const TensorInfo*, std::uint64_t>;

// Returns where they lie: in the unit's memory, or in scratch.
Places lay_out(Unit& unit, std::vector<const TensorInfo*> parts,
               const std::vector<std::uint64_t>& shard_bytes, bool to_scratch) {
  std::erase_if(parts, [](const TensorInfo* part) { return part->bytes == 0; });
  std::ranges::sort(parts, {}, [](const TensorInfo* t) { return std::tuple(t->shard, t->offset); });
  // Records with several parts. clang 14 has no std::ranges::unique of libstdc++.
  parts.erase(std::unique(parts.begin(), parts.end()), parts.end());
  std::uint64_t& bytes = to_scratch ? unit.scratch : unit.bytes;
  Places places;
  for (std::size_t i = 0; i < parts.size();) {
    Pages pages{parts[i]->shard, down(parts[i]->offset), 0};
    std::size_t last = i;
    for (; last < parts.size() && parts[last]->shard == pages.shard; ++last) {
      if (last > i && down(parts[last]->offset) > pages.end) break;  // pages of others between
      pages.end = std::max(pages.end, up(parts[last]->offset + parts[last]->bytes));
    }
    for (; i < last; ++i) places[parts[i]] = bytes + (parts[i]->offset - pages.begin);
    add_pieces(unit, pages, shard_bytes[static_cast<std::size_t>(pages.shard)], to_scratch);
    bytes += pages.end - pages.begin;
  }
  return places;
}

void lay_out_whole(Unit& unit, const File& file, const std::vector<const TensorInfo*>& parts,
                   const std::vector<std::uint64_t>& shard_bytes) {
  for (const auto& [tensor, place] : lay_out(unit, parts, shard_bytes, false))
    unit.extents.push_back({file.bytes(*tensor).data(), tensor->bytes, place});
}

// Each part begins where any kernel may read it.
void lay_out_formed(Unit& unit, const File& file, const WeightInfo& weight,
                    const std::vector<int>& parts, const std::vector<std::uint64_t>& shard_bytes) {
  constexpr std::uint64_t kLine = 64;
  const auto tensor = [&](int i) { return file.find(weight.parts[static_cast<std::size_t>(i)]); };
  std::vector<const TensorInfo*> from;
  for (const int i : parts) from.push_back(tensor(i));
  const Places places = lay_out(unit, from, shard_bytes, true);
  const Layout made = layout(weight.storage, weight.shape);
  for (const int i : parts) {
    const auto bytes = static_cast<std::uint64_t>(made.parts[static_cast<std::size_t>(i)].bytes);
    if (bytes == 0 || tensor(i)->bytes == 0) continue;
    unit.formed.push_back({i, places.at(tensor(i)), tensor(i)->bytes, unit.bytes, bytes});
    unit.extents.push_back({file.formed_place(weight, i), bytes, unit.bytes});
    unit.bytes += (bytes + kLine - 1) / kLine * kLine;
  }
  unit.bytes = up(unit.bytes);
}

void lay_out_weight(Unit& unit, const File& file, const WeightInfo& weight,
                    const std::vector<std::uint64_t>& shard_bytes) {
  std::vector<const TensorInfo*> whole;
  std::vector<int> formed;
  for (int i = 0; i < static_cast<int>(weight.parts.size()); ++i) {
    const bool of_none = !weight.forms.empty() && weight.forms[static_cast<std::size_t>(i)].one;
    if (file.formed_place(weight, i) != nullptr)
      formed.push_back(i);
    else if (!of_none)
      whole.push_back(file.find(weight.parts[static_cast<std::size_t>(i)]));
  }
  lay_out_whole(unit, file, whole, shard_bytes);
  lay_out_formed(unit, file, weight, formed, shard_bytes);
  std::ranges::sort(unit.extents, {}, &UnitPart::mapped);
}

}  // namespace

std::uint64_t scratch_for(std::uint64_t most, std::uint64_t budget) noexcept {
  constexpr std::uint64_t kSmallPart = 8;
  return 2 * most <= budget / kSmallPart ? 2 * most : most;
}

std::vector<Unit> units_of(const File& file) {
  std::vector<std::uint64_t> shard_bytes(file.paths().size());
  for (const TensorInfo& tensor : file.tensors()) {
    std::uint64_t& end = shard_bytes[static_cast<std::size_t>(tensor.shard)];
    end = std::max(end, tensor.offset + tensor.bytes);
  }
  std::vector<Unit> units;
  std::set<std::string_view> taken;
  for (const WeightInfo& weight : file.weights()) {
    for (const std::string& part : weight.parts) taken.insert(file.find(part)->name);
    Unit& unit = units.emplace_back(Unit{.name = weight.name, .is_weight = true});
    lay_out_weight(unit, file, weight, shard_bytes);
  }
  for (const TensorInfo& tensor : file.tensors()) {
    if (taken.contains(tensor.name)) continue;
    lay_out_whole(units.emplace_back(Unit{.name = tensor.name}), file, {&tensor}, shard_bytes);
  }
  std::ranges::sort(units, {}, &Unit::name);
  return units;
}

}  // namespace stowage::engine
