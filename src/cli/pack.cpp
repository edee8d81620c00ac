// SPDX-License-Identifier: Apache-2.0
// `stowage pack`: decides, declares, then streams: at any time one tensor is at work.
#include <vector>

#include "cli/bitsandbytes.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/model_folder.h"
#include "cli/pack_plan.h"
#include "cli/pack_report.h"
#include "cli/progress.h"
#include "cli/text.h"
#include "format/legal.h"

namespace stowage::cli {
namespace {

std::uint64_t bytes_of(const std::vector<Declaration>& tensors) {
  std::uint64_t bytes = 0;
  for (const Declaration& tensor : tensors)
    bytes += tensor.dtype == Dtype::unknown
                 ? tensor.bytes
                 : static_cast<std::uint64_t>(tensor.shape.elements()) *
                       static_cast<std::uint64_t>(bits(tensor.dtype)) / 8;
  return bytes;
}

WriterOptions writer_options(const File& file, const std::vector<Item>& items,
                             const PackOptions& options) {
  WriterOptions made;
  made.metadata = file.metadata();
  made.shard_bytes = options.shard_bytes;
  for (const Item& item : items) {
    const Source& source = item.source;
    if (item.packed())
      made.weights.push_back({source.name, item.storage, source.shape, {}, item.compute});
    else if (item.action == Item::Action::copy && source.rests())
      made.weights.push_back(
          {source.name, source.weight->storage, source.shape, {}, source.weight->compute});
  }
  return made;
}

Weight quantize_item(const Item& item, const Values& values, bool keep_nonfinite) {
  try {
    return quantize(values.data(), values.dtype(), item.source.shape, item.storage,
                    {.keep_nonfinite = keep_nonfinite});
  } catch (const Error& error) {
    if (error.code() != Code::invalid_argument || !can_keep_nonfinite(item.storage)) throw;
    throw Error(error.code(), std::string(error.what()) + " (--keep-nonfinite keeps it)");
  }
}

Loss write_item(const File& file, const Item& item, const PackOptions& options, Writer& writer) {
  const Source& source = item.source;
  if (item.action == Item::Action::copy) {
    if (source.rests())
      writer.write_weight(source.name, file.weight(source.name));
    else
      writer.write(source.name, file.bytes(*source.tensor));
    return {};
  }
  const Values values(file, source);
  // A plain tensor is cast as `model.to(dtype)` would cast it: masks of -inf pass.
  const bool keep = options.keep_nonfinite || item.action == Item::Action::cast;
  const Weight weight = quantize_item(item, values, keep);
  writer.write_weight(source.name, weight);
  return item.packed() ? measure(values.data(), values.dtype(), weight) : Loss{};
}

std::vector<Outcome> write_all(const File& file, const std::vector<Item>& items,
                               const PackOptions& options, Writer& writer) {
  std::uint64_t total = 0;
  for (const Item& item : items) total += item.source.bytes;
  Progress progress("packing", total);
  std::vector<Outcome> outcomes;
  for (const Item& item : items) {
    check_interrupt();
    progress.at(item.source.name);
    const Loss loss =
        in_tensor(file, item.source, [&] { return write_item(file, item, options, writer); });
    outcomes.push_back({item, bytes_of(declarations(item)), loss});
    drop(file, item.source);
    progress.done(item.source.bytes);
  }
  file.check();
  return outcomes;
}

}  // namespace

void pack(const PackOptions& options) {
  catch_interrupts();
  const File file = File::open(options.in);
  const std::vector<Item> items = plan_pack(file, options);
  Output output(options.in, options.out, options.force);
  const auto config = packed_config(output, items, options);
  std::vector<Declaration> tensors;
  for (const Item& item : items)
    for (Declaration& tensor : declarations(item)) tensors.push_back(std::move(tensor));
  Writer writer(output.weights_path(), std::move(tensors), writer_options(file, items, options));
  const std::vector<Outcome> outcomes = write_all(file, items, options, writer);
  output.copy_side_files(config);
  check_interrupt();
  writer.finish();
  output.commit();
  print(options.json ? report_json(options, outcomes) : report_text(options, outcomes));
}

}  // namespace stowage::cli
