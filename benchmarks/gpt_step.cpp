// Training steps of a GPT, one process per rank, under `echelon run`: Echelon's
// side of versus_pytorch/gpt.py.
//
//   echelon run -n 2 -- gpt_step --mode tp|dp|fsdp|cp [--stage 1|2|3] [--alone]
//     --layers L --hidden H --heads N --vocabulary V --positions P --steps S
//     --learning-rate R --weights FILE --data FILE [--sequence-parallel]
//     [--chunks C] [--backend local|gloo] --out FILE
//
// FILE of --data holds "tokens", int64 [batches, samples, P + 1]. --alone
// leaves the collectives out: with dp a rank trains on its part by itself, with
// tp and cp the group is silent, and losses mean nothing. cp passes keys round.
// Rank 0 writes JSON.
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/arguments.h"
#include "benchmarks/language_step.h"
#include "benchmarks/process_memory.h"
#include "echelon/comm/world.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/parallel/data/distributed_data_parallel.h"
#include "echelon/parallel/shard/sharded_units.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "echelon/parallel/tensor/vocab.h"

namespace {

using namespace echelon;
using torch::Tensor;

ModelOptions model_of(const Arguments& arguments) {
  ModelOptions model;
  model.name = "gpt";
  model.layers = arguments.integer("--layers");
  model.hidden_size = arguments.integer("--hidden");
  model.heads = arguments.integer("--heads");
  model.vocab_size = arguments.integer("--vocabulary");
  model.max_positions = arguments.integer("--positions");
  return model;
}

TensorParallel parallel_of(const Arguments& arguments, const World& world) {
  TensorParallel parallel;
  if (arguments.text("--mode") == "cp") {
    const ContextParallelOptions ring{ContextWay::ring};
    parallel.context =
        arguments.has("--alone")
            ? ContextParallel::silent(world.rank(), world.size(), ring)
            : ContextParallel(world.group(), ring);
  }
  if (arguments.text("--mode") != "tp") return parallel;
  parallel.group = arguments.has("--alone")
                       ? Group::silent("tp", world.rank(), world.size())
                       : world.group();
  parallel.options.sequence_parallel = arguments.has("--sequence-parallel");
  if (arguments.has("--chunks")) {
    parallel.options.overlap_chunks = arguments.integer("--chunks");
  }
  return parallel;
}

// This rank's number, on every rank.
Tensor gather(const World& world, double value) {
  Tensor all = torch::empty({world.size()}, torch::kFloat64);
  world.group().all_gather(all, torch::tensor({value}, torch::kFloat64));
  return all;
}

// The network, or its data-parallel wrapper, with what a step needs.
class Training {
 public:
  Training(const Arguments& arguments, const World& world)
      : parallel_(parallel_of(arguments, world)) {
    const ModelOptions model = model_of(arguments);
    const std::string& mode = arguments.text("--mode");
    words_ = model.vocab_size;
    const LayerList layers =
        model_layers(model, {model.max_positions}, words_, parallel_);
    if (mode == "fsdp") {
      ShardedUnitsOptions options;
      options.shard.stage = arguments.integer("--stage");
      sharded_ = std::make_unique<ShardedUnits>(
          world.group(), Group::alone("dp_replicate"), options);
    }
    const LayerWeights weights(layers, arguments.text("--weights"));
    const auto load = [&](NewLayer& added) {
      weights.load(added.index, added.layer.module.get());
      if (sharded_) shard(added);
    };
    network_ = build_network(layers, 0, layers.size(), std::nullopt, load);
    network_->train();
    if ((mode == "dp" || mode == "cp") && !arguments.has("--alone")) {
      ddp_ = std::make_unique<Ddp>(network_, world.group());
    }
    shared_ = std::make_unique<SharedGradients>(*network_, parallel_);
    optimizer_ = plain_adamw(to_update(), arguments.number("--learning-rate"));
  }

  // tokens [samples, length + 1]; the loss of each token, averaged.
  Tensor step(const Tensor& tokens) {
    const Tensor whole = tokens.slice(1, 0, -1).contiguous();
    Tensors inputs = {parallel_.context.cut(whole, 1)};
    if (parallel_.splits_tokens() || parallel_.context.is_used())
      inputs.push_back(torch::zeros_like(whole));
    const auto outputs =
        ddp_ ? ddp_->forward(inputs) : network_->forward(inputs);
    const Tensor loss =
        vocab_cross_entropy(
            outputs[0],
            parallel_.context.cut(tokens.slice(1, 1), 1).contiguous(), words_,
            parallel_)
            .mean();
    loss.backward();
    shared_->finish();
    if (sharded_) sharded_->finish();
    optimizer_->step();
    optimizer_->zero_grad();
    if (sharded_) sharded_->after_update();
    return loss.detach();
  }

 private:
  using Ddp = DistributedDataParallel<std::shared_ptr<Network>>;

  // A layer is a unit. A layer that uses a parameter of an earlier one, as the
  // head uses the embedding's, uses its unit as well.
  void shard(NewLayer& added) {
    std::set<size_t> units;
    if (!added.parameters.empty()) {
      units.insert(sharded_->add(added.layer.name, added.parameters));
    }
    for (const auto& tensor : added.shared) {
      units.insert(sharded_->unit_of(tensor).value());
    }
    if (units.empty()) return;
    added.layer.forward = sharded_->wrap(
        {units.begin(), units.end()}, std::move(added.layer.forward));
  }

  NamedTensors to_update() const {
    if (!sharded_) return named_parameters(*network_);
    NamedTensors flat;
    for (const auto& shard : sharded_->flat_shards()) {
      flat.emplace_back(shard.name, shard.tensor);
    }
    return flat;
  }

  TensorParallel parallel_;
  int64_t words_ = 0;
  std::unique_ptr<ShardedUnits> sharded_;
  std::shared_ptr<Network> network_;
  std::unique_ptr<Ddp> ddp_;
  std::unique_ptr<SharedGradients> shared_;
  std::unique_ptr<Optimizer> optimizer_;
};

void run(const Arguments& arguments) {
  arguments.allow(
      {"--mode", "--stage", "--alone", "--layers", "--hidden", "--heads",
       "--vocabulary", "--positions", "--steps", "--learning-rate", "--weights",
       "--data", "--sequence-parallel", "--chunks", "--backend", "--out"});
  torch::set_num_threads(1);
  CommOptions comm;
  if (arguments.has("--backend") && arguments.text("--backend") == "gloo") {
    comm.backend = BackendKind::gloo;
  }
  World world = World::from_environment(comm);
  const double base_bytes = memory_of("VmRSS");
  const std::string& mode = arguments.text("--mode");
  const bool cut_samples = mode != "tp" && mode != "cp";
  Tensor tokens = read_tokens(arguments.text("--data"));
  if (cut_samples) {
    tokens = tokens.chunk(world.size(), 1)[static_cast<size_t>(world.rank())];
  }
  Training training(arguments, world);
  const StepTimes times = time_steps(
      tokens,
      /*warm_up=*/1, arguments.integer("--steps"),
      [&](const Tensor& batch) { return training.step(batch); },
      [&] { world.group().barrier(); });
  if (mode != "tp") world.group().all_reduce(times.losses, ReduceOp::avg);

  const Tensor peaks = gather(world, memory_of("VmHWM"));
  const Tensor bases = gather(world, base_bytes);
  if (world.rank() == 0) {
    std::ofstream(arguments.text("--out"))
        << "{\"losses\": " << json_list(times.losses)
        << ", \"step_seconds\": " << json_list(times.seconds)
        << ", \"peak_bytes\": " << json_list(peaks)
        << ", \"base_bytes\": " << json_list(bases) << "}\n";
  }
}

}  // namespace

int main(int argc, char** argv) try {
  run(Arguments(argc, argv));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
