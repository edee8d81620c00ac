// SPDX-License-Identifier: Apache-2.0
// The public door to kernels of CUDA devices.
#include "stowage/cuda.h"

#include <array>

#include "device/programs.h"

namespace stowage {
inline namespace v0 {

using device::CudaStream;
using device::Programs;

class CudaOps::Kernels : public Programs {
  using Programs::Programs;
};

namespace {

Programs::Where where_of(const CudaOptions& options) {
  Programs::Where made;
  if (!options.driver.empty()) made.driver = options.driver;
  if (!options.compilers.empty()) made.compilers = options.compilers;
  made.folder = options.folder.empty() ? device::programs_folder() : options.folder;
  return made;
}

// Parts of a weight as kernels take them.
struct Pointers {
  std::array<void*, kMaxParts> at{};
  std::size_t count;
  explicit Pointers(const Weight& weight)
      : count(static_cast<std::size_t>(layout(weight.storage(), weight.shape()).count)) {
    for (std::size_t i = 0; i < count; ++i)
      at[i] = const_cast<void*>(weight.part(static_cast<int>(i)));
  }
  std::span<void* const> span() const { return {at.data(), count}; }
};

void check_served(const char* where, const Storage& storage) {
  if (!CudaOps::serves(storage))
    throw Error(
        Code::unsupported,
        std::string(where) + ": CUDA kernels must serve the storage, got " + to_string(storage));
}

}  // namespace

CudaOps::CudaOps(int device, const CudaOptions& options)
    : kernels_(std::make_unique<Kernels>(device, where_of(options))) {}
CudaOps::CudaOps(CudaOps&&) noexcept = default;
CudaOps::~CudaOps() = default;

int CudaOps::architecture() const noexcept { return kernels_->architecture(); }
int CudaOps::processors() const noexcept { return kernels_->processors(); }
std::string CudaOps::compiler() const { return kernels_->compiler().version(); }
int CudaOps::compiled() const { return kernels_->counts().compiled; }
int CudaOps::found() const { return kernels_->counts().read; }
bool CudaOps::serves(const Storage& storage) noexcept { return device::has_form(storage); }

std::size_t CudaOps::working_bytes(const Storage& storage, const Shape& shape) {
  return device::working_bytes(storage, shape);
}

void CudaOps::quantize(void* stream, const void* values, Dtype dtype, const Shape& shape,
                       const Storage& storage, std::span<void* const> parts, void* working) {
  check_served("quantize", storage);
  CudaStream on(*kernels_, stream);
  device::quantize(on, values, dtype, shape, storage, parts, working);
}

void CudaOps::dequantize(void* stream, const Weight& weight, void* out, Dtype dtype) {
  check_served("dequantize", weight.storage());
  CudaStream on(*kernels_, stream);
  device::dequantize(on, weight.storage(), weight.shape(), Pointers(weight).span(), out, dtype);
}

void CudaOps::embedding(void* stream, const Weight& weight, const void* ids, bool are_long,
                        std::int64_t count, void* out, Dtype dtype, std::uint32_t* word) {
  check_served("embedding", weight.storage());
  CudaStream on(*kernels_, stream);
  on.clear(word, sizeof *word);
  device::embedding(on, weight.storage(), weight.shape(), Pointers(weight).span(), ids, are_long,
                    count, out, dtype, word);
}

void CudaOps::linear(void* stream, const void* x, std::int64_t rows, Dtype dtype,
                     const Weight& weight, const void* bias, void* y) {
  check_served("linear", weight.storage());
  if (weight.shape().rank() != 2 || rows < 0)
    throw Error(Code::invalid_argument, "linear: a matrix must be multiplied by rows, got " +
                                            to_string(weight.shape()) + " and " +
                                            std::to_string(rows));
  CudaStream on(*kernels_, stream);
  device::linear(on, weight.storage(), weight.shape(), Pointers(weight).span(),
                 {dtype, rows, x, bias, y}, {kernels_->architecture(), kernels_->processors()});
}

int CudaOps::most_rows(const Storage& storage, const Shape& shape, Dtype dtype) const {
  check_served("most_rows", storage);
  if (shape.rank() != 2)
    throw Error(Code::invalid_argument,
                "most_rows: the weight must be a matrix, got " + to_string(shape));
  return device::most_rows(storage, dtype, shape,
                           {kernels_->architecture(), kernels_->processors()});
}

void CudaOps::grouped_linear(void* stream, const void* x, std::int64_t rows, Dtype dtype,
                             const Weight& weight, const std::int32_t* ends, const void* bias,
                             void* y) {
  check_served("grouped_linear", weight.storage());
  if (weight.shape().rank() != 3 || rows < 0 || describe(weight.storage()).transposed)
    throw Error(Code::invalid_argument,
                "grouped_linear: matrices [E, O, K] that lie so must be multiplied, got " +
                    to_string(weight.storage()) + " " + to_string(weight.shape()) + " and " +
                    std::to_string(rows) + " rows");
  CudaStream on(*kernels_, stream);
  device::grouped_linear(on, weight.storage(), weight.shape(), Pointers(weight).span(),
                         {dtype, rows, x, bias, y}, ends,
                         {kernels_->architecture(), kernels_->processors()});
}

void CudaOps::amax(void* stream, std::span<const Values> arrays, float* most) {
  CudaStream on(*kernels_, stream);
  device::amax(on, arrays, most);
}

bool CudaOps::refused(void* stream, const void* word) {
  const std::uint32_t said = CudaStream(*kernels_, stream).read_word(word);
  return said == 1 || said >= 0x7F800000u;
}

}  // namespace v0
}  // namespace stowage
