// SPDX-License-Identifier: Apache-2.0
#include "plan/costs.h"

#include <algorithm>

#include "base/file.h"
#include "plan/units.h"

namespace stowage::planning {
namespace {

// A card of the middle on PCIe 3, where nothing was measured.
constexpr AcceleratorRates kAssumed{.copy = 12e9, .read = 400e9, .multiply = 30e12};
constexpr double kHop = 20e-6;  // seconds: a launch and a wait on either side
constexpr double kWide = 2;     // bytes of a value of x and y

double operations(const PlanUnit& unit, std::int64_t rows) {
  const double met = std::max(1.0, static_cast<double>(rows) * unit.share);
  return 2.0 * static_cast<double>(unit.shape.elements()) * met;
}

// Few rows wait for the weight's bytes, many for the products.
double slower(double bytes, double read, double products, double multiply) {
  const double of_bytes = read > 0 ? bytes / read : 0;
  return multiply > 0 ? std::max(of_bytes, products / multiply) : of_bytes;
}

double per_byte_of_disk(const Links& links) { return links.disk > 0 ? 1 / links.disk : 0; }

}  // namespace

AcceleratorRates rates_of(const Links& links, const std::string& accelerator) {
  const auto at = links.accelerators.find(accelerator);
  return at == links.accelerators.end() ? kAssumed : at->second;
}

double seconds_on_cpu(const PlanUnit& unit, std::int64_t rows, const Links& links) {
  const auto at = links.linear.find(std::string(family_of(unit)));
  const auto bytes = static_cast<double>(unit.rest);
  if (at == links.linear.end() || unit.shape.rank() < 2)
    return unit.uses * slower(bytes, links.memcpy, 0, 0);
  return unit.uses * slower(bytes, at->second.read, operations(unit, rows), at->second.multiply);
}

double seconds_on(const PlanUnit& unit, std::int64_t rows, const AcceleratorRates& rates) {
  const double products = unit.shape.rank() < 2 ? 0 : operations(unit, rows);
  return unit.uses * slower(static_cast<double>(unit.rest), rates.read, products, rates.multiply);
}

std::uint64_t bytes_of_rows(const PlanUnit& unit, std::int64_t rows) {
  const auto all = static_cast<std::uint64_t>(std::max<std::int64_t>(1, unit.shape.rows()));
  const std::uint64_t taken = std::min(static_cast<std::uint64_t>(rows), all);
  return std::min(unit.bytes, taken * std::max(kPage, unit.rest / all));
}

double seconds_of_rows(const PlanUnit& unit, std::int64_t rows, const Links& links) {
  return unit.uses * static_cast<double>(bytes_of_rows(unit, rows)) * per_byte_of_disk(links);
}

double seconds_of_detour(const PlanUnit& unit, std::int64_t rows, const AcceleratorRates& rates) {
  const auto values = static_cast<double>(unit.shape.rows() + unit.shape.row_elements());
  return unit.uses * (kHop + values * static_cast<double>(rows) * unit.share * kWide / rates.copy);
}

std::uint64_t tile_on_cpu(const PlanUnit& unit) {
  if (!is_widened(unit) || unit.rows) return 0;
  return std::min(kTile, static_cast<std::uint64_t>(unit.shape.elements()) * sizeof(float));
}

std::uint64_t tile_on_accelerator(const PlanUnit& unit) {
  if (!is_widened(unit) || unit.rows) return 0;
  return static_cast<std::uint64_t>(static_cast<double>(unit.shape.elements()) * kWide);
}

}  // namespace stowage::planning
