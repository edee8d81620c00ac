// SPDX-License-Identifier: Apache-2.0
// Another architecture: the portable kernels are all there is.
#include "kernel/kernels.h"

namespace stowage {
void add_kernels_of_cpu(std::vector<NamedKernels>& /*tables*/) {}
}  // namespace stowage
