#include "echelon/cost/distinct_pipelines.h"

#include <algorithm>
#include <numeric>

namespace echelon::cost {
namespace {

// Where ranks are, without looking it up for each.
class Places {
 public:
  explicit Places(const cluster::Cluster& cluster) {
    int64_t begin = 0;
    for (const auto& group : cluster.groups) {
      const int64_t end = begin + group.count * group.node.num_devices;
      groups_.push_back({begin, end, group.node.num_devices});
      begin = end;
    }
  }
  /// The group of nodes.
  int64_t group(int64_t rank) const {
    const auto at = std::find_if(
        groups_.begin(), groups_.end(),
        [&](const Group& one) { return rank < one.end; });
    return at - groups_.begin();
  }
  bool in_one_node(int64_t rank, int64_t later) const {
    return later < rank + left_in_node(rank);
  }
  /// Ranks from this one on that lie like it: in the same group, and where
  /// those `stride` further on may share its node, in the same node.
  int64_t alike(int64_t rank, int64_t stride) const {
    const Group& own = of(rank);
    return stride < own.devices ? left_in_node(rank) : own.end - rank;
  }

 private:
  struct Group {
    int64_t begin, end, devices;  // its ranks; of a node
  };
  const Group& of(int64_t rank) const {
    return groups_[static_cast<size_t>(group(rank))];
  }
  int64_t left_in_node(int64_t rank) const {
    const Group& own = of(rank);
    return own.devices - (rank - own.begin) % own.devices;
  }

  std::vector<Group> groups_;
};

// First ranks below this one have pipelines of all kinds that there are, where
// nodes and microbatches are equal: 1 where all pipelines lie on nodes alike.
int64_t first_ranks_of_equal_nodes(
    const Strategy& strategy, int64_t stride, int64_t devices) {
  const int64_t ranks =
      stride * strategy.layout.pp;  // of neighbouring pipelines
  const bool whole =
      devices % stride == 0 && (ranks % devices == 0 || devices % ranks == 0);
  if (strategy.layout.pp == 1 || stride >= devices || whole) return 1;
  return std::lcm(ranks, devices);
}

enum class Visits { all, first_of_alike };

// Calls visit with each pipeline in order of its first rank, all of its place
// filled in; or with the first of those that follow each other and are alike.
template <class Visit>
void for_each_pipeline(
    const Strategy& strategy, const cluster::Cluster& cluster, Visits visits,
    const Visit& visit) {
  const Layout& layout = strategy.layout;
  const int64_t stride = layout.stride(Axis::pp);
  const int64_t replicate = layout.stride(Axis::dp_replicate);
  const int64_t shard = layout.stride(Axis::dp_shard);
  const bool equal = !cluster.mixed() && strategy.rank_microbatch.empty();
  int64_t first_ranks = layout.num_ranks();
  if (equal && visits == Visits::first_of_alike) {
    first_ranks = std::min(
        first_ranks, first_ranks_of_equal_nodes(
                         strategy, stride, cluster.groups[0].node.num_devices));
  }
  const Places places(cluster);
  PipelinePlace place;
  place.groups.resize(static_cast<size_t>(layout.pp));
  place.next_in_node.resize(static_cast<size_t>(layout.pp));
  for (int64_t begin = 0; begin < first_ranks; begin += stride * layout.pp) {
    const int64_t end = std::min(begin + stride, first_ranks);
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
        place.groups[static_cast<size_t>(at)] = places.group(member);
        place.next_in_node[static_cast<size_t>(at)] =
            at + 1 < layout.pp && places.in_one_node(member, member + stride);
        alike = std::min(alike, places.alike(member, stride));
      }
      visit(place);
      rank += visits == Visits::all ? 1 : alike;
    }
  }
}

}  // namespace

std::vector<PipelinePlace>
distinct_pipelines(const Strategy& strategy, const cluster::Cluster& cluster) {
  std::vector<PipelinePlace> distinct;
  for_each_pipeline(
      strategy, cluster, Visits::first_of_alike,
      [&](const PipelinePlace& place) {
        const int64_t size = microbatch_of(strategy, place.data_index);
        const bool known = std::any_of(
            distinct.begin(), distinct.end(), [&](const PipelinePlace& one) {
              return one.groups == place.groups &&
                     one.next_in_node == place.next_in_node &&
                     microbatch_of(strategy, one.data_index) == size;
            });
        if (!known) distinct.push_back(place);
      });
  return distinct;
}

std::vector<PipelinePlace>
all_pipelines(const Strategy& strategy, const cluster::Cluster& cluster) {
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

}  // namespace echelon::cost
