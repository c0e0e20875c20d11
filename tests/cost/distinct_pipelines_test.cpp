// Pipelines that are alike are timed once: the estimate is that of all of them.
#include "echelon/cost/distinct_pipelines.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/cost/step_estimate.h"

namespace echelon::cost::distinct_pipelines_test {

constexpr AxisOrder kPipelinesFirst = {
    Axis::pp, Axis::dp_replicate, Axis::dp_shard, Axis::cp, Axis::ep, Axis::tp};

struct Nodes {
  const char* device;
  int64_t count;
  int64_t devices;  // of a node
};

cluster::Cluster cluster_of(const std::vector<Nodes>& groups) {
  cluster::Cluster cluster;
  for (const Nodes& one : groups) {
    const std::string name = std::string(one.device) + ":1x8";
    cluster.groups.push_back(cluster::find_cluster(name).groups.front());
    cluster.groups.back().count = one.count;
    cluster.groups.back().node.num_devices = one.devices;
  }
  return cluster;
}

Strategy strategy_of(const Layout& layout, const AxisOrder& order = kAxes) {
  Strategy strategy;
  strategy.layout = layout;
  strategy.layout.order = order;
  strategy.zero_stage = layout.dp_shard > 1 ? 1 : 0;
  strategy.global_batch = 4 * strategy.data_ranks();
  return strategy;
}

// Microbatches of these sizes, one data-parallel rank after the other.
void take_sizes(Strategy& strategy, const std::vector<int64_t>& sizes) {
  strategy.rank_microbatch = sizes;
  strategy.microbatch_size = *std::max_element(sizes.begin(), sizes.end());
  strategy.global_batch = 4 * strategy.round_samples();
}

std::map<Axis, int64_t> coordinates(const Strategy& strategy, int64_t rank) {
  std::map<Axis, int64_t> of;
  const AxisOrder& order = strategy.layout.order;
  for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
    of[*axis] = rank % strategy.layout.degree(*axis);
    rank /= strategy.layout.degree(*axis);
  }
  return of;
}

int64_t group_of(const cluster::Cluster& cluster, int64_t rank) {
  int64_t group = 0;
  while (&cluster.node_of(rank) !=
         &cluster.groups[static_cast<size_t>(group)].node) {
    ++group;
  }
  return group;
}

// Finds the pipelines by their definition, rank by rank: the ranks of one
// differ along pp alone.
std::vector<PipelinePlace>
pipelines_by_rank(const Strategy& strategy, const cluster::Cluster& cluster) {
  std::map<std::map<Axis, int64_t>, PipelinePlace> of;
  std::map<std::map<Axis, int64_t>, int64_t> last_node;
  std::vector<std::map<Axis, int64_t>> keys;
  for (int64_t rank = 0; rank < strategy.layout.num_ranks(); ++rank) {
    auto key = coordinates(strategy, rank);
    const int64_t index = key[Axis::dp_replicate] * strategy.layout.dp_shard +
                          key[Axis::dp_shard];
    key[Axis::pp] = 0;
    if (!of.contains(key)) {
      keys.push_back(key);
      of[key] = {rank, index, {}, {}};
    }
    const int64_t node = cluster.node_index(rank);
    auto& [first, data, groups, near] = of[key];
    if (!groups.empty()) near.back() = last_node[key] == node;
    groups.push_back(group_of(cluster, rank));
    near.push_back(false);
    last_node[key] = node;
  }
  std::vector<PipelinePlace> all;
  for (const auto& key : keys) all.push_back(of[key]);
  return all;
}

// The step of the slowest one, each timed.
double seconds_of_each(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  double slowest = 0;
  for (const auto& pipeline : pipelines_by_rank(strategy, cluster)) {
    const Strategy own =
        with_microbatch(strategy, microbatch_of(strategy, pipeline.data_index));
    const auto times = stage_times(model, own, cluster, pipeline.first_rank);
    double after = 0;
    for (const auto& rank : times.after) after = std::max(after, rank.total());
    slowest = std::max(slowest, pipeline_seconds(own, times.stages) + after);
  }
  return slowest;
}

using Kinds =
    std::set<std::tuple<std::vector<int64_t>, std::vector<bool>, int64_t>>;

Kinds kinds_of(
    const Strategy& strategy, const std::vector<PipelinePlace>& places) {
  Kinds kinds;
  for (const auto& place : places) {
    kinds.emplace(
        place.groups, place.next_in_node,
        microbatch_of(strategy, place.data_index));
  }
  return kinds;
}

// The largest part of what a device may hold, of each rank by itself.
double fullness_of_each(
    const ModelShape& model, const Strategy& strategy,
    const cluster::Cluster& cluster) {
  double most = 0;
  for (const PipelinePlace& place : pipelines_by_rank(strategy, cluster)) {
    const MemoryEstimate memory = estimate_memory(
        model,
        with_microbatch(strategy, microbatch_of(strategy, place.data_index)));
    for (size_t rank = 0; rank < memory.ranks.size(); ++rank) {
      const auto group = static_cast<size_t>(place.groups[rank]);
      most = std::max(
          most,
          memory.bytes(rank) / usable_bytes(cluster.groups[group].node.device));
    }
  }
  return most;
}

void expect_as_each(const Strategy& strategy, const cluster::Cluster& cluster) {
  const auto by_rank = pipelines_by_rank(strategy, cluster);
  const auto all = all_pipelines(strategy, cluster);
  ASSERT_EQ(all.size(), by_rank.size());
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].first_rank, by_rank[i].first_rank);
    EXPECT_EQ(all[i].data_index, by_rank[i].data_index);
    EXPECT_EQ(all[i].groups, by_rank[i].groups);
    EXPECT_EQ(all[i].next_in_node, by_rank[i].next_in_node);
  }
  const auto distinct = distinct_pipelines(strategy, cluster);
  const Kinds kinds = kinds_of(strategy, by_rank);
  EXPECT_EQ(kinds_of(strategy, distinct), kinds);
  EXPECT_EQ(distinct.size(), kinds.size()) << "one of a kind";
  static const ModelShape model = find_model("gpt2");
  EXPECT_DOUBLE_EQ(
      estimate_time(model, strategy, cluster).step_seconds,
      seconds_of_each(model, strategy, cluster));
  EXPECT_DOUBLE_EQ(
      fullest_memory(model, strategy, cluster).fullness(),
      fullness_of_each(model, strategy, cluster));
}

TEST(DistinctPipelines, AreOneWhereAllNodesAreAlike) {
  const auto one = distinct_pipelines(
      strategy_of({.dp_replicate = 2, .tp = 2, .pp = 2}),
      cluster::find_cluster("a100-80gb:1x8"));
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].groups, (std::vector<int64_t>{0, 0}));
}

TEST(DistinctPipelines, NodesThatEndWithinSomePipelinesPartThem) {
  const cluster::Cluster cluster = cluster::find_cluster("a100-80gb:3x8");
  const Strategy inside = strategy_of({.dp_replicate = 6, .pp = 4});
  const Strategy across = strategy_of({.dp_replicate = 4, .pp = 6});
  EXPECT_EQ(distinct_pipelines(inside, cluster).size(), 1u);
  EXPECT_EQ(distinct_pipelines(across, cluster).size(), 3u);
  expect_as_each(inside, cluster);
  expect_as_each(across, cluster);
  // Whole pipelines fill whole nodes, but a stage's ranks do not.
  expect_as_each(
      strategy_of({.dp_replicate = 3, .pp = 8}, kPipelinesFirst), cluster);
}

TEST(DistinctPipelines, ABorderWithinAStrideParts) {
  // Ranks 0 to 2 are of the slow kind; a stage has ranks 0 to 3, or 4 to 7.
  const cluster::Cluster cluster =
      cluster_of({{"v100", 3, 1}, {"h100-sxm", 5, 1}});
  const Strategy strategy =
      strategy_of({.dp_replicate = 4, .pp = 2}, kPipelinesFirst);
  EXPECT_EQ(distinct_pipelines(strategy, cluster).size(), 2u);
  expect_as_each(strategy, cluster);
}

TEST(DistinctPipelines, TheSlowOneIsTheLast) {
  const cluster::Cluster cluster =
      cluster_of({{"h100-sxm", 7, 1}, {"v100", 1, 1}});
  const Strategy strategy =
      strategy_of({.dp_replicate = 4, .pp = 2}, kPipelinesFirst);
  expect_as_each(strategy, cluster);
  EXPECT_GT(
      estimate_time(find_model("gpt2"), strategy, cluster).step_seconds,
      1.5 * estimate_time(
                find_model("gpt2"), strategy, cluster_of({{"h100-sxm", 8, 1}}))
                .step_seconds);
}

TEST(DistinctPipelines, GroupsOfUnevenSizes) {
  const cluster::Cluster cluster =
      cluster_of({{"a100-80gb", 1, 3}, {"h100-sxm", 2, 5}, {"v100", 11, 1}});
  expect_as_each(
      strategy_of({.dp_replicate = 3, .dp_shard = 2, .pp = 4}), cluster);
  expect_as_each(strategy_of({.dp_shard = 12, .pp = 2}), cluster);
}

TEST(DistinctPipelines, EachSizeOfMicrobatchesIsOne) {
  Strategy strategy =
      strategy_of({.dp_replicate = 2, .dp_shard = 2, .tp = 2, .pp = 2});
  take_sizes(strategy, {1, 1, 4, 2});
  const cluster::Cluster equal = cluster::find_cluster("a100-80gb:2x8");
  EXPECT_EQ(distinct_pipelines(strategy, equal).size(), 3u);
  expect_as_each(strategy, equal);
  // Sizes that change within a stride of the pipeline.
  strategy.layout.order = {Axis::pp,       Axis::dp_replicate, Axis::tp,
                           Axis::dp_shard, Axis::cp,           Axis::ep};
  expect_as_each(strategy, equal);
  expect_as_each(strategy, cluster_of({{"v100", 1, 5}, {"a100-80gb", 3, 5}}));
}

TEST(DistinctPipelines, ARanksOwnStrategyHasItsSamplesAndAsManyMicrobatches) {
  Strategy strategy = strategy_of({.dp_replicate = 2, .pp = 2});
  EXPECT_EQ(with_microbatch(strategy, 5).microbatch_size, 1)
      << "all have theirs";
  take_sizes(strategy, {3, 1});
  const Strategy own = with_microbatch(strategy, 1);
  EXPECT_EQ(own.microbatch_size, 1);
  EXPECT_TRUE(own.rank_microbatch.empty());
  EXPECT_EQ(own.num_microbatches(), 4);
}

cluster::Cluster drawn_cluster(std::mt19937& draw) {
  const char* devices[] = {"v100", "a100-80gb", "h100-sxm", "a100-40gb"};
  const int64_t sizes[] = {1, 2, 3, 4, 6, 8};
  std::shuffle(std::begin(devices), std::end(devices), draw);
  std::vector<Nodes> groups(1 + draw() % 4);
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto count = static_cast<int64_t>(1 + draw() % 5);
    groups[i] = {devices[i], count, sizes[draw() % 6]};
  }
  return cluster_of(groups);
}

Strategy drawn_strategy(std::mt19937& draw) {
  const int64_t pipelines[] = {1, 2, 3, 4}, degrees[] = {1, 1, 2, 3};
  Layout layout;
  layout.pp = pipelines[draw() % 4];
  layout.dp_replicate = degrees[draw() % 4];
  layout.dp_shard = degrees[draw() % 4];
  layout.tp = static_cast<int64_t>(1 + draw() % 2);
  layout.cp = static_cast<int64_t>(1 + draw() % 2);
  auto order = kAxes;
  std::shuffle(order.begin(), order.end(), draw);
  Strategy strategy = strategy_of(layout, order);
  if (draw() % 2 == 0) return strategy;
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < layout.data_degree(); ++i) {
    sizes.push_back(static_cast<int64_t>(1 + draw() % 3));
  }
  take_sizes(strategy, sizes);
  return strategy;
}

TEST(DistinctPipelines, DrawnLayoutsOnDrawnClustersAreEstimatedAsEach) {
  std::mt19937 draw(7);
  int tried = 0;
  while (tried < 300 && !HasFailure()) {
    const cluster::Cluster cluster = drawn_cluster(draw);
    const Strategy strategy = drawn_strategy(draw);
    if (strategy.layout.num_ranks() > cluster.num_devices()) continue;
    ++tried;
    SCOPED_TRACE(
        "layout " + std::to_string(tried) + ": " + to_string(strategy));
    expect_as_each(strategy, cluster);
  }
}

}  // namespace echelon::cost::distinct_pipelines_test
