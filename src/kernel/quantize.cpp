// SPDX-License-Identifier: Apache-2.0
// Quantizing: checks, and how each kind of scaling is cut into tasks. No temporary grows with the
// weight, but for the block scales of nested storages.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/map_guard.h"
#include "format/dynamic_map.h"
#include "format/legal.h"
#include "format/under_one.h"
#include "kernel/chunks.h"
#include "kernel/drivers.h"
#include "kernel/quantize_torchao.h"
#include "stowage/descriptor.h"

namespace stowage {
namespace {

constexpr float kLargestE4m3 = 448.0f;

[[noreturn]] void refuse_nonfinite(const QuantizeJob& job) {
  const bool exact = sees_exact_values(job.storage);
  const auto is_finite = [&](std::int64_t i) {  // scaled storages see fp32 values
    const double x = job.value(i);
    return exact ? std::isfinite(x) : std::isfinite(static_cast<float>(x));
  };
  std::int64_t i = 0;
  while (i < job.n && is_finite(i)) ++i;
  if (i == job.n)  // but their scale is not
    throw Error(Code::invalid_argument, "quantize: values must have finite scales in " +
                                            to_string(job.storage) + ", got infinity");
  throw Error(Code::invalid_argument,
              "quantize: values must be finite" +
                  (can_keep_nonfinite(job.storage) ? "" : " in " + to_string(job.storage)) +
                  ", got " + std::to_string(job.value(i)) + " at element " + std::to_string(i));
}

std::uint32_t quantize_cast(const QuantizeJob& job) {
  const CastKernel cast = job.kernels.quantize.cast[job.codes()][job.in()];
  Largest largest;
  for_each_chunk(job.executor, job.n, kChunkElements, [&](std::int64_t begin, std::int64_t end) {
    largest.take(cast(job.at(begin), end - begin, job.code(begin)));
  });
  return largest.bits();
}

std::uint32_t quantize_blocks(const QuantizeJob& job, float* absmax) {
  const BlocksKernel kernel = job.kernels.quantize.blocks[job.codes()][job.in()];
  const std::int64_t block = job.storage.scaling.block;
  static_assert(kChunkElements % 4096 == 0, "a chunk holds whole blocks");
  Largest largest;
  for_each_chunk(job.executor, job.n, kChunkElements, [&](std::int64_t begin, std::int64_t end) {
    largest.take(
        kernel({job.at(begin), end - begin, block, job.code(begin), absmax + begin / block}));
  });
  return largest.bits();
}

std::uint32_t quantize_nested(const QuantizeJob& job) {
  std::vector<float> absmax(
      static_cast<std::size_t>(ceil_div<std::int64_t>(job.n, job.storage.scaling.block)));
  const std::uint32_t largest = quantize_blocks(job, absmax.data());
  if (largest >= kInfinityBits) return largest;
  const ExactFloats exact;
  nest_scales(absmax, static_cast<std::uint8_t*>(job.parts[1]), static_cast<float*>(job.parts[2]),
              static_cast<float*>(job.parts[4]));
  std::ranges::copy(dynamic_map(), static_cast<float*>(job.parts[3]));
  return largest;
}

/// Elements that share a scale: groups of `group` in lines of `line`, restarting at each line.
struct Groups {
  std::int64_t group, line, per_line, count;
  Groups(const QuantizeJob& job, const Shape& shape)
      : group(group_elements(job.storage, shape)),
        line(job.form.scale.group.kind == Group::Kind::along ? shape.row_elements() : job.n),
        per_line(ceil_div(line, group)),
        count(job.n / line * per_line) {}
  std::int64_t begin(std::int64_t g) const { return g / per_line * line + g % per_line * group; }
  std::int64_t size(std::int64_t g) const { return std::min(group, line - g % per_line * group); }
};

/// How the codes of a group are made of its values.
struct Coding {
  float r;  // multiplies them, or divides them
  float zero;
};

/// The groups of a weight: their scales, as the storage keeps them, and their codes; with a zero
/// for each, or symmetric.
template <bool kZero>
class Coder {
 public:
  explicit Coder(const QuantizeJob& job)
      : job_(job),
        range_(code_range(job.storage)),
        type_(job.form.scale.type),
        rule_(job.form.powers),
        under_(job.form.scale.code),
        divides_(stands_under_one(job.form)),
        encode_((divides_ ? job.kernels.quantize.divide
                          : job.kernels.quantize.encode)[job.codes()][job.in()]),
        scales_(job.parts[1]),
        outer_(divides_ ? *static_cast<const float*>(job.parts[2]) : 1.0f) {}

  /// Of elements from i on. Without zeros both sides are the largest magnitude.
  Extremes reach(std::int64_t i, std::int64_t n) const {
    if constexpr (kZero) return job_.kernels.quantize.reach[job_.in()](job_.at(i), n);
    const std::uint32_t most = job_.kernels.quantize.amax[job_.in()](job_.at(i), n);
    return {most, most};
  }
  /// Whether the type has a scale for such values, which may be no finite numbers.
  bool holds(const Extremes& reach) const {
    if (std::max(reach.below, reach.above) >= kInfinityBits) return false;
    const float scale = ratio(reach);
    return type_ == Dtype::f16 ? scale <= 65504.0f : scale <= std::numeric_limits<float>::max();
  }
  /// Keeps the scale of group g, which is read as the type has it.
  Coding put(std::int64_t g, const Extremes& reach) const {
    if (divides_) return {put_product(g, __builtin_bit_cast(float, reach.above)), 0};
    const bool has_values = (reach.below | reach.above) != 0;
    const float scale = has_values ? std::max(ratio(reach), 0x1p-126f) : 1.0f;
    const float r = 1.0f / put_scale(g, scale, reach.above);
    if constexpr (!kZero) return {r, 0};
    const float least = -__builtin_bit_cast(float, reach.below) / scale;
    const float zero = std::nearbyint(std::clamp(range_.least - least, range_.least, range_.most));
    static_cast<std::int8_t*>(job_.parts[2])[g] = static_cast<std::int8_t>(zero);
    return {r, zero};
  }
  void encode(std::int64_t i, std::int64_t n, const Coding& coding) const {
    if constexpr (kZero)
      job_.kernels.quantize.encode_from[job_.codes()][job_.in()](job_.at(i), n, coding.r,
                                                                 coding.zero, job_.code(i));
    else
      encode_(job_.at(i), n, coding.r, job_.code(i));
  }

 private:
  float ratio(const Extremes& reach) const {
    const auto above = __builtin_bit_cast(float, reach.above);
    if constexpr (kZero) return (above + __builtin_bit_cast(float, reach.below)) / range_.divisor;
    return above / range_.divisor;
  }
  float put_scale(std::int64_t g, float scale, std::uint32_t amax) const {
    switch (type_) {
      case Dtype::bf16:
        return bf16_to_f32(static_cast<std::uint16_t*>(scales_)[g] = f32_to_bf16(scale));
      case Dtype::f16:
        return f16_to_f32(static_cast<std::uint16_t*>(scales_)[g] = f16_of(scale));
      case Dtype::f8_e8m0:
        return put_power(g, scale, amax);
      default:
        return static_cast<float*>(scales_)[g] = scale;
    }
  }
  // A power of two; no scale is below 2^-126.
  float put_power(std::int64_t g, float scale, std::uint32_t amax) const {
    const std::uint32_t exponent = rule_ == PowerRule::ceil || amax == 0
                                       ? (__builtin_bit_cast(std::uint32_t, scale) + 0x7FFFFF) >> 23
                                       : floor_exponent(amax);
    static_cast<std::uint8_t*>(scales_)[g] = static_cast<std::uint8_t>(exponent);
    return __builtin_bit_cast(float, exponent << 23);
  }
  // A number of e4m3 but 0, and what it is under the one of all.
  float put_product(std::int64_t g, float amax) const {
    const float exact = under_ == ScaleCode::quotient ? amax * outer_ / range_.divisor
                                                      : amax / (range_.divisor * outer_);
    const std::uint8_t code =
        f32_to_e4m3(exact == 0.0f ? 1.0f : std::clamp(exact, 0x1p-9f, kLargestE4m3));
    static_cast<std::uint8_t*>(scales_)[g] = code;
    return under_one(under_, trait(Codes::f8_e4m3).values[code], outer_);
  }
  // The nearest number; among the subnormal ones, which are few, the least that is no smaller, so
  // that codes stay next to the largest.
  static std::uint16_t f16_of(float scale) {
    if (scale >= 0x1p-14f) return f32_to_f16(scale);
    return static_cast<std::uint16_t>(std::ceil(scale * 0x1p24f));
  }

  std::uint32_t floor_exponent(std::uint32_t amax) const {
    const std::uint32_t less = (__builtin_bit_cast(std::uint32_t, range_.most) >> 23) - 127;
    return std::max((amax >> 23) - std::min(amax >> 23, less), 1u);
  }

  const QuantizeJob& job_;
  CodeRange range_;
  Dtype type_;
  PowerRule rule_;
  ScaleCode under_;
  bool divides_;  // values by scales: those are products, of which reciprocals would round again
  EncodeKernel encode_;
  void* scales_;
  float outer_;  // over all scales, where they stand under one
};

/// Small groups: a task takes several and reads each twice, the second time from a cache.
template <bool kZero>
std::uint32_t quantize_small_groups(const QuantizeJob& job, const Groups& groups) {
  const Coder<kZero> coder(job);
  Largest refused;
  const std::int64_t chunk = std::max<std::int64_t>(1, kChunkElements / groups.group);
  for_each_chunk(job.executor, groups.count, chunk, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t g = from; g < to; ++g) {
      const std::int64_t begin = groups.begin(g), size = groups.size(g);
      const Extremes reach = coder.reach(begin, size);
      if (!coder.holds(reach)) return refused.take(kInfinityBits);
      coder.encode(begin, size, coder.put(g, reach));
    }
  });
  return refused.bits();
}

/// One group of more than a chunk: all tasks look for its reach, then all encode.
template <bool kZero>
std::uint32_t quantize_large_group(const QuantizeJob& job, std::int64_t first, std::int64_t size,
                                   std::int64_t g) {
  const Coder<kZero> coder(job);
  Largest below, above;
  for_each_chunk(job.executor, size, kChunkElements, [&](std::int64_t begin, std::int64_t end) {
    const Extremes reach = coder.reach(first + begin, end - begin);
    below.take(reach.below);
    above.take(reach.above);
  });
  const Extremes reach{below.bits(), above.bits()};
  if (!coder.holds(reach)) return kInfinityBits;
  const ExactFloats exact;
  const Coding coding = coder.put(g, reach);
  for_each_chunk(job.executor, size, kChunkElements, [&](std::int64_t begin, std::int64_t end) {
    coder.encode(first + begin, end - begin, coding);
  });
  return 0;
}

/// Blocks of `group.m` rows by `group.n` columns: a task takes some rows of blocks, and reads each
/// twice.
template <bool kZero>
std::uint32_t quantize_blocks2(const QuantizeJob& job, const Group& group, std::int64_t columns) {
  const Coder<kZero> coder(job);
  const std::int64_t rows = job.n / columns, across = ceil_div<std::int64_t>(columns, group.n);
  Largest refused;
  const auto quantize_block = [&](std::int64_t row, std::int64_t last, std::int64_t g,
                                  std::int64_t column) {
    const std::int64_t width = std::min<std::int64_t>(group.n, columns - column);
    Extremes all{0, 0};
    for (std::int64_t i = row; i < last; ++i) {
      const Extremes reach = coder.reach(i * columns + column, width);
      all = {std::max(all.below, reach.below), std::max(all.above, reach.above)};
    }
    if (!coder.holds(all)) return refused.take(kInfinityBits);
    const Coding coding = coder.put(g, all);
    for (std::int64_t i = row; i < last; ++i) coder.encode(i * columns + column, width, coding);
  };
  const std::int64_t chunk = std::max<std::int64_t>(1, kChunkElements / (group.m * columns));
  for_each_chunk(job.executor, ceil_div<std::int64_t>(rows, group.m), chunk,
                 [&](std::int64_t from, std::int64_t to) {
                   for (std::int64_t b = from * across; b < to * across; ++b)
                     quantize_block(b / across * group.m,
                                    std::min(rows, (b / across + 1) * group.m), b,
                                    b % across * group.n);
                 });
  return refused.bits();
}

/// The number over the scales of all groups, from the largest magnitude of all: the largest scale
/// is then that of e4m3, and none is below 2^-126 under it. Whether the values are finite.
bool put_outer(const QuantizeJob& job) {
  const Values values{job.values, job.dtype, job.n};
  float amax = 0;
  amax_with(job.kernels, {&values, 1}, &amax, job.executor);
  const ExactFloats exact;
  const float most = trait(job.storage.codes).divisor * kLargestE4m3;
  const float outer = describe(job.storage).scale.code == ScaleCode::quotient
                          ? std::min(most / amax, 0x1p117f)
                          : std::max(amax / most, 0x1p-117f);
  *static_cast<float*>(job.parts[2]) = amax == 0 ? 1.0f : outer;
  return std::isfinite(amax);
}

/// Not 0 where a value or a scale is not finite.
template <bool kZero>
std::uint32_t quantize_scaled(const QuantizeJob& job, const Shape& shape) {
  if (stands_under_one(job.form) && !put_outer(job)) return kInfinityBits;
  if (job.n == 0) {  // groups without elements still have their scale
    const Coder<kZero> coder(job);
    for (std::int64_t g = layout(job.storage, shape).parts[1].shape.elements(); g-- > 0;)
      coder.put(g, {0, 0});
    return 0;
  }
  const Group& group = job.form.scale.group;
  if (group.kind == Group::Kind::block2) return quantize_blocks2<kZero>(job, group, shape[1]);
  const Groups groups(job, shape);
  if (groups.group <= kChunkElements) return quantize_small_groups<kZero>(job, groups);
  std::uint32_t refused = 0;
  for (std::int64_t g = 0; g < groups.count && refused == 0; ++g)
    refused = quantize_large_group<kZero>(job, groups.begin(g), groups.size(g), g);
  return refused;
}

std::uint32_t run(const QuantizeJob& job, const Shape& shape) {
  switch (job.form.codec) {
    case Codec::cast:
      return quantize_cast(job);
    case Codec::amax:
      return job.form.zero == Zero::none ? quantize_scaled<false>(job, shape)
                                         : quantize_scaled<true>(job, shape);
    case Codec::bitsandbytes:
      if (job.form.scale.code == ScaleCode::mapped) return quantize_nested(job);
      return quantize_blocks(job, static_cast<float*>(job.parts[1]));
    case Codec::torchao:
      break;
  }
  return quantize_torchao(job);
}

void check(const void* values, Dtype dtype, const Layout& made, const Storage& storage,
           std::span<void* const> parts) {
  const auto refuse = [](const std::string& text) {
    throw Error(Code::invalid_argument, "quantize: " + text);
  };
  if (!is_value_dtype(dtype))
    refuse("values must be f64, f32, bf16 or f16, got " + std::string(disk_name(dtype)));
  if (parts.size() != static_cast<std::size_t>(made.count))
    refuse(to_string(storage) + " must have " + std::to_string(made.count) + " parts, got " +
           std::to_string(parts.size()));
  if (values == nullptr && made.parts[0].bytes != 0) refuse("values must not be null");
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (parts[i] == nullptr && made.parts[i].bytes != 0)
      refuse("part " + std::string(made.parts[i].name) + " must not be null");
}

}  // namespace

void quantize_with(const Kernels& kernels, const void* values, Dtype dtype, const Shape& shape,
                   const Storage& given, std::span<void* const> parts,
                   const QuantizeOptions& options) {
  const Storage storage = storage_for_values(given, dtype);
  check(values, dtype, layout(storage, shape), storage, parts);
  const Descriptor form = describe(storage);
  const QuantizeJob job{
      kernels, static_cast<const char*>(values), dtype, shape.elements(), storage, form,
      parts,   or_default(options.executor)};
  const std::uint32_t largest = run(job, shape);
  const bool keep = options.keep_nonfinite && can_keep_nonfinite(storage);
  if (largest >= kInfinityBits && !keep) refuse_nonfinite(job);
}

inline namespace v0 {

void quantize_into(const void* values, Dtype dtype, const Shape& shape, const Storage& storage,
                   std::span<void* const> parts, const QuantizeOptions& options) {
  quantize_with(kernels(), values, dtype, shape, storage, parts, options);
  check_memory(values);  // which may be a mapped file that was cut short meanwhile
}

Weight quantize(const void* values, Dtype dtype, const Shape& shape, const Storage& given,
                const QuantizeOptions& options) {
  const Storage storage = storage_for_values(given, dtype);
  const Layout made = layout(storage, shape);
  constexpr std::size_t kAlignment = 64;
  std::array<std::size_t, kMaxParts> offsets{};
  std::size_t bytes = kAlignment;  // a part without bytes still has an address inside
  for (int i = 0; i < made.count; ++i) {
    const auto part = static_cast<std::size_t>(i);
    offsets[part] = bytes - kAlignment;
    bytes += ceil_div(static_cast<std::size_t>(made.parts[part].bytes), kAlignment) * kAlignment;
  }
  std::shared_ptr<void> memory(::operator new (bytes, std::align_val_t{kAlignment}), [](void* p) {
    ::operator delete (p, std::align_val_t{kAlignment});
  });
  std::array<void*, kMaxParts> parts{};
  const auto count = static_cast<std::size_t>(made.count);
  for (std::size_t i = 0; i < count; ++i) parts[i] = static_cast<char*>(memory.get()) + offsets[i];
  quantize_into(values, dtype, shape, storage, {parts.data(), count}, options);
  std::array<const void*, kMaxParts> read{};
  std::ranges::copy(parts, read.begin());
  return {storage, shape, {read.data(), count}, std::move(memory)};
}

}  // namespace v0
}  // namespace stowage
