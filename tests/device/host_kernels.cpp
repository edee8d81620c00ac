// SPDX-License-Identifier: Apache-2.0
#include "device/host_kernels.h"

#include <functional>
#include <map>
#include <utility>

#include "device/on_host.h"

namespace stowage::cuda::on_host {
namespace {

/// Calls a kernel with what the addresses point to, in so many blocks of so many threads.
using Launch = std::function<void(const void* const*, unsigned, unsigned)>;

template <class... Arguments, std::size_t... kAt>
Launch called(void (*kernel)(Arguments...), bool together, std::index_sequence<kAt...> /*at*/) {
  return [=](const void* const* given, unsigned blocks, unsigned threads) {
    if (together)
      launch_together(kernel, blocks, threads, *static_cast<const Arguments*>(given[kAt])...);
    else
      launch(kernel, blocks, threads, *static_cast<const Arguments*>(given[kAt])...);
  };
}
/// Its threads one after the other.
template <class... Arguments>
Launch alone(void (*kernel)(Arguments...)) {
  return called(kernel, false, std::index_sequence_for<Arguments...>());
}
/// The lanes of its warps wait for each other.
template <class... Arguments>
Launch together(void (*kernel)(Arguments...)) {
  return called(kernel, true, std::index_sequence_for<Arguments...>());
}

const std::map<std::string_view, Launch>& kernels() {
  static const std::map<std::string_view, Launch> all{
      {"stowage_dequantize", alone(&stowage_dequantize)},
      {"stowage_embedding", alone(&stowage_embedding)},
      {"stowage_linear", together(&stowage_linear)},
      {"stowage_linear_tiles", together(&stowage_linear_tiles)},
      {"stowage_reach", together(&stowage_reach)},
      {"stowage_outer_reach", alone(&stowage_outer_reach)},
      {"stowage_outers", alone(&stowage_outers)},
      {"stowage_scales", alone(&stowage_scales)},
      {"stowage_records", alone(&stowage_records)},
      {"stowage_blocks", alone(&stowage_blocks)},
      {"stowage_mean", alone(&stowage_mean)},
      {"stowage_nest", alone(&stowage_nest)},
      {"stowage_encode", alone(&stowage_encode)},
      {"stowage_cast", alone(&stowage_cast)},
      {"stowage_amax", together(&stowage_amax)},
      {"stowage_amax_numbers", alone(&stowage_amax_numbers)},
  };
  return all;
}

}  // namespace

bool has_kernel(std::string_view name) { return kernels().contains(name); }

void run_kernel(const Form& of, std::string_view name, const void* const* arguments,
                unsigned blocks, unsigned threads) {
  set_form(of);
  kernels().at(name)(arguments, blocks, threads);
}

}  // namespace stowage::cuda::on_host
