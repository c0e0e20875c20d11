// gpt and llama on a GPU, alone and sharded over ranks that share it, compared
// with the CPU: losses, gradients of every step, and the final parameters.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>

#include "echelon/comm/nccl/nccl_backend.h"
#include "echelon/comm/world.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/expert/grouped_linear.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "tests/models/language_case.h"
#include "tests/parallel/tensor/parts.h"
#include "tests/support/gpu.h"
#include "tests/support/process_ranks.h"

namespace echelon::language_gpu_test {

using namespace language_case;
using parity::NamedTensors;
using parity::Record;
using testing_support::is_rank;
using testing_support::kRunByOthers;

constexpr int kSteps = 3;

struct Case {
  std::string model;
  std::string dtype;
  bool dropout = false;

  // The order of sums differs, over three steps.
  double tolerance() const { return dtype == "float64" ? 1e-9 : 1e-4; }
  ModelOptions options() const {
    auto options = options_of(model);
    options.dtype =
        dtype == "float64" ? ModelDtype::float64 : ModelDtype::float32;
    if (dropout) options.dropout = 0.25;
    return options;
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* model : {"gpt", "llama"}) {
    for (const char* dtype : {"float64", "float32"}) {
      all.push_back({model, dtype, false});
      all.push_back({model, dtype, true});
    }
  }
  return all;
}

std::string name_of(const Case& c) {
  return c.model + "_" + c.dtype + (c.dropout ? "_dropout" : "");
}
void PrintTo(const Case& c, std::ostream* out) {
  *out << name_of(c);
}

// Adam's first steps divide a gradient by its own magnitude, so of a gradient
// that should be zero only the rounding noise would remain.
std::unique_ptr<Optimizer> optimizer_of(const Case& c, const Network& network) {
  OptimizerOptions options{.name = OptimizerKind::adamw, .learning_rate = 1e-3};
  if (c.dtype == "float32") {
    options = {
        .name = OptimizerKind::sgd, .learning_rate = 0.1, .momentum = 0.9};
  }
  return make_optimizer(options, network);
}

NamedTensors on_the_cpu(const Network& network, bool gradients) {
  NamedTensors all;
  for (const auto& item : network.named_parameters()) {
    const auto& tensor = gradients ? item.value().grad() : item.value();
    all[item.key()] = tensor.detach().cpu();
  }
  return all;
}

Record train(
    const Case& c, torch::Device device, const TensorParallel& parallel = {}) {
  const auto network = build(c.options(), parallel);
  network->to(device);
  network->train();
  const auto optimizer = optimizer_of(c, *network);
  const auto inputs = make_inputs().to(device);
  SharedGradients shared(*network, parallel);
  Record record;
  for (int step = 0; step < kSteps; ++step) {
    const auto logits = network->forward(
        Tensors{inputs.tokens, inputs.documents, inputs.keys})[0];
    const auto loss = mean_loss(logits, inputs, parallel);
    loss.backward();
    shared.finish();
    record.step(on_the_cpu(*network, true), loss.item<double>());
    optimizer->step();
    optimizer->zero_grad();
  }
  record.parameters = on_the_cpu(*network, false);
  return record;
}

// This rank's shards of a record of the full model.
Record part_of(const Record& whole, const std::map<std::string, Shard>& parts) {
  const auto cut = [&](const NamedTensors& tensors) {
    NamedTensors here;
    for (const auto& [name, tensor] : tensors) {
      here[name] = slice_of(tensor, parts.at(name));
    }
    return here;
  };
  Record part;
  part.losses = whole.losses;
  for (const auto& step : whole.gradients) part.gradients.push_back(cut(step));
  part.parameters = cut(whole.parameters);
  return part;
}

class LanguageGpu : public GpuTest, public testing::WithParamInterface<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Cases, LanguageGpu, testing::ValuesIn(cases()),
    [](const auto& info) { return name_of(info.param); });

TEST_P(LanguageGpu, ComputesWhatTheCpuDoes) {
  parity::expect_parity(
      train(GetParam(), torch::kCPU), train(GetParam(), test_gpu()),
      GetParam().tolerance());
}

// ---------------------------------------------- two ranks, tensor parallel

// Ranks are processes: backward on one GPU has one thread in a process, which
// ranks as threads would share.
class Rank : public GpuTest {
 protected:
  void SetUp() override {
    if (!is_rank()) GTEST_SKIP() << kRunByOthers;
    GpuTest::SetUp();
  }
};

TEST_F(Rank, EqualsItsShardOfTheCpusModel) {
  World world = World::from_environment(
      {.backend = BackendKind::local, .timeout = std::chrono::minutes(1)});
  for (const auto& c : cases()) {
    const Record expected = train(c, torch::kCPU);
    for (const bool cut_tokens : {false, true}) {
      SCOPED_TRACE(name_of(c) + (cut_tokens ? ", tokens cut" : ""));
      const TensorParallel parallel{
          world.group(), {.sequence_parallel = cut_tokens}};
      const auto parts = parity::parts_of(*build(c.options(), parallel));
      parity::expect_parity(
          part_of(expected, parts), train(c, test_gpu(), parallel),
          c.tolerance());
    }
  }
}

class TensorParallelGpu : public GpuTest {};

TEST_F(TensorParallelGpu, TwoRanksShareTheGpu) {
  testing_support::run_as_ranks(2, "Rank.*", 1);
}

TEST_F(TensorParallelGpu, ThreeRanksShareTheGpu) {
  testing_support::run_as_ranks(3, "Rank.*", 1);
}

// In one kernel where LibTorch has it, else one by one.
TEST(GroupedLinearGpu, IsTheCpus) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
  load_accelerator(DeviceKind::cuda);
  const std::vector<int64_t> counts = {30, 0, 129, 1};
  const auto leaf = [](at::IntArrayRef shape, uint64_t seed) {
    return parity::random(shape, seed).to(torch::kBFloat16);
  };
  const auto all = leaf({4, 64, 128}, 1), x = leaf({160, 128}, 2),
             g = leaf({160, 64}, 3);
  const auto run = [&](const torch::TensorOptions& options) {
    const auto on = [&](const torch::Tensor& tensor) {
      return tensor.to(options).detach();
    };
    const auto matrices = on(all);
    std::vector<torch::Tensor> inputs;
    for (int64_t i = 0; i < 4; ++i) {
      inputs.push_back(matrices[i].detach().requires_grad_());
    }
    const auto rows = on(x).requires_grad_();
    const auto y = grouped_linear(rows, RowCounts(counts), inputs, 0.5);
    inputs.push_back(rows);
    auto results = torch::autograd::grad({y}, inputs, {on(g)});
    results.push_back(y.detach());
    return results;
  };
  const auto found = run(torch::dtype(torch::kBFloat16).device("cuda:0"));
  const auto exact = run(torch::dtype(torch::kFloat64));
  for (size_t i = 0; i < found.size(); ++i) {
    parity::expect_tensor(
        std::to_string(i), exact[i], found[i].cpu().to(torch::kFloat64), 0.02);
  }
}

}  // namespace echelon::language_gpu_test
