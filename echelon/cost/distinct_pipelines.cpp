#include "echelon/cost/distinct_pipelines.h"

#include <algorithm>

namespace echelon {
namespace {

// The group of nodes that each rank is in, without looking it up for each.
class GroupOfRank {
 public:
  explicit GroupOfRank(const Cluster& cluster) {
    int64_t end = 0;
    for (const auto& group : cluster.groups) {
      end += group.count * group.node.num_devices;
      ends_.push_back(end);
    }
  }
  int64_t of(int64_t rank) const {
    return std::upper_bound(ends_.begin(), ends_.end(), rank) - ends_.begin();
  }
  /// Ranks from this one on that are in the same group.
  int64_t left(int64_t rank) const {
    return ends_[static_cast<size_t>(of(rank))] - rank;
  }

 private:
  std::vector<int64_t> ends_;
};

enum class Visits { all, first_of_alike };

// Calls visit with each pipeline in order of its first rank, its groups filled in; or
// with the first of those that follow each other and are alike.
template <class Visit>
void for_each_pipeline(
    const Strategy& strategy, const Cluster& cluster, Visits visits,
    const Visit& visit) {
  const Layout& layout = strategy.layout;
  const int64_t ranks = layout.num_ranks();
  const int64_t stride = stride_along(strategy, Axis::pp);
  const int64_t replicate = stride_along(strategy, Axis::dp_replicate);
  const int64_t shard = stride_along(strategy, Axis::dp_shard);
  const GroupOfRank group(cluster);
  PipelinePlace place;
  place.groups.resize(static_cast<size_t>(layout.pp));
  for (int64_t begin = 0; begin < ranks; begin += stride * layout.pp) {
    const int64_t end = begin + stride;
    for (int64_t rank = begin; rank < end;) {
      place.first_rank = rank;
      place.data_index =
          rank / replicate % layout.dp_replicate * layout.dp_shard +
          rank / shard % layout.dp_shard;
      int64_t alike = end - rank;
      if (!strategy.rank_microbatch.empty()) {
        alike = std::min(
            {alike, replicate - rank % replicate, shard - rank % shard});
      }
      for (int64_t at = 0; at < layout.pp; ++at) {
        const int64_t member = rank + at * stride;
        place.groups[static_cast<size_t>(at)] = group.of(member);
        alike = std::min(alike, group.left(member));
      }
      visit(place);
      rank += visits == Visits::all ? 1 : alike;
    }
  }
}

}  // namespace

int64_t stride_along(const Strategy& strategy, Axis axis) {
  int64_t stride = 1;
  for (auto inner = strategy.order.rbegin(); *inner != axis; ++inner) {
    stride *= strategy.layout.degree(*inner);
  }
  return stride;
}

std::vector<PipelinePlace> distinct_pipelines(
    const Strategy& strategy, const Cluster& cluster) {
  if (!cluster.mixed() && strategy.rank_microbatch.empty()) {
    return {{.groups = std::vector<int64_t>(
                 static_cast<size_t>(strategy.layout.pp), 0)}};
  }
  std::vector<PipelinePlace> distinct;
  for_each_pipeline(strategy, cluster, Visits::first_of_alike, [&](const PipelinePlace& place) {
    const int64_t size = microbatch_of(strategy, place.data_index);
    const bool known = std::any_of(
        distinct.begin(), distinct.end(), [&](const PipelinePlace& one) {
          return one.groups == place.groups &&
                 microbatch_of(strategy, one.data_index) == size;
        });
    if (!known) distinct.push_back(place);
  });
  return distinct;
}

std::vector<PipelinePlace> all_pipelines(
    const Strategy& strategy, const Cluster& cluster) {
  std::vector<PipelinePlace> all;
  for_each_pipeline(
      strategy, cluster, Visits::all,
      [&](const PipelinePlace& place) { all.push_back(place); });
  return all;
}

int64_t microbatch_of(const Strategy& strategy, int64_t data_index) {
  return strategy.rank_microbatch.empty()
             ? strategy.microbatch_size
             : strategy.rank_microbatch[static_cast<size_t>(data_index)];
}

Strategy with_microbatch(const Strategy& strategy, int64_t samples) {
  if (strategy.rank_microbatch.empty()) return strategy;
  Strategy own = strategy;
  own.microbatch_size = samples;
  own.rank_microbatch.clear();
  own.global_batch = strategy.num_microbatches() * own.data_ranks() * samples;
  return own;
}

}  // namespace echelon
