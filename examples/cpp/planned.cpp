// SPDX-License-Identifier: Apache-2.0
// Multiplies every matrix of a packed model within a budget of memory, as a plan says: what saves
// most stays, the rest is prefetched: planned MODEL BYTES.
#include <cmath>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "stowage/engine.h"
#include "stowage/plan.h"
#include "stowage/quantize.h"

namespace {

// What stays in RAM has room of its own, the ring is for the rest. All else (small tensors, and
// embeddings, of which rows are read) is used from the file's mapping.
stowage::EngineOptions options_of(const stowage::Plan& plan, const stowage::File& file) {
  stowage::EngineOptions options;
  if (plan.ring.contains("ram")) options.ram = plan.ring.at("ram");
  std::set<std::string> known;
  for (const stowage::PlanUnit& unit : plan.units) {
    if (unit.stays || unit.rows) continue;
    known.insert(unit.name);
    if (unit.tier == "ram") options.ram += unit.bytes;
  }
  for (const stowage::WeightInfo& weight : file.weights()) {
    if (known.insert(weight.name).second) options.mapped_only.push_back(weight.name);
    known.insert(weight.parts.begin(), weight.parts.end());
  }
  for (const stowage::TensorInfo& tensor : file.tensors())
    if (known.insert(tensor.name).second) options.mapped_only.push_back(tensor.name);
  return options;
}

// |W x| for x = (1, 1/2, 1/3, ...), the weight in memory for as long as it is used.
double product(stowage::Engine& engine, stowage::WeightId id) {
  const stowage::Lease lease = engine.acquire(id);
  const stowage::Weight weight = lease.weight();
  std::vector<float> x(static_cast<std::size_t>(weight.row_elements()));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 1.0f / static_cast<float>(i + 1);
  std::vector<float> y(static_cast<std::size_t>(weight.rows()));
  stowage::linear(x.data(), 1, stowage::Dtype::f32, weight, nullptr, y.data());
  double sum = 0;
  for (const float value : y) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

void run(char** argv) {
  const stowage::File file = stowage::File::open(argv[1]);
  const stowage::Links links = stowage::links_of_this_machine(file.paths().front());
  const stowage::Plan plan = stowage::make_plan(file, {.ram = std::stoull(argv[2])}, links);
  stowage::Engine engine(file, options_of(plan, file));
  std::vector<stowage::WeightId> kept, order;
  for (const stowage::PlanUnit& unit : plan.units) {
    if (unit.stays || unit.rows || unit.shape.rank() != 2) continue;
    order.push_back(*engine.find(unit.name));
    if (unit.tier == "ram") kept.push_back(order.back());
  }
  engine.keep(kept);
  engine.expect(order);
  for (const stowage::WeightId id : order)
    std::printf("%s: |W x| = %.6g\n", engine.name(id).c_str(), product(engine, id));
  std::printf("%zu of %zu stay; predicted %.3g s, %llu bytes held at most\n", kept.size(),
              order.size(), plan.seconds, static_cast<unsigned long long>(engine.report().peak));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fputs("usage: planned MODEL BYTES\n", stderr), 2;
  try {
    run(argv);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "planned: %s\n", error.what());
    return 1;
  }
}
