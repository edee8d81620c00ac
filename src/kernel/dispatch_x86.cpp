// SPDX-License-Identifier: Apache-2.0
// What x86-64 has: tables of its instruction sets and of their variants, worst first.
#include <algorithm>
#include <chrono>

#include "base/cpu.h"
#include "kernel/float_mode.h"
#include "kernel/kernels.h"

namespace stowage {

extern const Kernels kAvx2Kernels, kAvx512Kernels;
extern const ByteTableKernels kAvx512VbmiTables;
extern const PairKernels kAvx512Bf16Pairs;
extern const MatrixKernels kAmxMatrices;
extern const BytesKernels kAvx2Bytes, kAvx2VnniBytes, kAvx512VnniBytes, kAvx512DenseBytes;

namespace {
// What some processors take a hundred cycles for, and others none. The best of many runs, so that
// it is the same each time.
bool are_subnormals_quick() {
  const ExactFloats exact;
  const auto best = [](float number) {
    using Clock = std::chrono::steady_clock;
    auto least = Clock::duration::max();
    for (int run = 0; run < 32; ++run) {
      volatile float factor = number;
      [[maybe_unused]] volatile float product = 0;
      const Clock::time_point begin = Clock::now();
      for (int i = 0; i < 256; ++i) product = factor * 1.5f;
      least = std::min(least, Clock::now() - begin);
    }
    return least;
  };
  return best(0x1p-130f) < 4 * best(1.0f);
}

// `bytes` with what `other` has for other codes.
BytesKernels with_rest(const BytesKernels& bytes, const BytesKernels& other) {
  BytesKernels both = bytes;
  for (int codes = 0; codes < kCodesCount; ++codes)
    if (both.dot[codes] == nullptr && other.dot[codes] != nullptr)
      both.set(static_cast<Codes>(codes), other.dot[codes], other.kind[codes]);
  for (int kind = 0; kind < kKindsOfX; ++kind)
    if (std::ranges::all_of(both.arrange[kind], [](auto* arrange) { return arrange == nullptr; }))
      std::ranges::copy(other.arrange[kind], both.arrange[kind]);
  return both;
}

Kernels with(const Kernels& table, const BytesKernels& bytes) {
  Kernels better = table;
  better.linear.bytes = bytes;
  better.linear.near = cpu_features().zen5;
  if (table.isa == Isa::avx2) {
    static const bool quick = are_subnormals_quick();
    if (!quick) better.linear.bytes.most_float8 = 0;
    return better;
  }
  better.linear.bytes.most_whole = 4;
  better.linear.bytes.most_float8 = 0;
  if (bytes.block[kForDigits] > kBytesBlock) return better;
  // Vectors of 512 bits hold twice the products of fp32, and between those of 256, in which
  // products of bytes are then, they hold these up.
  better.linear.bytes.most_long = 1;
  better.linear.bytes.most_short = 4;
  better.linear.bytes.most_words = 3;
  return better;
}
const Kernels& with_bytes() {
  static const Kernels table = with(kAvx2Kernels, kAvx2Bytes);
  return table;
}
const Kernels& with_vnni() {
  static const Kernels table = with(kAvx2Kernels, with_rest(kAvx2VnniBytes, kAvx2Bytes));
  return table;
}
const Kernels& with_512() {
  static const Kernels table = with(kAvx512Kernels, kAvx2Bytes);
  return table;
}
const Kernels& with_512_vnni() {
  static const Kernels table = with(kAvx512Kernels, with_rest(kAvx512VnniBytes, kAvx2Bytes));
  return table;
}
const Kernels& with_vbmi() {
  static const Kernels table = [] {
    Kernels better = with(kAvx512Kernels, with_rest(kAvx512VnniBytes, kAvx512DenseBytes));
    better.linear.bytes.lines = kAvx512DenseBytes.lines;
    better.dequantize = kAvx512VbmiTables.dequantize;
    better.scales.mapped = kAvx512VbmiTables.mapped;
    return better;
  }();
  return table;
}
constexpr std::int64_t kFewInIntegers = 4;  // rows of bf16, where pairs or matrices have more
const Kernels& with_bf16() {  // pairs for fp8 alone: of others integers and fp32 may be quicker
  static const Kernels table = [] {
    Kernels better = with_vbmi();
    better.isa = Isa::avx512bf16;
    for (int codes = 0; codes < kCodesCount; ++codes)
      if (DequantizeKernel to_bf16 = kAvx512Bf16Pairs.to_bf16[codes]; to_bf16 != nullptr)
        better.dequantize.to[codes][value_index(Dtype::bf16)] = to_bf16;
    better.linear.bf16.e4m3 = kAvx512Bf16Pairs.rows.e4m3;
    better.linear.bf16.e5m2 = kAvx512Bf16Pairs.rows.e5m2;
    return better;
  }();
  return table;
}
const Kernels& with_pairs() {
  static const Kernels table = [] {
    Kernels better = with_bf16();
    better.linear.bf16 = kAvx512Bf16Pairs.rows;
    better.linear.matrices = kAvx512Bf16Pairs.matrices;
    better.linear.matrices.most_by_vectors = cpu_features().zen5 ? 24 : 60;  // 60 at once
    if (cpu_features().zen5) better.linear.bf16.eights_columns = 2048;
    better.linear.bytes.most_bf16 = kFewInIntegers;
    return better;
  }();
  return table;
}
const Kernels& with_amx() {
  static const Kernels table = [] {
    Kernels better = with_bf16();
    better.isa = Isa::amx;
    better.linear.matrices = kAmxMatrices;
    better.linear.matrices.most_by_vectors = 4;
    better.linear.bytes.most_bf16 = kFewInIntegers;
    return better;
  }();
  return table;
}
}  // namespace

void add_kernels_of_cpu(std::vector<NamedKernels>& tables) {
  const CpuFeatures& cpu = cpu_features();
  tables.push_back({"avx2", cpu.runs_avx2() ? &with_bytes() : nullptr});
  tables.push_back({"avx2+vnni", cpu.runs_avx2() && cpu.avxvnni ? &with_vnni() : nullptr});
  tables.push_back({"avx512", cpu.runs_avx512() ? &with_512() : nullptr});
  const bool vnni = cpu.runs_avx512() && cpu.avx512vnni, vbmi = vnni && cpu.avx512vbmi;
  tables.push_back({"avx512+vnni", vnni ? &with_512_vnni() : nullptr});
  tables.push_back({"avx512+vbmi", vbmi ? &with_vbmi() : nullptr});
  const bool bf16 = cpu.runs_avx512bf16();
  tables.push_back({"avx512bf16", bf16 ? &with_bf16() : nullptr});
  tables.push_back({"avx512bf16+pairs", bf16 ? &with_pairs() : nullptr});
  static const bool quick = bf16 && kAvx512Bf16Pairs.are_quick();
  if (!quick) std::swap(tables[tables.size() - 2], tables.back());
  tables.push_back({"amx", cpu.runs_amx() ? &with_amx() : nullptr});
}

}  // namespace stowage
