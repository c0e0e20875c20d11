// A data-parallel rank is as slow as the slowest of the ranks that compute its
// samples together. The proportional model overrates a change where much of a
// rank's time does not depend on its samples. The next decision then measures
// the rest, so the division comes closer with each.
#include "echelon/train/batch_division.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "echelon/layout/partition.h"
#include "echelon/text/check.h"

namespace echelon {
namespace {

int64_t sum_of_samples(const std::vector<int64_t>& samples) {
  return std::accumulate(samples.begin(), samples.end(), int64_t{0});
}

}  // namespace

double mean_without_largest(const std::vector<double>& seconds) {
  const double sum = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  const auto count = static_cast<double>(seconds.size());
  if (seconds.size() < 3) return sum / count;
  return (sum - std::ranges::max(seconds)) / (count - 1);
}

BatchDivision::BatchDivision(
    const Mesh& mesh, std::vector<int64_t> samples, int64_t unit, int64_t every)
    : samples_(std::move(samples)), unit_(unit), every_(every) {
  ECHELON_CHECK(
      static_cast<int64_t>(samples_.size()) == mesh.layout().data_ranks(),
      "a share of the batch for each data-parallel rank");
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    data_index_.push_back(mesh.data_index(rank));
  }
  work_.resize(samples_.size());
}

std::optional<timeline::Rebalance>
BatchDivision::after_step(int64_t step, const std::vector<double>& work) {
  if (unusual_ > 0) {
    --unusual_;
    return std::nullopt;
  }
  std::vector<double> slowest(samples_.size(), 0);
  for (size_t rank = 0; rank < work.size(); ++rank) {
    double& seconds = slowest.at(static_cast<size_t>(data_index_.at(rank)));
    seconds = std::max(seconds, work[rank]);
  }
  for (size_t i = 0; i < slowest.size(); ++i) work_[i].push_back(slowest[i]);
  if (static_cast<int64_t>(work_[0].size()) < every_) return std::nullopt;

  timeline::Rebalance change{.step = step, .before = samples_};
  for (auto& steps : work_) {
    change.seconds.push_back(mean_without_largest(std::exchange(steps, {})));
  }
  std::vector<double> speeds;
  for (size_t i = 0; i < samples_.size(); ++i) {
    // Nobody works for no time.
    if (!(change.seconds[i] > 0)) return std::nullopt;
    speeds.push_back(static_cast<double>(samples_[i]) / change.seconds[i]);
  }
  change.after = share_out(sum_of_samples(samples_) / unit_, speeds);
  for (int64_t& samples : change.after) samples *= unit_;
  if (change.slowest_after() > (1 - kLeastGain) * change.slowest_before()) {
    return std::nullopt;
  }
  samples_ = change.after;
  unusual_ = kUnusualSteps;
  return change;
}

void BatchDivision::measure_anew() {
  unusual_ = kUnusualSteps;
  for (auto& steps : work_) steps.clear();
}

bool BatchDivision::resume(const std::vector<int64_t>& samples) {
  const bool fits = samples.size() == samples_.size() &&
                    sum_of_samples(samples) == sum_of_samples(samples_) &&
                    std::ranges::all_of(samples, [this](int64_t one) {
                      return one > 0 && one % unit_ == 0;
                    });
  if (fits) samples_ = samples;
  return fits;
}

}  // namespace echelon
