// What the settings of [memory] keep between forward and backward, and cost.
//
//   activation_memory [--layers L] [--hidden H] [--heads A] [--sequence S]
//                     [--batch B] [--steps N] [--dropout P]
//
// A gpt in float32 on one thread of the CPU. Bytes are those that are alive
// when forward has ended, beside logits and parameters; times are medians of
// forward and backward, the ways taking turns; both over those of recompute =
// "none".
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "benchmarks/arguments.h"
#include "echelon/memory/layer_memory.h"
#include "echelon/models/make_network.h"
#include "echelon/profiling/memory_meter.h"

namespace {

using namespace echelon;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

struct Way {
  std::string name;
  MemoryOptions options;
  std::shared_ptr<Network> network;
  int64_t kept = 0;
  std::vector<double> seconds;
};

struct Setting {
  LayerList layers;
  Tensors inputs;
  std::vector<cost::RecomputeCost> costs;
};

std::shared_ptr<Network>
build(const Setting& setting, const MemoryOptions& options) {
  const LayerMemory memory(
      options, cost::plan_recompute(options, setting.costs));
  const auto list = with_forwards(
      setting.layers,
      [memory](size_t i, const std::string& name, const BuiltLayer& layer) {
        return memory.wrap(i, name, layer.forward, layer.module);
      });
  return build_network(list, 0, list.size(), 1);
}

void step(Way& way, const Setting& setting, bool count) {
  profiling::MemoryMeter meter;
  const auto start = Clock::now();
  {
    std::unique_ptr<profiling::MemoryMeter::Counting> counting;
    if (count) counting = meter.count();
    const auto logits = way.network->forward(setting.inputs)[0];
    if (count) {
      way.kept = meter.now().total() - static_cast<int64_t>(logits.nbytes());
    }
    logits.sum().backward();
  }
  const std::chrono::duration<double> time = Clock::now() - start;
  if (!count) way.seconds.push_back(time.count());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int64_t kept(const Setting& setting, cost::Recompute choice) {
  int64_t bytes = 0;
  for (const auto& cost : setting.costs) bytes += cost.kept(choice);
  return bytes;
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments(argc, argv);
  arguments.allow(
      {"--layers", "--hidden", "--heads", "--sequence", "--batch", "--steps",
       "--dropout"});
  const auto number = [&](const std::string& name, int64_t value) {
    return arguments.has(name) ? arguments.integer(name) : value;
  };
  const int64_t layers = number("--layers", 6);
  const int64_t hidden = number("--hidden", 256);
  const int64_t sequence = number("--sequence", 256);
  const int64_t batch = number("--batch", 4);
  const int64_t steps = number("--steps", 9);
  const double dropout =
      arguments.has("--dropout") ? arguments.number("--dropout") : 0;
  at::set_num_threads(1);
  ModelOptions model;
  model.name = "gpt";
  model.layers = layers;
  model.hidden_size = hidden;
  model.heads = number("--heads", 8);
  model.max_positions = sequence;
  model.dropout = dropout;
  constexpr int64_t kWords = 512;
  const Setting setting = [&] {
    Setting one{model_layers(model, {sequence}, kWords), {}, {}};
    one.inputs = {torch::randint(kWords, {batch, sequence}, torch::kInt64)};
    std::vector<counting::TensorSpec> specs = {
        {{batch, sequence}, torch::kInt64}};
    if (dropout > 0) {
      one.inputs.push_back(torch::arange(batch));
      specs.push_back({{batch}, torch::kInt64});
    }
    one.costs = recompute_costs(one.layers, specs);
    return one;
  }();

  const int64_t half = kept(setting, cost::Recompute::none) / 2;
  std::vector<Way> ways = {
      {"none", {}},
      {"selective", {.recompute = Recompute::selective}},
      {"all", {.recompute = Recompute::all}},
      {"budget of a half",
       {.recompute = Recompute::budget, .activation_bytes = half}},
      {"activations bf16", {.activations = Activations::bf16}},
      {"activations offload", {.activations = Activations::offload}},
      {"all, bf16",
       {.recompute = Recompute::all, .activations = Activations::bf16}}};
  for (auto& way : ways) {
    way.network = build(setting, way.options);
    step(way, setting, false);  // whatever is slow the first time
    step(way, setting, true);
    way.seconds.clear();
  }
  for (int64_t i = 0; i < steps; ++i) {
    for (auto& way : ways) step(way, setting, false);
  }
  std::printf(
      "gpt: %ld layers of %ld, %ld x %ld tokens, dropout %g; none: %.1f MiB, "
      "%.1f ms\n",
      static_cast<long>(layers), static_cast<long>(hidden),
      static_cast<long>(batch), static_cast<long>(sequence), dropout,
      static_cast<double>(ways[0].kept) / (1 << 20),
      1e3 * median(ways[0].seconds));
  for (const auto& way : ways) {
    std::printf(
        "%-20s kept %.2f  time %.2f\n", way.name.c_str(),
        static_cast<double>(way.kept) / static_cast<double>(ways[0].kept),
        median(way.seconds) / median(ways[0].seconds));
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "activation_memory: %s\n", error.what());
  return 1;
}
