// SPDX-License-Identifier: Apache-2.0
// What AArch64 has: NEON, and its variants, worst first.
#include "base/cpu.h"
#include "kernel/kernels.h"

namespace stowage {

extern const Kernels kNeonKernels;
extern const BytesKernels kNeonDotBytes;
extern const MatrixKernels kNeonMatrices;

namespace {
const Kernels& with_dot() {
  static const Kernels table = [] {
    Kernels better = kNeonKernels;
    better.linear.bytes = kNeonDotBytes;
    return better;
  }();
  return table;
}
const Kernels& with_matrices() {
  static const Kernels table = [] {
    Kernels better = with_dot();
    better.linear.matrices = kNeonMatrices;
    // Of half a tile, by which time products in integers have been made twice.
    better.linear.matrices.most_by_vectors = 4;
    better.linear.bytes.most_bf16 = 4;
    return better;
  }();
  return table;
}
}  // namespace

void add_kernels_of_cpu(std::vector<NamedKernels>& tables) {
  tables.push_back({"neon", &kNeonKernels});
  const CpuFeatures& cpu = cpu_features();
  tables.push_back({"neon+dotprod", cpu.dotprod ? &with_dot() : nullptr});
  tables.push_back({"neon+bf16", cpu.dotprod && cpu.bf16 ? &with_matrices() : nullptr});
}

}  // namespace stowage
