// SPDX-License-Identifier: Apache-2.0
#include "store/dialects/dialects.h"

#include <algorithm>
#include <array>

#include "base/formatted.h"

namespace stowage::dialects {
namespace {

constexpr std::array<const FileDialect*, 12> kDialects{
    &kComfyUi,  &kComfyUiScaled, &kTorchao, &kFp8, &kMxfp4, &kCompressedTensors,
    &kModelOpt, &kBitsandbytes,  &kGptq,    &kAwq, &kHqq,   &kGguf};

// Models that our quantizer of transformers has written, whose files say themselves what rests.
constexpr std::string_view kOwnMethod = "stowage";

// Dialects without a method are never said by a configuration.
bool is_named(const FileDialect& dialect, const QuantConfig* config) {
  return config != nullptr && !dialect.method.empty() && config->method() == dialect.method;
}

// What shows that a file is of a dialect: its header, or else the configuration beside it.
std::string reading(const FileDialect& dialect, const TensorSource& source) {
  std::string shown = dialect.recognise(source);
  const QuantConfig* const config = source.config;
  if (shown.empty() && is_named(dialect, config))
    shown = formatted("quant_method {} of {}", in_quotes(config->method()), config->place().path);
  return shown;
}

}  // namespace

std::span<const FileDialect* const> file_dialects() noexcept { return kDialects; }

const FileDialect* recognised(const TensorSource& source) {
  const FileDialect* found = nullptr;
  std::string shown;
  for (const FileDialect* const dialect : file_dialects()) {
    const std::string another = reading(*dialect, source);
    if (another.empty()) continue;
    if (found != nullptr)
      refuse(Refusal::dialect_ambiguous, {source.paths[0], "", {}},
             formatted("{} ({}) and {} ({})", found->name, shown, dialect->name, another));
    found = dialect;
    shown = another;
  }
  const QuantConfig* const config = source.config;
  if (config == nullptr || config->method() == kOwnMethod) return found;
  if (std::ranges::none_of(file_dialects(), [&](const auto* d) { return is_named(*d, config); }))
    refuse(Refusal::dialect_unknown, config->place(),
           formatted("quant_method {}", in_quotes(config->method())));
  return found;
}

}  // namespace stowage::dialects
