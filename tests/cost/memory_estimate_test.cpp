// Memory by formula: against the papers' equations, in its limits, and against
// what others measured (benchmarks/published).
#include "echelon/cost/memory_estimate.h"

#include <gtest/gtest.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"

namespace echelon::cost::memory_estimate_test {

constexpr double kGiB = 1073741824.0;

Strategy
strategy_of(const Layout& layout, int64_t batch, const char* framework) {
  return {.layout = layout, .global_batch = batch, .framework = framework};
}

double gib(const ModelShape& model, const Strategy& strategy) {
  return estimate_memory(model, strategy).peak_bytes() / kGiB;
}

// arXiv:2205.05198, equations 1, 2 and 4 and table 2, of one layer of GPT-3.
TEST(ActivationBytes, AreThoseOfKorthikanti) {
  const ModelShape model = find_model("gpt3-175b");
  const Framework& framework = find_framework("megatron-2022");
  Strategy strategy = strategy_of({.tp = 1}, 8, "megatron-2022");
  const double s = 2048, h = 12288, a = 96, t = 8, sbh = s * h;
  const auto kept = [&](Recompute how) {
    return block_bytes(model, strategy, framework, false, how).kept / sbh;
  };
  EXPECT_NEAR(kept(Recompute::none), 34 + 5 * a * s / h, 1e-9);
  strategy.layout.tp = 8;
  EXPECT_NEAR(kept(Recompute::none), 10 + 24 / t + 5 * a * s / (h * t), 1e-9);
  strategy.sequence_parallel = true;
  EXPECT_NEAR(kept(Recompute::none), (34 + 5 * a * s / h) / t, 1e-9);
  EXPECT_NEAR(kept(Recompute::selective), 34 / t, 1e-9);
  EXPECT_NEAR(kept(Recompute::all), 2 / t, 1e-9);
}

// silu_times() (parallel/tensor/mlp.h) keeps its two inputs, and the next
// matmul keeps its product.
TEST(ActivationBytes, OfAGatedFeedForwardAreThreeTensors) {
  const ModelShape model = find_model("llama3-8b");
  const double s = 8192, h = 4096, projected = h + 2 * 1024, ffn = 14336;
  const auto kept = block_bytes(
                        model, strategy_of({}, 8, "echelon"),
                        find_framework("echelon"), false, Recompute::none)
                        .kept;
  EXPECT_NEAR(kept / (2 * s), 4 * h + projected + h + 3 * ffn, 1e-6);
}

// Beside what is kept, backward needs gradients: of the residual stream twice,
// and of the feed-forward's two tensors or of scores, projections and
// attention.
TEST(ActivationBytes, WhileALayerComputesItsGradientsAreThere) {
  const ModelShape model = find_model("gpt3-175b");
  const Strategy strategy = strategy_of({}, 8, "megatron-2022");
  const double s = 2048, h = 12288, a = 96, sbh = s * h;
  const auto working = [&](const char* framework, Recompute how) {
    return block_bytes(model, strategy, find_framework(framework), false, how)
               .working /
           sbh;
  };
  const double fused = 2 * (2 + 2 * 4),
               scores = 2 * (2 + 2 * a * s / h + 3 + 1);
  EXPECT_NEAR(working("echelon", Recompute::none), fused, 1e-9);
  EXPECT_NEAR(working("megatron-2022", Recompute::none), scores, 1e-9);
  // The recomputed tensors are there as well.
  EXPECT_NEAR(
      working("megatron-2022", Recompute::all), scores + 34 + 5 * a * s / h - 2,
      1e-9);
}

// Ranks of tp hold the compressed tensors of queries, keys and values, and
// their norm, whole.
TEST(ActivationBytes, OfLatentAttentionAreItsCompressedTensorsToo) {
  ModelShape model = find_model("deepseek-v3");
  Strategy strategy = strategy_of({.tp = 4}, 8, "echelon");
  const auto kept = [&](bool sequence_parallel) {
    strategy.sequence_parallel = sequence_parallel;
    return block_bytes(
               model, strategy, find_framework("echelon"), false,
               Recompute::none)
        .kept;
  };
  const double tokens =
      2.0 * static_cast<double>(model.seq_len);  // two bytes each
  const double whole = 4 * 7168 + 2 * (1536 + 512);
  EXPECT_NEAR(kept(false) - kept(true), tokens * whole * 3 / 4, 1);
}

TEST(ActivationBytes, OfACountedLayerAreItsElements) {
  const CountedLayer layer{
      .name = "conv", .kept_elements = 100, .output_elements = 30};
  Strategy strategy = strategy_of({}, 8, "echelon");
  strategy.microbatch_size = 4;
  const auto bytes = [&](Recompute how) {
    return counted_bytes(layer, strategy, how);
  };
  EXPECT_EQ(bytes(Recompute::none).kept, 2 * 4 * 100);
  EXPECT_EQ(bytes(Recompute::none).working, 2 * 4 * 2 * 30);
  EXPECT_EQ(bytes(Recompute::selective).kept, 2 * 4 * 50);
  EXPECT_EQ(bytes(Recompute::selective).working, 2 * 4 * (50 + 2 * 30));
  EXPECT_EQ(bytes(Recompute::all).kept, 2 * 4 * 30);
  EXPECT_EQ(bytes(Recompute::all).output, 2 * 4 * 30);
}

// arXiv:1910.02054, figure 1: 7.5 B parameters on 64 ranks, 16 bytes each.
TEST(StateBytes, AreThoseOfZeRO) {
  const double parameters = 7.5e9;
  Strategy strategy = strategy_of({.dp_shard = 64}, 64, "deepspeed");
  Framework framework = find_framework("deepspeed");
  framework.memory.master_gradient_bytes = 0;
  const double expected[] = {120, 31.4, 16.6, 1.9};
  for (int64_t stage = 0; stage <= 3; ++stage) {
    strategy.zero_stage = stage;
    const timeline::MemoryByKind state =
        state_bytes({.dense = parameters}, strategy, framework).device;
    EXPECT_NEAR(static_cast<double>(state.total()) / 1e9, expected[stage], 0.1);
  }
}

// The trainer's pipelines reduce once a step where parameters stay unsharded.
TEST(StateBytes, PipelinesThatGatherOnceKeepWholeGradients) {
  Strategy strategy = strategy_of({.dp_shard = 4, .pp = 2}, 32, "echelon");
  strategy.zero_stage = 3;
  const Framework& framework = find_framework("echelon");
  const auto gradients = [&](bool once) {
    strategy.unshard_once = once;
    return state_bytes({.dense = 1e6}, strategy, framework)
        .device[timeline::MemoryKind::gradients];
  };
  EXPECT_EQ(gradients(false), 4 * 1'000'000 / 4);
  EXPECT_EQ(gradients(true), 4 * 1'000'000 / 4 + 2 * 1'000'000);
  strategy.layout = {.dp_shard = 4};
  EXPECT_EQ(gradients(true), gradients(false));
}

TEST(StateBytes, AnOptimizerKeepsWhatItsStepNeeds) {
  Strategy strategy = strategy_of({}, 32, "echelon");
  const auto state = [&] {
    return state_bytes({.dense = 1e6}, strategy, find_framework("echelon"))
        .device[timeline::MemoryKind::optimizer_state];
  };
  EXPECT_EQ(state(), 2 * 4 * 1'000'000);  // two moments
  strategy.optimizer = OptimizerKind::sgd;
  EXPECT_EQ(state(), 0);
  strategy.momentum = 0.9;
  EXPECT_EQ(state(), 4 * 1'000'000);
}

TEST(MemoryEstimate, OfAPartIsLess) {
  const ModelShape model = find_model("llama3-70b");
  const auto with = [&](auto change) {
    Strategy strategy = strategy_of({.tp = 2, .pp = 2}, 16, "echelon");
    change(strategy);
    return gib(model, strategy);
  };
  const double plain = with([](Strategy&) {});
  const auto less = [&](auto change) { EXPECT_LT(with(change), plain); };
  less([](Strategy& s) { s.layout.tp = 4; });
  less([](Strategy& s) { s.layout.pp = 4; });
  less([](Strategy& s) { s.layout.cp = 2; });
  less([](Strategy& s) { s.sequence_parallel = true; });
  less([](Strategy& s) { s.recompute = Recompute::selective; });
  less([](Strategy& s) { s.recompute = Recompute::all; });
  less([](Strategy& s) { s.offload_optimizer = true; });
  less([](Strategy& s) { s.offload_activations = true; });
  for (const int64_t stage : {1, 2, 3}) {
    less([=](Strategy& s) {
      s.layout.dp_shard = 4;
      s.zero_stage = stage;
    });
  }
  EXPECT_GT(with([](Strategy& s) { s.schedule = ScheduleKind::gpipe; }), plain);
  EXPECT_GT(with([](Strategy& s) { s.microbatch_size = 2; }), plain);
  // Some layers of each stage compute again, the others keep.
  const double some = with([](Strategy& s) {
    s.recompute = Recompute::all;
    s.recompute_layers = 20;
  });
  EXPECT_LT(some, plain);
  EXPECT_GT(some, with([](Strategy& s) { s.recompute = Recompute::all; }));
}

TEST(ActivationBytes, OfAStageIsTheSumKeptAndTheLargestAtWork) {
  ModelShape model;
  for (const double elements : {5.0, 70.0, 20.0}) {
    model.layers.push_back(
        {.forward_flops = 1,
         .backward_flops = 2,
         .kept_elements = elements,
         .output_elements = elements});
  }
  const auto stages = stage_activations(
      model, strategy_of({}, 1, "echelon"), find_framework("echelon"));
  ASSERT_EQ(stages.size(), 1u);
  EXPECT_EQ(stages[0].kept, 2 * (5 + 70 + 20));
  EXPECT_EQ(stages[0].working, 2 * 2 * 70);
  EXPECT_EQ(stages[0].output, 2 * 20);
}

// Masters that are cast when used: gradients are what is computed in.
TEST(StateBytes, GradientsAreAsWideAsTheSoftwareSumsThem) {
  const RankParameters part{.dense = 1e9};
  const auto gradients = [&](const char* name, cluster::Precision precision) {
    Strategy strategy = strategy_of({}, 8, name);
    strategy.precision = precision;
    const StateBytes state = state_bytes(part, strategy, find_framework(name));
    return static_cast<double>(state.device[timeline::MemoryKind::gradients]);
  };
  EXPECT_EQ(gradients("echelon", cluster::Precision::bf16), 2e9);
  EXPECT_EQ(gradients("echelon", cluster::Precision::fp32), 4e9);
  EXPECT_EQ(gradients("megatron-2022", cluster::Precision::bf16), 4e9);
  EXPECT_EQ(gradients("megatron-core", cluster::Precision::bf16), 2e9);
}

TEST(StateBytes, AnOffloadedOptimizerIsInTheHostsMemory) {
  const RankParameters part{.dense = 1e9};
  for (const auto& [name, host] :
       {std::pair("echelon", 12e9), std::pair("megatron-2022", 12e9)}) {
    Strategy strategy = strategy_of({}, 8, name);
    const Framework& framework = find_framework(name);
    const timeline::MemoryByKind here =
        state_bytes(part, strategy, framework).device;
    strategy.offload_optimizer = true;
    const StateBytes state = state_bytes(part, strategy, framework);
    EXPECT_GT(here[timeline::MemoryKind::optimizer_state], 0);
    EXPECT_EQ(state.device[timeline::MemoryKind::optimizer_state], 0) << name;
    EXPECT_EQ(
        state.device[timeline::MemoryKind::gradients],
        here[timeline::MemoryKind::gradients]);
    EXPECT_EQ(state.host_bytes, host) << name;
  }
}

TEST(MemoryEstimate, AScheduleIsOfPipelinesAlone) {
  const ModelShape model = find_model("gpt3-175b");
  Strategy strategy =
      strategy_of({}, 16, "megatron-2022");  // blocks are the most
  const double plain = gib(model, strategy);
  strategy.schedule = ScheduleKind::gpipe;
  EXPECT_EQ(gib(model, strategy), plain);
}

// FSDP keeps the outermost unit gathered: embedding and head, where they are.
TEST(MemoryEstimate, AGatheredEmbeddingIsOnTheRanksThatHaveIt) {
  Strategy strategy = strategy_of({.dp_shard = 8, .pp = 4}, 64, "fsdp");
  strategy.zero_stage = 3;
  const ModelShape model = find_model("llama3-8b");
  const auto gathered = [&](size_t rank) {
    return static_cast<double>(
        estimate_memory(model, strategy)
            .ranks[rank][timeline::MemoryKind::unsharded]);
  };
  const double embedding = 2.0 * 128256 * 4096;
  const double first = gathered(0), middle = gathered(1), last = gathered(3);
  EXPECT_GT(first, 2 * embedding);
  EXPECT_NEAR(first, last, 1e-3 * embedding);
  EXPECT_LT(middle, embedding);
  strategy.schedule = ScheduleKind::zb_v;  // both ends are the first rank's
  EXPECT_NEAR(gathered(0), first + embedding, 1e-3 * embedding);
  EXPECT_EQ(gathered(3), middle);
}

TEST(MemoryEstimate, IsAtLeastTheQuickBound) {
  for (const char* name :
       {"gpt2", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "resnet50"}) {
    const ModelShape model = find_model(name);
    for (const int64_t stage : {0, 1, 2, 3}) {
      Strategy strategy = strategy_of({.dp_shard = 8, .pp = 2}, 32, "echelon");
      strategy.zero_stage = stage;
      const auto estimate = estimate_memory(model, strategy);
      EXPECT_LE(least_bytes(model, strategy), estimate.peak_bytes()) << name;
      EXPECT_EQ(estimate.ranks.size(), 2u);
      EXPECT_GT(least_bytes(model, strategy), 0) << name;
    }
  }
}

TEST(MemoryEstimate, ExpertsAreSharedOverTheirRanks) {
  const ModelShape model = find_model("mixtral-8x7b");
  const auto experts_of = [&](int64_t ep) {
    const auto stages =
        stage_parameters(model, strategy_of({.ep = ep}, 8, "echelon"));
    return stages.front().experts;
  };
  EXPECT_NEAR(experts_of(1), 8 * 3.0 * 4096 * 14336 * 32, 1);
  EXPECT_NEAR(experts_of(8), experts_of(1) / 8, 1);
}

TEST(MemoryEstimate, OfPureDataParallelismOfALargeModelFitsNowhere) {
  const cluster::Device device = cluster::find_device("h100-sxm");
  EXPECT_GT(
      least_bytes(
          find_model("gpt3-175b"),
          strategy_of({.dp_replicate = 8}, 8, "echelon")),
      usable_bytes(device));
  EXPECT_LT(
      gib(find_model("gpt2"), strategy_of({.dp_replicate = 8}, 8, "echelon")) *
          kGiB,
      usable_bytes(device));
}

// One measured peak, in GiB.
struct Measured {
  const char* framework;
  const char* model;
  Layout layout;
  int64_t layers, hidden, heads;  // 0: the model's
  int64_t batch, microbatch, seq;
  const char* schedule;
  Recompute recompute;
  int64_t zero_stage;
  double gib;
};

ModelShape model_of(const Measured& one) {
  ModelShape model = find_model(one.model);
  if (one.layers > 0) {
    model.transformer->layers = one.layers;
    model.transformer->hidden = one.hidden;
    model.transformer->heads = one.heads;
  }
  return model;
}

TEST(MemoryEstimate, IsWithinATenthOfWhatOthersMeasured) {
  const auto none = Recompute::none, all = Recompute::all,
             some = Recompute::selective;
  // clang-format off
  const Measured rows[] = {
    // BLOOM's trials on A100 80 GB: every size of pipeline and microbatch.
    {"megatron-deepspeed", "bloom-176b", {.dp_shard = 4, .tp = 8, .pp = 12},
     72, 14336, 64, 2048, 1, 2048, "1f1b", all, 1, 29},
    {"megatron-deepspeed", "bloom-176b", {.dp_shard = 4, .tp = 8, .pp = 12},
     72, 14336, 64, 2048, 8, 2048, "1f1b", all, 1, 69},
    {"megatron-deepspeed", "bloom-176b", {.dp_shard = 8, .tp = 8, .pp = 6},
     72, 14336, 64, 2048, 4, 2048, "1f1b", all, 1, 56},
    {"megatron-deepspeed", "bloom-176b", {.dp_shard = 24, .tp = 8, .pp = 2},
     72, 14336, 64, 2016, 1, 2048, "1f1b", all, 1, 65},
    {"megatron-deepspeed", "bloom-176b", {.dp_shard = 8, .tp = 2, .pp = 24},
     72, 14336, 64, 2048, 2, 2048, "1f1b", all, 1, 53},
    {"megatron-deepspeed", "bloom-176b", {.tp = 8},
     6, 14336, 64, 512, 2, 2048, "1f1b", all, 1, 54},
    // In bf16 gradients have 32 bits, and so do the buckets in which they are
    // summed.
    {"megatron-deepspeed-bf16", "bloom-176b", {.dp_shard = 8, .tp = 4, .pp = 12},
     106, 12288, 64, 2048, 2, 2048, "1f1b", all, 1, 67},
    {"megatron-deepspeed-bf16", "bloom-176b", {.dp_shard = 8, .tp = 8, .pp = 6},
     100, 12288, 64, 2048, 2, 2048, "1f1b", all, 1, 61},
    // Zero Bubble on A100 80 GB, no recompute: every schedule.
    {"zero-bubble", "zb-gpt-1.5b", {.pp = 8},
     0, 0, 0, 144, 6, 1024, "1f1b", none, 0, 30},
    {"zero-bubble", "zb-gpt-1.5b", {.pp = 8},
     0, 0, 0, 144, 6, 1024, "zb-h1", none, 0, 32},
    {"zero-bubble", "zb-gpt-1.5b", {.pp = 8},
     0, 0, 0, 144, 6, 1024, "zb-h2", none, 0, 59},
    {"zero-bubble", "zb-gpt-6.2b", {.pp = 8},
     0, 0, 0, 24, 3, 1024, "zb-h2", none, 0, 44},
    {"zero-bubble", "zb-gpt-6.2b", {.pp = 16},
     0, 0, 0, 288, 6, 1024, "zb-v", none, 0, 64},
    {"zero-bubble", "zb-gpt-28.3b", {.pp = 32},
     0, 0, 0, 96, 1, 1024, "1f1b", none, 0, 43},
    // NeMo on H100, exact bytes of a log.
    {"megatron-core", "llama3-8b", {.dp_shard = 4, .cp = 2},
     0, 0, 0, 128, 1, 8192, "1f1b", none, 1, 65.97},
    {"megatron-core", "nemotron4-15b", {.dp_shard = 32, .tp = 2},
     0, 0, 0, 256, 2, 4096, "1f1b", none, 1, 67.96},
    // torchtitan on H100.
    {"torchtitan-eager", "llama3-8b", {.dp_shard = 8},
     0, 0, 0, 16, 2, 8192, "1f1b", some, 3, 82.4},
    {"torchtitan-eager", "llama3-8b", {.dp_shard = 128},
     0, 0, 0, 256, 2, 8192, "1f1b", some, 3, 67},
    {"torchtitan", "llama3-8b", {.dp_shard = 128},
     0, 0, 0, 256, 2, 8192, "1f1b", some, 3, 62},
    {"torchtitan", "llama3-8b", {.cp = 8},
     0, 0, 0, 1, 1, 262144, "1f1b", all, 3, 84.5},
  };
  // clang-format on
  for (const Measured& one : rows) {
    Strategy strategy = strategy_of(one.layout, one.batch, one.framework);
    strategy.microbatch_size = one.microbatch;
    strategy.seq_len = one.seq;
    strategy.schedule = schedule_kind(one.schedule);
    strategy.recompute = one.recompute;
    strategy.zero_stage = one.zero_stage;
    const bool megatron = std::string(one.framework) == "megatron-core";
    strategy.sequence_parallel = megatron && one.layout.tp > 1;
    EXPECT_NEAR(gib(model_of(one), strategy), one.gib, 0.1 * one.gib)
        << one.framework << " " << one.model << " " << to_string(one.layout)
        << " " << one.schedule;
  }
}

}  // namespace echelon::cost::memory_estimate_test
