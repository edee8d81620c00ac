// SPDX-License-Identifier: Apache-2.0
// write_model FILE: one nf4 weight of 64 x 128 for the example to multiply.
#include <cmath>
#include <vector>

#include "stowage/quantize.h"
#include "stowage/writer.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const stowage::Shape shape{64, 128};
  std::vector<float> values(static_cast<std::size_t>(shape.elements()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = std::sin(static_cast<float>(i) * 0.37f);
  const stowage::Storage storage = stowage::parse_storage("nf4");
  const stowage::Weight weight =
      stowage::quantize(values.data(), stowage::Dtype::f32, shape, storage);
  stowage::Writer writer(argv[1], stowage::disk_layout("layer.weight", storage, shape));
  writer.write_weight("layer.weight", weight);
  writer.finish();
}
