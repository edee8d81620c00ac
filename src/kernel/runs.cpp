// SPDX-License-Identifier: Apache-2.0
// Runs of flat groups, of groups that restart at each row, and of scales that are expanded first.
#include "kernel/runs.h"

#include <algorithm>

#include "base/checked.h"
#include "format/convert.h"
#include "format/legal.h"
#include "format/q4_k.h"
#include "format/torchao.h"
#include "format/under_one.h"
#include "stowage/descriptor.h"

namespace stowage {
namespace {

// torchao: int8 codes, the factors of their groups, the mean.
template <class D>
void expand_affine(const KeptScales& kept, std::int64_t first, std::int64_t n,
                   float* out) noexcept {
  const auto* codes = static_cast<const std::int8_t*>(kept.parts[0]);
  const auto mean = torchao::load<D>(kept.parts[2], 0);
  for (std::int64_t b = first; b < first + n;) {
    const auto factor = torchao::load<D>(kept.parts[1], b / kept.outer);
    const std::int64_t stop = std::min(first + n, (b / kept.outer + 1) * kept.outer);
    for (; b < stop; ++b)
      out[b - first] = static_cast<float>(torchao::scale<D>(codes[b], factor, mean));
  }
}

// Powers of two, by their exponents: 0 is a subnormal number, 255 is NaN.
void expand_e8m0(const KeptScales& kept, std::int64_t first, std::int64_t n, float* out) noexcept {
  const auto* exponents = static_cast<const std::uint8_t*>(kept.parts[0]) + first;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t e = exponents[i];
    out[i] = float_of(e == 0 ? 0x400000u : e == 255 ? 0x7fc00000u : e << 23);
  }
}

// e4m3 numbers, and the one that stands over all.
template <ScaleCode kCode>
void expand_under_one(const KeptScales& kept, std::int64_t first, std::int64_t n,
                      float* out) noexcept {
  const auto* codes = static_cast<const std::uint8_t*>(kept.parts[0]) + first;
  const float outer = *static_cast<const float*>(kept.parts[1]);
  const float* const values = trait(Codes::f8_e4m3).values.data();
  for (std::int64_t i = 0; i < n; ++i) out[i] = under_one(kCode, values[codes[i]], outer);
}

// Superblocks of ggml: sub-blocks, eight to a record.
void expand_q4_k(const KeptScales& kept, std::int64_t first, std::int64_t n, float* out) noexcept {
  const auto* records = static_cast<const std::uint8_t*>(kept.parts[0]);
  for (std::int64_t b = first; b < first + n;) {
    const q4_k::Steps steps = q4_k::steps_of(records + b / q4_k::kSteps * q4_k::kRecord);
    const std::int64_t stop = std::min(first + n, (b / q4_k::kSteps + 1) * q4_k::kSteps);
    for (; b < stop; ++b) {
      out[b - first] = steps.scale[b % q4_k::kSteps];
      out[kExpandedScales + b - first] = steps.offset[b % q4_k::kSteps];
    }
  }
}

template <float (*kWiden)(std::uint16_t)>
void expand_halves(const KeptScales& kept, std::int64_t first, std::int64_t n,
                   float* out) noexcept {
  const auto* halves = static_cast<const std::uint16_t*>(kept.parts[0]) + first;
  for (std::int64_t i = 0; i < n; ++i) out[i] = kWiden(halves[i]);
}

Expand expand_of(const Descriptor& form, const Scaling& scaling) {
  switch (form.scale.code) {
    case ScaleCode::plain:
      if (form.scale.type == Dtype::f8_e8m0) return &expand_e8m0;
      if (form.scale.type == Dtype::bf16) return &expand_halves<&bf16_to_f32>;
      if (form.scale.type == Dtype::f16) return &expand_halves<&f16_to_f32>;
      break;
    case ScaleCode::mapped:
      return &expand_mapped;
    case ScaleCode::product:
      return &expand_under_one<ScaleCode::product>;
    case ScaleCode::product_bf16:
      return &expand_under_one<ScaleCode::product_bf16>;
    case ScaleCode::quotient:
      return &expand_under_one<ScaleCode::quotient>;
    case ScaleCode::q4_k:
      return &expand_q4_k;
    case ScaleCode::affine:
      return torchao::with_type(scaling.type,
                                []<class D>(D) -> Expand { return &expand_affine<D>; });
  }
  return nullptr;
}

}  // namespace

Runs::Runs(const Weight& weight) : form_(describe(weight.storage())) {
  const Storage& storage = weight.storage();
  const Group& group = form_.scale.group;
  codes_ = static_cast<const std::uint8_t*>(weight.part(0));
  pairs_ = form_.packing == Packing::whole ? 0 : 1;
  if (const auto values = trait(form_.codes).values; values.size() == 16) values_ = values.data();
  if (group.kind == Group::Kind::none) return;
  group_ = group.n != 0 ? group.n : group_elements(storage, weight.shape());
  group_ = std::max<std::int64_t>(group_, 1);
  if (group.kind == Group::Kind::block2) rows_ = group.m;
  if (rows_ != 1 || (group.kind == Group::Kind::along && weight.row_elements() % group_ != 0))
    row_ = weight.row_elements(), across_ = ceil_div(row_, group_);
  if (const std::int32_t inner = form_.scale.inner; inner != 0) {
    if (row_ != 0) across_ *= group.n / inner;
    group_ = inner;
  }
  if (form_.zero == Zero::code) zeros_ = static_cast<const std::int8_t*>(weight.part(2));
  expand_ = expand_of(form_, storage.scaling);
  if (expand_ == nullptr) scales_ = static_cast<const float*>(weight.part(1));
  if (group.kind == Group::Kind::named) {
    groups_ = static_cast<const std::int32_t*>(weight.part(zeros_ == nullptr ? 2 : 3));
    row_ = weight.row_elements(), across_ = ceil_div(row_, group_);
  }
  if (expand_ == nullptr) return;
  for (int i = 1; i < kMaxParts; ++i) kept_.parts[static_cast<std::size_t>(i - 1)] = weight.part(i);
  kept_.outer = std::max(form_.outer.group.n, 1);
  rounds_ = form_.rounds_to != Dtype::unknown;
  exact_ = form_.rounds_to == Dtype::f64;
  if (rounds_)
    torchao::with_type(storage.scaling.type, [&]<class D>(D) {
      for (std::int64_t k = 0; k < 16; ++k)
        rounded_[k] = static_cast<float>(torchao::load<D>(kept_.parts[3], k));
    });
}

// One block, with its 16 results.
Run Runs::next_doubles(std::int64_t begin, std::int64_t end, double* values) const noexcept {
  using torchao::F64;
  const std::int64_t b = begin / group_;
  const double scale = torchao::scale<F64>(static_cast<const std::int8_t*>(kept_.parts[0])[b],
                                           torchao::load<F64>(kept_.parts[1], b / kept_.outer),
                                           torchao::load<F64>(kept_.parts[2], 0));
  for (std::int64_t k = 0; k < 16; ++k) values[k] = torchao::load<F64>(kept_.parts[3], k) * scale;
  return {codes_, begin, nullptr, group_, std::min(end, (b + 1) * group_) - begin, values};
}

// The columns of one row.
Run Runs::next_named(std::int64_t begin, std::int64_t end, OfRow& room) const noexcept {
  const std::int64_t row = begin / row_, first = begin - row * row_, from = row * across_;
  const float* scales = scales_ + from;
  if (expand_ != nullptr) {
    expand_(kept_, from, across_, room.scales);
    scales = room.scales;
  }
  if (zeros_ != nullptr) std::copy_n(zeros_ + from, across_, room.zeros);
  room.named = {groups_, static_cast<std::int32_t>(across_ - 1),
                zeros_ == nullptr ? nullptr : room.zeros};
  return {codes_ + (row * row_ >> pairs_),     first,   scales,  group_,
          std::min(end - begin, row_ - first), values_, nullptr, &room.named};
}

}  // namespace stowage
