// Training steps of a language model in bfloat16 on one GPU: Echelon's side of
// versus_pytorch/gpu_models.py.
//
//   gpu_model_step --model gpt2|llama-1b --batch B --length L --steps N
//     --weights FOLDER --data FILE --out FILE
//
// FILE of --data holds "tokens", int64 [batches, B, L + 1]. Parameters and the
// optimizer's state are bfloat16, as on PyTorch's side. Writes JSON: losses, the
// seconds of each step, the floating-point operations of one, peak memory. Ends
// with 77 and says why where there is no GPU.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "benchmarks/arguments.h"
#include "echelon/checkpoint/safetensors.h"
#include "echelon/comm/nccl/cuda.h"
#include "echelon/models/language_model.h"
#include "echelon/models/layer_cost.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/optim/optimizer.h"
#include "echelon/parallel/tensor/vocab_cross_entropy.h"

namespace {

using namespace echelon;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

constexpr int kSkipped = 77;

Tensor read_tokens(const std::string& path) {
  const safetensors::File file(path);
  const auto& info = file.at("tokens");
  return torch::from_blob(
             const_cast<std::byte*>(file.bytes(info).data()),
             info.shape,
             torch::kInt64)
      .clone();
}

std::string list(const std::vector<double>& values) {
  std::ostringstream text;
  text.precision(9);
  for (size_t i = 0; i < values.size(); ++i) {
    text << (i == 0 ? "" : ", ") << values[i];
  }
  return "[" + text.str() + "]";
}

std::unique_ptr<Optimizer> optimizer_of(const Network& network) {
  ParameterGroup group;
  for (const auto& item : network.named_parameters()) {
    group.parameters.emplace_back(item.key(), item.value());
  }
  return make_optimizer(
      OptimizerOptions{.name = "adamw", .learning_rate = 1e-4},
      std::vector<ParameterGroup>{group});
}

double flops_of(const LayerList& layers, int64_t batch, int64_t length) {
  double sum = 0;
  for (const auto& cost :
       count_layers(layers, {{{batch, length}, torch::kInt64}})) {
    sum += cost.flops();
  }
  return sum;
}

int run(const Arguments& arguments) {
  arguments.allow(
      {"--model", "--batch", "--length", "--steps", "--weights", "--data",
       "--out"});
  if (cuda_device_count() == 0) {
    std::printf("skipped: no GPU; CUDA's driver counts none\n");
    return kSkipped;
  }
  load_cuda();
  set_cuda_device(0);
  const torch::Device device(torch::kCUDA, 0);
  ModelOptions options;
  options.name = arguments.text("--model");
  const int64_t words = vocabulary(options, 0);
  const int64_t batch = arguments.integer("--batch");
  const int64_t length = arguments.integer("--length");
  const LayerList layers = model_layers(options, {length}, words);
  const double flops = flops_of(layers, batch, length);

  Network network(layers, 0, layers.size(), /*seed=*/0);
  load_weights(network, arguments.text("--weights"));
  network.to(device, torch::kBFloat16);
  network.train();
  const auto optimizer = optimizer_of(network);
  const Tensor tokens = read_tokens(arguments.text("--data")).to(device);

  std::vector<Tensor> losses;
  std::vector<double> seconds;
  const int64_t steps = arguments.integer("--steps");
  for (int64_t step = -3; step < steps; ++step) {  // the first ones warm up
    const Tensor both = tokens[(step + 3) % tokens.size(0)];
    synchronize_cuda_stream();
    const auto start = Clock::now();
    const Tensor targets = both.slice(1, 1).contiguous();
    const auto outputs = network.forward(
        Tensors{both.slice(1, 0, length).contiguous()});
    const Tensor loss =
        vocab_cross_entropy(outputs[0], targets, words, {}).mean();
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    synchronize_cuda_stream();
    losses.push_back(loss.detach());
    if (step >= 0) {
      seconds.push_back(
          std::chrono::duration<double>(Clock::now() - start).count());
    }
  }
  std::vector<double> values;
  for (const auto& loss : losses) values.push_back(loss.item<double>());
  std::ofstream(arguments.text("--out"))
      << "{\"losses\": " << list(values)
      << ", \"step_seconds\": " << list(seconds) << ", \"flops\": " << flops
      << "}\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  return run(Arguments(argc, argv));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
