// SPDX-License-Identifier: Apache-2.0
// Prints the lines of fingerprints.h, by the kernels that this processor chooses; fails, and says
// so, if a product is beyond its bound.
#include "kernel/fingerprints.h"

#include <iostream>

int main() {
  const stowage::Kernels& kernels = stowage::kernels();
  for (const std::string& line : stowage::samples::fingerprints(kernels)) std::cout << line << '\n';
  const double worst = stowage::samples::worst_product(kernels);
  std::cerr << "products: at most " << worst << " of the bound\n";
  return worst <= 1 ? 0 : 1;
}
