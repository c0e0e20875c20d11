#include "echelon/simulator/simulate.h"

#include <gmock/gmock.h>

#include <map>
#include <set>
#include <utility>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/layout/mesh.h"
#include "echelon/timeline/overlap.h"
#include "tests/support/error_text.h"

namespace echelon::simulator::simulate_test {

using testing::HasSubstr;

// The fields of a strategy besides its layout and batch.
struct Extra {
  int64_t zero = 0;  // stage
  ScheduleKind schedule = ScheduleKind::one_f_one_b;
  ReduceDtype reduce = ReduceDtype::same;
  const char* framework = "echelon";
};

constexpr Extra kZero1{.zero = 1}, kZero2{.zero = 2}, kZero3{.zero = 3};
// Sums in float32, which computing hides less: bounds that are not proved for
// sums in bf16.
constexpr Extra kSummed32{.zero = 2, .reduce = ReduceDtype::float32};
constexpr Extra kFsdp{.zero = 3, .framework = "fsdp"};
constexpr Extra kInterleaved{.schedule = ScheduleKind::interleaved};

cost::Strategy with(Layout layout, int64_t batch, const Extra& extra = {}) {
  return {
      .layout = layout,
      .zero_stage = extra.zero,
      .global_batch = batch,
      .schedule = extra.schedule,
      .reduce = extra.reduce,
      .framework = extra.framework};
}

SimulatedRun simulated(
    const char* model, const cost::Strategy& strategy, const char* cluster,
    const SimulationOptions& options = {}) {
  return simulate(
      cost::find_model(model), strategy, cluster::find_cluster(cluster),
      options);
}

double relative(double a, double b) {
  return std::abs(a - b) / b;
}

// How far a simulated step is from the formula.
double error_of(
    const SimulatedRun& run, const cost::ModelShape& model,
    const cost::Strategy& strategy, const cluster::Cluster& cluster) {
  return relative(
      run.step.step_seconds,
      cost::estimate_step(model, strategy, cluster).step_seconds);
}

TEST(Simulate, EachRankByItselfGivesTheSame) {
  struct {
    const char* model;
    const char* cluster;
    cost::Strategy strategy;
  } cases[] = {
      {"gpt2", "h100-sxm:2x8", with({.dp_replicate = 16}, 64)},
      {"gpt2", "h100-sxm:2x8", with({.dp_shard = 16}, 64, kZero3)},
      {"gpt2", "h100-sxm:1x4", with({.tp = 4}, 8)},
      {"gpt2", "h100-sxm:1x4", with({.pp = 4}, 16)},
      {"llama2-7b", "a100-80gb:4x8",
       with({.dp_replicate = 2, .tp = 4, .pp = 4}, 32, kInterleaved)},
      {"llama2-7b", "a100-80gb:4x8",
       with({.dp_shard = 4, .cp = 2, .tp = 4}, 32, kZero2)},
      {"mixtral-8x7b", "h100-sxm:4x8",
       with({.dp_replicate = 2, .tp = 2, .pp = 2, .ep = 4}, 64)},
      {"llama2-7b", "h100-sxm:1x8", with({.cp = 4}, 4)},
      {"mixtral-8x7b", "h100-sxm:2x8", with({.ep = 8}, 32)},
      {"llama2-7b", "h100-sxm:2x8",
       with({.dp_replicate = 2, .dp_shard = 2, .cp = 2, .tp = 2}, 32, kZero3)},
      {"gpt2", "h100-sxm:2x8", with({.dp_replicate = 4, .pp = 4}, 64)},
      {"mixtral-8x7b", "h100-sxm:4x8",
       with({.dp_shard = 2, .tp = 2, .pp = 2, .ep = 4}, 64, kFsdp)},
      {"llama2-7b", "a100-80gb:2x8",
       with(
           {.dp_replicate = 2, .tp = 2, .pp = 4}, 32,
           {.schedule = ScheduleKind::zb_v})},
      {"gpt2", "h100-sxm:1x8+a100-80gb:1x8",
       with({.dp_replicate = 2, .tp = 4, .pp = 2}, 32)},
  };
  for (const auto& one : cases) {
    for (const int64_t stragglers : {0, 1}) {
      SimulationOptions options{
          .stragglers = stragglers, .straggler_factor = 1.3};
      const cost::ModelShape model = cost::find_model(one.model);
      const cluster::Cluster cluster = cluster::find_cluster(one.cluster);
      const SimulatedRun with = simulate(model, one.strategy, cluster, options);
      options.symmetry = false;
      const auto without = simulate(model, one.strategy, cluster, options);
      EXPECT_LT(
          relative(with.step.step_seconds, without.step.step_seconds), 1e-9)
          << cost::to_string(one.strategy) << " stragglers " << stragglers;
      EXPECT_EQ(without.simulated_ranks, one.strategy.layout.num_ranks());
      const bool alike = stragglers == 0 && !cluster.mixed();
      if (alike) {
        EXPECT_EQ(with.simulated_ranks, one.strategy.layout.pp);
      }
      EXPECT_LT(
          relative(with.step.parts.total(), with.step.step_seconds), 1e-9);
    }
  }
}

// The second pipeline is cut by the nodes elsewhere than the first; the ends of
// one sum a tied embedding, those of the other have nothing in common.
TEST(Simulate, PipelinesThatLeaveANodeElsewhereAreNotAlike) {
  for (const char* name : {"gpt2", "llama2-7b"}) {
    const cost::ModelShape model = cost::find_model(name);
    cost::Strategy strategy = with({.dp_replicate = 2, .pp = 6}, 24);
    cluster::Cluster cluster = cluster::find_cluster("h100-sxm:2x8");
    cluster.groups[0].node.network.bytes_per_second = 1e9;
    SimulationOptions options{.timeline_ranks = 0};
    const SimulatedRun with = simulate(model, strategy, cluster, options);
    EXPECT_EQ(with.simulated_ranks, 12) << name;
    options.symmetry = false;
    EXPECT_LT(
        relative(
            with.step.step_seconds,
            simulate(model, strategy, cluster, options).step.step_seconds),
        1e-9)
        << name;
    options.symmetry = true;
    cluster = cluster::find_cluster("h100-sxm:1x16");
    EXPECT_EQ(simulate(model, strategy, cluster, options).simulated_ranks, 6)
        << name;
  }
}

// Exactly where nothing waits for a neighbour on the other side of the step's
// end; stage 3 shares its links between gathers and gradients, interleaved
// stages end at different times.
TEST(Simulate, AgreesWithTheFormula) {
  struct {
    const char* model;
    const char* cluster;
    cost::Strategy strategy;
    double tolerance;
  } cases[] = {
      {"gpt2", "h100-sxm:1x8", with({}, 8), 1e-9},
      {"resnet50", "h100-sxm:1x8", with({}, 8), 1e-9},
      {"gpt3-175b", "a100-80gb:1x8", with({.tp = 8}, 16), 1e-9},
      {"llama2-7b", "h100-sxm:1x8", with({.cp = 1, .tp = 4, .pp = 2}, 32),
       0.002},
      {"llama3.1-70b", "h100-sxm:8x8", with({.tp = 8, .pp = 8}, 64), 0.005},
      {"llama3.1-70b", "h100-sxm:64x8",
       with({.dp_replicate = 8, .tp = 8, .pp = 8}, 512, kInterleaved), 0.02},
      {"gpt2", "h100-sxm:2x8", with({.dp_replicate = 16}, 64), 1e-6},
      {"gpt2", "h100-sxm:2x8", with({.dp_replicate = 4, .pp = 4}, 64), 1e-3},
      {"gpt2", "h100-sxm:2x8", with({.dp_replicate = 4, .tp = 4}, 64), 1e-6},
      {"gpt2", "h100-sxm:2x8", with({.pp = 4}, 16), 1e-6},
      {"gpt2", "h100-sxm:2x8", with({.dp_shard = 16}, 64, kZero1), 1e-6},
      {"gpt2", "h100-sxm:2x8", with({.dp_shard = 16}, 64, kZero3), 0.03},
      {"llama3.1-8b", "h100-sxm:2x8", with({.dp_shard = 16}, 64, kFsdp), 0.03},
      {"gpt2", "h100-sxm:2x8", with({.dp_shard = 4, .tp = 4}, 64, kZero1),
       1e-6},
      {"gpt2", "h100-sxm:2x8",
       with({.dp_replicate = 2, .dp_shard = 8}, 64, kZero1), 1e-6},
      {"mixtral-8x7b", "h100-sxm:2x8", with({.ep = 8}, 64), 1e-6},
      {"llama2-7b", "h100-sxm:2x8",
       with({.dp_shard = 4, .cp = 4}, 16, kSummed32), 0.002},
      {"resnet50", "h100-sxm:2x8", with({.dp_replicate = 16}, 256), 1e-6},
      {"simple_cnn", "h100-sxm:1x8", with({.dp_replicate = 8}, 256), 1e-6},
      {"resnet50", "h100-sxm:2x8", with({.dp_shard = 16}, 256, kZero2), 1e-6},
      {"gpt2", "a100-80gb:1x8",
       with(
           {.pp = 4}, 32,
           {.schedule = ScheduleKind::zb_h2, .framework = "zero-bubble"}),
       1e-4},
      {"gpt2", "a100-80gb:1x8",
       with(
           {.pp = 8}, 64,
           {.schedule = ScheduleKind::zb_h1, .framework = "zero-bubble"}),
       0.002},
      {"gpt2", "a100-80gb:2x8",
       with(
           {.dp_replicate = 2, .pp = 8}, 64,
           {.schedule = ScheduleKind::zb_h2, .framework = "zero-bubble"}),
       0.025},
      {"gpt2", "a100-80gb:1x8",
       with(
           {.pp = 4}, 32,
           {.schedule = ScheduleKind::zb_v, .framework = "zero-bubble"}),
       0.002},
      {"gpt2", "a100-80gb:1x8",
       with(
           {.pp = 4}, 32,
           {.schedule = ScheduleKind::zb_h2,
            .framework = "zero-bubble-synchronous"}),
       1e-6},
  };
  for (const auto& one : cases) {
    const cost::ModelShape model = cost::find_model(one.model);
    const cluster::Cluster cluster = cluster::find_cluster(one.cluster);
    const SimulatedRun run = simulate(model, one.strategy, cluster);
    EXPECT_LE(error_of(run, model, one.strategy, cluster), one.tolerance)
        << one.model << " " << cost::to_string(one.strategy) << ": "
        << run.step.step_seconds;
  }
}

// The slowest pipeline, of those that leave a node in other places and of those
// that are on other devices or have more samples, without gradients to wait
// for.
TEST(Simulate, AgreesWithTheFormulaWhereASlowerPipelineIsNotTheFirst) {
  const cost::ModelShape model = cost::find_model("gpt2");
  const auto expect_near = [&](const cost::Strategy& strategy,
                               const cluster::Cluster& cluster) {
    const double estimated =
        cost::estimate_time(model, strategy, cluster).step_seconds;
    const double simulated =
        simulate(model, strategy, cluster, {.timeline_ranks = 0})
            .step.step_seconds;
    EXPECT_LT(relative(simulated, estimated), 0.01)
        << cost::to_string(strategy);
    cluster::Cluster near = cluster;
    for (cluster::NodeGroup& group : near.groups)
      group.node = cluster.groups[0].node;
    near.groups[0].node.network = near.groups[0].node.inside;
    EXPECT_GT(
        estimated, 1.05 * estimate_time(model, strategy, near).step_seconds);
  };
  cluster::Cluster slow_network = cluster::find_cluster("h100-sxm:3x8");
  slow_network.groups[0].node.network.bytes_per_second = 5e9;
  expect_near(with({.dp_replicate = 4, .pp = 6}, 96), slow_network);
  expect_near(
      with({.dp_replicate = 4, .pp = 2}, 96),
      cluster::find_cluster("h100-sxm:1x6+v100:1x2"));
}

// Every stage's parameters are on their way when the step begins: a pipeline
// waits for those of its first stage, not for each stage's in turn.
TEST(Simulate, ParametersOfAllStagesAreGatheredAtOnce) {
  const cost::ModelShape model = cost::find_model("gpt3-175b");
  const cluster::Cluster cluster = cluster::find_cluster("a100-80gb:128x8");
  const SimulationOptions options{.timeline_ranks = 1024};
  for (const int64_t stage : {1, 2}) {
    const cost::Strategy strategy = with(
        {.dp_shard = 16, .tp = 8, .pp = 8}, 256,
        {.zero = stage, .reduce = ReduceDtype::float32});
    const SimulatedRun run = simulate(model, strategy, cluster, options);
    EXPECT_LT(error_of(run, model, strategy, cluster), 0.04);
    std::map<int32_t, int64_t> first;  // gather of a rank
    for (const timeline::Span& span : run.timeline.spans) {
      if (span.name.rfind("all_gather", 0) != 0 || span.axis == "tp") continue;
      const auto [at, is_new] = first.emplace(span.rank, span.begin_ns);
      at->second = std::min(at->second, span.begin_ns);
    }
    ASSERT_GE(first.size(), 8u);
    for (const auto& [rank, begin] : first) EXPECT_EQ(begin, 0) << rank;
  }
}

// Layers of `bytes` of gradients each.
cost::ModelShape layers_of(const std::vector<double>& bytes) {
  cost::ModelShape model{.name = "made"};
  for (const double one : bytes) {
    cost::CountedLayer layer;
    layer.name = "layer " + std::to_string(model.layers.size());
    layer.parameters = one / 2;  // bf16
    layer.forward_flops = 1e9;
    layer.backward_flops = 2e9;
    layer.output_elements = 100;
    layer.inner = layer.columns = layer.rows = 64;
    model.layers.push_back(layer);
  }
  return model;
}

// The trainer sums large gradients alone and small ones together.
TEST(Simulate, GradientsOfSmallLayersAreSummedTogether) {
  const cluster::Cluster cluster = cluster::find_cluster("h100-sxm:1x2");
  struct {
    std::vector<double> layers;
    std::vector<int64_t> sums;  // bytes, in the order of backward
  } cases[] = {
      {std::vector<double>(9, 8000), {72000}},
      {{400000, 500000, 600000}, {600000, 500000, 400000}},
      {{4000, 300000, 100000, 8000, 200000}, {308000, 300000, 4000}},
      {{100000, 100000, 100000, 100000}, {300000, 100000}},
  };
  for (const auto& one : cases) {
    const cost::ModelShape model = layers_of(one.layers);
    const cost::Strategy strategy = with({.dp_replicate = 2}, 8);
    const SimulatedRun run = simulate(model, strategy, cluster);
    std::vector<int64_t> sums;
    for (const timeline::Span& span : run.timeline.spans) {
      if (span.rank == 0 && span.track == "comm") sums.push_back(span.bytes);
    }
    EXPECT_EQ(sums, one.sums);
    EXPECT_LT(error_of(run, model, strategy, cluster), 1e-9);
  }
  // ZeRO cuts layer by layer. Stage 1 reduces once a step, stages 2 and 3 after
  // each of four microbatches, unless a pipeline keeps parameters unsharded:
  // so do ShardedUnits and PipelineModel.
  const auto reduced = [&](int64_t zero, bool once, int64_t pp) {
    cost::Strategy cut = with({.dp_shard = 2, .pp = pp}, 8, {.zero = zero});
    cut.unshard_once = once;
    const cluster::Cluster four = cluster::find_cluster("h100-sxm:1x4");
    size_t count = 0;
    for (const timeline::Span& span :
         simulate(layers_of({8000, 8000, 8000, 8000}), cut, four)
             .timeline.spans) {
      count += span.rank == 0 && span.name.rfind("reduce_scatter", 0) == 0;
    }
    return count;
  };
  EXPECT_EQ(reduced(1, false, 1), 4u);
  EXPECT_EQ(reduced(2, false, 1), 4u * 4);
  EXPECT_EQ(reduced(3, false, 1), 4u * 4);
  EXPECT_EQ(reduced(3, true, 1), 4u * 4);
  EXPECT_EQ(reduced(1, false, 2), 2u);
  EXPECT_EQ(reduced(2, false, 2), 2u * 4);
  EXPECT_EQ(reduced(3, false, 2), 2u * 4);
  EXPECT_EQ(reduced(3, true, 2), 2u);
}

// A rank goes on to the next step by itself. Its wait for the first microbatch
// then belongs to the step before, and the parts of a step are those of the
// rank's own time.
TEST(Simulate, StepsThatFollowWithoutMeetingTakeTheLongestRanksTime) {
  const auto on = [](const char* framework) {
    return simulated(
        "gpt2",
        with(
            {.pp = 8}, 32,
            {.schedule = ScheduleKind::zb_h2, .framework = framework}),
        "a100-80gb:1x8", {.steps = 2});
  };
  const SimulatedRun later = on("zero-bubble"),
                     meeting = on("zero-bubble-synchronous");
  EXPECT_LT(later.step.step_seconds, 0.98 * meeting.step.step_seconds);
  EXPECT_LT(relative(later.step.parts.total(), later.step.step_seconds), 1e-9);
  EXPECT_LT(later.step.parts.bubble, meeting.step.parts.bubble);
  // Each rank's second step begins after its first has ended.
  std::map<std::pair<int32_t, int64_t>, std::pair<int64_t, int64_t>> times;
  for (const timeline::Span& span : later.timeline.spans) {
    const bool works =
        span.kind == timeline::SpanKind::forward || span.name == "optimizer";
    if (span.track != "compute" || !works) continue;
    const auto [at, is_new] =
        times.try_emplace({span.rank, span.step}, span.begin_ns, span.end_ns);
    at->second.first = std::min(at->second.first, span.begin_ns);
    at->second.second = std::max(at->second.second, span.end_ns);
  }
  ASSERT_EQ(times.size(), 16u);
  for (int32_t rank = 0; rank < 8; ++rank) {
    EXPECT_GE(times.at({rank, 1}).first, times.at({rank, 0}).second - 1)
        << "rank " << rank;
  }
}

// Copies of a tied embedding on the ends of a pipeline, and nowhere else.
TEST(Simulate, TheEndsOfAPipelineSumATiedEmbedding) {
  const auto who_sums = [](const char* model, ScheduleKind schedule) {
    const SimulatedRun run = simulated(
        model, with({.dp_replicate = 2, .pp = 4}, 16, {.schedule = schedule}),
        "h100-sxm:1x8");
    std::set<int32_t> ranks;
    for (const timeline::Span& span : run.timeline.spans) {
      if (span.track != "comm" || span.name != "all_reduce tied embedding")
        continue;
      EXPECT_EQ(span.bytes, 50304 * 768 * 2);
      EXPECT_EQ(span.axis, "pp");
      ranks.insert(span.rank);
    }
    return ranks;
  };
  EXPECT_EQ(
      who_sums("gpt2", ScheduleKind::one_f_one_b),
      (std::set<int32_t>{0, 3, 4, 7}));
  EXPECT_EQ(who_sums("gpt2", ScheduleKind::zb_v), std::set<int32_t>{});
  EXPECT_EQ(
      who_sums("llama2-7b", ScheduleKind::one_f_one_b), std::set<int32_t>{});
}

TEST(Simulate, PartsAddUpToTheStep) {
  cost::Strategy strategy =
      with({.dp_replicate = 2, .dp_shard = 2, .tp = 2, .pp = 2}, 32, kZero3);
  strategy.recompute = cost::Recompute::all;
  const SimulatedRun run = simulated(
      "llama2-7b", strategy, "a100-80gb:2x8", {.steps = 5, .jitter = 0.05});
  EXPECT_LT(relative(run.step.parts.total(), run.step.step_seconds), 1e-9);
  EXPECT_GT(run.step.parts.matrix, 0);
  EXPECT_GT(run.step.parts.recompute, 0);
  EXPECT_GT(run.step.parts.exposed[static_cast<size_t>(Axis::tp)], 0);
  EXPECT_GT(run.step.communication[static_cast<size_t>(Axis::dp_shard)], 0);
  EXPECT_GT(run.step.parts.bubble, 0);
  EXPECT_GT(run.step.parts.optimizer, 0);
  EXPECT_EQ(run.step_seconds.size(), 5u);
  EXPECT_EQ(
      std::set<double>(run.step_seconds.begin(), run.step_seconds.end()).size(),
      5u);
}

TEST(Simulate, TheSeedDrawsJitterAndStragglers) {
  const cost::Strategy strategy =
      with({.dp_replicate = 2, .tp = 2, .pp = 4}, 32);
  const auto steps = [&](double jitter, int64_t stragglers, uint64_t seed) {
    return simulated(
               "gpt2", strategy, "h100-sxm:2x8",
               {.steps = 3,
                .jitter = jitter,
                .stragglers = stragglers,
                .straggler_factor = 1.5,
                .seed = seed,
                .timeline_ranks = 0})
        .step_seconds;
  };
  EXPECT_EQ(steps(0.1, 0, 1), steps(0.1, 0, 1));
  EXPECT_NE(steps(0.1, 0, 1), steps(0.1, 0, 2));
  EXPECT_EQ(steps(0, 3, 1), steps(0, 3, 1));
  EXPECT_EQ(steps(0, 0, 1), steps(0, 0, 2));
  // A straggler costs more in some stages than in others.
  std::set<double> first;
  for (uint64_t seed = 0; seed < 8; ++seed) first.insert(steps(0, 1, seed)[0]);
  EXPECT_GT(first.size(), 1u);
  // Waiting for the slowest of many: jitter costs, on average.
  EXPECT_GT(steps(0.1, 0, 1)[0], steps(0, 0, 1)[0]);
}

TEST(Simulate, DrawsJitterOnceForEachStep) {
  const auto steps = [](int64_t count) {
    return simulated(
               "gpt2", with({.dp_replicate = 2}, 16), "h100-sxm:1x8",
               {.steps = count, .jitter = 0.1})
        .step_seconds;
  };
  EXPECT_EQ(steps(1)[0], steps(3)[0]);
}

TEST(Simulate, AStragglerHoldsUpEverybodyInProportion) {
  const cost::Strategy strategy = with({.dp_replicate = 4, .tp = 8}, 64);
  const auto run = [&](const SimulationOptions& options) {
    return simulated("llama2-7b", strategy, "a100-80gb:4x8", options);
  };
  const double alone = run({}).step.step_seconds;
  const auto slowed = run({.stragglers = 1, .straggler_factor = 1.5});
  const double factor = slowed.step.step_seconds / alone;
  EXPECT_GT(
      factor, 1.2);  // its computing takes 1.5 times as long, not its messages
  EXPECT_LT(factor, 1.5);
  // Ranks differ by whether they are in the straggler's group along tp, and at
  // its place along dp.
  EXPECT_EQ(slowed.simulated_ranks, 4);
}

TEST(Simulate, SlowerDevicesOfAMixedClusterAreTheOthersWait) {
  const auto on = [](const char* cluster) {
    return simulated(
        "llama2-7b", with({.dp_replicate = 2, .tp = 8}, 32), cluster);
  };
  const double fast = on("h100-sxm:2x8").step.step_seconds;
  const double slow = on("a100-80gb:2x8").step.step_seconds;
  const SimulatedRun mixed = on("h100-sxm:1x8+a100-80gb:1x8");
  EXPECT_GT(mixed.step.step_seconds, fast * 1.3);
  EXPECT_LE(mixed.step.step_seconds, slow * 1.05);
  EXPECT_EQ(mixed.simulated_ranks, 2);
}

TEST(Simulate, LargeJobsAreAFewClasses) {
  cost::Strategy strategy =
      with({.dp_replicate = 128, .tp = 8, .pp = 16}, 2048, kInterleaved);
  strategy.seq_len = 8192;
  const auto with_options = [&](const SimulationOptions& options) {
    return simulated("llama3.1-405b", strategy, "h100-sxm:2048x8", options);
  };
  const SimulatedRun run = with_options({});
  EXPECT_EQ(run.simulated_ranks, 16);
  const auto slowed = with_options({.stragglers = 1, .straggler_factor = 2});
  EXPECT_EQ(slowed.simulated_ranks, 64);
  EXPECT_GT(slowed.step.step_seconds, run.step.step_seconds * 1.2);
}

TEST(Simulate, TheTimelineIsLikeARealRuns) {
  const SimulatedRun run = simulated(
      "gpt2", with({.dp_replicate = 2, .tp = 2, .pp = 2}, 16), "h100-sxm:1x8",
      {.steps = 3});
  std::set<std::string> names;
  std::set<int32_t> ranks;
  for (const timeline::Span& span : run.timeline.spans) {
    EXPECT_LE(span.begin_ns, span.end_ns);
    EXPECT_GE(span.step, 0);
    EXPECT_LT(span.step, 3);
    ranks.insert(span.rank);
    if (span.track == "comm") {
      EXPECT_EQ(span.kind, timeline::SpanKind::communication);
      EXPECT_GT(span.bytes, 0) << span.name;
      EXPECT_FALSE(span.axis.empty()) << span.name;
    } else {
      EXPECT_EQ(span.track, "compute");
      EXPECT_EQ(span.bytes, 0);
    }
    names.insert(span.track + " " + span.name);
  }
  EXPECT_EQ(ranks.size(), 8u);
  for (const char* name :
       {"compute 0F0", "compute 1B7", "compute optimizer", "compute wait 0F0",
        "comm send 0F0", "comm recv 1B0", "comm all_reduce bucket 0"}) {
    EXPECT_TRUE(names.count(name)) << name;
  }
  EXPECT_EQ(run.timeline.rank_names[7], "rank 7 (h100-sxm)");
  // Its own reader and diagnosis understand it.
  const timeline::Diagnosis diagnosis = timeline::diagnose(run.timeline);
  EXPECT_EQ(diagnosis.num_steps, 3);
  EXPECT_LT(relative(diagnosis.mean.step_seconds, run.step.step_seconds), 0.05);
}

TEST(Simulate, WithoutAPipelineSpansAreForwardAndBackward) {
  const auto run_with = [](int64_t timeline_ranks) {
    return simulated(
        "gpt2", with({.dp_shard = 4}, 8, kZero3), "h100-sxm:1x8",
        {.timeline_ranks = timeline_ranks});
  };
  const SimulatedRun run = run_with(2);
  std::set<std::string> names;
  for (const timeline::Span& span : run.timeline.spans) {
    EXPECT_LT(span.rank, 2);
    names.insert(span.name);
  }
  for (const char* name :
       {"forward", "backward", "all_gather gather block 1",
        "reduce_scatter reduce block 1"}) {
    EXPECT_TRUE(names.count(name)) << name;
  }
  EXPECT_TRUE(run_with(0).timeline.spans.empty());
}

// A part of a pipeline would seem to wait for nothing.
TEST(Simulate, OnlyWholePipelinesAreDrawn) {
  const auto ranks_of = [](int64_t pp, int64_t most) {
    const SimulatedRun run = simulated(
        "gpt2", with({.dp_replicate = 24 / pp, .pp = pp}, 48), "h100-sxm:3x8",
        {.stragglers = 1, .straggler_factor = 1.5, .timeline_ranks = most});
    std::map<int64_t, std::set<int32_t>> pipelines;  // by place along dp
    for (const timeline::Span& span : run.timeline.spans) {
      const Mesh mesh({.dp_replicate = 24 / pp, .pp = pp});
      pipelines[mesh.coordinate(span.rank, Axis::dp_replicate)].insert(
          span.rank);
    }
    std::vector<size_t> sizes;
    for (const auto& [place, ranks] : pipelines) sizes.push_back(ranks.size());
    return sizes;
  };
  EXPECT_THAT(ranks_of(3, 16), testing::ElementsAre(3, 3, 3, 3, 3));
  EXPECT_THAT(ranks_of(4, 16), testing::ElementsAre(4, 4, 4, 4));
  EXPECT_THAT(ranks_of(6, 4), testing::ElementsAre(6));
  EXPECT_THAT(ranks_of(6, 0), testing::ElementsAre());
}

TEST(Simulate, OnlyTheFirstStepsAreDrawn) {
  const SimulatedRun run = simulated(
      "gpt2", with({.dp_replicate = 2, .tp = 2}, 8), "h100-sxm:1x4",
      {.steps = 5, .jitter = 0.02, .timeline_steps = 2});
  std::set<int64_t> drawn;
  for (const timeline::Span& span : run.timeline.spans) drawn.insert(span.step);
  EXPECT_THAT(drawn, testing::ElementsAre(0, 1));
  EXPECT_EQ(run.step_seconds.size(), 5u);
}

// Whatever the formula said of the step, rates are those of the simulated one.
TEST(Simulate, RatesAreOfTheSimulatedStep) {
  const cost::ModelShape model = cost::find_model("gpt2");
  const cost::Strategy strategy = with({.dp_replicate = 2, .tp = 2}, 8);
  const cluster::Cluster cluster = cluster::find_cluster("h100-sxm:1x4");
  const SimulatedRun run = simulate(
      model, strategy, cluster, {.stragglers = 1, .straggler_factor = 3});
  EXPECT_LT(
      relative(
          run.step.tokens_per_second,
          8 * static_cast<double>(model.seq_len) / run.step.step_seconds),
      1e-9);
  EXPECT_EQ(run.step.step_seconds, run.step_seconds[0]);
  const cost::StepEstimate even = cost::estimate_step(model, strategy, cluster);
  EXPECT_LT(
      relative(
          run.step.model_flops_utilisation * run.step.step_seconds,
          even.model_flops_utilisation * even.step_seconds),
      1e-9);
}

TEST(Simulate, WrongStrategiesAndOptionsAreNamed) {
  const auto text = [](const cost::Strategy& strategy,
                       const SimulationOptions& o) {
    return error_text([&] { simulated("gpt2", strategy, "h100-sxm:1x8", o); });
  };
  EXPECT_THAT(text(with({.tp = 5}, 8), {}), HasSubstr("tp=5"));
  EXPECT_THAT(text(with({.dp_replicate = 16}, 16), {}), HasSubstr("16 ranks"));
  EXPECT_THAT(text(with({}, 8), {.jitter = 2}), HasSubstr("jitter"));
  EXPECT_THAT(text(with({}, 8), {.steps = 0}), HasSubstr("steps"));
}

}  // namespace echelon::simulator::simulate_test
