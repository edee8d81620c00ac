// SPDX-License-Identifier: Apache-2.0
// The registry of dialects: what tensors of a file are called and how they are packed, by whom, and
// which weights they are. Names and packing are no storages: a dialect maps tensors to the parts of
// a storage, and save() gives the same tensors back. docs/dialects.md says how one is recognised.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "store/claims.h"
#include "store/dialects/wording.h"

namespace stowage::dialects {

/// Of a whole file or shard set, whose header or config.json says it.
struct FileDialect {
  std::string_view name;
  std::string_view method;  // the quant_method of a config.json that says it; "" for none
  /// The tensor or metadata that shows the dialect, for a message; "" where none does.
  std::string (*recognise)(const TensorSource& source);
  /// Adds the weights; refuses tensors that contradict the dialect, its config or each other.
  void (*read)(Claims& claims);
  /// Adds the tensors of a weight, from the rows that `read` reads; whether it has such weights.
  /// Null where models of other files are not written in it.
  bool (*write)(Wording& wording, const WeightInfo& weight) = nullptr;
  /// Says what its readers must know of all weights; refuses what cannot stand in one model.
  void (*finish)(Wording& wording) = nullptr;
  std::span<const std::string_view> forms = {};  // ways to write the same storage
};

/// One row for each, in the order in which docs/dialects.md lists them.
std::span<const FileDialect* const> file_dialects() noexcept;

/// The dialect of a file, or null where nothing says one. Throws bad_file: dialect_ambiguous for
/// two, dialect_unknown for a quant_method that no row has.
const FileDialect* recognised(const TensorSource& source);

// What any file may hold beside that, told tensor by tensor, from the surest to the weakest.
void read_quant_states(Claims& claims);  // bitsandbytes' JSON beside 4-bit codes
void read_manifest(Claims& claims);      // ours, in the metadata
void read_labels(Claims& claims);        // ours, in tensors
void read_scaled(Claims& claims);        // 8-bit codes with a scale beside them
void read_plain(Claims& claims);         // what is left: casts, and 8-bit codes that are none

extern const FileDialect kAwq, kBitsandbytes, kComfyUi, kComfyUiScaled, kCompressedTensors, kFp8,
    kGguf, kGptq, kHqq, kModelOpt, kMxfp4, kTorchao;

}  // namespace stowage::dialects
