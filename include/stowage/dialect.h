// SPDX-License-Identifier: Apache-2.0
// Writing files in the dialects that peers publish models in: the tensors that resting weights
// become there, and what their readers must be told beside them. docs/dialects.md has the table.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "stowage/file.h"
#include "stowage/writer.h"

namespace stowage {
inline namespace v0 {

/// A tensor of a file in a dialect, and where its bytes come from.
struct DialectTensor {
  enum class From : std::uint8_t {
    part,         // of the weight, in a form
    text,         // these bytes
    quant_state,  // quant_state() of the weight, whose offset its values tell
  };
  Declaration declaration;
  From from = From::text;
  int part = 0;
  PartForm form = {};
  std::string text = {};
};

/// What a model becomes: tensors that are no part of a weight stay as they are.
struct DialectFiles {
  std::vector<std::vector<DialectTensor>> weights;  // in the order in which they were given
  std::vector<DialectTensor> markers;               // which only show the dialect
  std::map<std::string, std::string> metadata;      // of the header
  /// Keys of config.json, each with its JSON; and whole files beside it, by their names.
  std::map<std::string, std::string> config, files;
};

/// What the dialect is told of a model that it is to hold.
struct DialectModel {
  std::vector<WeightInfo> weights;       // names, storages, shapes, and what they compute in
  std::vector<Declaration> others = {};  // tensors that are no part of a weight
};

/// "fp8", "compressed-tensors", ...: dialects that in_dialect() takes, with the forms of those that
/// have several: "gptq", "gptq:gptq_v2", ...
STOWAGE_API std::vector<std::string> written_dialects();
/// The dialects that can hold a weight, without their forms.
STOWAGE_API std::vector<std::string> dialects_of(const WeightInfo& weight);
/// The storage that a weight gets in a dialect (or a form of it) with no value changed: its own,
/// else one whose scales are wider numbers, or that has zero points, all 0. Nothing where there is
/// none. Throws invalid_argument for an unknown dialect.
STOWAGE_API std::optional<Storage> storage_in_dialect(std::string_view dialect,
                                                      const WeightInfo& weight);
/// The files of a model in a dialect, or in one form of it ("compressed-tensors:pack-quantized").
/// What they say is read back here, so that File::open() finds the same weights in them. Throws
/// invalid_argument for an unknown dialect; unsupported, naming the weight, its storage and the
/// dialects that have it, or what contradicts, where it cannot hold the model.
STOWAGE_API DialectFiles in_dialect(std::string_view dialect, const DialectModel& model);
/// The bytes of a tensor that in_dialect() has given for this weight.
STOWAGE_API std::vector<std::byte> dialect_bytes(const DialectTensor& tensor, const Weight& weight,
                                                 Dtype compute);

}  // namespace v0
}  // namespace stowage
