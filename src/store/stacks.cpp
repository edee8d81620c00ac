// SPDX-License-Identifier: Apache-2.0
#include "store/stacks.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/formatted.h"
#include "store/part_form.h"
#include "store/refusal.h"
#include "store/shard.h"
#include "stowage/descriptor.h"

namespace stowage {
namespace {

[[noreturn]] void misfit(const StackInfo& info, const std::string& what) {
  throw Error(Code::invalid_argument, formatted("stack {}: {}", in_quotes(info.name), what));
}

const WeightInfo& matrix_of(const File& file, const StackInfo& info, const std::string& name) {
  const WeightInfo* const found = file.find_weight(name);
  if (found == nullptr) misfit(info, "must be of weights of the file, got " + in_quotes(name));
  const std::int64_t columns = info.shape[2];
  if (found->shape.rank() != 2 || found->shape[1] != columns)
    misfit(info, formatted("{} must be a matrix of {} columns, is {}", in_quotes(name), columns,
                           to_string(found->shape)));
  return *found;
}

}  // namespace

Stacks::Stacks(File file, std::vector<StackInfo> infos)
    : file_(std::move(file)), infos_(std::move(infos)) {
  std::ranges::sort(infos_, {}, &StackInfo::name);
  for (const StackInfo& info : infos_) {
    const auto twice = std::ranges::count(infos_, info.name, &StackInfo::name) > 1;
    if (twice || file_.find_weight(info.name) || file_.find(info.name))
      misfit(info, "must have a name that nothing else in the file has");
    stacks_.push_back(checked(info));
  }
}

Stacks::Stack Stacks::checked(const StackInfo& info) const {
  if (info.shape.rank() != 3) misfit(info, "must have 3 dimensions, has " + to_string(info.shape));
  const auto experts = static_cast<std::size_t>(info.shape[0]);
  if (info.matrices.size() != experts || experts == 0)
    misfit(info, formatted("must have matrices for each of {} indices, got {}", experts,
                           info.matrices.size()));
  const Layout made = layout(info.storage, info.shape);
  const auto count = static_cast<std::size_t>(made.count);
  Stack stack;
  for (std::size_t index = 0; index < experts; ++index) {
    std::vector<StackPiece> pieces;
    std::array<std::uint64_t, kMaxParts> filled{};
    std::int64_t rows = 0;
    for (const std::string& name : info.matrices[index]) {
      const WeightInfo& matrix = matrix_of(file_, info, name);
      rows += matrix.shape[0];
      const Layout own = layout(matrix.storage, matrix.shape);
      if (static_cast<std::size_t>(own.count) != count || matrix.parts.size() != count ||
          matrix.storage.codes != info.storage.codes)
        misfit(info,
               formatted("rests as {}, which is not made of {} as {} rests",
                         to_string(info.storage), to_string(matrix.storage), in_quotes(name)));
      for (std::size_t i = 0; i < count; ++i) {
        if (own.parts[i].dtype != made.parts[i].dtype)
          misfit(info, formatted("{} must be {}, of {} is {}", made.parts[i].name,
                                 disk_name(made.parts[i].dtype), in_quotes(name),
                                 disk_name(own.parts[i].dtype)));
        if (!matrix.forms.empty() && (matrix.forms[i].rounded || matrix.forms[i].one))
          misfit(info, formatted("{} of {} must be in the file as it rests", own.parts[i].name,
                                 in_quotes(name)));
        const std::uint64_t each = static_cast<std::uint64_t>(made.parts[i].bytes) / experts;
        const auto item = static_cast<std::uint64_t>(bits(made.parts[i].dtype) / 8);
        const bool repeats = own.parts[i].shape.rank() == 0 && each > item;
        const auto times = repeats ? static_cast<std::uint64_t>(matrix.shape[0]) : 1;
        const std::uint64_t bytes = static_cast<std::uint64_t>(own.parts[i].bytes) * times;
        pieces.push_back({file_.find(matrix.parts[i]), &matrix, static_cast<int>(i),
                          index * each + filled[i], bytes, times});
        filled[i] += bytes;
      }
    }
    for (std::size_t i = 0; i < count; ++i)
      if (rows != info.shape[1] ||
          filled[i] * experts != static_cast<std::uint64_t>(made.parts[i].bytes))
        misfit(info,
               formatted("matrices must fill index {}, have {} rows and {} bytes of {} for {} "
                         "and {}",
                         index, rows, filled[i], made.parts[i].name, info.shape[1],
                         static_cast<std::uint64_t>(made.parts[i].bytes) / experts));
    stack.of_index.push_back(std::move(pieces));
  }
  return stack;
}

std::span<const StackPiece> Stacks::pieces(std::size_t stack, std::int64_t index) const noexcept {
  return stacks_[stack].of_index[static_cast<std::size_t>(index)];
}

void Stacks::form(const StackPiece& piece, std::span<const std::byte> tensor,
                  std::span<std::byte> out) const {
  const auto i = static_cast<std::size_t>(piece.part);
  const auto one = out.first(out.size() / piece.times);
  if (piece.matrix->forms.empty() || piece.matrix->forms[i].is_whole())
    std::ranges::copy(tensor.first(one.size()), one.begin());
  else
    file_.form_part(*piece.matrix, piece.part, tensor, one);
  for (std::uint64_t k = 1; k < piece.times; ++k)
    std::ranges::copy(one, out.begin() + static_cast<std::ptrdiff_t>(k * one.size()));
}

ViewedTensor Stacks::viewed(const StackPiece& piece) const {
  static constexpr PartForm kWhole;
  const TensorInfo& tensor = *piece.tensor;
  const auto i = static_cast<std::size_t>(piece.part);
  const auto shard = static_cast<std::size_t>(tensor.shard);
  const Layout own = layout(piece.matrix->storage, piece.matrix->shape);
  return {.file = &OpenShards::of(file_)[shard].map,
          .offset = tensor.offset,
          .held = tensor.bytes,
          .place = {file_.paths()[shard], tensor.name, tensor.offset},
          .form = piece.matrix->forms.empty() ? kWhole : piece.matrix->forms[i],
          .shape = own.parts[i].shape,
          .begin = piece.place,
          .bytes = piece.bytes,
          .times = piece.times};
}

// Whole parts, as all others: who gives one to a system call has touched it before.
void Stacks::make_views() const {
  std::vector<ViewedPart> all;
  for (std::size_t s = 0; s < infos_.size(); ++s) {
    const Layout made = layout(infos_[s].storage, infos_[s].shape);
    stacks_[s].first_view = all.size();
    for (int part = 0; part < made.count; ++part) {
      const Part& of = made.parts[static_cast<std::size_t>(part)];
      all.push_back({.bytes = static_cast<std::uint64_t>(of.bytes), .tensors = {}});
      for (const auto& pieces : stacks_[s].of_index)
        for (const StackPiece& piece : pieces)
          if (piece.part == part) all.back().tensors.push_back(viewed(piece));
    }
  }
  if (!all.empty()) views_ = std::make_unique<FormedViews>(std::move(all));
}

const std::byte* Stacks::place(std::size_t stack, int part) const {
  std::call_once(viewed_, [this] { make_views(); });
  return views_->address(stacks_[stack].first_view + static_cast<std::size_t>(part));
}

inline namespace v0 {

File File::with_stacks(std::vector<StackInfo> stacks) const {
  File base = *this, made = *this;
  base.stacks_ = nullptr;
  made.stacks_ = std::make_shared<const Stacks>(std::move(base), std::move(stacks));
  return made;
}

const std::vector<StackInfo>& File::stacks() const noexcept {
  static const std::vector<StackInfo> none;
  return stacks_ ? stacks_->infos() : none;
}

Weight File::stack(std::string_view name) const {
  const std::vector<StackInfo>& all = stacks();
  const auto found = std::ranges::lower_bound(all, name, {}, &StackInfo::name);
  if (found == all.end() || found->name != name)
    throw Error(Code::invalid_argument, paths().front() + ": stack " + in_quotes(name) +
                                            ": must be one of the file's stacks, got none");
  const auto count = static_cast<std::size_t>(layout(found->storage, found->shape).count);
  std::array<const void*, kMaxParts> parts{};
  for (std::size_t i = 0; i < count; ++i)
    parts[i] = stacks_->place(static_cast<std::size_t>(found - all.begin()), static_cast<int>(i));
  return {found->storage, found->shape, std::span(parts).first(count), stacks_};
}

}  // namespace v0
}  // namespace stowage
