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

WriterOptions writer_options(const File& file, const std::vector<PackTask>& packings,
                             const PackOptions& options) {
  WriterOptions made;
  made.metadata = file.metadata();
  made.shard_bytes = options.shard_bytes;
  for (const PackTask& packing : packings) {
    const Item& item = packing.item;
    if (packing.packed())
      made.weights.push_back({item.name, packing.storage, item.shape, {}, packing.compute});
    else if (packing.action == PackTask::Action::copy && item.rests())
      made.weights.push_back(
          {item.name, item.weight->storage, item.shape, {}, item.weight->compute});
  }
  return made;
}

Weight quantize_values(const PackTask& packing, const ItemValues& values, bool keep_nonfinite) {
  try {
    return quantize(values.data(), values.dtype(), packing.item.shape, packing.storage,
                    {.keep_nonfinite = keep_nonfinite});
  } catch (const Error& error) {
    if (error.code() != Code::invalid_argument || !can_keep_nonfinite(packing.storage)) throw;
    throw Error(error.code(), std::string(error.what()) + " (--keep-nonfinite keeps it)");
  }
}

Loss write_packing(const File& file, const PackTask& packing, const PackOptions& options,
                   Writer& writer) {
  const Item& item = packing.item;
  if (packing.action == PackTask::Action::copy) {
    if (item.rests())
      writer.write_weight(item.name, file.weight(item.name));
    else
      writer.write(item.name, file.bytes(*item.tensor));
    return {};
  }
  const ItemValues values(file, item);
  // A plain tensor is cast as `model.to(dtype)` would cast it: masks of -inf pass.
  const bool keep = options.keep_nonfinite || packing.action == PackTask::Action::cast;
  const Weight weight = quantize_values(packing, values, keep);
  writer.write_weight(item.name, weight);
  return packing.packed() ? measure(values.data(), values.dtype(), weight) : Loss{};
}

std::vector<Outcome> write_all(const File& file, const std::vector<PackTask>& packings,
                               const PackOptions& options, Writer& writer) {
  std::uint64_t total = 0;
  for (const PackTask& packing : packings) total += packing.item.bytes;
  Progress progress("packing", total);
  std::vector<Outcome> outcomes;
  for (const PackTask& packing : packings) {
    check_interrupt();
    progress.at(packing.item.name);
    const Loss loss = in_tensor(file, packing.item,
                                [&] { return write_packing(file, packing, options, writer); });
    outcomes.push_back({packing, bytes_of(declarations(packing)), loss});
    drop(file, packing.item);
    progress.done(packing.item.bytes);
  }
  file.check();
  return outcomes;
}

}  // namespace

void pack(const PackOptions& options) {
  catch_interrupts();
  const File file = File::open(options.in);
  const std::vector<PackTask> packings = plan_pack(file, options);
  Output output(options.in, options.out, options.force);
  const auto config = packed_config(output, packings, options);
  std::vector<Declaration> tensors;
  for (const PackTask& packing : packings)
    for (Declaration& tensor : declarations(packing)) tensors.push_back(std::move(tensor));
  Writer writer(output.weights_path(), std::move(tensors), writer_options(file, packings, options));
  const std::vector<Outcome> outcomes = write_all(file, packings, options, writer);
  output.copy_side_files(config);
  check_interrupt();
  writer.finish();
  output.commit();
  print(options.json ? report_json(options, outcomes) : report_text(options, outcomes));
}

}  // namespace stowage::cli
