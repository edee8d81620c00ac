// SPDX-License-Identifier: Apache-2.0
// The storages that tests walk, chosen by what is to be covered, so that a row that the table gets
// is in all of them.
#pragma once
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "format/legal.h"
#include "stowage/descriptor.h"

namespace stowage::samples {

using Features = std::set<std::string>;

/// Every legal storage, with groups of a few sizes: odd and even ones, small and large ones, powers
/// of two and not.
inline const std::vector<Storage>& legal_samples() {
  static const std::vector<Storage> all = [] {
    std::vector<Storage> made;
    const auto add = [&](Codes codes, Dialect dialect, const Scaling& scaling) {
      for (int type = 0; type <= static_cast<int>(ScaleType::absmax); ++type)
        for (const int extra : {0, 1, 2, 3, 4, 5}) {
          Storage storage{codes, dialect, scaling};
          storage.scaling.type = static_cast<ScaleType>(type);
          storage.scaling.zero = extra == 1   ? Zero::code
                                 : extra == 4 ? Zero::sum
                                 : extra == 5 ? Zero::rounded
                                              : Zero::none;
          storage.scaling.nested = extra == 2 || extra == 3;
          storage.scaling.scaler_block = dialect == Dialect::standard ? 0 : extra - 1;
          for (const bool transposed : {false, true})
            for (const auto outer :
                 {Scaling::Kind::none, Scaling::Kind::row, Scaling::Kind::row2}) {
              storage.scaling.transposed = transposed;
              storage.scaling.outer = outer;
              if (is_legal(storage) && storage.scaling.type != ScaleType::of_values)
                made.push_back(storage);
            }
        }
    };
    using Kind = Scaling::Kind;
    for (const FormRow& row : form_rows()) {
      for (const Kind kind : {Kind::none, Kind::tensor, Kind::row, Kind::row2})
        add(row.codes, row.dialect, {.kind = kind});
      for (const int n : {32, 64, 16, 6, 7, 48})
        add(row.codes, row.dialect, {.kind = Kind::block, .block = n});
      if (row.legal.super) add(row.codes, row.dialect, {.kind = Kind::block, .block = 256});
      if (row.legal.nested) add(row.codes, row.dialect, {.kind = Kind::block, .block = 4096});
      for (const int n : {32, 6, 7})
        add(row.codes, row.dialect, {.kind = Kind::block2, .block = n, .rows = n == 7 ? 16 : 4});
      for (const int n : {4, 6}) add(row.codes, row.dialect, {.kind = Kind::column, .block = n});
    }
    return made;
  }();
  return all;
}

/// Storages that have between them every feature that any of `within` has, next to as few as can
/// be: always the first of those that add most. `features_of(storage)` gives Features.
template <class FeaturesOf, class Within>
std::vector<std::string> covering(const FeaturesOf& features_of, const Within& within) {
  std::vector<std::pair<std::string, Features>> left;
  for (const Storage& storage : legal_samples())
    if (within(storage)) left.emplace_back(to_string(storage), features_of(storage));
  const auto fewer = [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); };
  std::vector<std::string> chosen;
  while (true) {
    const auto best = std::ranges::max_element(left, fewer);
    if (best == left.end() || best->second.empty()) return chosen;
    const Features covered = best->second;
    chosen.push_back(best->first);
    for (auto& [name, features] : left)
      for (const std::string& feature : covered) features.erase(feature);
  }
}

/// What arithmetic on codes treats apart: kinds of groups, zeros and nested scales of each format;
/// types of scales and sizes of blocks of each packing.
inline Features codec_features(const Storage& storage) {
  const FormRow& row = *form_row(storage.codes, storage.dialect);
  const Scaling& s = storage.scaling;
  const auto number = [](auto of) { return std::to_string(static_cast<int>(of)) + " "; };
  const std::string name = number(storage.codes) + number(storage.dialect);
  const std::string form = number(row.packing) + number(row.codec);
  return {
      "kind " + name + number(s.kind) + number(s.zero) + number(s.transposed),
      "scales " + name + number(s.nested) + number(describe(storage).scale.code) + number(s.outer),
      "type " + form + number(s.type),
      "type " + form + number(s.kind) + number(s.type != ScaleType::f32),
      "size " + form + std::to_string(s.block)};
}
/// What products treat apart: which elements share a scale, whether scales are fp32 numbers as they
/// lie, and zeros, of each format.
inline Features product_features(const Storage& storage) {
  const Descriptor form = describe(storage);
  const auto number = [](auto of) { return std::to_string(static_cast<int>(of)) + " "; };
  const std::string name = number(storage.codes);
  const std::string form_of = number(form.packing) + number(form.codec);
  const bool long_groups = form.scale.group.n == 0 && !is_cast(storage);
  return {"group " + name + (long_groups ? "long" : number(form.scale.group.kind)),
          "scale " + name + number(form.scale.code) + number(form.scale.type == Dtype::f32),
          "outer " + name + number(form.outer.group.kind),
          "zero " + name + number(form.zero),
          "type " + form_of + number(form.scale.type),
          "long " + form_of + (long_groups ? number(form.scale.group.kind) : ""),
          "size " + form_of + std::to_string(form.scale.group.n)};
}
/// One storage for each way in which codes and scales lie, of whatever format.
inline Features form_features(const Storage& storage) {
  const Descriptor form = describe(storage);
  const auto number = [](auto of) { return std::to_string(static_cast<int>(of)) + " "; };
  const std::string codes = number(form.packing) + number(form.codec);
  return {codes + number(form.scale.code) + number(form.zero),
          codes + "outer " + number(form.outer.group.kind),
          codes + number(form.scale.group.kind) + number(form.transposed)};
}

/// Storages that every shape can have, but for a second dimension of row2.
inline bool has_every_shape(const Storage& storage) {
  return storage.dialect == Dialect::standard && storage.scaling.kind != Scaling::Kind::block2 &&
         (runs_across_rows(storage) || codes_together(describe(storage).packing) == 1);
}
/// Those that matrices have.
inline bool is_of_matrices(const Storage& storage) {
  return storage.dialect == Dialect::standard && storage.scaling.kind != Scaling::Kind::row2 &&
         storage.scaling.outer != Scaling::Kind::row2 && !storage.scaling.transposed;
}
inline bool is_any(const Storage& /*storage*/) { return true; }

}  // namespace stowage::samples
