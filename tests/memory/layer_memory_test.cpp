// Models give the same bits with and without the settings of [memory]: on one
// device, in pipelines and in tensor-parallel groups.
#include "echelon/memory/layer_memory.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "echelon/layers/network.h"
#include "echelon/models/make_network.h"
#include "echelon/parallel/data/sync_batch_norm.h"
#include "tests/memory/live_bytes.h"
#include "tests/parallel/pipeline/schedules.h"
#include "tests/parallel/pipeline/training.h"
#include "tests/parallel/tensor/parts.h"
#include "tests/support/error_text.h"

namespace echelon::layer_memory_test {

using testing::Each;

constexpr int64_t kVocabulary = 23;
constexpr int64_t kSequence = 8;
constexpr int64_t kBatch = 4;

struct Model {
  LayerList layers;
  Tensors inputs;
  std::vector<counting::TensorSpec> specs() const {
    std::vector<counting::TensorSpec> all;
    for (const auto& input : inputs) {
      all.push_back({input.sizes().vec(), input.scalar_type()});
    }
    return all;
  }
};

Model model_of(const std::string& name, const TensorParallel& parallel = {}) {
  ModelOptions options;
  options.name = name;
  options.dtype = ModelDtype::float64;
  options.layers = 3;
  options.hidden_size = 24;
  options.heads = 4;
  options.kv_heads = name == "llama" ? 2 : 0;
  options.intermediate_size = 40;
  options.max_positions = kSequence;
  options.dropout = 0.2;
  options.hidden = {13, 9, 6};
  if (name == "gpt" || name == "llama") {
    const auto steps = torch::arange(kBatch * kSequence, torch::kInt64);
    return {
        model_layers(options, {kSequence}, kVocabulary, parallel),
        {(steps * 7 + steps * steps * 3)
             .remainder(kVocabulary)
             .view({kBatch, kSequence}),
         steps.view({kBatch, kSequence}).div(5, "floor"),
         torch::tensor({17, 3, 1000001, 5}, torch::kInt64)}};
  }
  const std::vector<int64_t> input =
      name == "mlp" ? std::vector<int64_t>{7} : std::vector<int64_t>{3, 16, 16};
  std::vector<int64_t> batch = {kBatch};
  batch.insert(batch.end(), input.begin(), input.end());
  return {
      model_layers(options, input, kVocabulary, parallel),
      {parity::random(batch, 5)}};
}

// One way to run.
struct Way {
  Recompute recompute = Recompute::none;
  Activations activations = Activations::keep;
};

std::string name_of(const Way& way) {
  return to_string(way.recompute) + "_" + to_string(way.activations);
}

LayerList wrapped(
    const LayerList& list, const Way& way, int64_t budget = 0,
    const std::vector<counting::TensorSpec>& specs = {}) {
  MemoryOptions options;
  options.recompute = way.recompute;
  options.activations = way.activations;
  options.activation_bytes = budget;
  std::vector<cost::RecomputeCost> costs(list.size());
  if (way.recompute == Recompute::budget) costs = recompute_costs(list, specs);
  const LayerMemory memory(
      options, cost::plan_recompute(options, costs), /*min_bytes=*/1);
  return with_forwards(
      list,
      [memory](size_t i, const std::string& name, const BuiltLayer& layer) {
        return memory.wrap(i, name, layer.forward, layer.module);
      });
}

// Steps of gradient descent.
parity::Record train(const LayerList& list, const Tensors& inputs) {
  const auto network = build_network(list, 0, list.size(), 3);
  parity::Record record;
  for (int step = 0; step < 2; ++step) {
    const auto scores = network->forward(inputs)[0];
    const auto loss =
        scores.flatten(0, -2).log_softmax(-1).select(-1, step).neg().mean();
    network->zero_grad();
    loss.backward();
    record.step(*network, loss.item<double>());
    const torch::NoGradGuard no_grad;
    for (auto& parameter : network->parameters()) {
      if (parameter.grad().defined()) parameter.sub_(0.1 * parameter.grad());
    }
  }
  record.end(*network);
  return record;
}

class Models : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(
    Names, Models,
    testing::Values("mlp", "simple_cnn", "resnet18", "gpt", "llama"),
    [](const auto& info) { return info.param; });

TEST_P(Models, EverySettingGivesTheSameBits) {
  at::set_num_threads(1);
  const auto model = model_of(GetParam());
  const auto expected = train(model.layers, model.inputs);
  for (const Way& way :
       {Way{Recompute::none, Activations::offload},
        Way{Recompute::all, Activations::keep},
        Way{Recompute::all, Activations::offload},
        Way{Recompute::selective, Activations::keep},
        Way{Recompute::selective, Activations::offload}}) {
    SCOPED_TRACE(name_of(way));
    parity::expect_parity(
        expected, train(wrapped(model.layers, way), model.inputs),
        parity::kExact);
  }
}

TEST_P(Models, Bf16ActivationsAreNear) {
  const auto model = model_of(GetParam());
  const auto expected = train(model.layers, model.inputs);
  for (const auto recompute : {Recompute::none, Recompute::all}) {
    const auto actual = train(
        wrapped(model.layers, {recompute, Activations::bf16}), model.inputs);
    EXPECT_EQ(expected.losses[0], actual.losses[0]) << "forward is exact";
    double distance = 0, length = 0;
    for (const auto& [name, gradient] : expected.gradients[0]) {
      distance += (gradient - actual.gradients[0].at(name))
                      .square()
                      .sum()
                      .item<double>();
      length += gradient.square().sum().item<double>();
    }
    EXPECT_GT(distance, 0) << "something is rounded";
    EXPECT_LT(std::sqrt(distance / length), 0.3);
  }
}

TEST_P(Models, BudgetsAreKept) {
  const auto model = model_of(GetParam());
  const auto costs = recompute_costs(model.layers, model.specs());
  const auto expected = train(model.layers, model.inputs);
  const auto sum = [&](cost::Recompute choice) {
    int64_t bytes = 0;
    for (const auto& cost : costs) bytes += cost.kept(choice);
    return bytes;
  };
  const int64_t most = sum(cost::Recompute::none);
  const int64_t least =
      std::min(sum(cost::Recompute::all), sum(cost::Recompute::selective));
  for (const int64_t budget : {least, (least + most) / 2}) {
    SCOPED_TRACE(budget);
    const auto list =
        wrapped(model.layers, {Recompute::budget}, budget, model.specs());
    parity::expect_parity(expected, train(list, model.inputs), parity::kExact);
    const auto network = build_network(list, 0, list.size(), 3);
    const LiveBytes live;
    auto scores = network->forward(model.inputs)[0];
    // The scores, random states and counters come on top.
    EXPECT_LE(
        live.now(), budget + static_cast<int64_t>(scores.nbytes()) +
                        (16 << 10) * static_cast<int64_t>(list.size()));
  }
}

// The count on the meta device equals the memory of a real run.
TEST_P(Models, CountsEqualLiveBytes) {
  const auto model = model_of(GetParam());
  for (const auto choice : cost::kRecomputes) {
    SCOPED_TRACE(to_string(choice));
    const auto list = with_recompute(
        model.layers,
        std::vector<cost::Recompute>(model.layers.size(), choice));
    int64_t counted = 0;
    for (const auto& cost : counting::count_layers(list, model.specs())) {
      counted += cost.activation_bytes;
    }
    for (const auto& input : model.inputs) counted -= input.nbytes();
    const auto network = build_network(list, 0, list.size(), 3);
    const LiveBytes live;
    const auto scores = network->forward(model.inputs)[0];
    EXPECT_NEAR(
        static_cast<double>(live.now()), static_cast<double>(counted),
        0.02 * static_cast<double>(counted) +
            static_cast<double>(scores.nbytes()) + (8 << 10));
  }
}

TEST(LayerMemory, CostsOfABlock) {
  const auto model = model_of("gpt");
  const auto specs = model.specs();
  const auto costs = recompute_costs(model.layers, {specs[0], specs[2]});
  const auto& block = costs[model.layers.index_of("transformer.h.1")];
  const int64_t tokens = kBatch * kSequence;
  EXPECT_EQ(block.kept(cost::Recompute::all), tokens * 24 * 8);
  EXPECT_LT(
      block.kept(cost::Recompute::selective),
      block.kept(cost::Recompute::none));
  EXPECT_GT(
      block.kept(cost::Recompute::selective), block.kept(cost::Recompute::all));
  EXPECT_EQ(block.again(cost::Recompute::none), 0);
  // Attention with dropout is written out; its products are recomputed.
  const double scores = 2.0 * kBatch * kSequence * kSequence * 24;
  EXPECT_EQ(block.again(cost::Recompute::selective), 2 * scores);
  // Dropout saves its mask after the last product, which is recomputed too.
  EXPECT_EQ(
      block.again(cost::Recompute::all),
      2 * scores + 2.0 * tokens * 24 * (3 * 24 + 24 + 2 * 40));
}

TEST(LayerMemory, TooSmallABudgetIsRefusedWithTheNeed) {
  const std::vector<cost::RecomputeCost> costs(
      4, {"block", {9 << 20, 5 << 20, 2 << 20}, {0, 1, 2}});
  MemoryOptions options{
      .recompute = Recompute::budget, .activation_bytes = 23 << 20};
  EXPECT_THAT(
      error_text([&] { plan_recompute(options, costs, 3); }),
      HasAll(
          "activation_bytes=24117248 (23 MiB)", "3 microbatches", "24 MiB",
          "offload"));
  options.activation_bytes = 24 << 20;
  EXPECT_THAT(plan_recompute(options, costs, 3), Each(cost::Recompute::all));
  options.activation_bytes = 36 << 20;
  EXPECT_THAT(plan_recompute(options, costs, 1), Each(cost::Recompute::none));
}

// Statistics over ranks are updated once; selective recompute keeps them.
TEST(LayerMemory, SyncBatchNorm) {
  run_ranks(2, [](World& world) {
    const auto run = [&](const std::string& way) {
      const auto weight = parity::random({3}, 1).requires_grad_();
      const auto bias = parity::random({3}, 2).requires_grad_();
      const auto mean = torch::zeros({3}, torch::kFloat64);
      const auto variance = torch::ones({3}, torch::kFloat64);
      LayerForward forward = [&](const Tensors& in) -> Tensors {
        return {torch::tanh(sync_batch_norm(
            in[0], weight, bias, mean, variance, 0.1, 1e-5, world.group()))};
      };
      RecomputeOptions options{.buffers = {mean, variance}};
      if (way == "selective") options.keep = matmul_operators();
      if (way != "none") forward = recomputed(forward, options);
      const auto x = parity::random({4, 3, 5}, 7 + world.rank());
      const uint64_t before = world.history().count();
      const auto a = forward({x})[0];
      const auto b = forward({x * 2})[0];
      (a.square().sum() + b.square().sum()).backward();
      const auto calls =
          torch::tensor(static_cast<int64_t>(world.history().count() - before));
      return Tensors{mean, variance, weight.grad(), bias.grad(), calls};
    };
    const auto expected = run("none");
    const auto all = run("all");
    const auto selective = run("selective");
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(expected[i].equal(all[i])) << i;
      EXPECT_TRUE(expected[i].equal(selective[i])) << i;
    }
    EXPECT_EQ(expected[4].item<int>(), 4);
    EXPECT_EQ(selective[4].item<int>(), 4);
    EXPECT_EQ(all[4].item<int>(), 6);
  });
}

class Pipelines : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(
    Schedules, Pipelines,
    testing::Values(
        "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev"),
    [](const auto& info) {
      auto name = info.param;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST_P(Pipelines, SameBits) {
  const training::Plan plan{.microbatches = 6};
  const auto schedule = schedules::named(GetParam(), 2, plan.microbatches);
  for (const char* net : {"mlp", "tied", "masked"}) {
    const LayerList list = nets::named(net);
    const auto all = training::on_one_device(list, plan);
    const auto on_ranks = [&](const Way* way) {
      std::vector<parity::Record> records(2);
      run_ranks(2, [&](World& world) {
        // Each rank has a LayerMemory of its own.
        const LayerList layers = way != nullptr ? wrapped(list, *way) : list;
        records[world.rank()] =
            training::on_ranks(layers, plan, schedule, world.group(), {});
      });
      return records;
    };
    const auto plain = on_ranks(nullptr);
    for (const Way& way :
         {Way{Recompute::none, Activations::offload},
          Way{Recompute::all, Activations::keep},
          Way{Recompute::all, Activations::offload},
          Way{Recompute::selective, Activations::keep},
          Way{Recompute::selective, Activations::offload}}) {
      SCOPED_TRACE(net + (" " + name_of(way)));
      const auto actual = on_ranks(&way);
      for (int rank = 0; rank < 2; ++rank) {
        parity::expect_parity(plain[rank], actual[rank], parity::kExact);
        training::expect_part(
            all, actual[rank], schedule.rank_of_stage.back() == rank,
            parity::kRounding);
      }
    }
  }
}

// The results of a run and its collectives.
struct Sent {
  parity::Record record;
  std::map<std::string, int> calls;  // by the end of their label
};

std::vector<Sent> on_two_ranks(
    const std::string& name, const TensorParallelOptions& options,
    const Way& way) {
  std::vector<Sent> all(2);
  run_ranks(2, [&](World& world) {
    at::set_num_threads(1);
    const auto model = model_of(name, {world.group(), options});
    auto& mine = all[world.rank()];
    std::mutex mutex;
    world.history().on_end([&](const CollectiveRecord& call) {
      const std::lock_guard lock(mutex);
      ++mine.calls[call.label.substr(call.label.rfind(' ') + 1)];
    });
    mine.record = train(wrapped(model.layers, way), model.inputs);
    world.history().on_end(nullptr);
  });
  return all;
}

class TensorParallelMemory : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(
    Names, TensorParallelMemory,
    testing::Values("mlp", "simple_cnn", "gpt", "llama"),
    [](const auto& info) { return info.param; });

TEST_P(TensorParallelMemory, SelectiveRecomputeRepeatsNoCollective) {
  const bool language = GetParam() == "gpt" || GetParam() == "llama";
  for (const bool sequence_parallel : {false, true}) {
    if (sequence_parallel && !language) continue;
    for (const int64_t chunks : {1, 2}) {
      const TensorParallelOptions options{
          .sequence_parallel = sequence_parallel, .overlap_chunks = chunks};
      SCOPED_TRACE(
          testing::Message()
          << "sequence_parallel=" << sequence_parallel << " chunks=" << chunks);
      const auto plain = on_two_ranks(GetParam(), options, {});
      const auto selective = on_two_ranks(
          GetParam(), options, {Recompute::selective, Activations::keep});
      const auto full = on_two_ranks(
          GetParam(), options, {Recompute::all, Activations::offload});
      for (int rank = 0; rank < 2; ++rank) {
        parity::expect_parity(
            plain[rank].record, selective[rank].record, parity::kExact);
        parity::expect_parity(
            plain[rank].record, full[rank].record, parity::kExact);
        EXPECT_EQ(plain[rank].calls, selective[rank].calls)
            << "selective recompute sends nothing again";
        int before = 0, after = 0;
        for (const auto& [_, count] : plain[rank].calls) before += count;
        for (const auto& [_, count] : full[rank].calls) after += count;
        EXPECT_GT(after, before);
      }
    }
  }
}

}  // namespace echelon::layer_memory_test
