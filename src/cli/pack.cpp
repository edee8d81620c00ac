// SPDX-License-Identifier: Apache-2.0
// `stowage pack` and `stowage convert`: decide, declare, then stream: at any time one tensor is at
// work.
#include <algorithm>
#include <span>
#include <vector>

#include "cli/bitsandbytes.h"
#include "cli/commands.h"
#include "cli/convert_plan.h"
#include "cli/interrupt.h"
#include "cli/model_folder.h"
#include "cli/pack_plan.h"
#include "cli/pack_report.h"
#include "cli/progress.h"
#include "cli/restated.h"
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
    if (packing.rests())
      made.weights.push_back({item.name, packing.resting(), item.shape, {}, packing.computes()});
  }
  return made;
}

WriterOptions writer_options(const Conversion& conversion, const PackOptions& options) {
  WriterOptions made;
  made.metadata = conversion.metadata;
  made.shard_bytes = options.shard_bytes;
  made.manifest = false;
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

// What the files say of it, and what its readers make of that.
Weight as_written(const PackTask& packing, const Weight& weight) {
  if (!packing.written) return weight;
  const Weight made = restated(weight, *packing.written);
  const auto rounded = [](const DialectTensor& tensor) { return tensor.form.rounded; };
  return std::ranges::any_of(packing.said, rounded) ? with_rounded_scales(made) : made;
}

void write_resting(const PackTask& packing, const Weight& weight, Writer& writer) {
  if (packing.said.empty()) return writer.write_weight(packing.item.name, weight);
  const Layout made = layout(weight.storage(), weight.shape());
  for (const DialectTensor& tensor : packing.said) {
    const Part& part = made.parts[static_cast<std::size_t>(tensor.part)];
    if (tensor.from == DialectTensor::From::part && tensor.form.is_whole())
      writer.write(tensor.declaration.name,
                   {static_cast<const std::byte*>(weight.part(tensor.part)),
                    static_cast<std::size_t>(part.bytes)});
    else
      writer.write(tensor.declaration.name,
                   dialect_bytes(tensor, weight, packing.computes().value_or(Dtype::bf16)));
  }
}

Loss write_packing(const File& file, const PackTask& packing, const PackOptions& options,
                   Writer& writer) {
  const Item& item = packing.item;
  if (packing.action == PackTask::Action::copy) {
    if (item.rests())
      write_resting(packing, as_written(packing, file.weight(item.name)), writer);
    else
      writer.write(item.name, file.bytes(*item.tensor));
    return {};
  }
  const ItemValues values(file, item);
  // A plain tensor is cast as `model.to(dtype)` would cast it: masks of -inf pass.
  const bool keep = options.keep_nonfinite || packing.action == PackTask::Action::cast;
  const Weight weight = as_written(packing, quantize_values(packing, values, keep));
  if (packing.packed())
    write_resting(packing, weight, writer);
  else
    writer.write_weight(item.name, weight);
  return packing.packed() ? measure(values.data(), values.dtype(), weight) : Loss{};
}

std::vector<Outcome> write_all(const File& file, const std::vector<PackTask>& packings,
                               const PackOptions& options, Writer& writer) {
  std::uint64_t total = 0;
  for (const PackTask& packing : packings) total += packing.item.bytes;
  Progress progress(options.dialect.empty() ? "packing" : "converting", total);
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

std::vector<Declaration> declared(const std::vector<PackTask>& packings) {
  std::vector<Declaration> tensors;
  for (const PackTask& packing : packings)
    for (Declaration& tensor : declarations(packing)) tensors.push_back(std::move(tensor));
  return tensors;
}

}  // namespace

void pack(const PackOptions& options) {
  catch_interrupts();
  const File file = File::open(options.in);
  const std::vector<PackTask> packings = plan_pack(file, options);
  Output output(options.in, options.out, options.force);
  const auto config = packed_config(output, packings, options);
  Writer writer(output.weights_path(), declared(packings), writer_options(file, packings, options));
  const std::vector<Outcome> outcomes = write_all(file, packings, options, writer);
  output.copy_side_files({config});
  check_interrupt();
  writer.finish();
  output.commit();
  print(options.json ? report_json(options, outcomes) : report_text(options, outcomes));
}

void convert(const PackOptions& options) {
  catch_interrupts();
  const File file = File::open(options.in);
  std::vector<PackTask> packings = plan_pack(file, options);
  const Conversion conversion = plan_conversion(file, packings, options.dialect);
  Output output(options.in, options.out, options.force);
  const SideFiles side = converted_configs(output, conversion.files, options);
  std::vector<Declaration> tensors = declared(packings);
  for (const DialectTensor& marker : conversion.files.markers)
    tensors.push_back(marker.declaration);
  Writer writer(output.weights_path(), std::move(tensors), writer_options(conversion, options));
  const std::vector<Outcome> outcomes = write_all(file, packings, options, writer);
  for (const DialectTensor& marker : conversion.files.markers)
    writer.write(marker.declaration.name, std::as_bytes(std::span(marker.text)));
  output.copy_side_files(side);
  check_interrupt();
  writer.finish();
  output.commit();
  const auto& left_out = conversion.left_out;
  print(options.json ? report_json(options, outcomes, left_out)
                     : report_text(options, outcomes, left_out));
}

}  // namespace stowage::cli
