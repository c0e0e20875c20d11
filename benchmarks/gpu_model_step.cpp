// Training steps of a language model in bfloat16 on one GPU: Echelon's side of
// versus_pytorch/gpu_models.py.
//
//   gpu_model_step --model gpt2|llama-1b --batch B --length L --steps N
//     --weights FOLDER --data FILE --out FILE [--profile FILE]
//
// FILE of --data holds "tokens", int64 [batches, B, L + 1]. Parameters and the
// optimizer's state are bfloat16, as on PyTorch's side. Writes JSON: losses,
// the seconds of each step, the floating-point operations of one. --profile
// writes two more steps as a Chrome trace: operators and the device's kernels.
// Ends with 77 and says why where there is no GPU.
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <set>
#include <string>

#include "benchmarks/arguments.h"
#include "benchmarks/language_step.h"
#include "echelon/architecture/language_model.h"
#include "echelon/comm/nccl/accelerator.h"
#include "echelon/counting/layer_cost.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/parallel/tensor/vocab.h"

namespace {

using namespace echelon;
using torch::Tensor;

constexpr int kSkipped = 77;

double flops_of(const LayerList& layers, int64_t batch, int64_t length) {
  double sum = 0;
  for (const auto& cost :
       counting::count_layers(layers, {{{batch, length}, torch::kInt64}})) {
    sum += cost.flops();
  }
  return sum;
}

void write_profile(
    const std::string& path, const std::function<void()>& steps) {
  namespace profiler = torch::autograd::profiler;
  const std::set<profiler::ActivityType> activities = {
      profiler::ActivityType::CPU, profiler::ActivityType::CUDA};
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  steps();
  profiler::disableProfiler()->save(path);
}

int run(const Arguments& arguments) {
  arguments.allow(
      {"--model", "--batch", "--length", "--steps", "--weights", "--data",
       "--out", "--profile"});
  if (cuda_device_count() == 0) {
    std::printf("skipped: no GPU; CUDA's driver counts none\n");
    return kSkipped;
  }
  load_accelerator(DeviceKind::cuda);
  set_current_device(torch::Device(torch::kCUDA, 0));
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
  const auto optimizer = plain_adamw(named_parameters(network), 1e-4);

  const auto step = [&](const Tensor& tokens) {
    const Tensor targets = tokens.slice(1, 1).contiguous();
    const auto outputs =
        network.forward(Tensors{tokens.slice(1, 0, -1).contiguous()});
    const Tensor loss =
        vocab_cross_entropy(outputs[0], targets, words, {}).mean();
    loss.backward();
    optimizer->step();
    optimizer->zero_grad();
    return loss;
  };
  const auto fence = [] { synchronize_current_stream(torch::kCUDA); };
  const Tensor batches = read_tokens(arguments.text("--data")).to(device);
  const StepTimes times = time_steps(
      batches, /*warm_up=*/3, arguments.integer("--steps"), step, fence);
  if (arguments.has("--profile")) {
    write_profile(arguments.text("--profile"), [&] {
      time_steps(batches, 0, 2, step, fence);
    });
  }
  std::ofstream(arguments.text("--out"))
      << "{\"losses\": " << json_list(times.losses)
      << ", \"step_seconds\": " << json_list(times.seconds)
      << ", \"flops\": " << flops << "}\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  return run(Arguments(argc, argv));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
