#include "echelon/cost/expert_load.h"

#include <algorithm>
#include <numeric>

namespace echelon::cost {
namespace {

// Of one layer; 1 where nothing chose it, or ranks have no equal shares of it.
double of_busiest(const std::vector<double>& experts, size_t ranks) {
  const double all = std::accumulate(experts.begin(), experts.end(), 0.0);
  if (all <= 0 || experts.size() % ranks != 0) return 1;
  const auto each = static_cast<ptrdiff_t>(experts.size() / ranks);
  double most = 0;
  for (auto at = experts.begin(); at != experts.end(); at += each) {
    most = std::max(most, std::accumulate(at, at + each, 0.0));
  }
  return most * static_cast<double>(ranks) / all;
}

}  // namespace

double ExpertLoad::of_busiest_rank(int64_t ep) const {
  if (ep <= 1) return 1;
  // One rank cannot have more than all tokens.
  if (layers.empty()) return std::min(busiest, static_cast<double>(ep));
  double sum = 0;
  for (const auto& experts : layers) {
    sum += of_busiest(experts, static_cast<size_t>(ep));
  }
  return sum / static_cast<double>(layers.size());
}

ExpertLoad measured_load(const std::vector<timeline::StepMetrics>& steps) {
  std::vector<const std::vector<timeline::ExpertLoads>*> measured;
  for (const auto& step : steps) {
    if (!step.expert_loads.empty()) measured.push_back(&step.expert_loads);
  }
  ExpertLoad load;
  for (size_t i = measured.size() / 2; i < measured.size(); ++i) {
    load.layers.resize(std::max(load.layers.size(), measured[i]->size()));
    for (size_t layer = 0; layer < measured[i]->size(); ++layer) {
      const auto& chosen = (*measured[i])[layer].chosen;
      auto& sum = load.layers[layer];
      sum.resize(std::max(sum.size(), chosen.size()));
      for (size_t expert = 0; expert < chosen.size(); ++expert) {
        sum[expert] += static_cast<double>(chosen[expert]);
      }
    }
  }
  return load;
}

}  // namespace echelon::cost
