// Echelon's side of a data-parallel step, for versus_pytorch/run.py: the same
// weights, batches and optimizer as torch_step.py has. Rank 0 writes JSON.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "benchmarks/arguments.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/comm/world.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/data/distributed_data_parallel.h"

namespace {

using namespace echelon;

struct LocalBatch {
  torch::Tensor inputs;
  torch::Tensor targets;
};

torch::Tensor read_tensor(
    const safetensors::File& file, const std::string& name,
    torch::Dtype dtype) {
  const auto& info = file.at(name);
  return torch::from_blob(
             const_cast<std::byte*>(file.bytes(info).data()), info.shape, dtype)
      .clone();
}

/// This rank's share of each global batch of the file.
std::vector<LocalBatch> read_batches(
    const std::string& path, int64_t global_batch, const World& world) {
  const safetensors::File file(path);
  const auto inputs = read_tensor(file, "inputs", torch::kFloat32);
  const auto targets = read_tensor(file, "targets", torch::kInt64);
  const int64_t share = global_batch / world.size();
  std::vector<LocalBatch> batches;
  for (int64_t begin = 0; begin < inputs.size(0); begin += global_batch) {
    const int64_t mine = begin + world.rank() * share;
    batches.push_back(
        {inputs.narrow(0, mine, share), targets.narrow(0, mine, share)});
  }
  return batches;
}

struct Replica {
  std::shared_ptr<Network> network;
  std::unique_ptr<Optimizer> optimizer;
};

Replica build(const Arguments& arguments, const std::vector<int64_t>& shape) {
  ModelOptions model{.name = arguments.text("--model")};
  if (arguments.has("--hidden")) {
    model.hidden = arguments.integers("--hidden");
  }
  auto network =
      make_network(model, shape, arguments.integer("--classes"), /*seed=*/0);
  load_weights(*network, arguments.text("--weights"));
  static const std::map<std::string, OptimizerKind> kinds{
      {"sgd", OptimizerKind::sgd},
      {"adam", OptimizerKind::adam},
      {"adamw", OptimizerKind::adamw}};
  OptimizerOptions optimizer{
      .name = kinds.at(arguments.text("--optimizer")),
      .learning_rate = arguments.number("--learning-rate"),
      .weight_decay = 0.0};
  return {network, make_optimizer(optimizer, *network)};
}

/// `model` is the network or its distributed wrapper. Returns the last loss.
template <class Model>
torch::Tensor
step(Model& model, Optimizer& optimizer, const LocalBatch& batch) {
  optimizer.zero_grad();
  auto loss = torch::nn::functional::cross_entropy(
      model.forward(batch.inputs), batch.targets);
  loss.backward();
  optimizer.step();
  return loss;
}

template <class Model>
double seconds_per_step(
    Model& model, Optimizer& optimizer, const std::vector<LocalBatch>& batches,
    int64_t count, const World& world) {
  world.group().barrier();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; ++i) {
    step(model, optimizer, batches[i % batches.size()]);
  }
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - start;
  return seconds.count() / static_cast<double>(count);
}

std::string json_list(const std::vector<double>& values) {
  std::string text;
  for (double value : values) {
    char number[32];
    std::snprintf(number, sizeof number, "%.9g", value);
    text += (text.empty() ? "" : ", ") + std::string(number);
  }
  return "[" + text + "]";
}

void write_first_step_time(const std::string& path) {
  const std::chrono::duration<double> now =
      std::chrono::system_clock::now().time_since_epoch();
  std::ofstream(path) << std::fixed << now.count();
}

void run(const Arguments& arguments) {
  torch::set_num_threads(1);
  auto world = World::from_environment();
  const auto out = arguments.text("--out");
  const auto batches = read_batches(
      arguments.text("--data"), arguments.integer("--batch"), world);
  const auto shape = batches.front().inputs.sizes().slice(1).vec();

  auto replica = build(arguments, shape);
  DistributedDataParallel ddp(replica.network, world.group());
  if (arguments.has("--first-step")) {
    step(ddp, *replica.optimizer, batches.front());
    write_first_step_time(out + "." + std::to_string(world.rank()));
    return;
  }

  std::vector<double> losses;
  for (size_t i = 0; i < 6; ++i) {
    const auto loss =
        step(ddp, *replica.optimizer, batches[i % batches.size()]).detach();
    world.group().all_reduce(loss, ReduceOp::avg).wait();
    losses.push_back(loss.item<double>());
  }

  auto alone = build(arguments, shape);
  const int64_t steps = arguments.integer("--block-steps");
  std::vector<double> together_seconds, alone_seconds;
  for (int block = 0; block < 6; ++block) {
    const double with =
        seconds_per_step(ddp, *replica.optimizer, batches, steps, world);
    const double without = seconds_per_step(
        *alone.network, *alone.optimizer, batches, steps, world);
    if (block > 0) {  // the first one warms up
      together_seconds.push_back(with);
      alone_seconds.push_back(without);
    }
  }
  if (world.rank() == 0) {
    std::ofstream(out) << "{\"losses\": " << json_list(losses)
                       << ", \"step_seconds\": " << json_list(together_seconds)
                       << ", \"alone_seconds\": " << json_list(alone_seconds)
                       << "}\n";
  }
}

}  // namespace

int main(int argc, char** argv) try {
  run(Arguments(argc, argv));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
