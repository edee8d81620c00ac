// SPDX-License-Identifier: Apache-2.0
// Experts by layer as a picture: one path for all cells of a tier and a shade, so that ten thousand
// of them are a small page.
#include <algorithm>
#include <cmath>

#include "base/formatted.h"
#include "page/pieces.h"

namespace stowage::page {
namespace {

// Of the picture, in its own units: as wide as that of memory.
constexpr double kMargin = 76, kWidth = 820, kUnder = 22, kOver = 6;
constexpr double kLowest = 4, kHighest = 18;  // of a row
constexpr int kShades = 6;
constexpr std::size_t kLabels = 24;  // rows that have their name beside them

// Of the largest that there is, in equal steps of the square root: few experts are used often.
int shade_of(double uses, double most) {
  const double part = most > 0 ? std::sqrt(std::min(1.0, uses / most)) : 0;
  return std::clamp(static_cast<int>(std::lround(part * kShades)), 1, kShades);
}

// What differs between names, for the margin: "3" of "model.layers.3.mlp.experts".
std::string label_of(std::string_view name) {
  std::string found;
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (!part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos)
      found = part;
    begin = end + 1;
  }
  return found.empty() ? std::string(name) : found;
}

struct Grid {
  std::size_t columns = 1;
  double high = kLowest;  // of a row
  double most = 0;        // uses
  double wide() const { return kWidth / static_cast<double>(columns); }
};

Grid grid_of(const std::vector<PlanExperts>& layers) {
  Grid grid;
  for (const PlanExperts& layer : layers) {
    grid.columns = std::max(grid.columns, layer.experts.size());
    for (const PlanExpert& expert : layer.experts) grid.most = std::max(grid.most, expert.uses);
  }
  grid.high = std::clamp(420 / static_cast<double>(layers.size()), kLowest, kHighest);
  return grid;
}

std::string cells(const Grid& grid, const std::vector<PlanExperts>& layers,
                  const std::vector<std::string>& tiers) {
  std::map<std::pair<std::size_t, int>, std::string> paths;
  for (std::size_t row = 0; row < layers.size(); ++row)
    for (std::size_t i = 0; i < layers[row].experts.size(); ++i) {
      const PlanExpert& expert = layers[row].experts[i];
      if (expert.tier.empty()) continue;
      const auto tier =
          static_cast<std::size_t>(std::ranges::find(tiers, expert.tier) - tiers.begin());
      paths[{tier, shade_of(expert.uses, grid.most)}] += formatted(
          "M{:.1f} {:.1f}h{:.1f}v{:.1f}h-{:.1f}z", kMargin + grid.wide() * static_cast<double>(i),
          grid.high * static_cast<double>(row), grid.wide() * .92, grid.high * .9,
          grid.wide() * .92);
    }
  std::string text;
  for (const auto& [key, path] : paths)
    text += formatted("<path d=\"{}\" fill=\"{}\" opacity=\"{:.2f}\"/>\n", path, colour(key.first),
                      static_cast<double>(key.second) / kShades);
  return text;
}

}  // namespace

std::string heat_map(const std::vector<PlanExperts>& layers) {
  const Grid grid = grid_of(layers);
  std::vector<std::string> tiers;
  for (const PlanExperts& layer : layers)
    for (const PlanExpert& expert : layer.experts)
      if (!expert.tier.empty() && std::ranges::find(tiers, expert.tier) == tiers.end())
        tiers.push_back(expert.tier);
  std::ranges::sort(tiers, std::greater{});  // "ram" has the first colour, as in other pictures
  const double high = kOver + grid.high * static_cast<double>(layers.size());
  std::string svg = formatted(
      "<svg viewBox=\"0 0 {:.0f} {:.0f}\" role=\"img\" aria-label=\"Experts by layer\">\n",
      kMargin + kWidth + 14, high + kUnder);
  const std::size_t stride = (layers.size() + kLabels - 1) / kLabels;
  for (std::size_t row = 0; row < layers.size(); row += stride)
    svg += formatted("<text x=\"{:.0f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", kMargin - 6,
                     kOver + grid.high * (static_cast<double>(row) + .5) + 4,
                     escaped(label_of(layers[row].name)));
  svg += cells(grid, layers, tiers);
  svg += formatted(
      "<text x=\"{:.0f}\" y=\"{:.1f}\">0</text><text x=\"{:.0f}\" y=\"{:.1f}\" "
      "text-anchor=\"end\">expert {}</text></svg>\n",
      kMargin, high + 16, kMargin + kWidth, high + 16, grid.columns - 1);
  return svg + legend(tiers) +
         formatted("<p>The darker, the more often a pass uses it; the darkest {:.3g} times.</p>\n",
                   grid.most);
}

}  // namespace stowage::page
