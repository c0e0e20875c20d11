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

std::vector<int64_t> data_indices(const Mesh& mesh) {
  std::vector<int64_t> indices;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    indices.push_back(mesh.data_index(rank));
  }
  return indices;
}

}  // namespace

BatchDivision::BatchDivision(
    const Mesh& mesh, std::vector<int64_t> samples, int64_t unit, int64_t every)
    : samples_(std::move(samples)),
      unit_(unit),
      every_(every),
      times_(data_indices(mesh), samples_.size()) {
  ECHELON_CHECK(
      static_cast<int64_t>(samples_.size()) == mesh.layout().data_ranks(),
      "a share of the batch for each data-parallel rank");
}

std::optional<timeline::Rebalance>
BatchDivision::after_step(int64_t step, const std::vector<double>& work) {
  const auto times = times_.after_step(work, every_);
  if (!times) return std::nullopt;
  timeline::Rebalance change{
      .step = step, .before = samples_, .seconds = *times};
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
  measure_anew();
  return change;
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
