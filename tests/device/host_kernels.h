// SPDX-License-Identifier: Apache-2.0
// Every kernel of a device by its name, compiled for the host from its text.
#pragma once
#include <string_view>

#include "kernel/cuda/form.cuh"

namespace stowage::cuda::on_host {

bool has_kernel(std::string_view name);
/// Runs a kernel for a form with what the addresses point to, in so many blocks of so many threads.
void run_kernel(const Form& form, std::string_view name, const void* const* arguments,
                unsigned blocks, unsigned threads);

}  // namespace stowage::cuda::on_host
