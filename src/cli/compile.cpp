// SPDX-License-Identifier: Apache-2.0
// `stowage compile`: kernels of CUDA devices ahead of their first use, on a machine that need not
// have one.
#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "base/formatted.h"
#include "cli/commands.h"
#include "cli/text.h"
#include "device/form.h"
#include "device/kept_programs.h"

namespace stowage::cli {
namespace {

device::Compiler compiler_of(const CompileOptions& options) {
  if (options.compiler.empty()) return device::Compiler();
  return device::Compiler({options.compiler});
}

Dtype values_of(const CompileOptions& options) {
  constexpr std::pair<const char*, Dtype> kNames[] = {
      {"f32", Dtype::f32}, {"bf16", Dtype::bf16}, {"f16", Dtype::f16}};
  for (const auto& [name, dtype] : kNames)
    if (options.dtype == name) return dtype;
  throw UsageError("--dtype: must be f32, bf16 or f16, got " + options.dtype);
}

}  // namespace

void compile(const CompileOptions& options) {
  const Dtype values = values_of(options);
  std::vector<Storage> storages;
  for (const std::string& text : options.storages) {
    storages.push_back(storage_for_values(parse_storage(text), values));
    if (!device::has_form(storages.back()))
      throw UsageError("--storage: CUDA kernels must serve it, got " + text);
  }
  const device::Compiler compiler = compiler_of(options);
  const std::string folder = options.to.empty() ? device::programs_folder() : options.to;
  const device::KeptPrograms kept(folder);
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const Storage& storage : storages)
    for (const int architecture : options.architectures)
      for (const device::Ahead& one :
           device::programs_ahead(storage, values, architecture, options.rows)) {
        if (options.ptx) {
          print(compiler.compile(one.text, architecture, true).code);
          continue;
        }
        const auto begin = std::chrono::steady_clock::now();
        const device::KeptPrograms::Program made = kept.get(one.text, compiler, architecture);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        all.push_back({{"storage", to_string(storage)},
                       {"architecture", architecture},
                       {"file", one.file},
                       {"x_rows", one.x_rows},
                       {"many", one.many},
                       {"groups", one.groups},
                       {"bytes", made.code.size()},
                       {"path", made.path},
                       {"found", made.found},
                       {"seconds", took.count()}});
      }
  if (options.ptx) return;
  if (options.json) return print(json_text(all));
  std::size_t bytes = 0;
  for (const auto& one : all) bytes += one["bytes"].get<std::size_t>();
  print(formatted("{} programs, {}, by NVRTC {} in {}\n", all.size(), size_text(bytes),
                  compiler.version(), printable(folder)));
}

}  // namespace stowage::cli
