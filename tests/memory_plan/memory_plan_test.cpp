#include "echelon/memory_plan/memory_plan.h"

#include <gmock/gmock.h>

#include "tests/support/error_text.h"

namespace echelon::memory_plan::memory_plan_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kNumel = 1600;  // of each layer's one parameter

Schedule passes(int32_t count) {
  Schedule schedule{
      .name = "one stage",
      .num_microbatches = count,
      .rank_of_stage = {0},
      .ranks = {{}}};
  for (int32_t i = 0; i < count; ++i) {
    schedule.ranks[0].push_back({ActionKind::forward, 0, i});
    schedule.ranks[0].push_back({ActionKind::backward, 0, i});
  }
  return schedule;
}

// Layers that are alike: 100 bytes of activations, which recompute leaves out
// but for 10; a loss that needs nothing.
MemoryModel model_of(size_t layers, Schedule schedule = passes(1)) {
  MemoryModel model;
  for (size_t i = 0; i < layers; ++i) {
    PlannedLayer layer{.name = "layer" + std::to_string(i)};
    layer.parameters = {{.numel = kNumel, .decays = true}};
    layer.input_bytes = layer.output_bytes = 10;
    layer.use[0] = {
        .kept_bytes = 100,
        .forward_peak_bytes = 120,
        .backward_peak_bytes = 30 + 4 * kNumel,
        .backward_peak_gradient_bytes = 4 * kNumel,
        .backward_working_bytes = 30};
    layer.use[1] = layer.use[0];
    layer.use[1].kept_bytes = 40;
    layer.use[2] = layer.use[0];
    layer.use[2].kept_bytes = 10;
    layer.again_flops = {0, 5, 10};
    model.layers.push_back(layer);
  }
  model.layers.push_back({.name = "loss"});
  model.boundaries = {0, layers + 1};
  model.schedule = std::move(schedule);
  model.num_parameters = kNumel * static_cast<int64_t>(layers);
  return model;
}

int64_t sum_of(
    const RankPlan& plan, const std::string& operation,
    int64_t PlannedCalls::*figure) {
  int64_t sum = 0;
  for (const auto& call : plan.calls) {
    if (call.operation == operation) sum += call.*figure;
  }
  return sum;
}
int64_t calls(const RankPlan& plan, const std::string& operation) {
  return sum_of(plan, operation, &PlannedCalls::count);
}

RankPlan first_rank(const MemoryModel& model, const Job& job) {
  return plan_memory(model, job).ranks[0];
}

TEST(MemoryPlan, OneDeviceByHand) {
  const Job job;  // adamw
  const auto plan = plan_memory(model_of(3), job);
  ASSERT_EQ(plan.ranks.size(), 1u);
  const auto& rank = plan.ranks[0];
  const int64_t parameters = 3 * 4 * kNumel;
  EXPECT_EQ(rank.resting[timeline::MemoryKind::parameters], parameters);
  EXPECT_EQ(
      rank.resting[timeline::MemoryKind::optimizer_state], 2 * parameters);
  EXPECT_EQ(rank.resting.total(), 3 * parameters);
  // Gradients are large here, so the last of them to come is the peak; its
  // layer's activations are there still.
  EXPECT_EQ(rank.moment, "backward of layer0");
  EXPECT_EQ(rank.peak[timeline::MemoryKind::gradients], parameters);
  EXPECT_EQ(rank.peak[timeline::MemoryKind::activations], 100);
  EXPECT_EQ(rank.peak[timeline::MemoryKind::working], 30);
  EXPECT_TRUE(rank.calls.empty());
}

TEST(MemoryPlan, ActivationsOfAllLayersAreThePeakWhereTheyAreLarge) {
  auto model = model_of(3);
  for (auto& layer : model.layers) {
    for (auto& use : layer.use) use.kept_bytes *= 1000;
  }
  Job job;
  const auto plan = first_rank(model, job);
  EXPECT_EQ(plan.moment, "backward of layer2");
  EXPECT_EQ(plan.peak[timeline::MemoryKind::activations], 300'000);
  job.memory.recompute = Recompute::all;
  EXPECT_EQ(
      first_rank(model, job).peak[timeline::MemoryKind::activations], 30'000);
  job.memory.recompute = Recompute::none;
  job.memory.activations = Activations::offload;
  const auto offloaded = first_rank(model, job);
  EXPECT_EQ(offloaded.peak[timeline::MemoryKind::activations], 0);
  EXPECT_EQ(offloaded.host_bytes, 300'000);
}

TEST(MemoryPlan, ABudgetChoosesLayers) {
  auto model = model_of(4);
  Job job;
  job.memory.recompute = Recompute::budget;
  job.memory.activation_bytes = 100 + 100 + 40 + 40;
  const auto plan = first_rank(model, job);
  EXPECT_LE(plan.peak[timeline::MemoryKind::activations], 280);
}

// A layer's result that the next one keeps is not freed by computing it again.
TEST(MemoryPlan, WhatTheNextLayerKeepsStays) {
  auto model = model_of(3);
  model.layers[1].use[0].repeated_bytes = 7;
  model.layers.back().use[0].repeated_bytes = 9;  // the loss is no layer
  const auto costs = recompute_costs(model);
  ASSERT_EQ(costs.size(), 3u);
  EXPECT_EQ(costs[0].kept_bytes, (std::array<int64_t, 3>{100, 47, 17}));
  EXPECT_EQ(costs[1].kept_bytes, (std::array<int64_t, 3>{100, 40, 10}));
  EXPECT_EQ(costs[2].kept_bytes, (std::array<int64_t, 3>{100, 40, 10}));
}

TEST(MemoryPlan, ABudgetThatNothingFitsIsRefusedAsTheTrainerDoes) {
  Job job;
  job.memory.recompute = Recompute::budget;
  job.memory.activation_bytes = 39;
  EXPECT_THAT(
      error_text([&] { plan_memory(model_of(4), job); }),
      HasSubstr("[memory] activation_bytes=39"));
}

TEST(MemoryPlan, StagesOfShardingCutMoreAndMore) {
  const auto model = model_of(8);
  Job job;
  const int64_t whole = 8 * 4 * kNumel;
  std::vector<int64_t> peaks = {first_rank(model, job).peak.total()};
  job.layout.dp_shard = 4;
  for (const int64_t stage : {1, 2, 3}) {
    job.shard.stage = stage;
    const auto rank = first_rank(model, job);
    EXPECT_EQ(rank.ranks.size(), 4u);
    EXPECT_EQ(
        rank.resting[timeline::MemoryKind::optimizer_state], 2 * whole / 4);
    EXPECT_EQ(
        rank.resting[timeline::MemoryKind::parameters],
        stage < 3 ? whole : whole / 4);
    EXPECT_EQ(calls(rank, "reduce_scatter"), 8);
    EXPECT_EQ(sum_of(rank, "reduce_scatter", &PlannedCalls::bytes), whole);
    peaks.push_back(rank.peak.total());
  }
  EXPECT_GT(peaks[0], peaks[1]);
  EXPECT_GE(peaks[1], peaks[2]);
  EXPECT_GT(peaks[2], peaks[3]);
}

// Ranks of cp have fewer tokens, which the layers' figures say, and hold
// parameters as ranks of fsdp do, or replicas where nothing is sharded.
TEST(MemoryPlan, RanksOfContextParallelismHoldParametersLikeOthers) {
  const auto like = [](const Layout& cut, const Layout& other,
                       ComputeDtype compute) {
    const auto plan = [&](const Layout& layout) {
      Job job;
      job.layout = layout;
      job.precision.compute = compute;
      return first_rank(model_of(3), job);
    };
    const auto a = plan(cut), b = plan(other);
    EXPECT_EQ(a.peak.total(), b.peak.total()) << to_string(cut);
    EXPECT_EQ(calls(a, "reduce_scatter"), calls(b, "reduce_scatter"));
    EXPECT_EQ(calls(a, "all_reduce"), calls(b, "all_reduce"));
  };
  like({.dp_shard = 2, .cp = 4}, {.dp_shard = 8}, ComputeDtype::same);
  like({.dp_replicate = 2, .cp = 2}, {.dp_replicate = 4}, ComputeDtype::same);
  like({.cp = 4}, {.dp_shard = 4}, ComputeDtype::bf16);
}

// Ranks of ep have different experts, and sum the gradients of all else.
TEST(MemoryPlan, ExpertsAreSummedByTheRanksThatHaveThem) {
  auto model = model_of(3);
  model.layers[1].parameters = {
      {.numel = 500, .decays = true},
      {.numel = kNumel - 500, .decays = true, .expert = true}};
  const auto summed = [&](const Layout& layout, bool flat,
                          int64_t PlannedCalls::*figure) {
    Job job;
    job.layout = layout;
    if (flat) job.precision.compute = ComputeDtype::bf16;
    return sum_of(first_rank(model, job), "all_reduce", figure);
  };
  const auto bytes = [&](const Layout& layout) {
    return summed(layout, false, &PlannedCalls::bytes);
  };
  EXPECT_EQ(bytes({.ep = 2}), 4 * (2 * kNumel + 500));
  EXPECT_EQ(bytes({.dp_replicate = 2, .ep = 2}), 4 * 3 * kNumel);
  EXPECT_EQ(bytes({.dp_replicate = 2}), 4 * 3 * kNumel);
  // In flat buffers: one for the experts, one for the rest of each layer.
  const auto flats = [&](const Layout& layout) {
    return summed(layout, true, &PlannedCalls::count);
  };
  EXPECT_EQ(flats({.ep = 2}), 3);
  EXPECT_EQ(flats({.dp_replicate = 2, .ep = 2}), 4);
  EXPECT_EQ(flats({.dp_shard = 2, .ep = 2}), 0);
  EXPECT_EQ(flats({.dp_replicate = 2, .dp_shard = 2, .ep = 2}), 4);
}

TEST(MemoryPlan, StageThreeGathersAheadAndFrees) {
  const auto model = model_of(8);
  Job job;
  job.layout.dp_shard = 4;
  const int64_t unit = 4 * kNumel;
  for (const int64_t prefetch : {0, 1, 2}) {
    job.shard.prefetch = prefetch;
    const auto rank = first_rank(model, job);
    // The last layers stay from forward to backward: one gather of each is
    // less.
    EXPECT_EQ(calls(rank, "all_gather"), 16 - 1 - prefetch) << prefetch;
    EXPECT_LE(
        rank.peak[timeline::MemoryKind::unsharded] +
            rank.peak[timeline::MemoryKind::gradients],
        (1 + prefetch + 2) * unit + 8 * unit / 4);
  }
  job.shard.gather = Gather::step;
  const auto once = first_rank(model, job);
  EXPECT_EQ(calls(once, "all_gather"), 8);
  EXPECT_EQ(once.peak[timeline::MemoryKind::unsharded], 8 * unit);
}

TEST(MemoryPlan, AccumulationKeepsWholeGradientsInStageOneAlone) {
  const auto model = model_of(8, passes(3));
  Job job;
  job.layout.dp_shard = 4;
  job.shard.stage = 1;
  const auto one = first_rank(model, job);
  job.shard.stage = 2;
  const auto two = first_rank(model, job);
  EXPECT_EQ(calls(one, "reduce_scatter"), 8);
  EXPECT_EQ(calls(two, "reduce_scatter"), 3 * 8);
  const int64_t whole = 8 * 4 * kNumel;
  EXPECT_EQ(one.peak[timeline::MemoryKind::gradients], whole + whole / 4);
  EXPECT_LE(
      two.peak[timeline::MemoryKind::gradients], whole / 4 + 2 * whole / 8);
}

TEST(MemoryPlan, LowPrecisionHasMastersAndWholeParameters) {
  auto model = model_of(8);
  model.compute_bytes = 2;
  Job job;
  job.precision.compute = ComputeDtype::bf16;
  const int64_t numel = 8 * kNumel;
  const auto rank = first_rank(model, job);
  EXPECT_EQ(rank.resting[timeline::MemoryKind::parameters], 4 * numel);
  EXPECT_EQ(rank.resting[timeline::MemoryKind::unsharded], 2 * numel);
  job.memory.offload = Offload::optimizer;
  const auto offloaded = first_rank(model, job);
  EXPECT_EQ(offloaded.resting[timeline::MemoryKind::parameters], 0);
  EXPECT_EQ(offloaded.resting[timeline::MemoryKind::optimizer_state], 0);
  EXPECT_EQ(offloaded.host_bytes, (4 + 8 + 4) * numel);
}

TEST(MemoryPlan, EarlierPipelineRanksStoreMoreMicrobatches) {
  PipelineLayout layout{.microbatches = 8};
  auto model = model_of(4, make_schedule(layout, 4));
  model.boundaries = {0, 1, 2, 3, 5};
  Job job;
  job.layout.pp = 4;
  const auto plan = plan_memory(model, job);
  ASSERT_EQ(plan.ranks.size(), 4u);
  for (size_t rank = 0; rank + 1 < 4; ++rank) {
    EXPECT_EQ(plan.ranks[rank].ranks, std::vector<int>{static_cast<int>(rank)});
    EXPECT_GT(plan.ranks[rank].peak.total(), plan.ranks[rank + 1].peak.total());
    EXPECT_GE(calls(plan.ranks[rank], "send"), 8);
  }
  EXPECT_EQ(calls(plan.ranks[1], "send"), 16);
  EXPECT_EQ(calls(plan.ranks[3], "send"), 8);
}

TEST(MemoryPlan, AdviceComesBestFirstAndHelps) {
  auto model = model_of(8);
  for (auto& layer : model.layers) {
    for (auto& use : layer.use) {
      use.kept_bytes *= 500;
    }
  }
  Job job;
  job.layout.dp_replicate = 4;
  const int64_t now = plan_memory(model, job).largest().peak.total();
  const auto advice = advise(model, job);
  ASSERT_GE(advice.size(), 3u);
  for (size_t i = 0; i < advice.size(); ++i) {
    EXPECT_EQ(advice[i].peak_bytes + advice[i].saves_bytes, now);
    if (i == 0) continue;
    EXPECT_GE(advice[i - 1].saves_bytes, advice[i].saves_bytes);
  }
  const std::string text = explain_limit(model, job, now - 1000);
  EXPECT_THAT(text, HasSubstr("rank 0 needs "));
  EXPECT_THAT(text, HasSubstr(", which fits"));
  EXPECT_THAT(text, HasSubstr("memory.recompute = \"all\" saves "));
  EXPECT_EQ(explain_limit(model, job, now), "");
  EXPECT_EQ(explain_limit(model, job, 0), "");
}

TEST(MemoryPlan, OffloadNeedsItsHostsMemory) {
  const auto model = model_of(8);
  Job job;
  job.layout.dp_shard = 4;
  job.checkpoint.at_end = false;
  EXPECT_EQ(explain_host_memory(model, job, {0, 1}, 0), "");
  job.memory.offload = Offload::optimizer;
  const int64_t each = first_rank(model, job).host_bytes;
  ASSERT_GT(each, 0);
  EXPECT_EQ(explain_host_memory(model, job, {2, 3}, 2 * each), "");
  EXPECT_THAT(
      explain_host_memory(model, job, {2, 3}, 2 * each - 1),
      HasSubstr(
          "[memory] offload = \"optimizer\": the 2 ranks of this host need"));
  EXPECT_THAT(
      explain_host_memory(model, job, {3}, each - 1),
      HasSubstr("rank 3 needs"));
  job.memory = {.activations = Activations::offload};
  EXPECT_THAT(
      explain_host_memory(model, job, {0}, 0),
      HasSubstr("[memory] activations = \"offload\": rank 0 needs"));
}

// Ranks that compute in the host's memory have all of theirs there.
TEST(MemoryPlan, OffloadOnCpusNeedsRoomForEverything) {
  auto model = model_of(8);
  model.host_is_device = true;
  Job job;
  job.memory.offload = Offload::parameters;
  const auto plan = first_rank(model, job);
  const int64_t all = plan.host_bytes + plan.peak.total();
  EXPECT_EQ(explain_host_memory(model, job, {0}, all), "");
  EXPECT_NE(explain_host_memory(model, job, {0}, all - 1), "");
}

// Without a device of their own, too, when nothing is offloaded.
TEST(MemoryPlan, CpuRanksNeedTheirHostsMemory) {
  auto model = model_of(8);
  model.host_is_device = true;
  Job job;
  job.layout.dp_replicate = 2;
  const int64_t all = 2 * first_rank(model, job).peak.total();
  EXPECT_EQ(explain_host_memory(model, job, all_ranks(job.layout), all), "");
  EXPECT_THAT(
      explain_host_memory(model, job, all_ranks(job.layout), all - 1),
      testing::StartsWith("[layout] dp=2: the 2 ranks of this host need "));
  const auto plan = plan_memory(model, job);
  EXPECT_THAT(
      to_text(plan, model, job, {.host_bytes = all - 1}),
      HasSubstr("\nDoes not fit this host: [layout] dp=2: "));
}

// Ranks share what they write; two copies in the optimizer's state.
TEST(MemoryPlan, CheckpointsAreWrittenFromACopyOnTheHost) {
  auto model = model_of(8);
  int64_t numel = 0;
  for (const auto& layer : model.layers) {
    for (const auto& one : layer.parameters) numel += one.numel;
  }
  const int64_t state = 3 * numel * model.master_bytes;
  Job job;
  const auto copy = [&] { return first_rank(model, job).snapshot_bytes; };
  EXPECT_EQ(copy(), state) << "from a GPU, at the end";
  model.host_is_device = true;
  EXPECT_EQ(copy(), 0);
  job.checkpoint.every_steps = 10;
  EXPECT_EQ(copy(), state);
  for (const Layout& layout :
       {Layout{.dp_replicate = 4}, Layout{.dp_shard = 4},
        Layout{.dp_replicate = 2, .dp_shard = 2}}) {
    job.layout = layout;
    EXPECT_EQ(copy(), state / 4);
  }
  job.layout = {};
  job.optimizer.name = OptimizerKind::sgd;
  EXPECT_EQ(copy(), state / 3);
  job.optimizer.momentum = 0.9;
  EXPECT_EQ(copy(), state / 3 * 2);
  model.layers[0].buffer_bytes = 100;
  EXPECT_EQ(copy(), state / 3 * 2 + 100);
  const std::string text = to_text(plan_memory(model, job), model, job);
  EXPECT_THAT(text, HasSubstr("at rest  snapshot"));
  const std::string json = to_json(plan_memory(model, job), model, job);
  EXPECT_THAT(json, HasSubstr("\"snapshot_bytes\": " + std::to_string(copy())));
  job.checkpoint.async = false;
  EXPECT_EQ(copy(), 0);
  EXPECT_THAT(
      to_text(plan_memory(model, job), model, job),
      testing::Not(HasSubstr("snapshot")));
}

TEST(MemoryPlan, OffloadLeavesRoomForTheCopy) {
  auto model = model_of(8);
  model.host_is_device = true;
  Job job;
  job.memory.offload = Offload::optimizer;
  job.checkpoint.every_minutes = 10;
  const auto plan = first_rank(model, job);
  ASSERT_GT(plan.snapshot_bytes, 0);
  const int64_t all = plan.host_bytes + plan.peak.total() + plan.snapshot_bytes;
  EXPECT_EQ(explain_host_memory(model, job, {0}, all), "");
  EXPECT_THAT(
      explain_host_memory(model, job, {0}, all - 1),
      HasSubstr(" of them for what checkpoints are written from, "));
}

// One for each set of ranks, however many groups have it.
TEST(MemoryPlan, CommunicatorsOfGpusAreCounted) {
  auto model = model_of(8);
  Job job;
  const auto notes = [&] { return plan_memory(model, job).notes; };
  EXPECT_THAT(notes(), IsEmpty());
  job.layout = {.dp_shard = 8};
  EXPECT_THAT(
      notes(), ElementsAre("not in the plan: the GPU's context and 1 NCCL "
                           "communicator, of 8 ranks"));
  job.layout = {.dp_replicate = 2, .dp_shard = 4, .tp = 2};
  EXPECT_THAT(
      notes(), ElementsAre("not in the plan: the GPU's context and 5 NCCL "
                           "communicators, of 16, 8, 4, 2, 2 ranks"));
  model.host_is_device = true;
  EXPECT_THAT(notes(), IsEmpty());
}

TEST(MemoryPlan, TextFoldsRanksThatAreAlike) {
  const auto model = model_of(4);
  Job job;
  job.layout.dp_shard = 8;
  const auto plan = plan_memory(model, job);
  const std::string text = to_text(plan, model, job);
  EXPECT_THAT(text, HasSubstr("0 to 7"));
  EXPECT_THAT(text, HasSubstr("parameters of 4 layers"));
  // Axes have the names that --layout takes.
  EXPECT_THAT(text, HasSubstr("fsdp"));
  EXPECT_EQ(text.find("dp_shard"), std::string::npos);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    EXPECT_LE(end - begin, 100u) << text.substr(begin, end - begin);
    begin = end + 1;
  }
  EXPECT_THAT(
      to_text(plan, model, job, {.colours = true}), HasSubstr("\x1b[34m"));
}

}  // namespace echelon::memory_plan::memory_plan_test
