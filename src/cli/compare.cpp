// SPDX-License-Identifier: Apache-2.0
#include "cli/compare.h"

#include <nlohmann/json.hpp>

#include "base/formatted.h"
#include "cli/interrupt.h"
#include "cli/items.h"
#include "cli/losses.h"
#include "cli/progress.h"
#include "cli/text.h"
#include "format/legal.h"
#include "store/policy.h"
#include "stowage/quantize.h"

namespace stowage::cli {
namespace {

using Json = nlohmann::ordered_json;

// One weight in one storage.
struct Cell {
  std::uint64_t bytes = 0;
  Loss loss{};
  std::string reason;  // why it cannot rest so; empty if it can
};

struct Line {
  Item item;
  std::vector<Cell> cells;
};

struct Total {
  std::uint64_t bytes = 0;
  Losses losses;
  std::size_t refused = 0;
};

Cell cell(const ItemValues& values, const Shape& shape, const Storage& storage) {
  try {
    const Weight weight = quantize(values.data(), values.dtype(), shape, storage,
                                   {.keep_nonfinite = can_keep_nonfinite(storage)});
    const auto bytes = static_cast<std::uint64_t>(layout(weight.storage(), shape).bytes());
    return {bytes, measure(values.data(), values.dtype(), weight), ""};
  } catch (const Error& error) {
    if (error.code() != Code::invalid_argument && error.code() != Code::unsupported) throw;
    return {0, {}, error.what()};
  }
}

std::vector<Line> compare_all(const File& file, const std::vector<Item>& taken,
                              const std::vector<Storage>& storages) {
  std::uint64_t bytes = 0;
  for (const Item& item : taken) bytes += item.bytes;
  Progress progress("comparing", bytes);
  std::vector<Line> lines;
  for (const Item& item : taken) {
    check_interrupt();
    progress.at(item.name);
    Line line{item, {}};
    in_tensor(file, item, [&] {
      const ItemValues values(file, item);
      for (const Storage& storage : storages)
        line.cells.push_back(cell(values, item.shape, storage));
    });
    lines.push_back(std::move(line));
    drop(file, item);
    progress.done(item.bytes);
  }
  file.check();
  return lines;
}

Total total_of(const std::vector<Line>& lines, const Storage& storage, std::size_t column) {
  Total total;
  for (const Line& line : lines) {
    const Cell& cell = line.cells[column];
    if (!cell.reason.empty()) {
      ++total.refused;
      continue;
    }
    total.bytes += cell.bytes;
    total.losses.add(line.item.name, storage, cell.loss);
  }
  return total;
}

std::string error_text(const Loss& loss) { return formatted("{:.3g}", loss.relative()); }

std::string text(const std::string& model, const std::vector<Line>& lines,
                 const std::vector<Storage>& storages, std::size_t left_out) {
  std::vector<std::string> heading{"weight", "shape", "bytes"}, sums{"all of them", "", ""};
  for (const Storage& storage : storages) {
    heading.push_back(to_string(storage));
    heading.emplace_back("error");
  }
  Table table(heading, 2);
  std::uint64_t bytes = 0;
  for (const Line& line : lines) {
    std::vector<std::string> row{printable(line.item.name), to_string(line.item.shape),
                                 size_text(line.item.bytes)};
    for (const Cell& cell : line.cells) {
      row.push_back(cell.reason.empty() ? size_text(cell.bytes) : "-");
      row.push_back(cell.reason.empty() ? error_text(cell.loss) : "-");
    }
    table.add(std::move(row));
    bytes += line.item.bytes;
  }
  sums[2] = size_text(bytes);
  std::string notes;
  for (std::size_t i = 0; i < storages.size(); ++i) {
    const Total total = total_of(lines, storages[i], i);
    sums.push_back(size_text(total.bytes));
    sums.push_back(error_text(total.losses.sum));
    if (const auto& worst = total.losses.worst)
      notes +=
          formatted("{}: worst {}, relative {:.3g}; largest error {:.3g}\n", to_string(storages[i]),
                    printable(worst->name), worst->loss.relative(), total.losses.sum.max_error);
    if (total.losses.worst_block)
      notes += formatted("{}: {}\n", to_string(storages[i]), worst_block_text(total.losses));
    if (total.refused != 0)
      notes +=
          formatted("{}: cannot hold {} of the weights\n", to_string(storages[i]), total.refused);
  }
  table.add(std::move(sums));
  return formatted("{}: {} weights that would rest, {} tensors that stay plain\n\n{}\n{}",
                   printable(model), lines.size(), left_out, table.text(), notes);
}

Json cell_json(const Storage& storage, const Cell& cell) {
  Json json{{"storage", to_string(storage)}};
  if (!cell.reason.empty()) {
    json["reason"] = cell.reason;
    return json;
  }
  json["bytes"] = cell.bytes;
  json.update(errors_json(cell.loss));
  return json;
}

Json json_of(const File& file, const std::vector<Line>& lines, const std::vector<Storage>& storages,
             const Json& left_out) {
  Json totals = Json::array(), weights = Json::array();
  for (std::size_t i = 0; i < storages.size(); ++i) {
    const Total total = total_of(lines, storages[i], i);
    Json json{{"storage", to_string(storages[i])}, {"bytes", total.bytes}};
    json.update(errors_json(total.losses));
    json["refused"] = total.refused;
    totals.push_back(std::move(json));
  }
  for (const Line& line : lines) {
    const auto sizes = line.item.shape.sizes();
    Json compared = Json::array();
    for (std::size_t i = 0; i < storages.size(); ++i)
      compared.push_back(cell_json(storages[i], line.cells[i]));
    weights.push_back({{"name", line.item.name},
                       {"shape", std::vector<std::int64_t>(sizes.begin(), sizes.end())},
                       {"bytes", line.item.bytes},
                       {"compared", std::move(compared)}});
  }
  return {{"files", file.paths()},
          {"storages", totals},
          {"weights", weights},
          {"not_compared", left_out}};
}

}  // namespace

std::vector<Storage> parse_storages(std::string_view text) {
  std::vector<Storage> storages;
  while (true) {
    const std::size_t comma = text.find(',');
    storages.push_back(parse_storage(text.substr(0, comma)));
    if (comma == std::string_view::npos) return storages;
    text.remove_prefix(comma + 1);
  }
}

void compare(const std::string& model, const std::vector<Storage>& storages, bool json) {
  catch_interrupts();
  const File file = File::open(model);
  const Policy policy{.rules = {}, .storage = Storage{}};
  std::vector<Item> taken;
  Json left_out = Json::array();
  for (const Item& item : items_of(file)) {
    const bool floating = item.is_plain_float() || item.rests();
    const Choice choice = choose(policy, item.name, item.shape, floating);
    if (choice.storage)
      taken.push_back(item);
    else
      left_out.push_back({{"name", item.name}, {"reason", choice.reason}});
  }
  const std::vector<Line> lines = compare_all(file, taken, storages);
  if (json)
    print(json_text(json_of(file, lines, storages, left_out)));
  else
    print(text(model, lines, storages, left_out.size()));
}

}  // namespace stowage::cli
