// SPDX-License-Identifier: Apache-2.0
// Opens a packed model and multiplies one of its layers, without torch and without ever holding the
// widened weight: multiply MODEL [WEIGHT]. MODEL is a .safetensors file, an index or a folder.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "stowage/file.h"
#include "stowage/quantize.h"

namespace {

// The weight that is asked for, or the largest matrix of the model.
std::string choose(const stowage::File& file, int argc, char** argv) {
  if (argc > 2) return argv[2];
  const stowage::WeightInfo* best = nullptr;
  for (const stowage::WeightInfo& info : file.weights()) {
    if (info.shape.rank() != 2) continue;
    if (best == nullptr || info.shape.elements() > best->shape.elements()) best = &info;
  }
  return best == nullptr ? "" : best->name;
}

int run(int argc, char** argv) {
  const stowage::File file = stowage::File::open(argv[1]);
  const std::string name = choose(file, argc, argv);
  const stowage::Weight weight = file.weight(name);

  // y = W x for x = (1, 1/2, 1/3, ...), in bytes that are the same on every machine.
  std::vector<float> x(static_cast<std::size_t>(weight.row_elements()));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 1.0f / static_cast<float>(i + 1);
  std::vector<float> y(static_cast<std::size_t>(weight.rows()));
  stowage::linear_fixed(x.data(), 1, weight, nullptr, y.data());

  double norm = 0;
  for (const float value : y) norm += static_cast<double>(value) * value;
  std::printf("%s: %s %s, %lld bytes at rest\n", name.c_str(),
              stowage::to_string(weight.storage()).c_str(),
              stowage::to_string(weight.shape()).c_str(), static_cast<long long>(weight.bytes()));
  std::printf("y[0] = %.6g, |y| = %.6g\n", static_cast<double>(y.at(0)), std::sqrt(norm));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: multiply MODEL [WEIGHT]\n");
    return 2;
  }
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "multiply: %s\n", error.what());
    return 1;
  }
}
