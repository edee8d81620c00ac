// SPDX-License-Identifier: Apache-2.0
// The reference codec of nf4:torchao, in doubles.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "format/reference.h"
#include "format/torchao.h"

namespace stowage::reference {
namespace {

/// The dtype D of a weight's parts: its numbers, and its arithmetic. An operation of two of them is
/// computed in double, rounded to fp32 and then to D, as torch does; f64 stays as it is.
class Arithmetic {
 public:
  explicit Arithmetic(ScaleType type) noexcept
      : dtype_(type == ScaleType::f64    ? Dtype::f64
               : type == ScaleType::bf16 ? Dtype::bf16
               : type == ScaleType::f16  ? Dtype::f16
                                         : Dtype::f32),
        codes_(type == ScaleType::bf16  ? Codes::bf16
               : type == ScaleType::f16 ? Codes::f16
                                        : Codes::f32) {}

  double operator()(double result) const noexcept {
    return dtype_ == Dtype::f64 ? result : narrow(codes_, narrow(Codes::f32, result));
  }
  /// Rounded once.
  double once(double x) const noexcept { return dtype_ == Dtype::f64 ? x : narrow(codes_, x); }
  /// As the plain cast makes it.
  double cast(double x) const noexcept { return dtype_ == Dtype::f64 ? x : round(codes_, x); }

  double load(const void* part, std::int64_t i) const noexcept { return read(part, dtype_, i); }
  void store(void* part, std::int64_t i, double x) const noexcept {
    const auto width = static_cast<std::size_t>(bits(dtype_)) / 8;
    auto* const to = static_cast<char*>(part) + static_cast<std::size_t>(i) * width;
    if (dtype_ == Dtype::f64) {
      std::memcpy(to, &x, width);
    } else {
      const std::uint32_t code = encode(codes_, x);
      std::memcpy(to, &code, width);
    }
  }

 private:
  Dtype dtype_;
  Codes codes_;
};

// The first of the values at the least distance; the first of all for NaN.
unsigned code_of(const Arithmetic& in, double s) noexcept {
  unsigned best = 0;
  double least = HUGE_VAL;
  for (unsigned k = 0; k < torchao::kValues.size(); ++k) {
    const double distance = in(std::fabs(in(s - in(torchao::kValues[k]))));
    if (distance < least) best = k, least = distance;
  }
  return best;
}

// Parts 1 to 4, from the absmax of each block.
void nest(const Arithmetic& in, const std::vector<double>& absmax, std::int64_t scaler_block,
          std::span<void* const> parts) noexcept {
  double sum = 0;
  for (const double a : absmax) sum += a;
  const double mean = absmax.empty() ? 0 : in.once(sum / static_cast<double>(absmax.size()));
  in.store(parts[3], 0, mean);
  for (std::size_t k = 0; k < torchao::kValues.size(); ++k)
    in.store(parts[4], static_cast<std::int64_t>(k), in(torchao::kValues[k]));
  const auto count = static_cast<std::int64_t>(absmax.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = i / scaler_block * scaler_block;
    double most = 0;
    for (std::int64_t k = begin; k < std::min(begin + scaler_block, count); ++k)
      most = std::max(most, std::fabs(in(absmax[static_cast<std::size_t>(k)] - mean)));
    const double factor = in(256 / in(2 * most));
    in.store(parts[2], i / scaler_block, factor);
    const double distance = in(absmax[static_cast<std::size_t>(i)] - mean);
    const double q = std::nearbyint(in(distance * factor));
    // 0 times an infinite factor, where all scales are the mean: its cast to int8 gives 0.
    static_cast<std::int8_t*>(parts[1])[i] =
        std::isnan(q) ? std::int8_t{0} : static_cast<std::int8_t>(std::clamp(q, -128.0, 127.0));
  }
}

double scale_of(const Arithmetic& in, const Weight& weight, std::int64_t i) noexcept {
  const Scaling& scaling = weight.storage().scaling;
  const std::int64_t block = i / scaling.block;
  const double q = static_cast<const std::int8_t*>(weight.part(1))[block];
  const double factor = in.load(weight.part(2), block / scaling.scaler_block);
  return in(in(q / factor) + in.load(weight.part(3), 0));
}

}  // namespace

void quantize_torchao(const void* values, Dtype dtype, std::int64_t n, const Storage& storage,
                      std::span<void* const> parts) {
  const Arithmetic in(storage.scaling.type);
  const auto at = [&](std::int64_t i) { return in.cast(read(values, dtype, i)); };
  auto* const codes = static_cast<std::uint8_t*>(parts[0]);
  std::vector<double> absmax;
  for (std::int64_t first = 0; first < n; first += storage.scaling.block) {
    double most = 0;
    for (std::int64_t i = first; i < first + storage.scaling.block; ++i)
      most = std::max(most, std::fabs(at(i)));
    for (std::int64_t i = first; i < first + storage.scaling.block; i += 2)
      codes[i / 2] = static_cast<std::uint8_t>(code_of(in, in(at(i) / most)) << 4 |
                                               code_of(in, in(at(i + 1) / most)));
    absmax.push_back(most);
  }
  nest(in, absmax, storage.scaling.scaler_block, parts);
}

double torchao_value_at(const Weight& weight, std::int64_t i) noexcept {
  const Arithmetic in(weight.storage().scaling.type);
  const unsigned pair = static_cast<const std::uint8_t*>(weight.part(0))[i / 2];
  const unsigned code = i % 2 == 0 ? pair >> 4 : pair & 15u;
  return in(in.load(weight.part(4), code) * scale_of(in, weight, i));
}

float torchao_scale_at(const Weight& weight, std::int64_t i) noexcept {
  return static_cast<float>(scale_of(Arithmetic(weight.storage().scaling.type), weight, i));
}

}  // namespace stowage::reference
