// SPDX-License-Identifier: Apache-2.0
// `stowage unpack`: every resting weight as plain floats, everything else as it stands.

#include <algorithm>
#include <utility>
#include <vector>

#include "base/formatted.h"
#include "cli/bitsandbytes.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/model_folder.h"
#include "cli/progress.h"
#include "cli/source.h"
#include "cli/text.h"
#include "stowage/quantize.h"

namespace stowage::cli {
namespace {

// Nothing for tensors that hold no values: they are copied.
std::optional<Dtype> target(const Source& source, const UnpackOptions& options) {
  if (source.weight == nullptr && !source.is_plain_float()) return std::nullopt;
  if (options.compute) return options.compute;
  if (source.is_plain_float()) return source.tensor->dtype;
  return source.weight->compute.value_or(Dtype::bf16);
}

Declaration declare(const Source& source, const UnpackOptions& options) {
  const auto dtype = target(source, options);
  if (!dtype) return declare_copy(*source.tensor);
  return {source.name, *dtype, source.shape, "", 0};
}

// A weight without scales that holds the tensor's own values; f64 has no codes to be a weight of.
std::vector<std::byte> widen(const File& file, const Source& source, Dtype dtype) {
  std::vector<std::byte> out(static_cast<std::size_t>(source.shape.elements()) *
                             static_cast<std::size_t>(bits(dtype)) / 8);
  if (source.weight != nullptr) {
    const Weight weight = file.weight(source.name);
    dequantize(weight, {0, weight.rows()}, out.data(), dtype);
    return out;
  }
  const Values values(file, source);
  const Storage storage{.codes = dtype == Dtype::bf16  ? Codes::bf16
                                 : dtype == Dtype::f16 ? Codes::f16
                                                       : Codes::f32};
  void* const parts[] = {out.data()};
  quantize_into(values.data(), values.dtype(), source.shape, storage, parts,
                {.keep_nonfinite = true});
  return out;
}

void write_source(const File& file, const Source& source, const UnpackOptions& options,
                  Writer& writer) {
  const auto dtype = target(source, options);
  if (!dtype || (source.is_plain_float() && *dtype == source.tensor->dtype))
    writer.write(source.name, file.bytes(*source.tensor));
  else
    writer.write(source.name, widen(file, source, *dtype));
}

void write_all(const File& file, const std::vector<Source>& all, const UnpackOptions& options,
               Writer& writer) {
  std::uint64_t total = 0;
  for (const Source& source : all) total += source.bytes;
  Progress progress("unpacking", total);
  for (const Source& source : all) {
    check_interrupt();
    progress.at(source.name);
    in_tensor(file, source, [&] { write_source(file, source, options, writer); });
    drop(file, source);
    progress.done(source.bytes);
  }
  file.check();
}

}  // namespace

void unpack(const UnpackOptions& options) {
  catch_interrupts();
  const File file = File::open(options.in);
  const std::vector<Source> all = sources(file);
  Output output(options.in, options.out, options.force);
  const auto config = plain_config(output, options.compute);
  std::vector<Declaration> tensors;
  tensors.reserve(all.size());
  for (const Source& source : all) tensors.push_back(declare(source, options));
  WriterOptions made;
  made.metadata = file.metadata();
  made.shard_bytes = options.shard_bytes;
  Writer writer(output.weights_path(), std::move(tensors), made);
  write_all(file, all, options, writer);
  output.copy_side_files(config);
  check_interrupt();
  writer.finish();
  output.commit();
  const auto rested = std::ranges::count_if(all, &Source::rests);
  print(formatted("{}: {} of {} tensors unpacked\n", printable(options.out), rested, all.size()));
}

}  // namespace stowage::cli
