// SPDX-License-Identifier: Apache-2.0
// Kernels of CUDA devices for the ops (_ops/device_kernels.py): what they get are addresses of the
// device, which tensors of torch lend them, and torch's stream; they wait for nothing unless told.
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <sstream>

#include "stowage/cuda.h"
#include "torch/arguments.h"

namespace stowage::door {
namespace {
using nlohmann::json;
using Numbers = std::vector<std::int64_t>;

struct Devices {
  const pid_t process = ::getpid();
  std::mutex mutex;  // which a forked child may find locked
  std::map<std::int64_t, std::unique_ptr<CudaOps>> started;
};
Devices& devices() {
  static auto* const all = new Devices;  // never ended: a driver does not like to be
  if (all->process != ::getpid())
    throw Error(Code::unsupported,
                "cuda: devices must be used by the process that started them, got a forked child");
  return *all;
}
CudaOps& ops_of(std::int64_t index) {
  Devices& all = devices();
  const std::lock_guard lock(all.mutex);
  const auto found = all.started.find(index);
  if (found == all.started.end())
    throw Error(Code::invalid_argument,
                "cuda: device " + std::to_string(index) + " must be started, got none");
  return *found->second;
}

CudaOptions options_of(const std::string& text) {
  try {
    const json given = json::parse(text);
    return {.driver = given.value("driver", ""),
            .compilers = given.value("compilers", std::vector<std::string>()),
            .folder = given.value("folder", "")};
  } catch (const json::exception& error) {
    throw Error(Code::invalid_argument,
                std::string("cuda: options must be JSON of driver, compilers and folder, got ") +
                    error.what());
  }
}

// Tells what the device is.
Tensor device_start(std::int64_t index, const std::string& options) {
  auto made = std::make_unique<CudaOps>(static_cast<int>(index), options_of(options));
  const json said = {{"architecture", made->architecture()},
                     {"processors", made->processors()},
                     {"compiler", made->compiler()}};
  Devices& all = devices();
  const std::lock_guard lock(all.mutex);
  all.started.insert_or_assign(index, std::move(made));
  return text_bytes(said.dump());
}

void* at(std::int64_t address) { return reinterpret_cast<void*>(address); }
std::vector<void*> at(const Numbers& addresses) {
  std::vector<void*> made;
  for (const std::int64_t address : addresses) made.push_back(at(address));
  return made;
}
Weight weight_at(const Numbers& parts, std::int64_t key, const Numbers& shape) {
  const auto made = at(parts);
  const std::vector<const void*> read(made.begin(), made.end());
  return {storage_from_key(key), Shape(shape), read};
}

Dtype value_dtype(const std::string& name) {
  const Dtype dtype = dtype_from_disk_name(name);
  if (!is_value_dtype(dtype))
    throw Error(Code::invalid_argument, "cuda: values must be F64, F32, BF16 or F16, got " + name);
  return dtype;
}

std::int64_t device_working(std::int64_t key, const Numbers& shape) {
  return static_cast<std::int64_t>(CudaOps::working_bytes(storage_from_key(key), Shape(shape)));
}

void device_quantize(std::int64_t index, std::int64_t stream, std::int64_t x,
                     const std::string& dtype, std::int64_t key, const Numbers& shape,
                     const Numbers& parts, std::int64_t working) {
  ops_of(index).quantize(at(stream), at(x), value_dtype(dtype), Shape(shape), storage_from_key(key),
                         at(parts), at(working));
}

void device_dequantize(std::int64_t index, std::int64_t stream, const Numbers& parts,
                       std::int64_t key, const Numbers& shape, std::int64_t out,
                       const std::string& dtype) {
  ops_of(index).dequantize(at(stream), weight_at(parts, key, shape), at(out), value_dtype(dtype));
}

void device_embedding(std::int64_t index, std::int64_t stream, const Numbers& parts,
                      std::int64_t key, const Numbers& shape, std::int64_t ids, bool are_long,
                      std::int64_t count, std::int64_t out, const std::string& dtype,
                      std::int64_t word) {
  ops_of(index).embedding(at(stream), weight_at(parts, key, shape), at(ids), are_long, count,
                          at(out), value_dtype(dtype), static_cast<std::uint32_t*>(at(word)));
}

void device_linear(std::int64_t index, std::int64_t stream, const Numbers& parts, std::int64_t key,
                   const Numbers& shape, std::int64_t x, std::int64_t rows, std::int64_t bias,
                   std::int64_t y, const std::string& dtype) {
  ops_of(index).linear(at(stream), at(x), rows, value_dtype(dtype), weight_at(parts, key, shape),
                       at(bias), at(y));
}

std::int64_t device_most_rows(std::int64_t index, std::int64_t key, const Numbers& shape,
                              const std::string& dtype) {
  return ops_of(index).most_rows(storage_from_key(key), Shape(shape), value_dtype(dtype));
}

void device_grouped_linear(std::int64_t index, std::int64_t stream, const Numbers& parts,
                           std::int64_t key, const Numbers& shape, std::int64_t x,
                           std::int64_t rows, std::int64_t ends, std::int64_t bias, std::int64_t y,
                           const std::string& dtype) {
  ops_of(index).grouped_linear(at(stream), at(x), rows, value_dtype(dtype),
                               weight_at(parts, key, shape),
                               static_cast<const std::int32_t*>(at(ends)), at(bias), at(y));
}

void device_amax(std::int64_t index, std::int64_t stream, const Numbers& addresses,
                 const std::string& dtypes, const Numbers& counts, std::int64_t most) {
  CudaOps& ops = ops_of(index);
  std::istringstream names(dtypes);  // with a space between
  std::vector<Values> arrays;
  std::string name;
  while (names >> name && arrays.size() < std::min(addresses.size(), counts.size()))
    arrays.push_back({at(addresses[arrays.size()]), value_dtype(name), counts[arrays.size()]});
  if (arrays.size() != addresses.size() || addresses.size() != counts.size())
    throw Error(Code::invalid_argument,
                "cuda: arrays must have a dtype and a count each, got " + dtypes);
  ops.amax(at(stream), arrays, static_cast<float*>(at(most)));
}

bool device_refused(std::int64_t index, std::int64_t stream, std::int64_t word) {
  return ops_of(index).refused(at(stream), at(word));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(stowage, CompositeExplicitAutograd, m) {
  m.impl("device_start", TORCH_BOX(&Door<&device_start>::call));
  m.impl("device_working", TORCH_BOX(&Door<&device_working>::call));
  m.impl("device_quantize", TORCH_BOX(&Door<&device_quantize>::call));
  m.impl("device_dequantize", TORCH_BOX(&Door<&device_dequantize>::call));
  m.impl("device_embedding", TORCH_BOX(&Door<&device_embedding>::call));
  m.impl("device_linear", TORCH_BOX(&Door<&device_linear>::call));
  m.impl("device_most_rows", TORCH_BOX(&Door<&device_most_rows>::call));
  m.impl("device_grouped_linear", TORCH_BOX(&Door<&device_grouped_linear>::call));
  m.impl("device_amax", TORCH_BOX(&Door<&device_amax>::call));
  m.impl("device_refused", TORCH_BOX(&Door<&device_refused>::call));
}
}  // namespace stowage::door
