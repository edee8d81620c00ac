// SPDX-License-Identifier: Apache-2.0
// The whole C interface from C11: program FOLDER. Every function refuses null by the name of the
// argument, then a model is written, opened, used and held by an engine.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stowage.h"

static int failures = 0;
static void check_at(int line, const char* what, int holds) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "line %d: %s; last error: %s\n", line, what, stowage_last_error());
}
#define CHECK(holds) check_at(__LINE__, #holds, holds)
#define WORKS(call) check_at(__LINE__, #call, (call) == STOWAGE_OK)

static void fails_at(int line, const char* what, stowage_status status, stowage_status wanted,
                     const char* said) {
  check_at(line, what, status == wanted && strstr(stowage_last_error(), said) != NULL);
}
// With this status, and a message that has this text.
#define FAILS(call, status, said) fails_at(__LINE__, #call, call, status, said)
#define NEEDS(argument, call) FAILS(call, STOWAGE_INVALID_ARGUMENT, argument " must not be null")

// What the structs of ABI 1 are, which no later version changes.
_Static_assert(sizeof(stowage_weight_info) == 104, "stowage_weight_info");
_Static_assert(offsetof(stowage_weight_info, shape) == 32, "stowage_weight_info.shape");
_Static_assert(sizeof(stowage_tensor_info) == 112, "stowage_tensor_info");
_Static_assert(offsetof(stowage_tensor_info, data) == 104, "stowage_tensor_info.data");
_Static_assert(sizeof(stowage_engine_options) == 64, "stowage_engine_options");
_Static_assert(offsetof(stowage_engine_options, reads) == 24, "stowage_engine_options.reads");
_Static_assert(sizeof(stowage_engine_report) == 128, "stowage_engine_report");
_Static_assert(offsetof(stowage_engine_report, held) == 80, "stowage_engine_report.held");
_Static_assert(sizeof(stowage_uses) == 40, "stowage_uses");
_Static_assert(sizeof(stowage_writer_options) == 24, "stowage_writer_options");

enum { kRows = 24, kColumns = 128, kMost = kRows * kColumns };
static const int64_t shape[] = {kRows, kColumns};
static float values[kMost];

static void statuses(void) {
  CHECK(strcmp(stowage_last_error(), "") == 0);
  CHECK(stowage_abi_version() == STOWAGE_ABI_VERSION);
  int major = -1, minor = -1, patch = -1;
  CHECK(sscanf(stowage_version(), "%d.%d.%d", &major, &minor, &patch) == 3);
  CHECK(strcmp(stowage_status_name(STOWAGE_OK), "ok") == 0);
  CHECK(strcmp(stowage_status_name(STOWAGE_BAD_FILE), "bad_file") == 0);
  CHECK(strcmp(stowage_status_name(STOWAGE_OUT_OF_RANGE), "out_of_range") == 0);
  CHECK(strcmp(stowage_status_name(STOWAGE_DEFECT), "defect") == 0);
  CHECK(strcmp(stowage_status_name(8), "unknown") == 0);
  CHECK(strcmp(stowage_status_name(-1), "unknown") == 0);
  const char* name = NULL;
  WORKS(stowage_instruction_set(&name));
  CHECK(name != NULL && strlen(name) > 0);
  NEEDS("name", stowage_instruction_set(NULL));
}

static void null_files(const stowage_file* file) {
  stowage_file* opened = NULL;
  stowage_weight* weight = NULL;
  const char* text = NULL;
  int64_t n = 0;
  stowage_weight_info told = {.size = sizeof told};
  stowage_tensor_info tensor = {.size = sizeof tensor};
  NEEDS("path", stowage_file_open(NULL, &opened));
  NEEDS("file", stowage_file_open("x", NULL));
  stowage_file_free(NULL);
  NEEDS("file", stowage_file_dialect(NULL, &text));
  NEEDS("dialect", stowage_file_dialect(file, NULL));
  NEEDS("file", stowage_file_metadata(NULL, "k", &text));
  NEEDS("key", stowage_file_metadata(file, NULL, &text));
  NEEDS("value", stowage_file_metadata(file, "k", NULL));
  NEEDS("file", stowage_file_weight_count(NULL, &n));
  NEEDS("count", stowage_file_weight_count(file, NULL));
  NEEDS("file", stowage_file_find_weight(NULL, "w", &n));
  NEEDS("name", stowage_file_find_weight(file, NULL, &n));
  NEEDS("index", stowage_file_find_weight(file, "w", NULL));
  NEEDS("file", stowage_file_describe_weight(NULL, 0, &told));
  NEEDS("info", stowage_file_describe_weight(file, 0, NULL));
  NEEDS("file", stowage_file_tensor_count(NULL, &n));
  NEEDS("count", stowage_file_tensor_count(file, NULL));
  NEEDS("file", stowage_file_find_tensor(NULL, "w", &n));
  NEEDS("name", stowage_file_find_tensor(file, NULL, &n));
  NEEDS("index", stowage_file_find_tensor(file, "w", NULL));
  NEEDS("file", stowage_file_describe_tensor(NULL, 0, &tensor));
  NEEDS("info", stowage_file_describe_tensor(file, 0, NULL));
  NEEDS("file", stowage_file_weight(NULL, 0, STOWAGE_UNKNOWN, &weight));
  NEEDS("weight", stowage_file_weight(file, 0, STOWAGE_UNKNOWN, NULL));
  NEEDS("file", stowage_file_check(NULL));
  NEEDS("file", stowage_file_verify(NULL, &n));
  NEEDS("compared", stowage_file_verify(file, NULL));
  CHECK(opened == NULL && weight == NULL);
}

static void null_weights(const stowage_weight* weight) {
  stowage_weight* made = NULL;
  const void* const parts[] = {values};
  stowage_weight_info told = {.size = sizeof told};
  stowage_tensor_info part = {.size = sizeof part};
  int32_t count = 0;
  const int64_t id = 0;
  float y[kRows];
  NEEDS("values", stowage_quantize(NULL, STOWAGE_F32, shape, 2, "nf4", &made));
  NEEDS("shape", stowage_quantize(values, STOWAGE_F32, NULL, 2, "nf4", &made));
  NEEDS("storage", stowage_quantize(values, STOWAGE_F32, shape, 2, NULL, &made));
  NEEDS("weight", stowage_quantize(values, STOWAGE_F32, shape, 2, "nf4", NULL));
  NEEDS("storage", stowage_weight_of_parts(NULL, shape, 2, parts, 1, &made));
  NEEDS("shape", stowage_weight_of_parts("f32", NULL, 2, parts, 1, &made));
  NEEDS("parts", stowage_weight_of_parts("f32", shape, 2, NULL, 1, &made));
  NEEDS("weight", stowage_weight_of_parts("f32", shape, 2, parts, 1, NULL));
  stowage_weight_free(NULL);
  NEEDS("weight", stowage_weight_describe(NULL, &told));
  NEEDS("info", stowage_weight_describe(weight, NULL));
  NEEDS("weight", stowage_weight_part_count(NULL, &count));
  NEEDS("count", stowage_weight_part_count(weight, NULL));
  NEEDS("weight", stowage_weight_describe_part(NULL, 0, &part));
  NEEDS("info", stowage_weight_describe_part(weight, 0, NULL));
  NEEDS("weight", stowage_dequantize(NULL, 0, 1, y, STOWAGE_F32));
  NEEDS("out", stowage_dequantize(weight, 0, 1, NULL, STOWAGE_F32));
  NEEDS("weight", stowage_embedding(NULL, &id, 1, y, STOWAGE_F32));
  NEEDS("ids", stowage_embedding(weight, NULL, 1, y, STOWAGE_F32));
  NEEDS("out", stowage_embedding(weight, &id, 1, NULL, STOWAGE_F32));
  NEEDS("weight", stowage_linear(NULL, values, 1, STOWAGE_F32, NULL, y));
  NEEDS("x", stowage_linear(weight, NULL, 1, STOWAGE_F32, NULL, y));
  NEEDS("y", stowage_linear(weight, values, 1, STOWAGE_F32, NULL, NULL));
  NEEDS("weight", stowage_linear_fixed(NULL, values, 1, NULL, y));
  NEEDS("x", stowage_linear_fixed(weight, NULL, 1, NULL, y));
  NEEDS("y", stowage_linear_fixed(weight, values, 1, NULL, NULL));
  CHECK(made == NULL);
}

static void null_engines(const stowage_file* file, stowage_engine* engine, stowage_lease* lease) {
  stowage_engine* made = NULL;
  stowage_lease* leased = NULL;
  const stowage_engine_options options = {.size = sizeof options, .ram = 1 << 20};
  stowage_engine_report report = {.size = sizeof report};
  stowage_uses uses = {.size = sizeof uses};
  const stowage_weight* weight = NULL;
  const char* text = NULL;
  const void* at = NULL;
  int32_t id = 0;
  uint64_t bytes = 0;
  NEEDS("file", stowage_engine_new(NULL, &options, &made));
  NEEDS("options", stowage_engine_new(file, NULL, &made));
  NEEDS("engine", stowage_engine_new(file, &options, NULL));
  stowage_engine_free(NULL);
  NEEDS("engine", stowage_engine_count(NULL, &id));
  NEEDS("count", stowage_engine_count(engine, NULL));
  NEEDS("engine", stowage_engine_find(NULL, "w", &id));
  NEEDS("name", stowage_engine_find(engine, NULL, &id));
  NEEDS("id", stowage_engine_find(engine, "w", NULL));
  NEEDS("engine", stowage_engine_name(NULL, 0, &text));
  NEEDS("name", stowage_engine_name(engine, 0, NULL));
  NEEDS("engine", stowage_engine_bytes(NULL, 0, &bytes));
  NEEDS("bytes", stowage_engine_bytes(engine, 0, NULL));
  NEEDS("engine", stowage_engine_slices(NULL, 0, &id, &id));
  NEEDS("first", stowage_engine_slices(engine, 0, NULL, &id));
  NEEDS("count", stowage_engine_slices(engine, 0, &id, NULL));
  NEEDS("engine", stowage_engine_want(NULL, &id, 1));
  NEEDS("ids", stowage_engine_want(engine, NULL, 1));
  NEEDS("engine", stowage_engine_uses(NULL, 0, &uses));
  NEEDS("uses", stowage_engine_uses(engine, 0, NULL));
  NEEDS("engine", stowage_engine_keep(NULL, &id, 1));
  NEEDS("ids", stowage_engine_keep(engine, NULL, 1));
  NEEDS("engine", stowage_engine_expect(NULL, &id, 1));
  NEEDS("ids", stowage_engine_expect(engine, NULL, 1));
  NEEDS("engine", stowage_engine_acquire(NULL, 0, &leased));
  NEEDS("lease", stowage_engine_acquire(engine, 0, NULL));
  NEEDS("engine", stowage_engine_cancel(NULL));
  NEEDS("engine", stowage_engine_describe(NULL, &report));
  NEEDS("report", stowage_engine_describe(engine, NULL));
  stowage_lease_free(NULL);
  NEEDS("lease", stowage_lease_weight(NULL, &weight));
  NEEDS("weight", stowage_lease_weight(lease, NULL));
  NEEDS("lease", stowage_lease_at(NULL, values, &at));
  NEEDS("mapped", stowage_lease_at(lease, NULL, &at));
  NEEDS("at", stowage_lease_at(lease, values, NULL));
  CHECK(made == NULL && leased == NULL);
}

static void null_writers(stowage_writer* writer, const stowage_weight* weight) {
  stowage_writer* made = NULL;
  NEEDS("path", stowage_writer_new(NULL, NULL, &made));
  NEEDS("writer", stowage_writer_new("x.safetensors", NULL, NULL));
  stowage_writer_free(NULL);
  NEEDS("writer", stowage_writer_set_metadata(NULL, "k", "v"));
  NEEDS("key", stowage_writer_set_metadata(writer, NULL, "v"));
  NEEDS("value", stowage_writer_set_metadata(writer, "k", NULL));
  NEEDS("writer", stowage_writer_declare_weight(NULL, "w", "nf4", shape, 2, STOWAGE_UNKNOWN));
  NEEDS("name", stowage_writer_declare_weight(writer, NULL, "nf4", shape, 2, STOWAGE_UNKNOWN));
  NEEDS("storage", stowage_writer_declare_weight(writer, "w", NULL, shape, 2, STOWAGE_UNKNOWN));
  NEEDS("shape", stowage_writer_declare_weight(writer, "w", "nf4", NULL, 2, STOWAGE_UNKNOWN));
  NEEDS("writer", stowage_writer_declare_tensor(NULL, "t", STOWAGE_I32, shape, 1));
  NEEDS("name", stowage_writer_declare_tensor(writer, NULL, STOWAGE_I32, shape, 1));
  NEEDS("shape", stowage_writer_declare_tensor(writer, "t", STOWAGE_I32, NULL, 1));
  NEEDS("writer", stowage_writer_write_weight(NULL, "w", weight));
  NEEDS("name", stowage_writer_write_weight(writer, NULL, weight));
  NEEDS("weight", stowage_writer_write_weight(writer, "w", NULL));
  NEEDS("writer", stowage_writer_write_tensor(NULL, "t", values, 4));
  NEEDS("name", stowage_writer_write_tensor(writer, NULL, values, 4));
  NEEDS("data", stowage_writer_write_tensor(writer, "t", NULL, 4));
  NEEDS("writer", stowage_writer_finish(NULL));
  CHECK(made == NULL);
}

// Writes "layer.weight" as nf4, "layer.bias" as f32 and the plain tensor "ids".
static void write_model(const char* path) {
  stowage_writer* writer = NULL;
  stowage_weight *weight = NULL, *bias = NULL;
  const int64_t rows = kRows, three = 3;
  const int32_t ids[] = {1, 2, 3};
  const void* const parts[] = {values};
  const stowage_writer_options options = {.size = sizeof options};
  WORKS(stowage_quantize(values, STOWAGE_F32, shape, 2, "nf4", &weight));
  WORKS(stowage_weight_of_parts("f32", &rows, 1, parts, 1, &bias));
  WORKS(stowage_writer_new("x", NULL, &writer));
  FAILS(stowage_writer_finish(writer), STOWAGE_INVALID_ARGUMENT, "safetensors");
  stowage_writer_free(writer);
  WORKS(stowage_writer_new(path, &options, &writer));
  null_writers(writer, weight);
  WORKS(stowage_writer_set_metadata(writer, "made", "in C"));
  WORKS(stowage_writer_declare_weight(writer, "layer.weight", "nf4", shape, 2, STOWAGE_F16));
  WORKS(stowage_writer_declare_weight(writer, "layer.bias", "f32", &rows, 1, STOWAGE_UNKNOWN));
  WORKS(stowage_writer_declare_tensor(writer, "ids", STOWAGE_I32, &three, 1));
  FAILS(stowage_writer_declare_weight(writer, "w", "nf5", shape, 2, STOWAGE_F16),
        STOWAGE_INVALID_ARGUMENT, "nf5");
  FAILS(stowage_writer_declare_tensor(writer, "t", 99, shape, 2), STOWAGE_INVALID_ARGUMENT,
        "dtype must be one of stowage_dtype, got 99");
  WORKS(stowage_writer_write_weight(writer, "layer.weight", weight));
  FAILS(stowage_writer_declare_tensor(writer, "t", STOWAGE_I32, &three, 1),
        STOWAGE_INVALID_ARGUMENT, "before the first write, got 't'");
  FAILS(stowage_writer_finish(writer), STOWAGE_INVALID_ARGUMENT, "ids");
  WORKS(stowage_writer_write_weight(writer, "layer.bias", bias));
  FAILS(stowage_writer_write_tensor(writer, "ids", ids, 8), STOWAGE_INVALID_ARGUMENT, "ids");
  WORKS(stowage_writer_write_tensor(writer, "ids", ids, sizeof ids));
  WORKS(stowage_writer_finish(writer));
  stowage_writer_free(writer);
  stowage_weight_free(weight);
  stowage_weight_free(bias);
}

static void read_model(const stowage_file* file) {
  int64_t weights = 0, tensors = 0, compared = 0, index = -1;
  const char *dialect = NULL, *value = NULL;
  stowage_weight_info told = {.size = sizeof told};
  stowage_tensor_info ids = {.size = sizeof ids};
  null_files(file);
  WORKS(stowage_file_check(file));
  WORKS(stowage_file_verify(file, &compared));
  WORKS(stowage_file_weight_count(file, &weights));
  WORKS(stowage_file_tensor_count(file, &tensors));
  CHECK(weights == 2 && tensors == compared && tensors >= 5);
  WORKS(stowage_file_dialect(file, &dialect));
  CHECK(strcmp(dialect, "") == 0);
  WORKS(stowage_file_metadata(file, "made", &value));
  CHECK(value != NULL && strcmp(value, "in C") == 0);
  WORKS(stowage_file_metadata(file, "unmade", &value));
  CHECK(value == NULL);
  WORKS(stowage_file_find_weight(file, "layer.weight", &index));
  WORKS(stowage_file_describe_weight(file, index, &told));
  CHECK(strcmp(told.name, "layer.weight") == 0 && strcmp(told.storage, "nf4:block64") == 0);
  CHECK(told.rank == 2 && told.shape[0] == kRows && told.shape[1] == kColumns);
  CHECK(told.compute == STOWAGE_F16 && told.bytes == kMost / 2 + kMost / 64 * 4);
  WORKS(stowage_file_find_tensor(file, "ids", &index));
  WORKS(stowage_file_describe_tensor(file, index, &ids));
  CHECK(ids.dtype == STOWAGE_I32 && strcmp(ids.dtype_name, "I32") == 0 && ids.bytes == 12);
  CHECK(ids.rank == 1 && ids.shape[0] == 3 && ((const unsigned char*)ids.data)[4] == 2);
  WORKS(stowage_file_find_tensor(file, "id", &index));
  CHECK(index == -1);
  WORKS(stowage_file_find_weight(file, "ids", &index));
  CHECK(index == -1);
  FAILS(stowage_file_describe_weight(file, -1, &told), STOWAGE_OUT_OF_RANGE, "[0, 2), got -1");
  FAILS(stowage_file_describe_tensor(file, 99, &ids), STOWAGE_OUT_OF_RANGE, "got 99");
}

static void use(const stowage_weight* weight) {
  float whole[kMost], rows[2 * kColumns], y[kRows], fixed[kRows];
  uint16_t half[kColumns];
  const int64_t ids[] = {5, 0}, outside = kRows;
  int32_t parts = 0;
  stowage_tensor_info part = {.size = sizeof part};
  null_weights(weight);
  WORKS(stowage_dequantize(weight, 0, kRows, whole, STOWAGE_F32));
  WORKS(stowage_dequantize(weight, 5, 6, half, STOWAGE_BF16));
  WORKS(stowage_embedding(weight, ids, 2, rows, STOWAGE_F32));
  CHECK(memcmp(rows, whole + 5 * kColumns, sizeof rows / 2) == 0);
  CHECK(memcmp(rows + kColumns, whole, sizeof rows / 2) == 0);
  WORKS(stowage_linear(weight, values, 1, STOWAGE_F32, NULL, y));
  WORKS(stowage_linear_fixed(weight, values, 1, NULL, fixed));
  for (int i = 0; i < kRows; ++i) {
    double sum = 0;
    for (int k = 0; k < kColumns; ++k) sum += (double)whole[i * kColumns + k] * values[k];
    CHECK(fabs(y[i] - sum) < 1e-3 && fabs(fixed[i] - sum) < 1e-3);
  }
  WORKS(stowage_weight_part_count(weight, &parts));
  CHECK(parts == 2);
  WORKS(stowage_weight_describe_part(weight, 1, &part));
  CHECK(strcmp(part.name, "absmax") == 0 && part.dtype == STOWAGE_F32 && part.data != NULL);
  FAILS(stowage_weight_describe_part(weight, 2, &part), STOWAGE_OUT_OF_RANGE, "[0, 2), got 2");
  FAILS(stowage_dequantize(weight, 3, 99, whole, STOWAGE_F32), STOWAGE_INVALID_ARGUMENT, "rows");
  FAILS(stowage_dequantize(weight, 0, 1, whole, STOWAGE_I8), STOWAGE_INVALID_ARGUMENT, "dtype");
  FAILS(stowage_embedding(weight, &outside, 1, rows, STOWAGE_F32), STOWAGE_OUT_OF_RANGE, "ids");
  FAILS(stowage_embedding(weight, ids, -1, rows, STOWAGE_F32), STOWAGE_INVALID_ARGUMENT, "ids");
  FAILS(stowage_linear(weight, values, -1, STOWAGE_F32, NULL, y), STOWAGE_INVALID_ARGUMENT,
        "m must not be negative, got -1");
  FAILS(stowage_linear(weight, values, INT64_MAX / 2, STOWAGE_F32, NULL, y),
        STOWAGE_INVALID_ARGUMENT, "64 bits");
  FAILS(stowage_linear(weight, values, 1, STOWAGE_F64, NULL, y), STOWAGE_INVALID_ARGUMENT, "dtype");
}

static void hold(const stowage_file* file) {
  stowage_engine* engine = NULL;
  stowage_lease *lease = NULL, *plain = NULL;
  const stowage_weight *weight = NULL, *again = NULL;
  const char* const mapped_only[] = {"ids"};
  const char* name = NULL;
  const void* at = NULL;
  int32_t count = 0, id = -1, ids = -1;
  uint64_t bytes = 1;
  stowage_tensor_info tensor = {.size = sizeof tensor};
  stowage_engine_report report = {.size = sizeof report};
  stowage_engine_options options = {.size = sizeof options, .ram = 1};
  FAILS(stowage_engine_new(file, &options, &engine), STOWAGE_INVALID_ARGUMENT, "budget");
  options.ram = 1 << 20;
  options.reads = 4;
  FAILS(stowage_engine_new(file, &options, &engine), STOWAGE_INVALID_ARGUMENT, "options.reads");
  options.reads = STOWAGE_READS_BUFFERED;
  options.mapped_only_count = 1;
  FAILS(stowage_engine_new(file, &options, &engine), STOWAGE_INVALID_ARGUMENT, "mapped_only");
  options.mapped_only = mapped_only;
  WORKS(stowage_engine_new(file, &options, &engine));
  WORKS(stowage_engine_count(engine, &count));
  CHECK(count == 5);  // with the state and the map of nf4
  WORKS(stowage_engine_find(engine, "nothing", &id));
  CHECK(id == -1);
  WORKS(stowage_engine_find(engine, "layer.weight", &id));
  WORKS(stowage_engine_find(engine, "ids", &ids));
  WORKS(stowage_engine_name(engine, id, &name));
  CHECK(strcmp(name, "layer.weight") == 0);
  WORKS(stowage_engine_bytes(engine, ids, &bytes));
  CHECK(bytes == 0);
  WORKS(stowage_engine_keep(engine, &id, 1));
  WORKS(stowage_engine_expect(engine, &id, 1));
  FAILS(stowage_engine_acquire(engine, 5, &lease), STOWAGE_INVALID_ARGUMENT, "below 5, got 5");
  WORKS(stowage_engine_acquire(engine, id, &lease));
  WORKS(stowage_engine_acquire(engine, ids, &plain));
  null_engines(file, engine, lease);
  WORKS(stowage_lease_weight(lease, &weight));
  WORKS(stowage_lease_weight(lease, &again));
  CHECK(weight == again);
  use(weight);
  FAILS(stowage_lease_weight(plain, &again), STOWAGE_INVALID_ARGUMENT, "ids");
  WORKS(stowage_file_describe_tensor(file, 0, &tensor));
  CHECK(strcmp(tensor.name, "ids") == 0);
  WORKS(stowage_lease_at(plain, tensor.data, &at));
  CHECK(memcmp(at, tensor.data, tensor.bytes) == 0);
  WORKS(stowage_engine_describe(engine, &report));
  CHECK(report.acquired > 0 && report.held > 0 && report.reads == STOWAGE_READS_BUFFERED);
  WORKS(stowage_engine_cancel(engine));
  stowage_lease_free(plain);
  stowage_engine_free(engine);
  stowage_lease_free(lease);  // good beyond its engine
}

// Rows one by one, as experts of a stack come.
static void hold_rows(const stowage_file* file) {
  stowage_engine* engine = NULL;
  stowage_lease* lease = NULL;
  const stowage_weight* weight = NULL;
  const char* const by_rows[] = {"layer.weight"};
  int32_t id = -1, first = -1, count = -1;
  stowage_weight_info info = {.size = sizeof info};
  stowage_uses uses = {.size = sizeof uses};
  stowage_engine_options options = {.size = sizeof options, .ram = 1 << 20};
  options.by_rows_count = 1;
  FAILS(stowage_engine_new(file, &options, &engine), STOWAGE_INVALID_ARGUMENT, "by_rows");
  options.by_rows = by_rows;
  WORKS(stowage_engine_new(file, &options, &engine));
  WORKS(stowage_engine_find(engine, "layer.weight", &id));
  WORKS(stowage_engine_slices(engine, id, &first, &count));
  CHECK(count == kRows && first > id);
  const int32_t wanted[] = {first + 3, first + 5};
  WORKS(stowage_engine_want(engine, wanted, 2));
  WORKS(stowage_engine_acquire(engine, first + 5, &lease));
  WORKS(stowage_lease_weight(lease, &weight));
  WORKS(stowage_weight_describe(weight, &info));
  CHECK(info.shape[0] == 1 && info.shape[1] == kColumns);
  WORKS(stowage_engine_uses(engine, first + 5, &uses));
  CHECK(uses.hits + uses.misses + uses.late == 1 && uses.borrowed == 0 && uses.unused == 0);
  WORKS(stowage_engine_uses(engine, first + 4, &uses));
  CHECK(uses.hits + uses.misses + uses.late + uses.ahead == 0);
  FAILS(stowage_engine_uses(engine, 999, &uses), STOWAGE_INVALID_ARGUMENT, "must be below");
  FAILS(stowage_engine_slices(engine, -1, &first, &count), STOWAGE_INVALID_ARGUMENT,
        "must be below");
  stowage_lease_free(lease);
  stowage_engine_free(engine);
}

int main(int argc, char** argv) {
  if (argc != 2) return fputs("usage: program FOLDER\n", stderr), 2;
  char path[4096], missing[4096];
  snprintf(path, sizeof path, "%s/model.safetensors", argv[1]);
  snprintf(missing, sizeof missing, "%s/missing.safetensors", argv[1]);
  for (int i = 0; i < kMost; ++i) values[i] = sinf(0.37f * (float)i);
  stowage_file* file = NULL;
  stowage_weight* weight = NULL;
  int64_t index = -1;
  statuses();
  write_model(path);
  FAILS(stowage_file_open(missing, &file), STOWAGE_IO, "missing.safetensors");
  WORKS(stowage_file_open(path, &file));
  read_model(file);
  WORKS(stowage_file_find_weight(file, "layer.weight", &index));
  WORKS(stowage_file_weight(file, index, STOWAGE_UNKNOWN, &weight));
  FAILS(stowage_file_weight(file, 0, 18, &weight), STOWAGE_INVALID_ARGUMENT, "compute");
  hold(file);
  hold_rows(file);
  stowage_file_free(file);
  use(weight);  // which keeps the mapping
  stowage_weight_free(weight);
  if (failures == 0) puts("every function answered");
  return failures == 0 ? 0 : 1;
}
