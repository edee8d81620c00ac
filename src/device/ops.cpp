// SPDX-License-Identifier: Apache-2.0
#include "device/ops.h"

#include <algorithm>
#include <array>
#include <initializer_list>

#include "base/checked.h"
#include "format/dynamic_map.h"

namespace stowage::device {
namespace {

/// The launches of one op, of one weight.
class Op {
 public:
  /// `array`: the values beside the weight.
  Op(Stream& stream, const Storage& storage, Dtype values, const Shape& shape,
     std::span<void* const> parts, const void* array)
      : stream_(stream), form(form_of(storage, values)), weight(weight_of(storage, shape, parts)) {
    form.whole = is_whole(form, weight, {array});
  }

  void run(std::string_view kernel, std::int64_t threads,
           std::initializer_list<const void*> arguments) {
    if (threads != 0)
      stream_.launch(form, kernel, threads, weight.elements.n, std::span(arguments));
  }
  /// Threads that take all of so many.
  std::int64_t chunks(std::int64_t elements) const {
    return ceil_div<std::int64_t>(elements, form.together);
  }

 private:
  Stream& stream_;

 public:
  cuda::Form form;
  const cuda::Weight weight;
};

/// How much quantizing works with, and where it lies.
struct Counts {
  std::int64_t groups = 0, steps = 0, outers = 0;
  bool zeros = false;
  Counts(const Storage& storage, const Shape& shape) {
    const Descriptor form = describe(storage);
    if (is_cast(storage)) return;
    const Layout made = layout(storage, shape);
    const Level& scale = form.scale;
    groups = made.parts[1].shape.elements();
    if (scale.record != 0) groups /= scale.record;
    steps = groups * (scale.record != 0 ? scale.group.n / scale.inner : 1);
    if (stands_under_one(form)) outers = made.parts[2].shape.elements();
    zeros = form.zero != Zero::none;
  }
  static constexpr std::int64_t kHead = 4;  // words: what is refused, and nothing
  std::int64_t cleared() const { return kHead + steps * (zeros ? 2 : 1) + outers; }
  std::int64_t words() const { return cleared() + 2 * steps; }

  cuda::Working in(void* memory) const {
    auto* const at = static_cast<std::uint32_t*>(memory);
    cuda::Working made{};
    made.refused = at;
    made.above = at + kHead;
    made.below = zeros ? made.above + steps : nullptr;
    made.most = made.above + steps * (zeros ? 2 : 1);
    made.r = reinterpret_cast<float*>(at + cleared());
    made.moved = made.r + steps;
    return made;
  }
};

std::size_t bytes_of(Dtype dtype, std::int64_t n) {
  return static_cast<std::size_t>(n * bits(dtype) / 8);
}

void nest(Op& op, const cuda::Working& work, std::int64_t blocks) {
  const cuda::Extent count = blocks;
  op.run("stowage_mean", 1, {&op.weight, &work, &count});
  std::array<float, 256> map = dynamic_map();
  op.run("stowage_nest", std::max<std::int64_t>(1, ceil_div<std::int64_t>(blocks, op.form.outer_n)),
         {&op.weight, &work, &count, &map});
}

// Raises *most to the bits of the largest magnitude. A program for each dtype serves all storages.
void reach(Stream& stream, const Values& array, std::uint32_t* most) {
  constexpr std::int64_t kEach = 16;  // elements of a thread, where there are many
  const cuda::Extent n = array.count;
  const std::array<const void*, 3> arguments{&array.data, &n, &most};
  if (n.n != 0)
    stream.launch(form_of(Storage{}, array.dtype), "stowage_amax",
                  ceil_div<std::int64_t>(n.n, kEach), n.n, arguments);
}

}  // namespace

void dequantize(Stream& stream, const Storage& storage, const Shape& shape,
                std::span<void* const> parts, void* out, Dtype dtype) {
  if (trait(storage.codes).disk == dtype)  // a plain cast in its own type
    return stream.copy(out, parts[0], bytes_of(dtype, shape.elements()));
  Op op(stream, storage, dtype, shape, parts, out);
  op.run("stowage_dequantize", op.chunks(shape.elements()), {&op.weight, &out});
}

void embedding(Stream& stream, const Storage& storage, const Shape& shape,
               std::span<void* const> parts, const void* ids, bool are_long, std::int64_t count,
               void* out, Dtype dtype, std::uint32_t* refused) {
  Op op(stream, storage, dtype, shape, parts, out);
  const int long_ids = are_long ? 1 : 0;
  const cuda::Extent rows = count;
  op.run("stowage_embedding", count * op.chunks(shape.row_elements()),
         {&op.weight, &ids, &long_ids, &rows, &out, &refused});
}

bool on_tensor_cores(const cuda::Form& form, const Facts& facts) noexcept {
  const bool halves = form.values == cuda::Number::bf16 || form.values == cuda::Number::f16;
  return facts.architecture >= 80 && halves && form.whole && (form.slabs || form.x_rows > 1);
}

namespace {

// With one matrix or one for each group: by which kernel, on how many threads.
void multiply(Stream& stream, const cuda::Form& form, const cuda::Weight& weight,
              const Factor& factor, const std::int32_t* ends, const Facts& facts) {
  constexpr std::int64_t kWarp = 32, kWarps = 8, kWarpsEach = 32;  // of a block; of a processor
  constexpr std::int64_t kTile = 16;  // lines of w of a block that works on tensor cores
  const std::int64_t matrices = form.groups ? weight.rows.n : 1, lines = weight.lines.n;
  const cuda::Extent rows = factor.rows;
  const std::int64_t columns = weight.columns.n;
  const std::int64_t counted =
      std::max(matrices * lines * columns, factor.rows * std::max(columns, lines));
  if (on_tensor_cores(form, facts)) {
    const std::array<const void*, 6> arguments{&weight, &factor.x,    &ends,
                                               &rows,   &factor.bias, &factor.y};
    return stream.launch(form, "stowage_linear_tiles",
                         matrices * ceil_div<std::int64_t>(lines, kTile) * kWarps * kWarp, counted,
                         arguments);
  }
  const std::int64_t read = std::min(matrices, factor.rows) * lines;  // at most so many lines
  int share = 1;  // warps of a line: as few as leave no processor without work
  while (share < kWarps && read * share < facts.processors * kWarpsEach) share *= 2;
  const std::array<const void*, 7> arguments{&weight,      &factor.x, &ends, &rows,
                                             &factor.bias, &factor.y, &share};
  stream.launch(form, "stowage_linear",
                matrices * ceil_div<std::int64_t>(lines * share, kWarps) * kWarps * kWarp, counted,
                arguments);
}

}  // namespace

int most_rows(const Storage& storage, Dtype dtype, const Shape& shape, const Facts& facts) {
  constexpr int kPasses = 4;  // over codes that stay in a cache
  cuda::Form form = form_of(storage, dtype);
  form.x_rows = kMostTogether;
  const std::array<void*, kMaxParts> aligned{};
  form.whole = is_whole(form, weight_of(storage, shape, aligned), {});
  return on_tensor_cores(form, facts) ? kPasses * kMostTogether : kMostTogether;
}

void linear(Stream& stream, const Storage& storage, const Shape& shape,
            std::span<void* const> parts, const Factor& factor, const Facts& facts) {
  if (shape.rows() == 0 || factor.rows == 0) return;
  cuda::Form form = form_of(storage, factor.dtype);
  form.many = factor.rows > kMostTogether;
  form.x_rows = static_cast<int>(std::min<std::int64_t>(factor.rows, kMostTogether));
  const cuda::Weight weight = weight_of(storage, shape, parts);
  form.whole = is_whole(form, weight, {factor.x});
  form.slabs = has_slabs(form) && weight.columns.n % 64 == 0;
  multiply(stream, form, weight, factor, nullptr, facts);
}

void grouped_linear(Stream& stream, const Storage& storage, const Shape& shape,
                    std::span<void* const> parts, const Factor& factor, const std::int32_t* ends,
                    const Facts& facts) {
  stream.clear(factor.y, bytes_of(factor.dtype, factor.rows * shape[1]));
  if (shape[0] == 0 || shape[1] == 0 || factor.rows == 0) return;
  cuda::Form form = form_of(storage, factor.dtype);
  form.many = form.groups = true;
  const cuda::Weight weight = weight_of(storage, shape, parts);
  form.whole = is_whole(form, weight, {factor.x}) && weight.columns.n % form.together == 0;
  form.slabs = has_slabs(form) && weight.columns.n % 64 == 0;
  form.x_rows = factor.rows > kTileRows[0] ? kTileRows[1] : kTileRows[0];
  if (!on_tensor_cores(form, facts)) form.x_rows = kFusedRows;
  multiply(stream, form, weight, factor, ends, facts);
}

std::size_t working_bytes(const Storage& storage, const Shape& shape) {
  return static_cast<std::size_t>(Counts(storage, shape).words()) * sizeof(std::uint32_t);
}

void quantize(Stream& stream, const void* values, Dtype dtype, const Shape& shape,
              const Storage& storage, std::span<void* const> parts, void* working) {
  const Counts counts(storage, shape);
  const cuda::Working work = counts.in(working);
  stream.clear(working, static_cast<std::size_t>(counts.cleared()) * sizeof(std::uint32_t));
  const std::int64_t n = shape.elements();
  if (is_cast(storage) && trait(storage.codes).disk == dtype) {
    reach(stream, {values, dtype, n}, work.refused);
    return stream.copy(parts[0], values, bytes_of(dtype, n));
  }
  Op op(stream, storage, dtype, shape, parts, values);
  if (is_cast(storage))
    return op.run("stowage_cast", op.chunks(n), {&op.weight, &values, &work.refused});
  const cuda::Extent groups = counts.groups, outers = counts.outers;
  op.run("stowage_reach", op.chunks(n), {&op.weight, &values, &work});
  switch (op.form.codec) {
    case cuda::Codec::ggml:
      op.run("stowage_records", counts.groups, {&op.weight, &work, &groups});
      break;
    case cuda::Codec::bitsandbytes:
    case cuda::Codec::torchao:
      op.run("stowage_blocks", counts.groups, {&op.weight, &work, &groups});
      if (op.form.outer_n != 0) nest(op, work, counts.groups);
      break;
    default:
      if (counts.outers != 0) {
        op.run("stowage_outer_reach", counts.groups, {&op.weight, &work, &groups});
        op.run("stowage_outers", counts.outers, {&op.weight, &work, &outers});
      }
      op.run("stowage_scales", counts.groups, {&op.weight, &work, &groups});
  }
  op.run("stowage_encode", op.chunks(n), {&op.weight, &values, &work});
}

void amax(Stream& stream, std::span<const Values> arrays, float* most) {
  auto* const bits = reinterpret_cast<std::uint32_t*>(most);
  stream.clear(most, arrays.size() * sizeof(float));
  for (std::size_t i = 0; i < arrays.size(); ++i) reach(stream, arrays[i], bits + i);
  const cuda::Extent count = static_cast<long long>(arrays.size());
  const std::array<const void*, 2> arguments{&bits, &count};
  if (!arrays.empty())
    stream.launch(form_of(Storage{}, Dtype::f32), "stowage_amax_numbers", count.n, count.n,
                  arguments);
}

}  // namespace stowage::device
