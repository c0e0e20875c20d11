// A program's own data, loss and metrics give what a loop written by hand for
// one device gives, in any layout.
#include "tests/train/own/own_parts.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "echelon/layers/network.h"
#include "echelon/timeline/rollback.h"
#include "echelon/train/strategies/count_job.h"
#include "tests/support/error_text.h"
#include "tests/train/trained_runs.h"

namespace echelon::own_parts_test {

using torch::Tensor;
namespace F = torch::nn::functional;

constexpr double kBound = 1e-10;

struct ByHand {
  std::vector<double> losses;
  std::map<std::string, Tensor> parameters;
  double held_out_loss = 0;
  double mae = 0;
};

std::map<std::string, Tensor> initial(const Job& job, const OwnParts& own) {
  const auto layers = model_source(job, own, own.dataset->spec()).layers;
  const auto network = build_network(layers, 0, layers.size(), job.train.seed);
  std::map<std::string, Tensor> values;
  for (const auto& item : network->named_parameters()) {
    values[item.key()] = item.value().detach().clone().requires_grad_();
  }
  return values;
}

std::vector<Tensor> tensors_of(const std::map<std::string, Tensor>& values) {
  std::vector<Tensor> all;
  for (const auto& [_, tensor] : values) all.push_back(tensor);
  return all;
}

struct Samples {
  Tensor inputs, numbers, classes, weights;
};

Samples samples_of(const std::vector<int64_t>& indices) {
  std::vector<Tensor> inputs, numbers, classes, weights;
  for (const int64_t index : indices) {
    const Sample one = own_sample(index);
    inputs.push_back(one.input);
    numbers.push_back(one.target);
    classes.push_back(one.more_targets[0]);
    weights.push_back(one.more_targets[1]);
  }
  return {
      torch::stack(inputs), torch::stack(numbers), torch::stack(classes),
      torch::stack(weights)};
}

Tensor outputs_of(const std::map<std::string, Tensor>& p, const Tensor& x) {
  const auto linear = [&](const std::string& name, const Tensor& input) {
    return torch::mm(input, p.at(name + ".weight").t()) + p.at(name + ".bias");
  };
  const auto up = torch::tanh(linear("up", x));
  return linear("out", torch::tanh(linear("mid", linear("down", up))));
}

Tensor loss_of(const Tensor& outputs, const Samples& s) {
  const auto squares =
      (outputs.slice(1, 0, kNumbers) - s.numbers).square().sum(1);
  const auto entropy = F::cross_entropy(
      outputs.slice(1, kNumbers), s.classes,
      F::CrossEntropyFuncOptions().reduction(torch::kNone));
  return (s.weights * (squares + entropy)).sum() / s.weights.sum();
}

ByHand by_hand(const Job& job) {
  ByHand result;
  auto p = initial(job, own_parts());
  const auto all = tensors_of(p);
  torch::optim::SGD optimizer(
      all, torch::optim::SGDOptions(job.optimizer.learning_rate)
               .momentum(job.optimizer.momentum));
  const Split split =
      split_samples(kOwnSamples, job.data.holdout, job.train.seed);
  std::vector<int64_t> order;
  size_t at = 0;
  for (int64_t step = 0, epoch = 0; step < job.train.steps; ++step) {
    if (at == order.size()) {
      order = epoch_order(split.train, job.train.seed, epoch++, true);
      at = 0;
    }
    const size_t end =
        std::min(order.size(), at + static_cast<size_t>(job.train.batch));
    const Samples batch = samples_of(
        {order.begin() + static_cast<long>(at),
         order.begin() + static_cast<long>(end)});
    at = end;
    const auto loss = loss_of(outputs_of(p, batch.inputs), batch);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  const torch::NoGradGuard no_grad;
  const Samples held_out = samples_of(split.holdout);
  const auto outputs = outputs_of(p, held_out.inputs);
  result.held_out_loss = loss_of(outputs, held_out).item<double>();
  result.mae = (outputs.slice(1, 0, kNumbers) - held_out.numbers)
                   .abs()
                   .sum()
                   .item<double>() /
               static_cast<double>(split.holdout.size());
  result.parameters = std::move(p);
  return result;
}

void expect_parameters(
    const std::filesystem::path& run,
    const std::map<std::string, Tensor>& expected, const std::string& what) {
  const auto saved = load_tensors(last_weights(run));
  ASSERT_EQ(saved.size(), expected.size()) << what;
  for (const auto& [name, tensor] : saved) {
    const auto difference =
        (tensor - expected.at(name).detach()).abs().max().item<double>();
    EXPECT_LT(difference, kBound) << what << " " << name;
  }
}

class OwnParts_ : public TrainedRuns {
 protected:
  void expect_as_by_hand(
      const Job& job, const OwnParts& own, const std::string& name) {
    std::vector<double> seen;  // by on_step
    OwnParts parts = own;
    parts.on_step = [&](const timeline::StepMetrics& one) {
      seen.push_back(one.loss);
    };
    const auto folder = run(job, name, parts);
    const ByHand expected = by_hand(job);
    const auto metrics = timeline::read_metrics(folder / "metrics.jsonl");
    ASSERT_EQ(metrics.steps.size(), expected.losses.size()) << name;
    for (size_t i = 0; i < expected.losses.size(); ++i) {
      EXPECT_NEAR(metrics.steps[i].loss, expected.losses[i], kBound)
          << name << " step " << i + 1;
      EXPECT_EQ(seen.at(i), metrics.steps[i].loss);
    }
    expect_parameters(folder, expected.parameters, name);
    if (parts.dataset->is_stream()) return;
    ASSERT_FALSE(metrics.evaluations.empty()) << name;
    const auto& last = metrics.evaluations.back();
    EXPECT_EQ(last.samples, 10) << name;
    EXPECT_FALSE(last.accuracy) << name;  // a loss without right answers
    EXPECT_NEAR(last.loss, expected.held_out_loss, kBound) << name;
    ASSERT_EQ(last.own.size(), 1U) << name;
    EXPECT_EQ(last.own[0].first, "mae");
    EXPECT_NEAR(last.own[0].second, expected.mae, kBound) << name;
  }
};

TEST_F(OwnParts_, EqualALoopWrittenByHandInEveryLayout) {
  for (const char* layout :
       {"dp=1", "dp=2", "dp=3", "fsdp=2", "fsdp=3", "tp=2", "tp=3", "pp=2",
        "dp=2,pp=2", "dp=2,fsdp=2", "fsdp=2,tp=2", "tp=2,pp=2", "fsdp=2,pp=2",
        "dp=2,tp=2,pp=2"}) {
    expect_as_by_hand(own_job(layout), own_parts(), layout);
  }
}

TEST_F(OwnParts_, EqualItForStagesPassesAndUnevenRanks) {
  for (const int64_t stage : {1, 2, 3}) {
    Job job = own_job("fsdp=2");
    job.shard.stage = stage;
    job.train.accumulate = 2;
    expect_as_by_hand(job, own_parts(), "stage " + std::to_string(stage));
  }
  Job job = own_job("dp=3");
  job.train.rank_batch = {1, 8, 3};
  expect_as_by_hand(job, own_parts(), "uneven");
  job = own_job("fsdp=2,pp=2");
  job.train.rank_batch = {9, 3};
  expect_as_by_hand(job, own_parts(), "uneven pipelines");
}

TEST_F(OwnParts_, EqualItWhenSamplesComeOneAfterTheOther) {
  OwnParts own = own_parts();
  for (const bool tells_position : {true, false}) {
    own.dataset = std::make_shared<OwnStreams>(tells_position);
    for (const char* layout :
         {"dp=1", "dp=2", "dp=3", "fsdp=2", "tp=2", "pp=2", "dp=2,pp=2"}) {
      expect_as_by_hand(
          own_job(layout), own,
          std::string(layout) + (tells_position ? " stream" : " skipped"));
    }
  }
}

// The rest of a run, in another layout, reads the samples that it has not seen.
TEST_F(OwnParts_, AStreamGoesOnWhereTheCheckpointWas) {
  for (const bool tells_position : {true, false}) {
    OwnParts own = own_parts();
    own.dataset = std::make_shared<OwnStreams>(tells_position);
    const std::string name = tells_position ? "told" : "skipped";
    run(own_job("dp=2", 6), name, own);  // in the second epoch
    const int before = OwnStream::seeks;
    const Job rest = own_job("fsdp=3", 9);
    run(rest, name, own);
    EXPECT_EQ(OwnStream::seeks - before, tells_position ? 3 : 0);
    const ByHand expected = by_hand(rest);
    const auto metrics =
        timeline::read_metrics(folder_.path(name) + "/metrics.jsonl");
    ASSERT_EQ(metrics.steps.size(), 9U);
    for (size_t i = 0; i < 9; ++i) {
      EXPECT_NEAR(metrics.steps[i].loss, expected.losses[i], kBound) << i;
    }
    expect_parameters(folder_.path(name), expected.parameters, name);
  }
}

// In the first epoch the samples of steps 4 to 7 are not finite, in batches of
// four.
class Broken : public OwnDataset {
 public:
  explicit Broken(bool streams) : streams_(streams) {}
  bool is_stream() const override { return streams_; }
  int64_t size() const override {
    return streams_ ? kUnknownSize : OwnDataset::size();
  }
  Sample sample(int64_t index, const SampleContext& context) const override {
    Sample one = own_sample(index);
    if (context.epoch > 0) return one;
    const auto order = OwnStreams::order_of(3, 0);
    const auto at = std::ranges::find(order, index) - order.begin();
    if (at >= 12 && at < 28) one.input = one.input * NAN;
    return one;
  }
  std::unique_ptr<SampleStream>
  open(const SampleContext& context) const override {
    struct Stream : SampleStream {
      std::optional<Sample> next() override {
        if (at >= order.size()) return std::nullopt;
        return data->sample(order[at++], context);
      }
      std::string position() const override { return std::to_string(at); }
      void seek(const std::string& place) override { at = std::stoul(place); }
      const Broken* data = nullptr;
      SampleContext context;
      std::vector<int64_t> order;
      size_t at = 0;
    };
    auto stream = std::make_unique<Stream>();
    stream->data = this;
    stream->context = context;
    stream->order = OwnStreams::order_of(context.seed, context.epoch);
    return stream;
  }

 private:
  bool streams_;
};

TEST_F(OwnParts_, AStreamGoesBackAndLeavesOutTheSameSamples) {
  OwnParts own = own_parts();
  std::vector<std::vector<double>> losses;
  for (const bool streams : {false, true}) {
    own.dataset = std::make_shared<Broken>(streams);
    Job job = own_job("dp=2", 8);
    job.train.batch = 4;
    job.train.on_non_finite = OnNonFinite::rollback;
    job.checkpoint.every_steps = 2;
    const auto folder = run(job, streams ? "stream" : "index", own);
    const auto path = (folder / "metrics.jsonl").string();
    const auto all = timeline::read_rollbacks(path);
    ASSERT_EQ(all.size(), 1U);
    EXPECT_EQ(timeline::samples_text(all[0]), "samples 8 to 27 of epoch 0");
    losses.emplace_back();
    for (const auto& step : timeline::read_metrics(path).steps) {
      losses.back().push_back(step.loss);
    }
  }
  ASSERT_EQ(losses[0].size(), 8U);
  EXPECT_EQ(losses[0], losses[1]);
}

TEST_F(OwnParts_, AStreamCanBeHeldOut) {
  OwnParts own = own_parts();
  own.holdout = std::make_shared<OwnStreams>();
  for (const char* layout : {"dp=1", "dp=3"}) {
    const auto folder = run(own_job(layout, 2), layout, own);
    const auto metrics = timeline::read_metrics(folder / "metrics.jsonl");
    EXPECT_EQ(metrics.evaluations.back().samples, 40) << layout;
  }
}

TEST_F(OwnParts_, VerifyPasses) {
  for (const char* layout : {"dp=2", "fsdp=2", "tp=2", "pp=2", "dp=2,pp=2"}) {
    for (const bool stream : {false, true}) {
      OwnParts own = own_parts();
      if (stream) own.dataset = std::make_shared<OwnStreams>();
      const Job job = own_job(layout);
      run_ranks(static_cast<int>(job.layout.num_ranks()), [&](World& world) {
        const auto result = verify(job, world, {.steps = 5}, own);
        EXPECT_TRUE(result.passed) << layout << "\n" << to_text(result, {});
        EXPECT_EQ(result.num_compared, 5 * (1 + 2 * 8));
      });
    }
  }
}

TEST_F(OwnParts_, MemoryAndOperationsAreCounted) {
  const Job job = own_job("tp=2");
  EXPECT_EQ(count_memory(job, own_parts()).layers.size(), 5U);  // with the loss
  EXPECT_EQ(counted_shape(job, own_parts()).layers.size(), 5U);
}

// ---- a contrastive loss: pairs of one sample against those of all others

class Pairs : public Dataset {
 public:
  int64_t size() const override { return kOwnSamples; }
  SampleSpec spec() const override {
    return {.input_shape = {2, kInputs}, .input_dtype = torch::kFloat64};
  }
  Sample sample(int64_t index, const SampleContext&) const override {
    const auto one = own_sample(index).input;
    return {
        .input = torch::stack({one, torch::cos(one * 1.7)}),
        .target = torch::tensor(index)};
  }
};

LayerList two_towers() {
  LayerList layers;
  layers.add(
      "first", [] { return torch::nn::Linear(kInputs, 5); },
      [](auto& first, const Tensor& x) {
        return std::tuple(first.forward(x.select(1, 0)), x.select(1, 1));
      });
  layers.add(
      "second", [] { return torch::nn::Linear(kInputs, 5); },
      [](auto& second, const Tensor& one, const Tensor& other) {
        return std::tuple(one, torch::tanh(second.forward(other)));
      });
  return layers;
}

Tensor entropy_sum(const Tensor& scores, int64_t begin) {
  return F::cross_entropy(
      scores, torch::arange(begin, begin + scores.size(0)),
      F::CrossEntropyFuncOptions().reduction(torch::kSum));
}

class Contrastive : public Objective {
 public:
  bool needs_whole_batch() const override { return true; }
  Tensor loss_sum(
      const Tensors& outputs, const Tensors&,
      const BatchRanks& ranks) const override {
    const auto one = ranks.gather(outputs[0]);
    const auto other = ranks.gather(outputs[1]);
    return entropy_sum(torch::mm(outputs[0], other.rows.t()), one.begin) +
           entropy_sum(torch::mm(outputs[1], one.rows.t()), one.begin);
  }
};

OwnParts contrastive_parts() {
  return {
      .layers = two_towers(),
      .dataset = std::make_shared<Pairs>(),
      .objective = std::make_shared<Contrastive>()};
}

TEST_F(OwnParts_, AContrastiveLossComparesTheWholeBatch) {
  const int64_t kSteps = 6;
  const Job one = own_job("dp=1", kSteps);
  auto p = initial(one, contrastive_parts());
  torch::optim::SGD optimizer(
      tensors_of(p), torch::optim::SGDOptions(one.optimizer.learning_rate)
                         .momentum(one.optimizer.momentum));
  const Split split = split_samples(kOwnSamples, 0.2, one.train.seed);
  const auto loss_of = [&](const std::vector<int64_t>& indices) {
    const auto x = samples_of(indices).inputs;
    const auto first =
        torch::mm(x, p.at("first.weight").t()) + p.at("first.bias");
    const auto second = torch::tanh(
        torch::mm(torch::cos(x * 1.7), p.at("second.weight").t()) +
        p.at("second.bias"));
    const auto scores = torch::mm(first, second.t());
    return (entropy_sum(scores, 0) + entropy_sum(scores.t(), 0)) /
           static_cast<double>(indices.size());
  };
  std::vector<double> losses;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto order = epoch_order(split.train, one.train.seed, step / 4, true);
    const auto begin = order.begin() + 12 * (step % 4);
    const auto end = step % 4 == 3 ? order.end() : begin + 12;
    const auto loss = loss_of({begin, end});
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  const double held_out = loss_of(split.holdout).item<double>();
  for (const char* layout :
       {"dp=1", "dp=2", "dp=3", "dp=5", "fsdp=2", "fsdp=3", "pp=2",
        "dp=2,pp=2"}) {
    Job job = own_job(layout, kSteps);
    job.pipeline.microbatches = 1;
    if (job.layout == parse_layout("dp=3")) job.train.rank_batch = {1, 8, 3};
    const auto folder = run(job, layout, contrastive_parts());
    const auto metrics = timeline::read_metrics(folder / "metrics.jsonl");
    ASSERT_EQ(metrics.steps.size(), losses.size());
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(metrics.steps[i].loss, losses[i], kBound)
          << layout << " step " << i + 1;
    }
    EXPECT_NEAR(metrics.evaluations.back().loss, held_out, kBound) << layout;
    expect_parameters(folder, p, layout);
  }
}

TEST_F(OwnParts_, AContrastiveLossIsOnePass) {
  Job job = own_job("dp=1");
  job.train.accumulate = 2;
  EXPECT_THAT(
      error_text<ConfigError>([&] { run(job, "a", contrastive_parts()); }),
      HasAll("[train] accumulate = 2", "set it to 1"));
  job = own_job("pp=2");
  EXPECT_THAT(
      error_text<ConfigError>([&] { run(job, "b", contrastive_parts()); }),
      HasAll("[layout] microbatches = 3", "set it to 1"));
}

}  // namespace echelon::own_parts_test
