// SPDX-License-Identifier: Apache-2.0
// The schemas of all ops. Fakes and gradients are in Python (_ops/fakes.py, _tensor/autograd.py): a
// shape function written in stable-ABI C++ would fix symbolic sizes without a word.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(stowage, m) {
  // On weights. Codes are uint8 (wider casts keep their dtype), never float8: opcheck and half of
  // torch's ops cannot take float8. Scales follow in the order of layout().
  m.def("quantize(Tensor x, int storage, bool keep_nonfinite=False) -> Tensor[]");
  m.def(
      "dequantize(Tensor codes, Tensor[] scales, int storage, SymInt[] shape, ScalarType out)"
      " -> Tensor");
  m.def(
      "linear(Tensor x, Tensor codes, Tensor[] scales, int storage, SymInt rows, Tensor? bias,"
      " bool exact=False) -> Tensor");
  // The same product in eager mode, where a list costs 0.4 us: never in a graph, see
  // _tensor/products/linear.py.
  m.def(
      "_linear(Tensor x, Tensor codes, Tensor scale, int storage, int rows, Tensor? bias=None)"
      " -> Tensor");
  m.def(
      "linear_grad_input(Tensor g, Tensor codes, Tensor[] scales, int storage, SymInt columns,"
      " bool exact=False) -> Tensor");
  m.def(
      "grouped_rows(Tensor x, Tensor codes, Tensor[] scales, int storage, int[] shape, int[] ends,"
      " bool transposed) -> Tensor");
  m.def(
      "embedding(Tensor ids, Tensor codes, Tensor[] scales, int storage, SymInt[] shape,"
      " ScalarType out, bool tile=False) -> Tensor");
  m.def("amax(Tensor[] values) -> Tensor");
  m.def("measure(Tensor x, Tensor codes, Tensor[] scales, int storage) -> Tensor");
  // On descriptions: what is structured crosses as JSON.
  m.def("storage_key(str text) -> int");
  m.def("storage_describe(int storage) -> str");
  m.def("storage_has_matrices(int storage, int[] shape) -> bool");
  m.def(
      "storage_on_disk(str name, int storage, int[] shape, str compute='BF16',"
      " float nested_offset=0.0) -> Tensor");
  m.def("storage_label(str name, int storage, int[] shape) -> Tensor");
  m.def("quantization_config(str weights) -> Tensor");
  m.def("dialect_files(str dialect, str model) -> Tensor");
  m.def("state_describe(str where, str tensors, Tensor[] values) -> Tensor");
  m.def("info() -> Tensor");
}

// On files, engines, plans and writers: a handle stands for an open one.
STABLE_TORCH_LIBRARY_FRAGMENT(stowage, m) {
  m.def("file_open(str path) -> int");
  m.def("file_describe(int file) -> Tensor");
  m.def("file_read(int file, str name) -> Tensor");
  m.def("file_map(int file, str name, int begin, int bytes) -> Tensor");
  m.def("file_parts(int file, str weight, str compute) -> Tensor[]");
  m.def("file_rows(int file, str weight, int first, int last, str compute) -> Tensor[]");
  m.def("file_copy(int file, str name, int begin=0, int bytes=-1) -> Tensor");
  m.def("file_stacks(int file, str stacks) -> int");
  m.def("file_stack_part(int file, str name, int part) -> Tensor");
  m.def("file_part(int file, str weight, int part, str compute, bool touched) -> Tensor");
  m.def("tensor_of_part(Tensor part, int form) -> Tensor");
  m.def("file_header(int file, int shard) -> Tensor");
  m.def("file_populate(int file, str name, int begin, int bytes, bool mapped=True) -> ()");
  m.def("file_drop(int file, str name) -> ()");
  m.def("file_drop_behind(int file, str name) -> ()");
  m.def("file_verify(int file) -> int");
  m.def("file_check(int file) -> ()");
  m.def("file_close(int file) -> ()");
  m.def(
      "engine_open(int file, int ram, str reads, int workers, float timeout=0.0, bool lock=False,"
      " str mapped_only='[]', str by_rows='{}') -> int");
  m.def("engine_keep(int engine, str names, int ram, int ring) -> int");
  m.def("engine_expect(int engine, str names) -> ()");
  m.def("engine_together(Tensor[] codes) -> ()");
  m.def("engine_want(Tensor[] codes, int[] slices, bool one_by_one, bool after) -> bool");
  m.def("engine_signature(int engine, int signature) -> ()");
  m.def(
      "engine_counts(int engine) -> (int acquired, int hits, int misses, int late, int borrowed, "
      "int ahead, int unused, int evicted, int bytes_read, int bytes_formed, int held, int peak, "
      "float stall, float forming)");
  m.def("engine_uses(int engine) -> Tensor");
  m.def("engine_foresee(int engine, str uses) -> ()");
  m.def("engine_describe(int engine) -> Tensor");
  m.def("engine_close(int engine) -> ()");
  m.def("plan_make(str request, str links) -> Tensor");
  m.def("plan_text(str plan) -> Tensor");
  m.def("plan_read(str plan, str where) -> Tensor");
  m.def("plan_check(str plan, str request) -> ()");
  m.def("plan_html(str plan, str measured) -> Tensor");
  m.def("plan_compare(str plan, str measured) -> Tensor");
  m.def("report_html(str report, str plan, str measured) -> Tensor");
  m.def("machine_key() -> Tensor");
  m.def("links_measure(str path, bool anew) -> Tensor");
  m.def("crossover_measure() -> Tensor");
  m.def("crossover_now() -> Tensor");
  m.def("crossover_use_kept() -> bool");
  m.def("trace_start(int most_events) -> ()");
  m.def("trace_stop() -> Tensor");
  m.def("writer_open(str path, str declaration) -> int");
  m.def("writer_write(int writer, str name, Tensor bytes) -> ()");
  m.def("writer_finish(int writer) -> ()");
  m.def("writer_discard(int writer) -> ()");
}

// On devices: addresses of theirs, and streams, as integers (_ops/device_kernels.py).
STABLE_TORCH_LIBRARY_FRAGMENT(stowage, m) {
  m.def("device_start(int device, str options) -> Tensor");
  m.def("device_working(int storage, int[] shape) -> int");
  m.def(
      "device_quantize(int device, int stream, int x, str dtype, int storage, int[] shape, int[] "
      "parts, int working) -> ()");
  m.def(
      "device_dequantize(int device, int stream, int[] parts, int storage, int[] shape, int out, "
      "str dtype) -> ()");
  m.def(
      "device_embedding(int device, int stream, int[] parts, int storage, int[] shape, int ids, "
      "bool are_long, int count, int out, str dtype, int word) -> ()");
  m.def(
      "device_linear(int device, int stream, int[] parts, int storage, int[] shape, int x, int "
      "rows, int bias, int y, str dtype) -> ()");
  m.def("device_most_rows(int device, int storage, int[] shape, str dtype) -> int");
  m.def(
      "device_grouped_linear(int device, int stream, int[] parts, int storage, int[] shape, int x, "
      "int rows, int ends, int bias, int y, str dtype) -> ()");
  m.def(
      "device_amax(int device, int stream, int[] values, str dtypes, int[] counts, int most) -> "
      "()");
  m.def("device_refused(int device, int stream, int word) -> bool");
}
