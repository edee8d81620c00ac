// SPDX-License-Identifier: Apache-2.0
// The C interface of Stowage, C11, for every language that calls C; docs/c-api.md has its rules.
// Handles are opaque, and each has one *_free(), which takes null. What can fail gives a status and
// writes results only on STOWAGE_OK; stowage_last_error() then says what was wrong. Texts are
// UTF-8, end with 0, and live as long as the handle that they came from.
#pragma once
#include <stddef.h>
#include <stdint.h>

// A library has all that this header has where its stowage_abi_version() is no less than this.
#define STOWAGE_ABI_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef int32_t stowage_status;
// clang-format off
enum {
  STOWAGE_OK = 0, STOWAGE_INVALID_ARGUMENT = 1, STOWAGE_BAD_FILE = 2, STOWAGE_IO = 3,
  STOWAGE_UNSUPPORTED = 4, STOWAGE_OUT_OF_MEMORY = 5, STOWAGE_CUDA = 6, STOWAGE_OUT_OF_RANGE = 7,
  STOWAGE_DEFECT = 255  // of the library: an error that it has no code for
};
// What the last call that failed on this thread said, at most 4 KiB; "" if none did.
const char* stowage_last_error(void);
const char* stowage_status_name(stowage_status status);  // "bad_file"; else "unknown"
const char* stowage_version(void);                       // "0.1.0"
int32_t stowage_abi_version(void);
// Those in use: "avx2". Fails where STOWAGE_FORCE_ISA asks for what this CPU lacks.
stowage_status stowage_instruction_set(const char** name);

typedef int32_t stowage_dtype;
enum {
  STOWAGE_UNKNOWN = -1,  // of an argument: what the file says
  STOWAGE_BOOL = 0, STOWAGE_U8 = 1, STOWAGE_I8 = 2, STOWAGE_U16 = 3, STOWAGE_I16 = 4,
  STOWAGE_U32 = 5, STOWAGE_I32 = 6, STOWAGE_U64 = 7, STOWAGE_I64 = 8,
  STOWAGE_F8_E4M3 = 9, STOWAGE_F8_E5M2 = 10, STOWAGE_F8_E8M0 = 11, STOWAGE_F4 = 12,
  STOWAGE_F16 = 13, STOWAGE_BF16 = 14, STOWAGE_F32 = 15, STOWAGE_F64 = 16, STOWAGE_C64 = 17
};
// How an engine reads.
enum {STOWAGE_READS_AUTOMATIC, STOWAGE_READS_MAPPED, STOWAGE_READS_BUFFERED, STOWAGE_READS_DIRECT};
// clang-format on

typedef struct stowage_file stowage_file;      // an opened model
typedef struct stowage_weight stowage_weight;  // a resting weight in memory
typedef struct stowage_engine stowage_engine;  // weights of a file within a budget of bytes
typedef struct stowage_lease stowage_lease;    // the right to one of them in memory
typedef struct stowage_writer stowage_writer;  // a file that is being written

// The caller sets `size` of a struct to its sizeof and all else to 0: later versions append fields.
typedef struct stowage_weight_info {
  size_t size;
  const char* name;       // "" for one that is of no file
  const char* storage;    // "nf4:block64"
  stowage_dtype compute;  // what the file says that it computes in, or STOWAGE_UNKNOWN
  int32_t rank;           // at most 8
  int64_t shape[8];
  uint64_t bytes;  // at rest, all parts
} stowage_weight_info;
typedef struct stowage_tensor_info {
  size_t size;
  const char* name;
  const char* dtype_name;  // as files spell it: "BF16"
  stowage_dtype dtype;     // STOWAGE_UNKNOWN for a name that this version does not know
  int32_t rank;
  int64_t shape[8];
  uint64_t bytes;
  const void* data;  // mapped, or in memory; lives as long as the handle
} stowage_tensor_info;

// ---- files: a .safetensors or .gguf file, a shard index or a folder, in any dialect that is read
stowage_status stowage_file_open(const char* path, stowage_file** file);
void stowage_file_free(stowage_file* file);  // its weights and engines keep the mapping
stowage_status stowage_file_dialect(const stowage_file* file, const char** dialect);
// Null where the first shard has no such key.
stowage_status stowage_file_metadata(const stowage_file* file, const char* key, const char** value);
// Weights and tensors are sorted by name. What is not found has index -1, which is no failure.
stowage_status stowage_file_weight_count(const stowage_file* file, int64_t* count);
stowage_status stowage_file_find_weight(const stowage_file* file, const char* name, int64_t* index);
stowage_status stowage_file_describe_weight(const stowage_file* file, int64_t index,
                                            stowage_weight_info* info);
stowage_status stowage_file_tensor_count(const stowage_file* file, int64_t* count);
stowage_status stowage_file_find_tensor(const stowage_file* file, const char* name, int64_t* index);
stowage_status stowage_file_describe_tensor(const stowage_file* file, int64_t index,
                                            stowage_tensor_info* info);
// The weight, mapped. `compute` is what scales are rounded to where their owner's decoder does so.
stowage_status stowage_file_weight(const stowage_file* file, int64_t index, stowage_dtype compute,
                                   stowage_weight** weight);
// Fails where a shard was cut short or rewritten since it was opened: who reads `data` asks after.
stowage_status stowage_file_check(const stowage_file* file);
// Compares every checksum that the file has; `compared` is how many tensors had one.
stowage_status stowage_file_verify(const stowage_file* file, int64_t* compared);

// ---- weights: values are row-major, in f64, f32, bf16 or f16; products have no f64
stowage_status stowage_quantize(const void* values, stowage_dtype dtype, const int64_t* shape,
                                int32_t rank, const char* storage, stowage_weight** weight);
// Of the caller's memory, which must outlive it, in the order of stowage_weight_describe_part().
stowage_status stowage_weight_of_parts(const char* storage, const int64_t* shape, int32_t rank,
                                       const void* const* parts, int32_t count,
                                       stowage_weight** weight);
void stowage_weight_free(stowage_weight* weight);
stowage_status stowage_weight_describe(const stowage_weight* weight, stowage_weight_info* info);
stowage_status stowage_weight_part_count(const stowage_weight* weight, int32_t* count);
stowage_status stowage_weight_describe_part(const stowage_weight* weight, int32_t part,
                                            stowage_tensor_info* info);
// out[end - begin, ...] = the rows [begin, end) of dim 0.
stowage_status stowage_dequantize(const stowage_weight* weight, int64_t begin, int64_t end,
                                  void* out, stowage_dtype dtype);
// out[n, ...] = the rows that `ids` name.
stowage_status stowage_embedding(const stowage_weight* weight, const int64_t* ids, int64_t n,
                                 void* out, stowage_dtype dtype);
// y[m, N] = x[m, K] W^T + bias, for W [N, K]; x, bias and y in `dtype`; bias may be null.
stowage_status stowage_linear(const stowage_weight* weight, const void* x, int64_t m,
                              stowage_dtype dtype, const void* bias, void* y);
// The same in fp32, slower, with the same bytes on every instruction set and number of threads.
stowage_status stowage_linear_fixed(const stowage_weight* weight, const float* x, int64_t m,
                                    const float* bias, float* y);

// ---- engines
typedef struct stowage_engine_options {
  size_t size;
  uint64_t ram;     // the most bytes held at a time
  double timeout;   // seconds that an acquire waits; 0: as long as it takes
  int32_t reads;    // STOWAGE_READS_*
  int32_t workers;  // threads that prefetch; 0: 8; -1: none
  int32_t lock;     // 1: keep the memory from being swapped
  int32_t mapped_only_count;
  const char* const* mapped_only;  // names that never come into memory: leases give the mapping
  const char* const* by_rows;      // names of stacks whose matrices come one by one (experts)
  int32_t by_rows_count;
} stowage_engine_options;
typedef struct stowage_engine_report {
  size_t size;
  uint64_t acquired, hits, misses, late, borrowed, ahead, evicted, bytes_read, bytes_formed;
  uint64_t held, peak;    // bytes in memory now, and at most
  double stall, forming;  // seconds of waiting; of putting parts in order, all threads together
  int32_t reads;          // what automatic came to
  uint64_t unused;        // of `ahead`: what went again before it was used
} stowage_engine_report;
typedef struct stowage_uses {
  size_t size;
  uint32_t hits, misses, late, borrowed, ahead, unused;
  double stall;
} stowage_uses;
stowage_status stowage_engine_new(const stowage_file* file, const stowage_engine_options* options,
                                  stowage_engine** engine);
void stowage_engine_free(stowage_engine* engine);  // its leases stay good
// Ids are 0 <= id < count: weights and plain tensors, then matrices that come one by one. -1: none.
stowage_status stowage_engine_count(const stowage_engine* engine, int32_t* count);
stowage_status stowage_engine_find(const stowage_engine* engine, const char* name, int32_t* id);
stowage_status stowage_engine_name(const stowage_engine* engine, int32_t id, const char** name);
stowage_status stowage_engine_bytes(const stowage_engine* engine, int32_t id, uint64_t* bytes);
// Those matrices; of other weights none, count 0.
stowage_status stowage_engine_slices(const stowage_engine* engine, int32_t id, int32_t* first,
                                     int32_t* count);
// These stay from their first use on; said before the first acquire.
stowage_status stowage_engine_keep(stowage_engine* engine, const int32_t* ids, int64_t count);
// The order of use to expect where none has been learnt.
stowage_status stowage_engine_expect(stowage_engine* engine, const int32_t* ids, int64_t count);
// These are used next: they are read together, as far as there is room.
stowage_status stowage_engine_want(stowage_engine* engine, const int32_t* ids, int64_t count);
stowage_status stowage_engine_acquire(stowage_engine* engine, int32_t id, stowage_lease** lease);
stowage_status stowage_engine_cancel(stowage_engine* engine);  // acquires fail now
stowage_status stowage_engine_describe(const stowage_engine* engine, stowage_engine_report* report);
stowage_status stowage_engine_uses(const stowage_engine* engine, int32_t id, stowage_uses* uses);
void stowage_lease_free(stowage_lease* lease);  // on the thread that acquired it
// The lease's own, not to be freed; fails for a plain tensor.
stowage_status stowage_lease_weight(stowage_lease* lease, const stowage_weight** weight);
// Where the byte lies that the file's mapping has at `mapped`.
stowage_status stowage_lease_at(const stowage_lease* lease, const void* mapped, const void** at);

// ---- writing: declare all, write each, finish; a file is there whole or not at all
typedef struct stowage_writer_options {
  size_t size;
  uint64_t shard_bytes;  // 0: one file; else an index and shards
  int32_t no_checksums;  // 1: none in the manifest
} stowage_writer_options;
// `path` ends in .safetensors; options may be null.
stowage_status stowage_writer_new(const char* path, const stowage_writer_options* options,
                                  stowage_writer** writer);
void stowage_writer_free(stowage_writer* writer);  // unfinished: leaves nothing
stowage_status stowage_writer_set_metadata(stowage_writer* writer, const char* key,
                                           const char* value);
stowage_status stowage_writer_declare_weight(stowage_writer* writer, const char* name,
                                             const char* storage, const int64_t* shape,
                                             int32_t rank, stowage_dtype compute);
stowage_status stowage_writer_declare_tensor(stowage_writer* writer, const char* name,
                                             stowage_dtype dtype, const int64_t* shape,
                                             int32_t rank);
stowage_status stowage_writer_write_weight(stowage_writer* writer, const char* name,
                                           const stowage_weight* weight);
stowage_status stowage_writer_write_tensor(stowage_writer* writer, const char* name,
                                           const void* data, uint64_t bytes);
stowage_status stowage_writer_finish(stowage_writer* writer);

#pragma GCC visibility pop
#ifdef __cplusplus
}  // extern "C"
#endif
