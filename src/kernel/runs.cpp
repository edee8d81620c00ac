// SPDX-License-Identifier: Apache-2.0
// Runs of flat groups, of groups that restart at each row, and of nested scales.
#include "kernel/runs.h"

#include <algorithm>
#include <string>

#include "base/checked.h"
#include "format/legal.h"
#include "format/torchao.h"
#include "stowage/descriptor.h"

namespace stowage {

Runs::Runs(const Weight& weight) {
  const Storage& storage = weight.storage();
  codes_ = static_cast<const std::uint8_t*>(weight.part(0));
  const Descriptor form = describe(storage);
  if (form.scale.group.kind == Group::Kind::none) return;
  group_ = std::max<std::int64_t>(group_elements(storage, weight.shape()), 1);
  if (form.scale.code == ScaleCode::affine) {
    torchao_ = {static_cast<const std::int8_t*>(weight.part(1)),
                weight.part(2),
                weight.part(3),
                weight.part(4),
                storage.scaling.scaler_block,
                storage.scaling.type};
    torchao::with_type(torchao_.type, [&]<class D>(D) {
      for (std::int64_t k = 0; k < 16; ++k)
        table_[k] = static_cast<float>(torchao::load<D>(torchao_.table, k));
    });
    return;
  }
  if (form.scale.code == ScaleCode::mapped) {
    nested_ = {static_cast<const std::uint8_t*>(weight.part(1)),
               static_cast<const float*>(weight.part(2)), static_cast<const float*>(weight.part(3)),
               static_cast<const float*>(weight.part(4))};
    return;
  }
  scales_ = static_cast<const float*>(weight.part(1));
  if (form.scale.group.kind == Group::Kind::along && weight.row_elements() % group_ != 0)
    row_ = weight.row_elements();
}

Run Runs::next(std::int64_t begin, std::int64_t end, Expanded& room) const noexcept {
  if (nested_.absmax != nullptr) return next_nested(begin, end, room.scales);
  if (torchao_.scalers != nullptr)
    return torchao_.type == ScaleType::f64 ? next_doubles(begin, end, room.values)
                                           : next_torchao(begin, end, room.scales);
  if (row_ == 0) return {codes_, begin, scales_, group_, end - begin};
  const std::int64_t row = begin / row_, first = begin % row_;
  return {codes_ + row * row_, first, scales_ + row * ceil_div(row_, group_), group_,
          std::min(end - begin, row_ - first)};
}

Run Runs::next_nested(std::int64_t begin, std::int64_t end, float* scales) const noexcept {
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

Run Runs::next_torchao(std::int64_t begin, std::int64_t end, float* scales) const noexcept {
  const std::int64_t from = begin / group_;
  const std::int64_t to = std::min(ceil_div(end, group_), from + kExpandedScales);
  torchao::with_type(torchao_.type, [&]<class D>(D) {
    const auto mean = torchao::load<D>(torchao_.mean, 0);
    for (std::int64_t b = from; b < to;) {
      const std::int64_t place = b / torchao_.scaler_block;
      const auto factor = torchao::load<D>(torchao_.factors, place);
      const std::int64_t stop = std::min(to, (place + 1) * torchao_.scaler_block);
      for (; b < stop; ++b)
        scales[b - from] = static_cast<float>(torchao::scale<D>(torchao_.scalers[b], factor, mean));
    }
  });
  const std::int64_t base = from * group_;
  return {
      codes_ + base / 2, begin - base, scales, group_, std::min(end, to * group_) - begin, table_};
}

// One block, with its 16 results.
Run Runs::next_doubles(std::int64_t begin, std::int64_t end, double* values) const noexcept {
  using torchao::F64;
  const std::int64_t b = begin / group_;
  const double scale = torchao::scale<F64>(
      torchao_.scalers[b], torchao::load<F64>(torchao_.factors, b / torchao_.scaler_block),
      torchao::load<F64>(torchao_.mean, 0));
  for (std::int64_t k = 0; k < 16; ++k) values[k] = torchao::load<F64>(torchao_.table, k) * scale;
  return {codes_, begin, nullptr, group_, std::min(end, (b + 1) * group_) - begin, values};
}

}  // namespace stowage
