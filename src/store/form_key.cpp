// SPDX-License-Identifier: Apache-2.0
// Forms of parts as one integer each, and back.
#include "base/formatted.h"
#include "store/part_form.h"
#include "stowage/error.h"

namespace stowage {
namespace {

constexpr std::int64_t kRounded = 1, kOne = 3;           // their keys
constexpr std::int64_t kBlocks = std::int64_t{1} << 62;  // in keys

}  // namespace

inline namespace v0 {

// bit    0 rounded | 1-5 in_file | 6 folded | 7-11 in_part | 12 string | 13-18 word | 19 rows | 20
// transposed | 21 tiled 22-29 bias | 30-37 less | 38-61 order, three bits each; of blocks, whose
// numbers are in order: 22-29 record | 30-37 at | 38-45 span | 46-53 halves | 54-61 most | 62 set
std::int64_t form_key(const PartForm& form) noexcept {
  if (form.is_whole()) return 0;
  if (form.rounded) return kRounded;
  if (form.one) return kOne;
  std::int64_t key = std::int64_t{form.in_file} << 1 | std::int64_t{form.folded} << 6 |
                     std::int64_t{form.string} << 12 | std::int64_t{form.in_part} << 7 |
                     std::int64_t{form.word} << 13 |
                     std::int64_t{static_cast<int>(form.axis)} << 19 |
                     std::int64_t{form.transposed} << 20 | std::int64_t{form.tiled} << 21;
  if (is_block(form))
    return key | std::int64_t{form.record} << 22 | std::int64_t{form.at} << 30 |
           std::int64_t{form.span} << 38 | std::int64_t{form.halves} << 46 |
           std::int64_t{form.most} << 54 | kBlocks;
  key |= std::int64_t{form.bias} << 22 | std::int64_t{form.less} << 30;
  for (std::size_t j = 0; j < form.order.size(); ++j)
    key |= std::int64_t{form.order[j]} << (38 + 3 * j);
  return key;
}

PartForm form_from_key(std::int64_t key) {
  PartForm form;
  const auto field = [&](int bit, int bits) {
    return static_cast<std::uint8_t>(key >> bit & ((1 << bits) - 1));
  };
  if (key != 0 && key != kRounded && key != kOne) {
    form = {.in_file = field(1, 5), .in_part = field(7, 5), .word = field(13, 6)};
    form.axis = static_cast<PartForm::Axis>(field(19, 1));
    form.transposed = field(20, 1) != 0, form.tiled = field(21, 1) != 0;
    form.folded = field(6, 1) != 0;
    form.string = field(12, 1) != 0;
    if ((key & kBlocks) != 0) {
      form.record = field(22, 8), form.at = field(30, 8);
      form.span = field(38, 8), form.halves = field(46, 8), form.most = field(54, 8);
    } else {
      form.bias = field(22, 8), form.less = field(30, 8);
    }
    for (int j = 0; j < 8 && (key & kBlocks) == 0; ++j)
      form.order[static_cast<std::size_t>(j)] = field(38 + 3 * j, 3);
  }
  form.rounded = key == kRounded, form.one = key == kOne;
  if (!is_legal(form) || form_key(form) != key)
    throw Error(Code::invalid_argument,
                formatted("form key: must come from form_key(), got {}", key));
  return form;
}

}  // namespace v0
}  // namespace stowage
