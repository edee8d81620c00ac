// SPDX-License-Identifier: Apache-2.0
// Runs of flat groups, of groups that restart at each row, and of scales that are expanded first.
#include "kernel/runs.h"

#include <algorithm>

#include "base/checked.h"
#include "format/legal.h"
#include "format/torchao.h"
#include "kernel/stream.h"
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

Expand of_type(const ScaleKernels::OfType& kernels, Dtype type) {
  return type == Dtype::bf16 ? kernels.bf16 : type == Dtype::f16 ? kernels.f16 : kernels.f32;
}

Expand expand_of(const ScaleKernels& kernels, const Descriptor& form, const Scaling& scaling) {
  switch (form.scale.code) {
    case ScaleCode::plain:
      if (form.zero == Zero::sum) return of_type(kernels.added, form.scale.type);
      if (form.zero == Zero::rounded) return of_type(kernels.taken, form.scale.type);
      if (form.scale.type == Dtype::f8_e8m0) return kernels.e8m0;
      if (form.scale.type == Dtype::bf16) return kernels.bf16;
      if (form.scale.type == Dtype::f16) return kernels.f16;
      break;
    case ScaleCode::absmax:
      break;
    case ScaleCode::mapped:
      return kernels.mapped;
    case ScaleCode::product:
      return kernels.product;
    case ScaleCode::product_bf16:
      return kernels.product_bf16;
    case ScaleCode::quotient:
      return kernels.quotient;
    case ScaleCode::q4_k:
      return kernels.q4_k;
    case ScaleCode::q6_k:
      return kernels.q6_k;
    case ScaleCode::affine:
      return torchao::with_type(scaling.type,
                                []<class D>(D) -> Expand { return &expand_affine<D>; });
  }
  return nullptr;
}

// What a weight keeps for each scale, and reads one after the other: sixteenths of a byte.
std::int64_t kept_sixteenths(const Descriptor& form) noexcept {
  if (form.scale.code == ScaleCode::q4_k) return 16 * 16 / 8;
  if (form.scale.code == ScaleCode::q6_k) return 16 * 18 / 16;
  return form.scale.code == ScaleCode::plain ? 16 * bits(form.scale.type) / 8 : 16;
}

}  // namespace

Runs::Runs(const Kernels& kernels, const Weight& weight) : form_(describe(weight.storage())) {
  const Storage& storage = weight.storage();
  const Group& group = form_.scale.group;
  codes_ = static_cast<const std::uint8_t*>(weight.part(0));
  if (form_.packing != Packing::whole) bits_ = trait(form_.codes).bits;
  if (form_.packing == Packing::dense) unpack_ = kernels.dequantize.unpack;
  if (const auto values = trait(form_.codes).values; values.size() == 16) values_ = values.data();
  if (group.kind == Group::Kind::none) return;
  group_ = group.n != 0 ? group.n : group_elements(storage, weight.shape());
  group_ = std::max<std::int64_t>(group_, 1);
  if (group.kind == Group::Kind::column)
    group_ = 1, begins_ = -std::int64_t{codes_together(form_.packing)};
  if (spans_rows(group)) {
    rows_ = BlockRows(group, weight.shape());
    row_ = rows_.columns(), across_ = ceil_div(row_, group_);
  } else if (group.kind == Group::Kind::along && weight.row_elements() % group_ != 0) {
    row_ = weight.row_elements(), across_ = ceil_div(row_, group_);
  }
  if (const std::int32_t inner = form_.scale.inner; inner != 0) {
    if (row_ != 0) across_ *= group.n / inner;
    group_ = inner;
  }
  if (form_.zero == Zero::code) zeros_ = static_cast<const std::int8_t*>(weight.part(2));
  expand_ = expand_of(kernels.scales, form_, storage.scaling);
  kept_sixteenths_ = kept_sixteenths(form_);
  beside_ = form_.zero > Zero::code;
  if (expand_ == nullptr) scales_ = static_cast<const float*>(weight.part(1));
  if (group.kind == Group::Kind::named) {
    groups_ = static_cast<const std::int32_t*>(weight.part(zeros_ == nullptr ? 2 : 3));
    row_ = weight.row_elements(), across_ = ceil_div(row_, group_);
  }
  if (expand_ == nullptr) return;
  for (int i = 1; i < kMaxParts; ++i) kept_.parts[i - 1] = weight.part(i);
  if (form_.outer.group.kind != Group::Kind::none)
    kept_.outer = std::max<std::int64_t>(scales_under_one(storage, weight.shape()), 1);
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
  return {codes_ + row * row_ * bits_ / 8,     first,   scales,  group_,
          std::min(end - begin, row_ - first), values_, nullptr, &room.named};
}

// Elements of a run from one on: as many as there is room for, and no part of a group but at an
// end, unless all are of one.
Run Runs::next_unpacked(const Run& run, std::int64_t done, std::int8_t* room,
                        NamedGroups& named) const noexcept {
  const std::int64_t at = run.first + done, eight = at / 8 * 8, g = at / run.group;
  const std::int64_t in_group = (g + 1) * run.group - at;
  std::int64_t n = std::min(run.n - done, kUnpacked - (at - eight));
  const bool one = run.named != nullptr || n <= in_group || run.group > kUnpacked;
  if (one && run.named == nullptr) n = std::min(n, in_group);
  const std::int64_t from = one ? eight : g * run.group;
  if (!one) n = std::min(n, kUnpacked / run.group * run.group - (at - from));
  const auto* codes = static_cast<const std::uint8_t*>(run.codes);
  unpack_(codes + from * bits_ / 8, bits_, at + n - from, room);
  fetch_ahead(codes + (at + n) * bits_ / 8, n * bits_ / 8);  // on their way while these are read
  Run made{room, at - from, run.scales, one ? kUnpacked : run.group, n};
  if (run.named != nullptr) {
    named = *run.named;
    named.groups += from;
    made.named = &named;
    return made;
  }
  made.scales += g;
  if (run.zeros != nullptr) made.zeros = run.zeros + g;
  return made;
}

}  // namespace stowage
