// SPDX-License-Identifier: Apache-2.0
// Rows of weights of every dialect: the bytes that the whole weight has of them, and how many bytes
// of the file they take.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "expect_error.h"
#include "scratch.h"
#include "stowage/descriptor.h"
#include "stowage/file.h"

namespace stowage::test {
namespace {

namespace fs = std::filesystem;
constexpr std::int64_t kOfWord = 8, kOfTile = 128;  // rows
// The groups of a column have rows all over the weight.
const std::string kAllOver = "hqq-4bit-axis0";
// A byte has numbers of two rows that are far apart.
const std::string kFolded = "hqq-4bit";
using Bytes = std::vector<std::byte>;

struct PartsRead {
  std::vector<Bytes> parts;
  std::uint64_t read = 0;
};

PartsRead read_rows(const File& file, const WeightInfo& weight, std::int64_t first,
                    std::int64_t last) {
  PartsRead made;
  std::vector<std::span<std::byte>> out;
  for (int i = 0; i < static_cast<int>(weight.parts.size()); ++i)
    made.parts.emplace_back(file.rows_bytes(weight, i, first, last));
  for (Bytes& part : made.parts) out.emplace_back(part);
  made.read = file.read_rows(weight, first, last, {}, out);
  return made;
}

// Rows that end where all blocks do, so few of them are together.
std::int64_t rows_together(const WeightInfo& weight) {
  std::int64_t rows = 1;
  for (int i = 0; i < parts_in_rows(weight.storage); ++i) {
    const std::int64_t each = elements_of_part_row(weight.storage, i, weight.shape);
    while (rows < weight.shape.rows() && rows * weight.shape.row_elements() % each != 0) ++rows;
  }
  return rows;
}

// Of the part of all rows, which is made of so many.
std::span<const std::byte> rows_of(const Bytes& part, std::int64_t first, std::int64_t last,
                                   std::int64_t all) {
  const auto at = [&](std::int64_t row) {
    return part.size() * static_cast<std::size_t>(row) / static_cast<std::size_t>(all);
  };
  return std::span(part).subspan(at(first), at(last) - at(first));
}

struct Counts {
  int weights = 0, ranges = 0, halved = 0;
  std::set<std::string> whole;  // what is read whole for a quarter of the rows
};

void compare(const File& file, const WeightInfo& weight, const std::string& name, Counts& counts) {
  const std::int64_t all = weight.shape.rows(), each = rows_together(weight);
  const PartsRead whole = read_rows(file, weight, 0, all);
  const int in_rows = parts_in_rows(weight.storage);
  for (std::int64_t first = 0; first < all; first += each) {
    for (std::int64_t last : {first + each, first + 3 * each, all}) {
      last = std::min(last, all);
      SCOPED_TRACE(testing::Message() << weight.name << " rows " << first << " to " << last);
      const PartsRead some = read_rows(file, weight, first, last);
      for (std::size_t i = 0; i < some.parts.size(); ++i) {
        const bool is_cut = static_cast<int>(i) < in_rows && all % each == 0;
        const std::span expected =
            is_cut ? rows_of(whole.parts[i], first, last, all) : std::span(whole.parts[i]);
        if (!is_cut && static_cast<int>(i) < in_rows) continue;
        EXPECT_TRUE(std::ranges::equal(some.parts[i], expected)) << "part " << i;
      }
      ++counts.ranges;
      if (4 * (last - first) <= all && some.read == whole.read) counts.whole.insert(name);
    }
  }
  ++counts.weights;
}

// Two processes with half of the rows read no byte twice, but those that are of all rows.
void compare_halves(const File& file, const WeightInfo& weight, const std::string& name,
                    Counts& counts) {
  const bool are_tiles = std::ranges::any_of(weight.forms, &PartForm::tiled);
  const std::int64_t all = weight.shape.rows();
  const std::int64_t each = std::lcm(rows_together(weight), are_tiles ? kOfTile : kOfWord);
  const std::int64_t half = all / 2 / each * each;
  if (half == 0) return;
  std::uint64_t of_all = 0;
  for (std::size_t i = static_cast<std::size_t>(parts_in_rows(weight.storage));
       i < weight.parts.size(); ++i)
    of_all += weight.forms.empty() || !weight.forms[i].one ? file.find(weight.parts[i])->bytes : 0;
  const std::uint64_t both =
      read_rows(file, weight, 0, half).read + read_rows(file, weight, half, all).read;
  const std::uint64_t once = read_rows(file, weight, 0, all).read;
  if (name == kAllOver || name == kFolded) return;
  EXPECT_EQ(both, once + of_all) << weight.name;
  ++counts.halved;
}

// What weight() gives is what read_rows() gives of all rows.
void compare_whole(const File& file, const WeightInfo& weight) {
  const PartsRead rows = read_rows(file, weight, 0, weight.shape.rows());
  const Weight held = file.weight(weight.name);
  for (std::size_t i = 0; i < rows.parts.size(); ++i) {
    const bool is_number = layout(weight.storage, weight.shape).parts[i].name == "nested_offset";
    if (is_number || rows.parts[i].empty()) continue;
    const auto* const data = static_cast<const std::byte*>(held.part(static_cast<int>(i)));
    EXPECT_TRUE(std::equal(rows.parts[i].begin(), rows.parts[i].end(), data)) << weight.name << i;
  }
}

TEST(FileRows, AreThoseOfTheWholeWeightInEveryDialect) {
  Counts counts;
  const std::string all = std::string(STOWAGE_GOLDEN).append("/dialects");
  for (const auto& golden : fs::directory_iterator(all)) {
    const std::string name = golden.path().filename();
    SCOPED_TRACE(name);
    const Scratch folder;
    for (const auto& entry : fs::directory_iterator(golden))
      if (entry.path().filename() != "expected.safetensors")  // else it were two models
        fs::copy(entry.path(), folder.path(entry.path().filename().string()));
    const File file = File::open(folder.path());
    for (const WeightInfo& weight : file.weights()) {
      compare_whole(file, weight);
      compare(file, weight, name, counts);
      compare_halves(file, weight, name, counts);
    }
  }
  EXPECT_EQ(counts.whole, std::set<std::string>{kAllOver});
  EXPECT_GE(counts.weights, 100);
  EXPECT_GE(counts.ranges, 1000);
  EXPECT_GE(counts.halved, 40);
}

}  // namespace
}  // namespace stowage::test
