// SPDX-License-Identifier: Apache-2.0
// Runs of flat groups, of groups that restart at each row, and of nested scales.
#include "kernel/runs.h"

#include <algorithm>
#include <string>

#include "base/checked.h"

namespace stowage {

Runs::Runs(const Weight& weight) {
  const Storage& storage = weight.storage();
  if (storage.dialect != Dialect::standard)
    throw Error(Code::unsupported,
                "dequantize: storage must have kernels in this version, got " + to_string(storage));
  codes_ = static_cast<const std::uint8_t*>(weight.part(0));
  if (storage.scaling.kind == Scaling::Kind::none) return;
  group_ = std::max<std::int64_t>(group_elements(storage, weight.shape()), 1);
  if (storage.scaling.nested) {
    nested_ = {static_cast<const std::uint8_t*>(weight.part(1)),
               static_cast<const float*>(weight.part(2)), static_cast<const float*>(weight.part(3)),
               static_cast<const float*>(weight.part(4))};
    return;
  }
  scales_ = static_cast<const float*>(weight.part(1));
  const bool by_row =
      storage.scaling.kind == Scaling::Kind::block && trait(storage.codes).bits == 8;
  if (by_row && weight.row_elements() % group_ != 0) row_ = weight.row_elements();
}

Run Runs::next(std::int64_t begin, std::int64_t end, float* scales) const noexcept {
  if (nested_.absmax != nullptr) return next_nested(begin, end, scales);
  if (row_ == 0) return {codes_, begin, scales_, group_, end - begin};
  const std::int64_t row = begin / row_, first = begin % row_;
  return {codes_ + row * row_, first, scales_ + row * ceil_div(row_, group_), group_,
          std::min(end - begin, row_ - first)};
}

Run Runs::next_nested(std::int64_t begin, std::int64_t end, float* scales) const noexcept {
  constexpr std::int64_t kNestedBlock = 256;  // block scales under one fp32
  const std::int64_t from = begin / group_;
  const std::int64_t to = std::min(ceil_div(end, group_), from + kExpandedScales);
  const float offset = *nested_.offset;
  const float* const map = nested_.map;
  for (std::int64_t b = from; b < to;) {
    const float scale = nested_.table[b / kNestedBlock];
    const std::int64_t stop = std::min(to, (b / kNestedBlock + 1) * kNestedBlock);
    for (; b < stop; ++b) {
      const float product = map[nested_.absmax[b]] * scale;
      scales[b - from] = product + offset;
    }
  }
  const std::int64_t base = from * group_;  // even: two codes to a byte
  return {codes_ + base / 2, begin - base, scales, group_, std::min(end, to * group_) - begin};
}

}  // namespace stowage
