// Training steps of a pipeline, one process per rank, under `echelon run`:
// Echelon's side of versus_pytorch/pipeline.py, and memory against the share
// that a rank should have.
//
//   echelon run -n P -- pipeline_step --kind K --microbatches M --blocks B
//     --width D --rows R --steps N [--weights FILE --data FILE] [--memory]
//     [--backend local|gloo] --out FILE
//
// The model: B residual blocks (LayerNorm, Linear D x 4D, GELU, Linear 4D x D).
// Rank 0 writes JSON.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "benchmarks/arguments.h"
#include "benchmarks/process_memory.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/comm/world.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/schedule/memory.h"
#include "echelon/schedule/options.h"

namespace {

using namespace echelon;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  Tensor forward(const Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

Tensor read_tensor(const safetensors::File& file, const std::string& name) {
  const auto& info = file.at(name);
  return torch::from_blob(
             const_cast<std::byte*>(file.bytes(info).data()), info.shape,
             torch::kFloat32)
      .clone();
}

void load(const std::vector<PipelineStage>& stages, const std::string& path) {
  const safetensors::File file(path);
  torch::NoGradGuard no_grad;
  for (const auto& stage : stages) {
    for (const auto& [name, tensor] : stage.named_parameters()) {
      Tensor parameter = tensor;
      parameter.copy_(read_tensor(file, name));
    }
  }
}

// From here on VmHWM counts anew.
void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

// What one microbatch keeps at one block from forward to backward: the input,
// what the norm gives, and both sides of the GELU, in float32.
double activation_bytes(int64_t rows, int64_t width) {
  return 4.0 * static_cast<double>(rows * width) * (1 + 1 + 4 + 4);
}

std::string list(const std::vector<double>& values) {
  std::ostringstream text;
  text.precision(9);
  for (size_t i = 0; i < values.size(); ++i) {
    text << (i == 0 ? "" : ", ") << values[i];
  }
  return "[" + text.str() + "]";
}

// This rank's number, on every rank.
std::vector<double> gather(const World& world, double value) {
  Tensor all = torch::empty({world.size()}, torch::kFloat64);
  world.group().all_gather(all, torch::tensor({value}, torch::kFloat64));
  return {all.data_ptr<double>(), all.data_ptr<double>() + world.size()};
}

void run(const Arguments& arguments) {
  torch::set_num_threads(1);
  CommOptions comm;
  if (arguments.has("--backend") && arguments.text("--backend") == "gloo") {
    comm.backend = BackendKind::gloo;
  }
  World world = World::from_environment(comm);
  const int64_t width = arguments.integer("--width");
  const int64_t rows = arguments.integer("--rows");
  const int64_t blocks = arguments.integer("--blocks");
  const auto microbatches =
      static_cast<int32_t>(arguments.integer("--microbatches"));
  const Schedule schedule = make_schedule(
      {.kind = schedule_kind(arguments.text("--kind")),
       .ranks = world.size(),
       .microbatches = microbatches});

  LayerList layers;
  for (int64_t i = 0; i < blocks; ++i) {
    layers.add("block" + std::to_string(i), [width] { return Block(width); });
  }
  // The libraries' own memory, which every process has, is not the model's.
  {
    const Tensor warm = torch::randn({64, 64}).requires_grad_();
    torch::gelu(warm.mm(warm)).sum().backward();
    world.group().barrier();
  }
  forget_peak();
  const double base_bytes = memory_of("VmRSS");

  const auto boundaries = partition_evenly(layers, schedule.num_stages());
  Pipeline pipeline(
      world.group(), schedule,
      build_stages(layers, boundaries, schedule.rank_of_stage, world.rank()));
  if (arguments.has("--weights")) {
    load(pipeline.stages(), arguments.text("--weights"));
  }
  ParameterGroup parameters;
  double parameter_bytes = 0;
  for (const auto& stage : pipeline.stages()) {
    for (const auto& [name, tensor] : stage.named_parameters()) {
      parameters.parameters.emplace_back(name, tensor);
      parameter_bytes += static_cast<double>(tensor.nbytes());
    }
  }
  const bool adam = arguments.has("--memory");
  const auto optimizer = make_optimizer(
      OptimizerOptions{
          .name = adam ? OptimizerKind::adamw : OptimizerKind::sgd,
          .learning_rate = 1e-3},
      std::vector<ParameterGroup>{parameters});

  std::vector<Tensors> batch;
  Tensor targets = torch::zeros({microbatches * rows, width});
  Tensor inputs = torch::randn({microbatches * rows, width});
  if (arguments.has("--data")) {
    const safetensors::File file(arguments.text("--data"));
    inputs = read_tensor(file, "inputs");
    targets = read_tensor(file, "targets");
  }
  if (pipeline.has_first_stage()) {
    for (const auto& rows_of : inputs.chunk(microbatches)) {
      batch.push_back({rows_of});
    }
  }
  const auto targets_of = targets.chunk(microbatches);
  const auto loss = [&](const Tensors& outputs, int64_t m) {
    return torch::mse_loss(outputs[0], targets_of[static_cast<size_t>(m)]) /
           static_cast<double>(microbatches);
  };

  std::vector<double> losses;
  std::vector<double> seconds;
  const int64_t steps = arguments.integer("--steps");
  for (int64_t step = 0; step <= steps; ++step) {
    world.group().barrier();
    const auto start = Clock::now();
    const auto result = pipeline.step(batch, loss);
    optimizer->step();
    optimizer->zero_grad();
    world.group().barrier();
    if (step > 0) {  // the first one warms up
      seconds.push_back(
          std::chrono::duration<double>(Clock::now() - start).count());
    }
    double sum = 0;
    for (const auto& l : result.losses) sum += l.item<double>();
    double total = 0;
    for (double part : gather(world, sum)) total += part;
    losses.push_back(total);
  }

  const double peak_bytes = memory_of("VmHWM");
  const auto stored = stored_activations(schedule).stages;
  double activations = 0;
  for (int32_t stage : schedule.stages_of(world.rank())) {
    const auto i = static_cast<size_t>(stage);
    activations += stored[i] *
                   static_cast<double>(boundaries[i + 1] - boundaries[i]) *
                   activation_bytes(rows, width);
  }
  const double share = parameter_bytes * (adam ? 4 : 2) + activations +
                       static_cast<double>(inputs.nbytes() + targets.nbytes());
  const auto peaks = gather(world, peak_bytes);
  const auto bases = gather(world, base_bytes);
  const auto shares = gather(world, share);
  if (world.rank() == 0) {
    std::ofstream(arguments.text("--out"))
        << "{\"losses\": " << list(losses)
        << ", \"step_seconds\": " << list(seconds)
        << ", \"peak_bytes\": " << list(peaks)
        << ", \"base_bytes\": " << list(bases)
        << ", \"share_bytes\": " << list(shares) << "}\n";
  }
}

}  // namespace

int main(int argc, char** argv) try {
  run(Arguments(argc, argv));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
