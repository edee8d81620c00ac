// SPDX-License-Identifier: Apache-2.0
#include "engine/units.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "base/formatted.h"
#include "engine/arena.h"
#include "store/stacks.h"
#include "stowage/descriptor.h"

namespace stowage::engine {
namespace {

constexpr std::uint64_t kPiece = 1 << 20;  // several reads of this size are in flight for one unit
constexpr std::uint64_t kLine = 64;        // where any kernel may read from

constexpr std::uint64_t down(std::uint64_t n) { return n / kPage * kPage; }
constexpr std::uint64_t up(std::uint64_t n) { return (n + kPage - 1) / kPage * kPage; }

// Bytes of a shard that a unit needs.
struct Stretch {
  int shard;
  std::uint64_t offset, bytes;
  const std::byte* mapped;
  auto key() const noexcept { return std::tuple(shard, offset); }
};

Stretch stretch_of(const File& file, const TensorInfo& tensor) {
  return {tensor.shard, tensor.offset, tensor.bytes, file.bytes(tensor).data()};
}

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

// Returns for each where it lies: in the unit's memory, or in scratch.
std::vector<std::pair<Stretch, std::uint64_t>> lay_out(
    Unit& unit, std::vector<Stretch> parts, const std::vector<std::uint64_t>& shard_bytes,
    bool to_scratch) {
  std::erase_if(parts, [](const Stretch& part) { return part.bytes == 0; });
  std::ranges::sort(parts, {}, &Stretch::key);
  // Records with several parts. clang 14 has no std::ranges::unique of libstdc++.
  const auto same = [](const Stretch& a, const Stretch& b) { return a.key() == b.key(); };
  parts.erase(std::unique(parts.begin(), parts.end(), same), parts.end());
  std::uint64_t& bytes = to_scratch ? unit.scratch : unit.bytes;
  std::vector<std::pair<Stretch, std::uint64_t>> places;
  for (std::size_t i = 0; i < parts.size();) {
    Pages pages{parts[i].shard, down(parts[i].offset), 0};
    std::size_t last = i;
    for (; last < parts.size() && parts[last].shard == pages.shard; ++last) {
      if (last > i && down(parts[last].offset) > pages.end) break;  // pages of others between
      pages.end = std::max(pages.end, up(parts[last].offset + parts[last].bytes));
    }
    for (; i < last; ++i) places.emplace_back(parts[i], bytes + (parts[i].offset - pages.begin));
    add_pieces(unit, pages, shard_bytes[static_cast<std::size_t>(pages.shard)], to_scratch);
    bytes += pages.end - pages.begin;
  }
  return places;
}

using Places = std::map<decltype(std::declval<Stretch>().key()), std::uint64_t>;

// Where they lie in scratch.
Places lay_out_scratch(Unit& unit, std::vector<Stretch> from,
                       const std::vector<std::uint64_t>& shard_bytes) {
  Places places;
  for (const auto& [part, place] : lay_out(unit, std::move(from), shard_bytes, true))
    places[part.key()] = place;
  return places;
}

void lay_out_whole(Unit& unit, std::vector<Stretch> parts,
                   const std::vector<std::uint64_t>& shard_bytes) {
  for (const auto& [part, place] : lay_out(unit, std::move(parts), shard_bytes, false))
    unit.extents.push_back({part.mapped, part.bytes, place});
}

bool are_values(const Storage& storage) noexcept {
  return is_cast(storage) && is_value_cast(storage.codes);
}

// Values that are used as they are begin where torch's own memory would: its products may round
// otherwise elsewhere, so that each would take a copy (torch/gemm.cpp).
void lay_out_values(Unit& unit, const Stretch& values,
                    const std::vector<std::uint64_t>& shard_bytes) {
  lay_out_whole(unit, {values}, shard_bytes);
  if (unit.extents.empty()) return;
  unit.down = unit.extents.front().place % kLine;
  unit.extents.front().place -= unit.down;
}

// Each part begins where any kernel may read it.
void lay_out_formed(Unit& unit, const File& file, const WeightInfo& weight,
                    const std::vector<int>& parts, const std::vector<std::uint64_t>& shard_bytes) {
  const auto tensor = [&](int i) { return file.find(weight.parts[static_cast<std::size_t>(i)]); };
  std::vector<Stretch> from;
  for (const int i : parts) from.push_back(stretch_of(file, *tensor(i)));
  const Places places = lay_out_scratch(unit, std::move(from), shard_bytes);
  const Layout made = layout(weight.storage, weight.shape);
  for (const int i : parts) {
    const auto bytes = static_cast<std::uint64_t>(made.parts[static_cast<std::size_t>(i)].bytes);
    if (bytes == 0 || tensor(i)->bytes == 0) continue;
    const std::uint64_t place = places.at({tensor(i)->shard, tensor(i)->offset});
    unit.formed.push_back({i, place, tensor(i)->bytes, unit.bytes, bytes});
    unit.extents.push_back({file.formed_place(weight, i), bytes, unit.bytes});
    unit.bytes += (bytes + kLine - 1) / kLine * kLine;
  }
  unit.bytes = up(unit.bytes);
}

void lay_out_weight(Unit& unit, const File& file, const WeightInfo& weight,
                    const std::vector<std::uint64_t>& shard_bytes) {
  std::vector<Stretch> whole;
  std::vector<int> formed;
  for (int i = 0; i < static_cast<int>(weight.parts.size()); ++i) {
    const bool of_none = !weight.forms.empty() && weight.forms[static_cast<std::size_t>(i)].one;
    if (file.formed_place(weight, i) != nullptr)
      formed.push_back(i);
    else if (!of_none)
      whole.push_back(stretch_of(file, *file.find(weight.parts[static_cast<std::size_t>(i)])));
  }
  if (are_values(weight.storage) && whole.size() == 1)
    lay_out_values(unit, whole.front(), shard_bytes);
  else
    lay_out_whole(unit, std::move(whole), shard_bytes);
  lay_out_formed(unit, file, weight, formed, shard_bytes);
  std::ranges::sort(unit.extents, {}, &UnitPart::mapped);
}

struct Rows {
  std::int64_t first, last;
};

// Elements, in the order of the weight, that one index of dim 0 of part `i` is of; 0: of all.
std::int64_t elements_of_index(const WeightInfo& weight, int i) {
  if (i < parts_in_rows(weight.storage))
    return elements_of_part_row(weight.storage, i, weight.shape);
  const Descriptor form = describe(weight.storage);
  const bool in_groups = form.parts[static_cast<std::size_t>(i)].extent == Extent::outers &&
                         form.outer.group.kind == Group::Kind::flat;
  return in_groups ? std::int64_t{form.scale.group.n} * form.outer.group.n : 0;
}

// Where the bytes of those rows begin in part `i`, and how many they are; of what all rows share,
// all.
std::pair<std::int64_t, std::int64_t> bytes_of_rows(const WeightInfo& weight, int i,
                                                    const Rows& rows) {
  const Part part = layout(weight.storage, weight.shape).parts[static_cast<std::size_t>(i)];
  const std::int64_t each = elements_of_index(weight, i), row = weight.shape.row_elements();
  if (each == 0) return {0, part.bytes};
  const std::int64_t first = rows.first * row, last = rows.last * row;
  if (first % each != 0 || (last % each != 0 && rows.last != weight.shape.rows()))
    throw Error(Code::invalid_argument,
                formatted("{}: must come by rows that end where {} of {} elements do, got {} of {}",
                          weight.name, part.name, each, rows.last - rows.first, row));
  const std::int64_t bytes = part.bytes / part.shape.rows();
  const std::int64_t begin = first / each * bytes, end = ceil_div(last, each) * bytes;
  return {begin, end - begin};
}

std::string slice_name(const std::string& of, const Rows& rows) {
  const bool one = rows.last - rows.first == 1;
  return of + "[" + std::to_string(rows.first) + (one ? "" : ":" + std::to_string(rows.last)) + "]";
}

// One index of a stack, from the tensors of its matrices.
Unit unit_of_index(const File& file, std::size_t stack, std::int64_t index,
                   const std::vector<std::uint64_t>& shard_bytes) {
  const Stacks& stacks = *OpenStacks::of(file);
  const StackInfo& info = stacks.infos()[stack];
  Unit unit{.name = slice_name(info.name, {index, index + 1}),
            .is_weight = true,
            .first_row = index,
            .last_row = index + 1};
  const std::span<const StackPiece> pieces = stacks.pieces(stack, index);
  std::vector<Stretch> from;
  for (const StackPiece& piece : pieces) from.push_back(stretch_of(file, *piece.tensor));
  const Places places = lay_out_scratch(unit, std::move(from), shard_bytes);
  const Layout made = layout(info.storage, info.shape);
  for (int i = 0; i < made.count; ++i) {
    const auto bytes =
        static_cast<std::uint64_t>(made.parts[static_cast<std::size_t>(i)].bytes / info.shape[0]);
    const std::uint64_t begin = static_cast<std::uint64_t>(index) * bytes;
    for (const StackPiece& piece : pieces)
      if (piece.part == i)
        unit.formed.push_back({i, places.at({piece.tensor->shard, piece.tensor->offset}),
                               piece.tensor->bytes, unit.bytes + (piece.place - begin), piece.bytes,
                               &piece});
    unit.extents.push_back({stacks.place(stack, i) + begin, bytes, unit.bytes});
    unit.bytes += (bytes + kLine - 1) / kLine * kLine;
  }
  unit.bytes = up(unit.bytes);
  std::ranges::sort(unit.extents, {}, &UnitPart::mapped);
  return unit;
}

// What is of all rows stays where it is mapped.
Unit unit_of_rows(const File& file, const WeightInfo& weight, const Rows& rows,
                  const std::vector<std::uint64_t>& shard_bytes) {
  Unit unit{.name = slice_name(weight.name, rows),
            .is_weight = true,
            .first_row = rows.first,
            .last_row = rows.last};
  std::vector<Stretch> parts;
  for (int i = 0; i < static_cast<int>(weight.parts.size()); ++i) {
    if (elements_of_index(weight, i) == 0) continue;
    const auto [begin, bytes] = bytes_of_rows(weight, i, rows);
    Stretch part = stretch_of(file, *file.find(weight.parts[static_cast<std::size_t>(i)]));
    part.offset += static_cast<std::uint64_t>(begin);
    part.mapped += begin;
    part.bytes = static_cast<std::uint64_t>(bytes);
    parts.push_back(part);
  }
  if (are_values(weight.storage) && parts.size() == 1)
    lay_out_values(unit, parts.front(), shard_bytes);
  else
    lay_out_whole(unit, std::move(parts), shard_bytes);
  std::ranges::sort(unit.extents, {}, &UnitPart::mapped);
  return unit;
}

const WeightInfo& checked_cut(const File& file, const RowCut& cut) {
  const auto refuse = [&](const std::string& what) {
    throw Error(Code::invalid_argument, file.paths().front() + ": " + what);
  };
  const WeightInfo* const weight = file.find_weight(cut.name);
  if (weight == nullptr) refuse("must have a weight " + cut.name);
  if (cut.rows < 1)
    refuse(formatted("{}: must come by at least one row, got {}", cut.name, cut.rows));
  for (std::size_t i = 0; i < weight->forms.size(); ++i)
    if (elements_of_index(*weight, static_cast<int>(i)) != 0 && !weight->forms[i].is_whole())
      refuse(cut.name + ": must lie in the file as it rests to come by rows, has " +
             weight->parts[i] + " in another form");
  return *weight;
}

}  // namespace

std::uint64_t scratch_for(std::uint64_t most, std::uint64_t budget) noexcept {
  constexpr std::uint64_t kSmallPart = 8;
  return 2 * most <= budget / kSmallPart ? 2 * most : most;
}

std::uint64_t bytes_of(std::span<const Unit> units) noexcept {
  std::uint64_t all = 0;
  for (const Unit& unit : units)
    if (unit.comes) all += unit.bytes;
  return all;
}

std::size_t named_units(std::span<const Unit> units) noexcept {
  const auto slice = [](const Unit& unit) { return unit.whole >= 0; };
  return static_cast<std::size_t>(std::ranges::partition_point(units, std::not_fn(slice)) -
                                  units.begin());
}

std::optional<WeightId> find_unit(std::span<const Unit> named, std::string_view name) {
  const auto found = std::ranges::lower_bound(named, name, {}, &Unit::name);
  if (found == named.end() || found->name != name) return std::nullopt;
  return static_cast<WeightId>(found - named.begin());
}

Weight rows_of(const Weight& all, const Unit& unit) {
  const WeightInfo weight{.name = unit.name,
                          .storage = all.storage(),
                          .shape = all.shape(),
                          .parts = {},
                          .compute = {}};
  const Rows rows{unit.first_row, unit.last_row};
  const auto count = static_cast<std::size_t>(layout(all.storage(), all.shape()).count);
  std::array<const void*, kMaxParts> parts{};
  for (std::size_t i = 0; i < count; ++i)
    parts[i] = static_cast<const std::byte*>(all.part(static_cast<int>(i))) +
               bytes_of_rows(weight, static_cast<int>(i), rows).first;
  std::vector<std::int64_t> sizes(all.shape().sizes().begin(), all.shape().sizes().end());
  sizes.front() = rows.last - rows.first;
  return {all.storage(), Shape(sizes), std::span(parts).first(count)};
}

namespace {

// What a file has by itself: its weights, stacks in the place of their matrices, and other tensors.
std::vector<Unit> whole_units(const File& file, const std::vector<std::uint64_t>& shard_bytes) {
  std::vector<Unit> units;
  std::set<std::string_view> taken, in_stacks;
  for (const StackInfo& stack : file.stacks()) {
    units.push_back({.name = stack.name, .is_weight = true, .comes = false});
    for (const auto& index : stack.matrices) in_stacks.insert(index.begin(), index.end());
  }
  for (const WeightInfo& weight : file.weights()) {
    for (const std::string& part : weight.parts) taken.insert(file.find(part)->name);
    if (in_stacks.contains(weight.name)) continue;
    lay_out_weight(units.emplace_back(Unit{.name = weight.name, .is_weight = true}), file, weight,
                   shard_bytes);
  }
  for (const TensorInfo& tensor : file.tensors()) {
    if (taken.contains(tensor.name)) continue;
    lay_out_values(units.emplace_back(Unit{.name = tensor.name}), stretch_of(file, tensor),
                   shard_bytes);
  }
  std::ranges::sort(units, {}, &Unit::name);
  return units;
}

// `slice(rows)`: the unit of those rows of the weight.
template <class Slice>
void add_slices(std::vector<Unit>& units, WeightId whole, std::int64_t rows, std::int64_t each,
                Slice&& slice) {
  const auto first = static_cast<WeightId>(units.size());
  for (std::int64_t row = 0; row < rows; row += each) {
    units.push_back(slice(Rows{row, std::min(row + each, rows)}));
    units.back().whole = whole;
  }
  Unit& of = units[static_cast<std::size_t>(whole)];
  of.slices = {first, static_cast<WeightId>(units.size()) - first, each};
  of.comes = false;
}

}  // namespace

std::vector<Unit> units_of(const File& file, std::span<const RowCut> cuts) {
  std::vector<std::uint64_t> shard_bytes(file.paths().size());
  for (const TensorInfo& tensor : file.tensors()) {
    std::uint64_t& end = shard_bytes[static_cast<std::size_t>(tensor.shard)];
    end = std::max(end, tensor.offset + tensor.bytes);
  }
  std::vector<Unit> units = whole_units(file, shard_bytes);
  const std::size_t named = units.size();  // slices follow
  const auto id_of = [&](const std::string& name) {
    const auto found = find_unit(std::span(units).first(named), name);
    if (!found || units[static_cast<std::size_t>(*found)].slices.count != 0)
      throw Error(
          Code::invalid_argument,
          file.paths().front() + ": must come by rows in one way, and whole in no stack: " + name);
    return *found;
  };
  for (std::size_t i = 0; i < file.stacks().size(); ++i) {
    const StackInfo& stack = file.stacks()[i];
    add_slices(units, id_of(stack.name), stack.shape[0], 1,
               [&](const Rows& rows) { return unit_of_index(file, i, rows.first, shard_bytes); });
  }
  for (const RowCut& cut : cuts) {
    const WeightInfo& weight = checked_cut(file, cut);
    add_slices(units, id_of(cut.name), weight.shape.rows(), cut.rows,
               [&](const Rows& rows) { return unit_of_rows(file, weight, rows, shard_bytes); });
  }
  return units;
}

}  // namespace stowage::engine
