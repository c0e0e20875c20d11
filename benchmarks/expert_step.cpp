// Training steps of a mixture of experts, one process per rank, under `echelon
// run`: Echelon's side of versus_pytorch/experts.py. In one process,
// --exchange times what moving tokens to experts and back costs beside copying
// them.
//
//   echelon run -n 2 -- expert_step --hidden H --inner I --experts E --chosen K
//     --steps S --learning-rate R --weights FILE --data FILE [--alone]
//     --out FILE
//   expert_step --exchange [--ranks N] [--tokens T] [--hidden H] [--experts E]
//     [--chosen K] [--rounds R]
//
// FILE of --data holds "x" and "y", float32 [batches, tokens, H], which ranks
// share out; the loss is the mean of the squared differences of y to the
// mixture's result. Each rank has its share of the experts; --alone trains all
// of them on each rank by itself. Rank 0 writes JSON.
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/arguments.h"
#include "benchmarks/language_step.h"
#include "benchmarks/process_memory.h"
#include "benchmarks/time_in_turn.h"
#include "echelon/architecture/language_model.h"
#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/comm/differentiable.h"
#include "echelon/comm/world.h"
#include "echelon/models/mixture.h"
#include "echelon/parallel/expert/exchange.h"

namespace {

using namespace echelon;
using torch::Tensor;

LanguageModelShape shape_of(const Arguments& arguments) {
  LanguageModelShape shape;
  for (const auto& kind : architectures()) {
    if (std::string(kind.name) == "qwen3-moe") shape.kind = &kind;
  }
  shape.hidden_size = arguments.integer("--hidden");
  shape.experts = arguments.integer("--experts");
  shape.experts_per_token = arguments.integer("--chosen");
  shape.expert_size = arguments.integer("--inner");
  return shape;
}

std::map<std::string, Tensor> tensors_of(const std::string& path) {
  const auto all = load_tensors(path);
  return {all.begin(), all.end()};
}

class Training {
 public:
  Training(const Arguments& arguments, const World& world)
      : whole_(world.group()), alone_(arguments.has("--alone")) {
    TensorParallel parallel;
    if (!alone_) parallel.experts = world.group();
    mixture_ = std::make_shared<models::MixtureOfExperts>(
        shape_of(arguments), parallel, "model.layers.0.mlp");
    const torch::NoGradGuard no_grad;
    const auto weights = tensors_of(arguments.text("--weights"));
    for (const auto& item : mixture_->named_parameters()) {
      item.value().detach().copy_(weights.at(item.key()));
    }
    mixture_->train();
    optimizer_ = plain_adamw(
        named_parameters(*mixture_), arguments.number("--learning-rate"));
  }

  // The mean over the tokens of all ranks.
  Tensor step(const Tensor& x, const Tensor& y) {
    const auto result = mixture_->forward(x.unsqueeze(0), 1, x.size(0)).y;
    const auto loss = (result.squeeze(0) - y).square().mean();
    loss.backward();
    if (!alone_) {
      auto gradient = mixture_->named_parameters()["gate.weight"].grad();
      whole_.all_reduce(gradient, ReduceOp::avg, {.label = "gate"}).wait();
    }
    optimizer_->step();
    optimizer_->zero_grad();
    return loss.detach();
  }

 private:
  Group whole_;
  bool alone_;
  std::shared_ptr<models::MixtureOfExperts> mixture_;
  std::unique_ptr<Optimizer> optimizer_;
};

// This rank's number, on every rank.
Tensor gather(const World& world, double value) {
  Tensor all = torch::empty({world.size()}, torch::kFloat64);
  world.group().all_gather(all, torch::tensor({value}, torch::kFloat64));
  return all;
}

void train(const Arguments& arguments) {
  torch::set_num_threads(1);
  World world = World::from_environment({});
  const double base_bytes = memory_of("VmRSS");
  const auto data = tensors_of(arguments.text("--data"));
  const auto own = [&](const char* name) {
    return data.at(name)
        .chunk(world.size(), 1)[static_cast<size_t>(world.rank())]
        .contiguous();
  };
  const Tensor x = own("x"), y = own("y");
  Training training(arguments, world);
  const StepTimes times = time_steps(
      torch::arange(x.size(0)), /*warm_up=*/1, arguments.integer("--steps"),
      [&](const Tensor& batch) {
        const auto i = batch.item<int64_t>();
        return training.step(x[i], y[i]);
      },
      [&] { world.group().barrier(); });
  world.group().all_reduce(times.losses, ReduceOp::avg);
  const Tensor peaks = gather(world, memory_of("VmHWM"));
  const Tensor bases = gather(world, base_bytes);
  if (world.rank() != 0) return;
  std::ofstream(arguments.text("--out"))
      << "{\"losses\": " << json_list(times.losses)
      << ", \"step_seconds\": " << json_list(times.seconds)
      << ", \"peak_bytes\": " << json_list(peaks)
      << ", \"base_bytes\": " << json_list(bases) << "}\n";
}

// Both directions, without gradients. Copying is the same permutations and, in
// place of what is sent, a copy of as many rows.
void exchange(const Arguments& arguments, World& world) {
  at::set_num_threads(1);
  const torch::NoGradGuard no_grad;
  const auto of = [&](const char* name, int64_t otherwise) {
    return arguments.has(name) ? arguments.integer(name) : otherwise;
  };
  const int64_t tokens = of("--tokens", 4096), hidden = of("--hidden", 512);
  const RoutingOptions options{
      .experts = of("--experts", 8), .per_token = of("--chosen", 2)};
  torch::manual_seed(world.rank());
  const auto x = torch::randn({tokens, hidden});
  const auto routing =
      route(torch::randn({tokens, options.experts}), options, 1, false);
  const Assignment assignment(routing.experts, options.experts);
  const auto& group = world.group();
  Exchange all(assignment.counts(), group, x, "exchange");
  all.settle();
  const auto rows = assignment.spread(x);
  const auto arrived = all.send(rows);
  const auto order = torch::randperm(arrived.size(0));
  const auto inverse = order.argsort();
  const std::vector<Variant> variants = {
      {"copying",
       [&] {
         const auto there = arrived.clone().index_select(0, order);
         const auto back = rows.clone();
         there.index_select(0, inverse);
       }},
      {"dispatch and return", [&] { all.give_back(all.send(rows)); }}};
  const auto times = time_in_turn(
      variants, static_cast<int>(of("--rounds", 31)), [&] { group.barrier(); });
  if (world.rank() != 0) return;
  for (const auto& one : times) {
    std::printf(
        "%-20s %8.2f ms  ratio %.3f (%.3f to %.3f)\n", one.name.c_str(),
        1e3 * quantile(one.seconds, 0.5), quantile(one.ratios, 0.5),
        quantile(one.ratios, 0.1), quantile(one.ratios, 0.9));
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments(argc, argv);
  arguments.allow(
      {"--hidden", "--inner", "--experts", "--chosen", "--steps",
       "--learning-rate", "--weights", "--data", "--alone", "--out",
       "--exchange", "--ranks", "--tokens", "--rounds"});
  if (arguments.has("--exchange")) {
    run_ranks(
        arguments.has("--ranks")
            ? static_cast<int>(arguments.integer("--ranks"))
            : 2,
        [&](World& world) { exchange(arguments, world); });
  } else {
    train(arguments);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
