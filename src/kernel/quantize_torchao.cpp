// SPDX-License-Identifier: Apache-2.0
// Quantizing to nf4:torchao: codes and absmax by the kernels, block scales by the rules.
#include <algorithm>
#include <cmath>
#include <vector>

#include "format/torchao.h"
#include "kernel/chunks.h"
#include "kernel/quantize_torchao.h"
#include "kernel/tables.h"
#include "stowage/descriptor.h"

namespace stowage {
namespace {

constexpr std::int64_t kPiece = 4096;  // elements that are cast at a time; a multiple of any block

/// Elements [begin, end), whole blocks, of any dtype.
struct Pieces {
  const QuantizeJob& job;
  TorchaoKernel kernel;
  CastKernel cast;  // null: the values have the dtype of the parts
  const float* thresholds;
  float* absmax;

  std::uint32_t encode(const void* x, std::int64_t begin, std::int64_t n) const noexcept {
    const std::int64_t block = job.storage.scaling.block;
    auto* codes = static_cast<std::uint8_t*>(job.parts[0]) + begin / 2;
    return kernel({x, n, block, codes, absmax + begin / block}, thresholds);
  }
  std::uint32_t run(std::int64_t begin, std::int64_t end) const noexcept {
    const std::int64_t width = bits(job.dtype) / 8;
    if (cast == nullptr) return encode(job.values + begin * width, begin, end - begin);
    alignas(64) float room[kPiece];
    std::uint32_t most = 0;
    for (std::int64_t i = begin; i < end; i += kPiece) {
      const std::int64_t n = std::min(kPiece, end - i);
      most = std::max(most, cast(job.values + i * width, n, room));
      encode(room, i, n);
    }
    return most;
  }
};

std::uint32_t by_kernels(const QuantizeJob& job) {
  const ScaleType type = job.storage.scaling.type;
  const Dtype own = job.form.rounds_to;
  const auto place = static_cast<std::size_t>(value_index(own));
  std::vector<float> absmax(static_cast<std::size_t>(job.n / job.storage.scaling.block));
  const Pieces pieces{job, job.kernels.quantize.torchao[place],
                      own == job.dtype
                          ? nullptr
                          : job.kernels.quantize.cast[static_cast<std::size_t>(
                                cast_codes(own))][static_cast<std::size_t>(value_index(job.dtype))],
                      torchao_thresholds(own), absmax.data()};
  Largest largest;
  for_each_chunk(job.executor, job.n, kChunkElements, [&](std::int64_t begin, std::int64_t end) {
    largest.take(pieces.run(begin, end));
  });
  if (largest.bits() >= kInfinityBits) return largest.bits();
  const ExactFloats exact;
  torchao::with_type(type, [&]<class D>(D) {
    if constexpr (sizeof(typename D::Work) == sizeof(float))
      torchao::nest<D>(absmax, job.storage.scaling.scaler_block, job.parts);
  });
  return largest.bits();
}

// f64 weights are rare: one portable loop serves them.
std::uint32_t by_doubles(const QuantizeJob& job) {
  using torchao::F64;
  const ExactFloats exact;
  const std::int64_t block = job.storage.scaling.block;
  auto* const codes = static_cast<std::uint8_t*>(job.parts[0]);
  std::vector<double> absmax;
  for (std::int64_t first = 0; first < job.n; first += block) {
    double most = 0;
    for (std::int64_t i = first; i < first + block; ++i) {
      if (!std::isfinite(job.value(i))) return kInfinityBits;
      most = std::max(most, std::fabs(job.value(i)));
    }
    for (std::int64_t i = first; i < first + block; i += 2)
      codes[i / 2] = static_cast<std::uint8_t>(torchao::encode<F64>(job.value(i) / most) << 4 |
                                               torchao::encode<F64>(job.value(i + 1) / most));
    absmax.push_back(most);
  }
  torchao::nest<F64>(absmax, job.storage.scaling.scaler_block, job.parts);
  return 0;
}

}  // namespace

std::uint32_t quantize_torchao(const QuantizeJob& job) {
  return job.storage.scaling.type == ScaleType::f64 ? by_doubles(job) : by_kernels(job);
}

}  // namespace stowage
