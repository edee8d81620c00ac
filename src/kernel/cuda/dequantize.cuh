// SPDX-License-Identifier: Apache-2.0
// Kernels that read weights: all values, and the values of some rows.
#pragma once
#include "kernel/cuda/grid.cuh"
#include "kernel/cuda/values.cuh"

namespace stowage::cuda {

/// out: all values, in the order of the shape.
STOWAGE_KERNEL stowage_dequantize(Weight w, void* out) {
  for (Index i = this_thread() * together(); i < w.elements; i += all_threads() * together()) {
    const Index row = i / w.row;
    const int n = piece_of(w.elements - i);
    float values[kMostTogether];
    decode(w, row, i - row * w.row, n, values);
    put_some(out, i, n, values);
  }
}

/// out [count, row]: the rows that `ids` names, i64 or i32. An id that is none of the weight's
/// raises *refused, and its row is left as it was.
STOWAGE_KERNEL stowage_embedding(Weight w, const void* ids, int long_ids, Extent count, void* out,
                                 std::uint32_t* refused) {
  const Index each = up(w.row, together());
  for (Index t = this_thread(); t < count * each; t += all_threads()) {
    const Index which = t / each, from = (t - which * each) * together();
    const long long id = long_ids != 0 ? static_cast<const long long*>(ids)[which]
                                       : static_cast<const std::int32_t*>(ids)[which];
    if (id < 0 || id >= w.rows) {
      atomicMax(refused, 1u);
      continue;
    }
    const int n = piece_of(w.row - from);
    float values[kMostTogether];
    decode(w, static_cast<Index>(id), from, n, values);
    put_some(out, which * w.row + from, n, values);
  }
}

}  // namespace stowage::cuda
