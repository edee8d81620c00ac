// SPDX-License-Identifier: Apache-2.0
// Which storages exist: the rules behind the parser, which also guard hand-made Storage values.
#pragma once
#include <cstdint>
#include <span>

#include "stowage/descriptor.h"

namespace stowage {

/// N of `block<N>` inside of rows: any number in this range, where codes are packed one of whole
/// bytes.
inline constexpr std::int32_t kMinBlock = 2, kMaxBlock = 1 << 20;
/// N of `block<N>` for 4-bit codes: bitsandbytes' sizes, the powers of two in this range.
inline constexpr std::int32_t kMinBlock4 = 32, kMaxBlock4 = 4096;
/// N of `block<N>` for nf4:torchao: the powers of two from here to kMaxBlock4.
inline constexpr std::int32_t kMinBlockTorchao = 16;
/// Block scales of nf4:torchao that share a factor: the powers of two in this range.
inline constexpr std::int32_t kMinScalerBlock = 1, kMaxScalerBlock = 4096;
/// N of `block<N>` whose scales are records.
inline constexpr std::int32_t kSuperblock = 256;
/// M of `block<M>x<N>`: the powers of two in this range.
inline constexpr std::int32_t kMinRows = 2, kMaxRows = 4096;
/// Groups of a row whose columns have them by name.
inline constexpr std::int64_t kMostNamed = 4096;
/// Block scales that share one fp32 in a nested storage.
inline constexpr std::int64_t kNestedBlock = 256;

/// Which storages a format has, besides its own default.
struct Legal {
  std::uint8_t kinds;  // bits: 1 << Scaling::Kind
  std::int32_t least_block = 0, most_block = 0;
  std::int32_t step = 1;    // blocks are multiples of it
  bool powers = false;      // blocks are powers of two
  bool nested = false;      // scales may be nested
  bool typed = false;       // scales may be bf16 or f16, and those of blocks powers of two
  bool zero = false;        // scales may have a code beside them that stands for 0
  bool sum = false;         // or a number that is added to products
  bool rounded = false;     // those that are no records have a number that codes are measured from
  bool named = false;       // which columns are of a group of block<N> may stand in a part
  bool product = false;     // scales of block<N> may be e4m3, under one of all
  bool absmax = false;      // scales but of blocks may be the largest magnitudes
  bool super = false;       // scales are records, of blocks of one size; of typed ones, may be
  bool transposed = false;  // stacks of matrices may lie transposed, with blocks of plain scales
  bool open = false;        // nf4:torchao: always nested, a dtype and a scaler block of its own
};
/// What codes and dialect have for all of their storages; null where no row has them.
struct FormRow {
  Codes codes;
  Dialect dialect;
  Packing packing;
  Codec codec;
  FileForm file;
  Legal legal;
  PowerRule powers = PowerRule::ceil;
};
const FormRow* form_row(Codes codes, Dialect dialect) noexcept;
std::span<const FormRow> form_rows() noexcept;

bool is_legal(const Storage& storage) noexcept;
/// Whether NaN and infinity have codes, or scales that show them: casts, and 4-bit codes with plain
/// scales.
bool can_keep_nonfinite(const Storage& storage);
/// Throws invalid_argument where values alone do not make such a weight: the tool that found the
/// order of its columns gives it.
void check_quantizable(const Storage& storage);
/// Throws invalid_argument "`where`: ..." with the legal storages unless is_legal().
void check_legal(const Storage& storage, const char* where);

}  // namespace stowage
