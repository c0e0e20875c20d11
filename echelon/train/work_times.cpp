#include "echelon/train/work_times.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace echelon {
namespace {

double mean_without_largest(const std::vector<double>& seconds) {
  const double sum = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  const auto count = static_cast<double>(seconds.size());
  if (seconds.size() < 3) return sum / count;
  return (sum - std::ranges::max(seconds)) / (count - 1);
}

}  // namespace

WorkTimes::WorkTimes(std::vector<int64_t> places, size_t num_places)
    : places_(std::move(places)), seconds_(num_places) {}

std::optional<std::vector<double>>
WorkTimes::after_step(const std::vector<double>& seconds, int64_t steps) {
  if (unusual_ > 0) {
    --unusual_;
    return std::nullopt;
  }
  std::vector<double> slowest(seconds_.size(), 0);
  for (size_t rank = 0; rank < seconds.size(); ++rank) {
    double& most = slowest.at(static_cast<size_t>(places_.at(rank)));
    most = std::max(most, seconds[rank]);
  }
  for (size_t i = 0; i < slowest.size(); ++i) seconds_[i].push_back(slowest[i]);
  if (static_cast<int64_t>(seconds_[0].size()) < steps) return std::nullopt;
  std::vector<double> times;
  for (auto& measured : seconds_) {
    times.push_back(mean_without_largest(std::exchange(measured, {})));
  }
  return times;
}

void WorkTimes::measure_anew() {
  unusual_ = kUnusualSteps;
  for (auto& steps : seconds_) steps.clear();
}

}  // namespace echelon
