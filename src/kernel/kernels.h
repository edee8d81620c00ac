// SPDX-License-Identifier: Apache-2.0
// The only door between the library and its instruction sets (docs/dispatch.md). Tables of plain
// functions cross it: no inline code, no containers, nothing that allocates or throws.
#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "kernel/dequantize.h"
#include "kernel/linear.h"
#include "kernel/quantize.h"
#include "kernel/scales.h"

namespace stowage {
enum class Isa : std::uint8_t { scalar, neon, avx2, avx512, avx512bf16, amx };
std::string_view to_string(Isa isa) noexcept;

struct Kernels {
  Isa isa;
  DequantizeKernels dequantize;
  QuantizeKernels quantize;
  LinearKernels linear;
  ScaleKernels scales;
};

/// What an instruction set does better that looks bytes up.
struct ByteTableKernels {
  DequantizeKernels dequantize;
  Expand mapped;
};

/// The best table that this CPU runs, or the one that STOWAGE_FORCE_ISA names. Chosen once, at
/// first use. Throws unsupported (a forced set that this CPU lacks; composite, which lives in the
/// Python package), invalid_argument (an unknown name).
const Kernels& best_kernels();
/// The same, with the crossover that is in force (stowage/crossover.h).
const Kernels& kernels();
/// The same choice for a given text; "" asks for the best.
const Kernels& kernels_named(std::string_view forced);

/// Every table of this build, worst first, each with a name of its own: an instruction set may come
/// in variants ("avx2+vnni", "avx512+vbmi"). Null where this CPU cannot run it. For tests and
/// benchmarks.
struct NamedKernels {
  std::string_view name;
  const Kernels* kernels;
};
std::vector<NamedKernels> every_kernels();
/// Adds those of the architecture (dispatch_x86.cpp, dispatch_arm.cpp).
void add_kernels_of_cpu(std::vector<NamedKernels>& tables);
/// Those that this CPU can run.
std::vector<NamedKernels> runnable_kernels();
}  // namespace stowage
