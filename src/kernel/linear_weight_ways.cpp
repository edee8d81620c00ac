// SPDX-License-Identifier: Apache-2.0
// Which ways to multiply a weight has: their kernels, how many of its rows one call takes, and of
// x.
#include <algorithm>
#include <limits>
#include <string>

#include "base/checked.h"
#include "format/superblocks.h"
#include "kernel/linear_weight.h"

namespace stowage {
namespace {

// Checked before anything else reads the weight as a matrix.
const Weight& matrix(const Weight& weight, const char* where) {
  if (weight.shape().rank() != 2)
    throw Error(Code::invalid_argument, std::string(where) +
                                            ": weight must have 2 dimensions, got shape " +
                                            to_string(weight.shape()));
  return weight;
}

// Null where values are not products in fp32, rounded to 16 bits or not.
DotKernel dot_kernel(const LinearKernels& kernels, const Descriptor& form) {
  if (form.rounds_to == Dtype::unknown || form.rounds_to == Dtype::f32)
    return kernels.dot[static_cast<std::size_t>(codes_read(form))];
  return form.rounds_to == Dtype::f64 ? nullptr : kernels.dot_rounded[value_index(form.rounds_to)];
}

Bf16DotKernel bf16_kernel(const Bf16Kernels& kernels, const Descriptor& form) {
  if (form.packing != Packing::high_first && form.packing != Packing::low_first) return nullptr;
  if (form.factor != 1.0f || form.zero == Zero::rounded) return nullptr;
  if (form.rounds_to == Dtype::bf16) return kernels.exact;
  if (form.rounds_to != Dtype::unknown && form.rounds_to != Dtype::f32) return nullptr;
  return form.codes == Codes::nf4   ? kernels.nf4
         : form.codes == Codes::fp4 ? kernels.fp4
                                    : kernels.exact;
}

// Null where sums of a group are not what its one scale multiplies.
Bf16DotKernel float8_kernel(const Bf16Kernels& kernels, const Descriptor& form) {
  if (form.zero != Zero::none || form.factor != 1.0f) return nullptr;
  return form.codes == Codes::f8_e4m3   ? kernels.e4m3
         : form.codes == Codes::f8_e5m2 ? kernels.e5m2
                                        : nullptr;
}

// The same, of more rows of x.
Bf16DotKernel eights_kernel(const Bf16Kernels& kernels, const Descriptor& form) {
  if (form.zero != Zero::none || form.factor != 1.0f) return nullptr;
  if (form.codes == Codes::int8)
    return form.rounds_to == Dtype::unknown ? kernels.eights_int8 : nullptr;
  return form.codes == Codes::f8_e4m3   ? kernels.eights_e4m3
         : form.codes == Codes::f8_e5m2 ? kernels.eights_e5m2
                                        : nullptr;
}

// Scales that are no fp32 numbers are expanded so many at a time; rows may cut the first and the
// last of them, where they are no number of groups. An even number, since kernels take rows in
// twos; in fours, if possible.
std::int64_t expanded_rows(std::int64_t block, std::int64_t columns) noexcept {
  const std::int64_t cut = columns % block == 0 ? 0 : 2;
  const std::int64_t some = (kExpandedScales - cut) * block / columns;
  return some > 3 ? some / 4 * 4 : some > 1 ? some / 2 * 2 : some;
}

// Whether groups begin anew with each row, so that a Run has no more than one.
bool restarts(const Group& group, std::int64_t columns) noexcept {
  return group.kind == Group::Kind::block2 ||
         (group.kind == Group::Kind::along && columns % group.n != 0);
}

// Whether elements of a group lie side by side.
bool side_by_side(const Group& group) noexcept {
  return group.kind != Group::Kind::named && group.kind != Group::Kind::column;
}

// Codes of a byte are as quick in fp32 where groups are long; what is beside scales must be zeros
// of theirs.
bool fits_integers(const Descriptor& form, std::int64_t group, bool whole_in_long) noexcept {
  if (form.factor != 1.0f || form.zero > Zero::code) return false;
  return group < kBytesBlock || whole_in_long || form.packing == Packing::dense;
}

// Whether bf16 has all that codes stand for.
bool exact_in_bf16(const Descriptor& form) noexcept {
  return form.codes != Codes::nf4 && form.codes != Codes::fp4 && form.rounds_to == Dtype::unknown;
}

// Whether scales are exponents of two, one for each stretch of elements of the whole matrix.
bool are_exponents(const Descriptor& form, std::int64_t columns) noexcept {
  return columns % std::max(form.scale.group.n, 1) == 0 &&
         form.scale.group.kind == Group::Kind::along && form.scale.code == ScaleCode::plain &&
         form.scale.type == Dtype::f8_e8m0 && form.scale.inner == 0;
}

// Words share an exponent across 32 columns; values and products must not be rounded.
bool fits_words(const Descriptor& form, std::int64_t group) noexcept {
  const bool rounds = form.rounds_to != Dtype::unknown && form.rounds_to != Dtype::f32;
  return group >= kBytesBlock / 2 && !rounds && form.factor == 1.0f && form.zero == Zero::none;
}

}  // namespace

LinearWeight::LinearWeight(const Kernels& kernels, const Weight& weight, const char* where)
    : runs_(kernels, matrix(weight, where)),
      codes_(static_cast<const char*>(weight.part(0))),
      rows_(weight.shape()[0]),
      columns_(weight.shape()[1]),
      to_f32_(kernels.dequantize, runs_.form(), Dtype::f32),
      to_bf16_(kernels.dequantize, runs_.form(), Dtype::bf16) {
  const Descriptor& form = runs_.form();
  const FormatTrait& format = trait(form.codes);
  dot_ = dot_kernel(kernels.linear, form);
  bits_ = format.bits;
  in_pairs_ = exact_in_bf16(form);
  is_bf16_ = form.codes == Codes::bf16;
  by_rows_ = in_pairs_ && columns_ != 0 &&
             (form.scale.group.kind == Group::Kind::none || runs_.group() % columns_ == 0);
  arranged_ = form.packing != Packing::whole && !runs_.unpacks();
  dot_rows_ = most_dot_rows(form.scale.group);
  dot_bf16_ = bf16_kernel(kernels.linear.bf16, form);
  dot_bf16_rows_ = most_dot_bf16_rows(form);
  dot_bf16_least_ = least_dot_bf16_vectors(form);
  // Scales of so few columns multiply as often as x does: for many rows decoding once is quicker.
  dot_bf16_most_ = runs_.group() == 16 ? 12 : std::numeric_limits<std::int64_t>::max();
  dot_bf16_sums_ = form.zero == Zero::offset && runs_.group() == 32;
  dot_bf16_scaled_ = most_scaled_bf16_vectors(form);
  dot_float8_ = float8_kernel(kernels.linear.bf16, form);
  dot_float8_rows_ = dot_float8_ == nullptr ? 0 : most_dot_float8_rows(form.scale.group);
  dot_eights_ = eights_kernel(kernels.linear.bf16, form);
  if (dot_eights_ != nullptr) dot_eights_rows_ = most_dot_eights_rows(form.scale.group);
  dot_bytes_ = kernels.linear.bytes.dot[static_cast<std::size_t>(form.codes)];
  dot_bytes_kind_ = kernels.linear.bytes.kind[static_cast<std::size_t>(form.codes)];
  dot_bytes_block_ = kernels.linear.bytes.block[dot_bytes_kind_];
  dot_bytes_exponents_ = dot_bytes_kind_ == kForFloat8 && are_exponents(form, columns_)
                             ? static_cast<const std::uint8_t*>(weight.part(1))
                             : nullptr;
  dot_bytes_rows_ = most_dot_bytes_rows(form.scale.group, kernels.linear.bytes.whole_in_long);
  keep_scales(kernels.linear.bytes.lines, weight);
  lines_ = form.scale.group.kind == Group::Kind::block2 ? form.scale.group.m : 0;
  near_ = kernels.linear.near;
  dot_bytes_most_ = dot_bytes_rows_ == 0 ? 0 : most_dot_bytes_vectors(kernels.linear.bytes);
}

// One row of x, with scales as they lie.
void LinearWeight::keep_scales(const LinesKernels& kernels, const Weight& weight) noexcept {
  const Descriptor& form = runs_.form();
  const std::int64_t group = runs_.group();
  if (dot_bytes_rows_ == 0 || form.factor != 1.0f || columns_ > kMostLinesColumns) return;
  if (restarts(form.scale.group, columns_) || columns_ % group != 0) return;
  kept_scales_ = static_cast<const std::uint8_t*>(weight.part(1));
  const bool q4_k = form.scale.code == ScaleCode::q4_k;
  if (q4_k || form.scale.code == ScaleCode::q6_k) {
    if (columns_ % superblocks::kBlock == 0) dot_kept_ = q4_k ? kernels.q4_k : kernels.q6_k;
  } else if (form.scale.code == ScaleCode::product) {
    if (form.codes != Codes::f4_e2m1 || group != 16) return;
    if (scales_under_one(weight.storage(), weight.shape()) < rows_ * columns_ / group) return;
    kept_outer_ = static_cast<const float*>(weight.part(2));
    dot_kept_ = kernels.nvfp4;
  } else if (form.scale.code == ScaleCode::plain) {
    dot_kept_ = kernels.plain(form.codes, form.scale.type, group, form.zero);
  }
}

std::int64_t LinearWeight::most_dot_rows(const Group& group) const noexcept {
  if (columns_ == 0) return 0;
  if (dot_ == nullptr) return 0;
  if (arranged() && columns_ % kLinearPad != 0) return 0;
  if (group.n % kLinearPad != 0 || !side_by_side(group)) return 0;
  const std::int64_t most = runs_.expands() ? expanded_rows(runs_.group(), columns_) : rows_;
  if (restarts(group, columns_) || (runs_.unpacks() && columns_ > kUnpacked))
    return std::min<std::int64_t>(most, 1);
  return runs_.unpacks() ? std::min(most, kUnpacked / columns_) : most;
}

std::int64_t LinearWeight::most_dot_bf16_rows(const Descriptor& form) const noexcept {
  const Group& group = form.scale.group;
  const std::int64_t of = runs_.group();
  if (dot_bf16_ == nullptr || columns_ == 0 || columns_ % kBf16Block != 0) return 0;
  if (group.kind == Group::Kind::none || !side_by_side(group) || restarts(group, columns_))
    return 0;
  if (of != 16 && of != 32 && of % kBf16Block != 0) return 0;
  if (columns_ % of != 0 && of % columns_ != 0) return 0;
  if (columns_ > kMostBf16Columns) return 0;
  if (of == 16 && form.zero != Zero::none) return 0;
  return runs_.expands() ? expanded_rows(of, columns_) : rows_;
}

// By integers is quicker for a row of x, where codes are multiples of one number, and for two or
// three where zeros or offsets are beside scales.
std::int64_t LinearWeight::least_dot_bf16_vectors(const Descriptor& form) const noexcept {
  if (form.zero == Zero::code || form.zero == Zero::sum) return 3;
  return form.codes == Codes::nf4 || form.codes == Codes::fp4 ? 1 : 2;
}

// More are worth the rounding of values, for which scales are not multiplied again for each of
// them.
std::int64_t LinearWeight::most_scaled_bf16_vectors(const Descriptor& form) const noexcept {
  if (form.zero != Zero::none) return dot_bf16_sums_ ? 6 : 0;
  return runs_.group() == 16 ? dot_bf16_most_ : runs_.group() == 32 ? 8 : 6;
}

std::int64_t LinearWeight::most_dot_float8_rows(const Group& group) const noexcept {
  const std::int64_t of = runs_.group();
  if (columns_ == 0 || columns_ % kBf16Block != 0) return 0;
  const bool one = group.kind == Group::Kind::none || of % columns_ == 0;  // scale of a row
  if (!side_by_side(group) || (!one && of != 16 && of != 32 && of % kBf16Block != 0)) return 0;
  if (!one && !restarts(group, columns_) && columns_ % of != 0) return 0;
  const std::int64_t most = runs_.expands() ? expanded_rows(of, columns_) : rows_;
  return restarts(group, columns_) ? std::min<std::int64_t>(most, 1) : most;
}

std::int64_t LinearWeight::most_dot_eights_rows(const Group& group) const noexcept {
  if (columns_ == 0) return 0;
  const std::int64_t of = runs_.group();
  const bool one = group.kind == Group::Kind::none || of % columns_ == 0;
  const bool begin = of % kBf16Block == 0 && columns_ % of == 0;
  return one || begin ? most_dot_float8_rows(group) : 0;
}

// Rows must begin with a group, or lie in one.
std::int64_t LinearWeight::most_dot_bytes_rows(const Group& group,
                                               bool whole_in_long) const noexcept {
  const std::int64_t of = group.kind == Group::Kind::none ? columns_ : runs_.group();
  if (dot_bytes_ == nullptr || columns_ == 0 || columns_ % kBytesBlock != 0) return 0;
  if (of != 16 && of != 32 && of != 64 && of % dot_bytes_block_ != 0 && of < columns_) return 0;
  if ((columns_ % of != 0 && of % columns_ != 0) || !side_by_side(group)) return 0;
  const bool integers = dot_bytes_kind_ == kForBytes || dot_bytes_kind_ == kForIntegers;
  if (integers && !fits_integers(runs_.form(), of, whole_in_long)) return 0;
  if (dot_bytes_kind_ == kForWords && !fits_words(runs_.form(), of)) return 0;
  if (dot_bytes_kind_ == kForFloat8 &&
      (runs_.form().zero != Zero::none || runs_.form().factor != 1.0f))
    return 0;
  if (dot_bytes_exponents_ != nullptr) return rows_;
  const std::int64_t most = runs_.expands() ? expanded_rows(of, columns_) : rows_;
  return restarts(group, columns_) ? std::min<std::int64_t>(most, 1) : most;
}

std::int64_t LinearWeight::most_dot_vectors() const noexcept {
  constexpr std::int64_t kFewGroups = 1024, kManyGroups = 32;  // elements of one
  if (!has_dot()) return 0;
  if (bits_ >= 8) return runs_.group() >= kFewGroups ? 16 : 8;
  return runs_.group() > kManyGroups ? 8 : 4;
}

std::int64_t LinearWeight::most_dot_bytes_vectors(const BytesKernels& bytes) const noexcept {
  if (dot_bytes_kind_ == kForBytes || dot_bytes_kind_ == kForIntegers) return bytes.most_whole;
  if (dot_bytes_kind_ == kForWords) return bytes.most_words;
  if (dot_bytes_kind_ == kForFloat8) return bytes.most_float8;
  return runs_.group() >= kBytesBlock ? bytes.most_long : bytes.most_short;
}

}  // namespace stowage
