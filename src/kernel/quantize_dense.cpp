// SPDX-License-Identifier: Apache-2.0
#include "kernel/quantize_dense.h"

#include <algorithm>

namespace stowage {
namespace {

constexpr std::int64_t kPiece = 4096;  // elements: their numbers stay in the nearest cache

}  // namespace

void encode_dense(const QuantizeJob& job, const CodeRange& range, std::int64_t i, std::int64_t n,
                  std::int64_t group, const float* r, const float* zero) noexcept {
  const auto encode = job.kernels.quantize.within[job.in()];
  const int bits = trait(job.storage.codes).bits;
  std::int8_t numbers[kPiece];
  for (std::int64_t done = 0, some = 0; done < n; done += some) {
    const std::int64_t g = done / group, left = n - done;
    const bool whole = group <= kPiece;  // of groups; else a piece of one
    some = whole ? std::min(left, kPiece / group * group)
                 : std::min({left, kPiece, (g + 1) * group - done});
    encode({job.at(i + done), some, whole ? group : some, r + g,
            zero == nullptr ? nullptr : zero + g, numbers},
           range.least, range.most);
    job.kernels.quantize.pack(numbers, bits, some, job.code(i + done));
  }
}

}  // namespace stowage
