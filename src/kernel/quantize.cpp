// SPDX-License-Identifier: Apache-2.0
// Quantizing: checks, and how each kind of scaling is cut into tasks. No temporary grows with the
// weight, but for the block scales of nested storages and one matrix of those that lie transposed.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/map_guard.h"
#include "format/dynamic_map.h"
#include "format/legal.h"
#include "format/under_one.h"
#include "kernel/chunks.h"
#include "kernel/drivers.h"
#include "kernel/quantize_dense.h"
#include "kernel/quantize_groups.h"
#include "kernel/quantize_superblocks.h"
#include "kernel/quantize_torchao.h"
#include "kernel/transposed.h"
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

/// What the codes of groups are made with, for each of them.
template <bool kZero>
struct Codings {
  float r[Groups::kTogether];  // multiplies values, or divides them
  float zero[kZero ? Groups::kTogether : 1];
};

/// The groups of a weight: their scales, as the storage keeps them, and their codes; with a zero
/// for each, or symmetric.
template <bool kZero>
class Coder {
 public:
  /// Bits of the largest magnitude, of either side where there are zeros.
  using Reach = std::conditional_t<kZero, Extremes, std::uint32_t>;

  /// `under_one`: how many scales stand under one number, if they do.
  Coder(const QuantizeJob& job, std::int64_t under_one)
      : job_(job),
        range_(code_range(job.storage)),
        most_(job.form.scale.type == Dtype::f16 ? 65504.0f : std::numeric_limits<float>::max()),
        scales_(job.parts[1]),
        outers_(stands_under_one(job.form) ? static_cast<const float*>(job.parts[2]) : nullptr),
        under_one_(under_one),
        quick_(job.storage.codes == Codes::int8) {
    const QuantizeKernels& kernels = job.kernels.quantize;
    const auto& encode = kZero                        ? kernels.encode_from
                         : stands_under_one(job.form) ? kernels.divide  // no reciprocal of products
                                                      : kernels.encode;
    encode_ = encode[job.codes()][job.in()];
  }

  /// Of n elements from i on, for each group of `group`. `asked`: as ManyValues has it.
  void reach(std::int64_t i, std::int64_t n, std::int64_t group, bool asked, Reach* out) const {
    if constexpr (kZero)
      job_.kernels.quantize.reach[job_.in()](job_.at(i), n, group, out);
    else
      job_.kernels.quantize.amaxes[job_.in()](
          {job_.at(i), n, group, asked, quick_ ? job_.code(i) : nullptr}, out);
  }
  void reach(const Groups& groups, const Groups::Some& some, Reach* out) const {
    if constexpr (kZero)
      if (groups.group == 1) return reach_each(job_, groups, some, out);
    reach(some.begin, some.size, groups.group, some.rows == 1, out);
    Reach more[Groups::kTogether];
    for (std::int64_t row = 1; row < some.rows; ++row) {
      reach(some.begin + row * groups.step, some.size, groups.group, false, more);
      for (std::int64_t i = 0; i < some.n; ++i) take(out[i], more[i]);
    }
  }

  /// Keeps the scales of n groups from g on, which are read as the type has them. Whether it has
  /// scales for such values, which may be no finite numbers.
  bool put(std::int64_t g, std::int64_t n, const Reach* reach, Codings<kZero>& out) const {
    switch (job_.form.scale.code) {
      case ScaleCode::product:
        return put_products<ScaleCode::product>(g, n, reach, out);
      case ScaleCode::product_bf16:
        return put_products<ScaleCode::product_bf16>(g, n, reach, out);
      case ScaleCode::quotient:
        return put_products<ScaleCode::quotient>(g, n, reach, out);
      case ScaleCode::absmax:
        return put_absmax(g, n, reach, out);
      default:
        break;
    }
    switch (job_.form.scale.type) {
      case Dtype::bf16:
        return put_scales<std::uint16_t>(g, n, reach, out, [](float scale, float) {
          const std::uint16_t kept = f32_to_bf16(scale);
          return std::pair{kept, bf16_to_f32(kept)};
        });
      case Dtype::f16:
        return put_scales<std::uint16_t>(g, n, reach, out, [](float scale, float) {
          const std::uint16_t kept = f16_of(scale);
          return std::pair{kept, f16_to_f32(kept)};
        });
      case Dtype::f8_e8m0:
        return job_.form.powers == PowerRule::ceil ? put_powers<PowerRule::ceil>(g, n, reach, out)
                                                   : put_powers<PowerRule::floor>(g, n, reach, out);
      default:
        return put_scales<float>(g, n, reach, out, [](float scale, float) {
          return std::pair{scale, scale};
        });
    }
  }

  void encode(std::int64_t i, std::int64_t n, std::int64_t group,
              const Codings<kZero>& codings) const {
    if (job_.form.packing == Packing::dense)
      return encode_dense(job_, range_, i, n, group, codings.r, kZero ? codings.zero : nullptr);
    encode_({job_.at(i), n, group, codings.r, codings.zero, job_.code(i)});
  }

 private:
  // `keep` makes of a scale what is kept and what that is read as.
  template <class Kept, class Keep>
  bool put_scales(std::int64_t g, std::int64_t n, const Reach* reach, Codings<kZero>& out,
                  Keep keep) const {
    auto* const scales = static_cast<Kept*>(scales_) + g;
    for (std::int64_t i = 0; i < n; ++i) {
      const float width = width_of(reach[i]), exact = width / range_.divisor;
      if (!(exact <= most_)) return false;
      const float scale = width != 0 ? std::max(exact, 0x1p-126f) : 1.0f;
      const auto [kept, read] = keep(scale, width);
      scales[i] = kept;
      out.r[i] = 1.0f / read;
      if constexpr (kZero)
        if (!put_zero(g + i, float_of(reach[i].below), scale, out.r[i], out.zero[i])) return false;
    }
    return true;
  }
  // Keeps what stands for 0 in a group with values down to -below, and says what moves codes. `r`:
  // of the scale as it is read. Whether the type has such a number.
  bool put_zero(std::int64_t g, float below, float scale, float r, float& moved) const {
    if (job_.form.zero == Zero::code) {
      const float least = -below / scale;
      moved = std::nearbyint(std::clamp(range_.least - least, range_.least, range_.most));
      static_cast<std::int8_t*>(job_.parts[2])[g] = static_cast<std::int8_t>(moved);
      return true;
    }
    if (job_.form.zero == Zero::rounded) {
      moved = put_number(g, std::clamp(below / scale, range_.least, range_.most));
      return true;
    }
    const float zero = -range_.least * scale - below;  // an exact product
    if (!(std::fabs(zero) <= most_)) return false;
    moved = -put_number(g, zero) * r;
    return true;
  }
  // In the type of scales; what it is then.
  float put_number(std::int64_t g, float number) const {
    auto* const halves = static_cast<std::uint16_t*>(job_.parts[2]) + g;
    switch (job_.form.scale.type) {
      case Dtype::bf16:
        return bf16_to_f32(*halves = f32_to_bf16(number));
      case Dtype::f16:
        return f16_to_f32(*halves = f32_to_f16(number));
      default:
        return static_cast<float*>(job_.parts[2])[g] = number;
    }
  }
  // The largest magnitudes themselves, none below F 2^-126 but 0.
  bool put_absmax(std::int64_t g, std::int64_t n, const Reach* reach, Codings<kZero>& out) const {
    auto* const kept = static_cast<float*>(scales_) + g;
    for (std::int64_t i = 0; i < n; ++i) {
      const float width = width_of(reach[i]);
      if (!(width <= most_)) return false;
      kept[i] = width == 0 ? 0.0f : std::max(width, range_.divisor * 0x1p-126f);
      out.r[i] = width == 0 ? 0.0f : range_.divisor * (1.0f / kept[i]);
    }
    return true;
  }
  // Powers of two; none is below 2^-126.
  template <PowerRule kRule>
  bool put_powers(std::int64_t g, std::int64_t n, const Reach* reach, Codings<kZero>& out) const {
    const std::uint32_t less = (__builtin_bit_cast(std::uint32_t, range_.most) >> 23) - 127;
    return put_scales<std::uint8_t>(g, n, reach, out, [=](float scale, float width) {
      std::uint32_t exponent = (__builtin_bit_cast(std::uint32_t, scale) + 0x7FFFFF) >> 23;
      if constexpr (kRule == PowerRule::floor) {
        const std::uint32_t own = __builtin_bit_cast(std::uint32_t, width) >> 23;
        if (width != 0) exponent = std::max(own - std::min(own, less), 1u);
      }
      return std::pair{static_cast<std::uint8_t>(exponent),
                       __builtin_bit_cast(float, exponent << 23)};
    });
  }
  // Numbers of e4m3 but 0, and what they are under theirs. Values are finite: put_outers().
  template <ScaleCode kCode>
  bool put_products(std::int64_t g, std::int64_t n, const Reach* reach, Codings<kZero>& out) const {
    auto* const scales = static_cast<std::uint8_t*>(scales_) + g;
    const float* const values = trait(Codes::f8_e4m3).values.data();
    for (std::int64_t i = 0; i < n;) {
      const std::int64_t which = (g + i) / under_one_;
      const std::int64_t stop = std::min(n, (which + 1) * under_one_ - g);
      const float outer = outers_[which], under = range_.divisor * outer;
      for (; i < stop; ++i) {
        const float amax = width_of(reach[i]);
        const float exact =
            kCode == ScaleCode::quotient ? amax * outer / range_.divisor : amax / under;
        scales[i] = f32_to_e4m3(exact == 0.0f ? 1.0f : std::clamp(exact, 0x1p-9f, kLargestE4m3));
        out.r[i] = under_one(kCode, values[scales[i]], outer);
      }
    }
    return true;
  }
  // The nearest number; of the subnormal ones, which are few, the least that is no smaller.
  static std::uint16_t f16_of(float scale) {
    if (scale >= 0x1p-14f) return f32_to_f16(scale);
    return static_cast<std::uint16_t>(std::ceil(scale * 0x1p24f));
  }

  static float width_of(const Reach& reach) {
    if constexpr (kZero)
      return __builtin_bit_cast(float, reach.above) + __builtin_bit_cast(float, reach.below);
    else
      return __builtin_bit_cast(float, reach);
  }

  const QuantizeJob& job_;
  CodeRange range_;
  float most_;  // scale that the type has
  EncodeKernel encode_;
  void* scales_;
  const float* outers_;     // over scales, where they stand under numbers
  std::int64_t under_one_;  // so many under each
  bool quick_;              // encoded before their lines are there
};

/// Groups of at most a chunk, or of rows: a task takes several and reads each twice, the second
/// time from a cache.
template <bool kZero>
std::uint32_t quantize_groups(const QuantizeJob& job, const Coder<kZero>& coder,
                              const Groups& groups) {
  using Reach = typename Coder<kZero>::Reach;
  Largest refused;
  const std::int64_t chunk = groups.chunk();
  for_each_chunk(job.executor, groups.count, chunk, [&](std::int64_t from, std::int64_t to) {
    Reach all[Groups::kTogether];
    Codings<kZero> codings;
    while (from < to) {
      const Groups::Some some = groups.from(from, to);
      coder.reach(groups, some, all);
      if (!coder.put(from, some.n, all, codings)) return refused.take(kInfinityBits);
      for (std::int64_t row = 0; row < some.rows; ++row)
        coder.encode(some.begin + row * groups.step, some.size, groups.group, codings);
      from += some.n;
    }
  });
  return refused.bits();
}

/// One group of more than a chunk: all tasks look for its reach, then all encode.
template <bool kZero>
std::uint32_t quantize_large_group(const QuantizeJob& job, const Coder<kZero>& coder,
                                   const Groups::Some& one) {
  using Reach = typename Coder<kZero>::Reach;
  Largest below, above;
  for_each_chunk(job.executor, one.size, kChunkElements, [&](std::int64_t begin, std::int64_t end) {
    Reach reach;
    coder.reach(one.begin + begin, end - begin, end - begin, false, &reach);
    if constexpr (kZero) below.take(reach.below), above.take(reach.above);
    if constexpr (!kZero) above.take(reach);
  });
  Reach reach;
  if constexpr (kZero) reach = {below.bits(), above.bits()};
  if constexpr (!kZero) reach = above.bits();
  const ExactFloats exact;
  Codings<kZero> coding;
  if (!coder.put(one.g, 1, &reach, coding)) return kInfinityBits;
  for_each_chunk(job.executor, one.size, kChunkElements, [&](std::int64_t begin, std::int64_t end) {
    coder.encode(one.begin + begin, end - begin, end - begin, coding);
  });
  return 0;
}

/// The numbers over the scales of groups, from the largest magnitude of all that are under each:
/// the largest scale is then that of e4m3, and none is below 2^-126 under it. Whether the values
/// are finite.
bool put_outers(const QuantizeJob& job, const Shape& shape) {
  const std::int64_t count = layout(job.storage, shape).parts[2].shape.elements();
  const std::int64_t each = count == 0 ? 0 : job.n / count;
  auto* const outers = static_cast<float*>(job.parts[2]);
  if (count == 1 || each == 0) {
    std::fill_n(outers, count, 0.0f);
    const Values values{job.values, job.dtype, job.n};
    if (each != 0) amax_with(job.kernels, {&values, 1}, outers, job.executor);
  } else {
    const auto amaxes = job.kernels.quantize.amaxes[job.in()];
    const std::int64_t chunk = std::max<std::int64_t>(1, kChunkElements / each);
    for_each_chunk(job.executor, count, chunk, [&](std::int64_t from, std::int64_t to) {
      std::uint32_t reach[Groups::kTogether];
      for (std::int64_t some = 0; from < to; from += some) {
        some = std::min(to - from, Groups::kTogether);
        amaxes({job.at(from * each), some * each, each}, reach);
        for (std::int64_t i = 0; i < some; ++i) outers[from + i] = float_of(reach[i]);
      }
    });
  }
  const ExactFloats exact;
  const float most = trait(job.storage.codes).divisor * kLargestE4m3;
  const bool quotient = job.form.scale.code == ScaleCode::quotient;
  bool finite = true;
  for (std::int64_t i = 0; i < count; ++i) {
    const float amax = outers[i];
    finite = finite && std::isfinite(amax);
    const float outer =
        quotient ? std::min(most / amax, 0x1p117f) : std::max(amax / most, 0x1p-117f);
    outers[i] = amax == 0 ? 1.0f : outer;
  }
  return finite;
}

/// Not 0 where a value or a scale is not finite.
template <bool kZero>
std::uint32_t quantize_scaled(const QuantizeJob& job, const Shape& shape) {
  const bool under_one = stands_under_one(job.form);
  if (under_one && !put_outers(job, shape)) return kInfinityBits;
  const Coder<kZero> coder(job, under_one ? scales_under_one(job.storage, shape) : 1);
  if (job.n == 0) {  // groups without elements still have their scale
    Codings<kZero> coding;
    const typename Coder<kZero>::Reach none{};
    for (std::int64_t g = layout(job.storage, shape).parts[1].shape.elements(); g-- > 0;)
      coder.put(g, 1, &none, coding);
    return 0;
  }
  const Groups groups(job, shape);
  if (groups.group <= kChunkElements || groups.rows > 1) return quantize_groups(job, coder, groups);
  std::uint32_t refused = 0;
  for (std::int64_t g = 0; g < groups.count && refused == 0; ++g)
    refused = quantize_large_group(job, coder, groups.from(g, g + 1));
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
    case Codec::ggml:
      return quantize_superblocks(job, shape);
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

// Each matrix as it lies. What is not finite is refused where the caller has it.
std::uint32_t run_transposed(const QuantizeJob& job, const Shape& shape) {
  const Storage storage = lying(job.storage);
  const Descriptor form = describe(storage);
  const Shape matrix{shape[2], shape[1]};
  const Layout one = layout(storage, matrix);
  const std::int64_t n = matrix.elements(), width = bits(job.dtype) / 8;
  std::vector<char> turned(static_cast<std::size_t>(n * width));
  Largest largest;
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    transpose_matrix(job.at(i * n), shape[1], shape[2], width, turned.data(), job.executor);
    std::array<void*, kMaxParts> parts{};
    for (std::size_t p = 0; p < job.parts.size(); ++p)
      parts[p] = static_cast<char*>(job.parts[p]) + i * one.parts[p].bytes;
    largest.take(run({job.kernels, turned.data(), job.dtype, n, storage, form,
                      std::span(parts).first(job.parts.size()), job.executor},
                     matrix));
  }
  return largest.bits();
}

}  // namespace

void quantize_with(const Kernels& kernels, const void* values, Dtype dtype, const Shape& shape,
                   const Storage& given, std::span<void* const> parts,
                   const QuantizeOptions& options) {
  const Storage storage = storage_for_values(given, dtype);
  check_quantizable(storage);
  check(values, dtype, layout(storage, shape), storage, parts);
  const Descriptor form = describe(storage);
  const QuantizeJob job{
      kernels, static_cast<const char*>(values), dtype, shape.elements(), storage, form,
      parts,   or_default(options.executor)};
  const std::uint32_t largest = form.transposed ? run_transposed(job, shape) : run(job, shape);
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
