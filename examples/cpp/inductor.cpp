// SPDX-License-Identifier: Apache-2.0
// Runs a package of AOTInductor in which weights rest, without Python: docs/serving.md.
// Usage: inductor OPS PACKAGE INPUT OUTPUT. OPS is stowage_torch.so of the installed package; INPUT
// is a tensor that torch.save wrote, OUTPUT one for torch.load.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

int main(int count, char** arguments) {
  if (count != 5) {
    std::cerr << "usage: inductor OPS PACKAGE INPUT OUTPUT\n";
    return 2;
  }
  if (dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {  // registers the ops with torch
    std::cerr << dlerror() << '\n';
    return 1;
  }
  std::ifstream input(arguments[3], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(input), {}};
  torch::inductor::AOTIModelPackageLoader model(arguments[2]);
  const auto found = model.run({torch::jit::pickle_load(bytes).toTensor()});
  const auto made = torch::jit::pickle_save(found.at(0));
  std::ofstream(arguments[4], std::ios::binary)
      .write(made.data(), static_cast<std::streamsize>(made.size()));
}
