// SPDX-License-Identifier: Apache-2.0
// `stowage unpack`: every resting weight as plain floats, everything else as it stands.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/formatted.h"
#include "cli/bitsandbytes.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/items.h"
#include "cli/model_folder.h"
#include "cli/progress.h"
#include "cli/text.h"
#include "stowage/quantize.h"

namespace stowage::cli {
namespace {

// Nothing for tensors that hold no values: they are copied.
std::optional<Dtype> target(const Item& item, const UnpackOptions& options) {
  if (item.weight == nullptr && !item.is_plain_float()) return std::nullopt;
  if (options.compute) return options.compute;
  if (item.is_plain_float()) return item.tensor->dtype;
  return item.weight->compute.value_or(Dtype::bf16);
}

Declaration declare(const Item& item, const UnpackOptions& options) {
  const auto dtype = target(item, options);
  if (!dtype) return declare_copy(*item.tensor);
  return {item.name, *dtype, item.shape, "", 0};
}

// A weight without scales that holds the tensor's own values; f64 has no codes to be a weight of.
std::vector<std::byte> widen(const File& file, const Item& item, Dtype dtype) {
  std::vector<std::byte> out(static_cast<std::size_t>(item.shape.elements()) *
                             static_cast<std::size_t>(bits(dtype)) / 8);
  if (item.weight != nullptr) {
    const Weight weight = file.weight(item.name);
    dequantize(weight, {0, weight.rows()}, out.data(), dtype);
    return out;
  }
  const ItemValues values(file, item);
  const Storage storage{.codes = dtype == Dtype::bf16  ? Codes::bf16
                                 : dtype == Dtype::f16 ? Codes::f16
                                                       : Codes::f32};
  void* const parts[] = {out.data()};
  quantize_into(values.data(), values.dtype(), item.shape, storage, parts,
                {.keep_nonfinite = true});
  return out;
}

void write_item(const File& file, const Item& item, const UnpackOptions& options, Writer& writer) {
  const auto dtype = target(item, options);
  if (!dtype || (item.is_plain_float() && *dtype == item.tensor->dtype))
    writer.write(item.name, file.bytes(*item.tensor));
  else
    writer.write(item.name, widen(file, item, *dtype));
}

void write_all(const File& file, const std::vector<Item>& all, const UnpackOptions& options,
               Writer& writer) {
  std::uint64_t total = 0;
  for (const Item& item : all) total += item.bytes;
  Progress progress("unpacking", total);
  for (const Item& item : all) {
    check_interrupt();
    progress.at(item.name);
    in_tensor(file, item, [&] { write_item(file, item, options, writer); });
    drop(file, item);
    progress.done(item.bytes);
  }
  file.check();
}

}  // namespace

void unpack(const UnpackOptions& options) {
  catch_interrupts();
  const File file = File::open(options.in);
  const std::vector<Item> all = items_of(file);
  Output output(options.in, options.out, options.force);
  const auto config = plain_config(output, options.compute);
  std::vector<Declaration> tensors;
  tensors.reserve(all.size());
  for (const Item& item : all) tensors.push_back(declare(item, options));
  WriterOptions made;
  made.metadata = file.metadata();
  made.shard_bytes = options.shard_bytes;
  Writer writer(output.weights_path(), std::move(tensors), made);
  write_all(file, all, options, writer);
  output.copy_side_files({config});
  check_interrupt();
  writer.finish();
  output.commit();
  const auto rested = std::ranges::count_if(all, &Item::rests);
  if (options.json)
    return print(json_text(
        {{"in", options.in}, {"out", options.out}, {"tensors", all.size()}, {"unpacked", rested}}));
  print(formatted("{}: {} of {} tensors unpacked\n", printable(options.out), rested, all.size()));
}

}  // namespace stowage::cli
