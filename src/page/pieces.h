// SPDX-License-Identifier: Apache-2.0
// The pieces of a page about a plan or a model: escaped text, tables, bars, and memory over the
// pass as inline SVG.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stowage/plan.h"

namespace stowage::page {

inline constexpr int kColours = 8;  // of the page's style; later ones repeat

std::string escaped(std::string_view text);
std::string colour(std::size_t i);                          // as the page's style has it
std::string legend(const std::vector<std::string>& names);  // in the first colours

/// Stacked parts of one row, each a name and bytes.
struct Bar {
  std::string name, value;
  std::vector<std::pair<std::string, double>> parts;
};
/// One row for each bar, as long as the largest sum; parts of one name have one colour, which the
/// legend below names.
std::string bars(const std::vector<Bar>& rows);

/// Bytes in use as each unit's work begins, with the limits as lines.
std::string memory_over_the_pass(const Plan& plan);

/// A row for each module of experts, a cell for each of them: as dark as it is used often, in the
/// colour of its tier.
std::string heat_map(const std::vector<PlanExperts>& layers);

/// Bytes by a name, in parts by another.
using BytesBy = std::map<std::string, BytesByName>;
std::string bars(const BytesBy& bytes);

/// A figure with its name above it; several make a row in `facts`.
std::string fact(std::string_view name, std::string_view value);
std::string facts(const std::string& inside);
/// What a plan predicts for a pass, as figures for `facts`.
std::string predicted_facts(const Plan& plan);

/// Rows of cells, which it escapes.
class PageTable {
 public:
  struct Column {
    std::string name;
    bool number = false;
  };
  explicit PageTable(std::vector<Column> columns);
  void add(const std::vector<std::string>& cells);
  /// With a line for those of `count` rows that were not added.
  std::string text(std::size_t count) const;

 private:
  std::vector<Column> columns_;
  std::string rows_;
  std::size_t added_ = 0;
};
inline constexpr std::size_t kMostRows = 2000;  // of a table of weights

std::string section(std::string_view heading, std::string_view inside);
/// Each figure that was measured beside the one that was predicted; "" for none.
std::string measured_section(const Plan& plan, const PlanMeasured& measured);
/// All of it: readable in light and dark, without any other resource. `lead`: below the title.
std::string document(std::string_view title, std::string_view lead, std::string_view sections);

}  // namespace stowage::page
