#include "echelon/timeline/expert_loads.h"

#include <algorithm>
#include <numeric>

#include "echelon/text/check.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::timeline {
namespace {

int64_t sum_of(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

double ratio(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

}  // namespace

int64_t ExpertLoads::total() const {
  return sum_of(chosen);
}

double ExpertLoads::imbalance() const {
  if (chosen.empty()) return 0;
  return ratio(std::ranges::max(chosen) * std::ssize(chosen), total());
}

std::vector<ExpertLoads> expert_loads(
    const std::vector<std::string>& layers,
    const std::vector<int64_t>& counts) {
  ECHELON_CHECK(
      !layers.empty() && counts.size() % (2 * layers.size()) == 0,
      "{} counts of {} layers", counts.size(), layers.size());
  const size_t half = counts.size() / 2;
  const size_t experts = half / layers.size();
  std::vector<ExpertLoads> all;
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto part = [&](size_t begin) {
      const auto first =
          counts.begin() + static_cast<ptrdiff_t>(begin + i * experts);
      return std::vector<int64_t>(
          first, first + static_cast<ptrdiff_t>(experts));
    };
    all.push_back({layers[i], part(0), part(half)});
    if (sum_of(all.back().dropped) == 0) all.back().dropped.clear();
  }
  return all;
}

double imbalance_of(const std::vector<ExpertLoads>& layers) {
  double most = 0;
  for (const auto& layer : layers) most = std::max(most, layer.imbalance());
  return most;
}

double dropped_share(const std::vector<ExpertLoads>& layers) {
  int64_t chosen = 0;
  int64_t dropped = 0;
  for (const auto& layer : layers) {
    chosen += layer.total();
    dropped += sum_of(layer.dropped);
  }
  return ratio(dropped, chosen);
}

std::string most_dropped(const std::vector<ExpertLoads>& layers) {
  const ExpertLoads* where = nullptr;
  size_t expert = 0;
  for (const auto& layer : layers) {
    if (layer.dropped.empty()) continue;
    const auto most = std::ranges::max_element(layer.dropped);
    if (where != nullptr && *most <= where->dropped[expert]) continue;
    where = &layer;
    expert = static_cast<size_t>(most - layer.dropped.begin());
  }
  ECHELON_CHECK(where != nullptr, "no token was dropped");
  return format(
      "expert {} of {}, {} of its own", expert, where->layer,
      format_percent(ratio(where->dropped[expert], where->chosen[expert])));
}

}  // namespace echelon::timeline
