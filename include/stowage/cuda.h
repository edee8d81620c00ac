// SPDX-License-Identifier: Apache-2.0
// Arithmetic on resting weights that lie in the memory of a CUDA device. The driver and NVRTC are
// found when they are asked for; kernels are compiled when they are first needed and kept in a
// folder. quantize, dequantize, embedding and amax give the bytes of the CPU.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "stowage/quantize.h"
#include "stowage/weight.h"

namespace stowage {
inline namespace v0 {

/// Where the kernels of a device come from.
struct CudaOptions {
  std::string driver;                  // "": libcuda.so.1
  std::vector<std::string> compilers;  // the first that can be opened; none: libnvrtc.so.13, .12
  std::string
      folder;  // of compiled kernels, for all processes; "": stowage/cuda in that for caches
};

/// The ops on one device, in its primary context, which torch and the runtime share. Pointers are
/// of the device, `stream` is a CUstream (null: the default one), and nothing waits unless it says
/// so. Any number of threads may call. Kernels are compiled when an op first meets a storage, which
/// takes seconds: call it once before a stream is captured.
class STOWAGE_API CudaOps {
 public:
  /// Throws unsupported where there is no driver or no NVRTC, cuda for what the driver refuses.
  explicit CudaOps(int device, const CudaOptions& options = {});
  CudaOps(CudaOps&&) noexcept;
  ~CudaOps();

  /// Compute capability, as 90 for 9.0; multiprocessors; NVRTC's version.
  int architecture() const noexcept;
  int processors() const noexcept;
  std::string compiler() const;
  /// Programs that were compiled here, and that were found in the folder.
  int compiled() const;
  int found() const;

  /// Whether kernels serve a storage: all but nf4:torchao:f64.
  static bool serves(const Storage& storage) noexcept;

  /// Bytes of the device that quantize() works with, beside the parts.
  static std::size_t working_bytes(const Storage& storage, const Shape& shape);
  /// As stowage::quantize_into. Whether the values were finite says refused(), of `working`.
  void quantize(void* stream, const void* values, Dtype dtype, const Shape& shape,
                const Storage& storage, std::span<void* const> parts, void* working);
  /// As stowage::dequantize, of all rows.
  void dequantize(void* stream, const Weight& weight, void* out, Dtype dtype);
  /// out [count, elements of a row]: rows by ids of i64, or i32 if not `are_long`. Whether all ids
  /// were of the weight's rows says refused(), of one word; the rows of others are left as they
  /// were.
  void embedding(void* stream, const Weight& weight, const void* ids, bool are_long,
                 std::int64_t count, void* out, Dtype dtype, std::uint32_t* word);
  /// y [rows, O] = x [rows, K] w^T + bias [O] (or null), all of `dtype`: f32, bf16 or f16. Sums
  /// have a fixed order. Each 16 rows decode w once. Throws invalid_argument for a w that is no
  /// matrix.
  void linear(void* stream, const void* x, std::int64_t rows, Dtype dtype, const Weight& weight,
              const void* bias, void* y);
  /// Up to how many rows linear() is taken to be faster than dequantize() and a product of
  /// matrices.
  int most_rows(const Storage& storage, const Shape& shape, Dtype dtype) const;
  /// The same by groups of rows, of w [E, O, K] and bias [E, O] (or null): rows of x before ends[0]
  /// by matrix 0, those from there to ends[1] by matrix 1, and so on; rows of y from the last end
  /// on are 0. `ends`: [E], ascending, of the device; nobody waits for them, and matrices without
  /// rows are not read. Any number of rows: each 16 of a group read its matrix once. Throws
  /// invalid_argument for a w of another rank, or whose matrices lie transposed.
  void grouped_linear(void* stream, const void* x, std::int64_t rows, Dtype dtype,
                      const Weight& weight, const std::int32_t* ends, const void* bias, void* y);
  /// As stowage::amax.
  void amax(void* stream, std::span<const Values> arrays, float* most);

  /// Waits for the stream; whether quantize() met values, or scales, that are not finite, or
  /// embedding() an id of no row.
  bool refused(void* stream, const void* word);

 private:
  class Kernels;
  std::unique_ptr<Kernels> kernels_;
};

}  // namespace v0
}  // namespace stowage
