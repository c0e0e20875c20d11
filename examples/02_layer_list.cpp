// A model of one's own as a list of layers, built in two halves, with
// the boundary at any layer.
//
//   build/bin/02_layer_list
//   layers: embed mix.0 mix.1 head
//   whole list        7 parameters        loss 2.30… -> 0.003…
//   split at mix.0    1 and 6 parameters  loss 2.30… -> 0.003…
//   …                 the same losses, to the last digit
//
// A layer takes what the one before it returned. Here the embedding passes by
// the mixers to the head, across any boundary. Pipeline stages are such slices
// on different ranks, device placements on different devices.
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "echelon/layers/network.h"

using torch::Tensor;

constexpr int64_t kWords = 10;
constexpr int64_t kWidth = 16;

struct MixImpl : torch::nn::Module {
  MixImpl() { fc = register_module("fc", torch::nn::Linear(kWidth, kWidth)); }
  std::tuple<Tensor, Tensor> forward(const Tensor& x, const Tensor& skip) {
    return {torch::tanh(fc(x)), skip};
  }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Mix);

echelon::LayerList model() {
  echelon::LayerList layers;
  layers.add(
      "embed", [] { return torch::nn::Embedding(kWords, kWidth); },
      [](auto& embed, const Tensor& words) {
        const auto x = embed.forward(words);
        return std::make_tuple(x, x);
      });
  layers.add("mix.0", [] { return Mix(); });
  layers.add("mix.1", [] { return Mix(); });
  layers.add(
      "head", [] { return torch::nn::Linear(kWidth, kWords); },
      [](auto& head, const Tensor& x, const Tensor& skip) {
        return head.forward(x + skip);
      });
  return layers;
}

// Learns to count: after word w comes w + 1.
std::pair<double, double>
train(const std::vector<std::shared_ptr<echelon::Network>>& slices) {
  std::vector<Tensor> parameters;
  for (const auto& slice : slices) {
    for (const auto& tensor : slice->parameters()) parameters.push_back(tensor);
  }
  torch::optim::SGD optimizer(parameters, 1.0);
  const auto words = torch::arange(kWords);
  const auto next = (words + 1) % kWords;
  double first = 0;
  double last = 0;
  for (int step = 0; step < 100; ++step) {
    echelon::Tensors values = {words};
    for (const auto& slice : slices) values = slice->forward(values);
    const auto loss = torch::nn::functional::cross_entropy(values[0], next);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  return {first, last};
}

int main() {
  const auto layers = model();
  std::printf("layers:");
  for (const auto& name : layers.names()) std::printf(" %s", name.c_str());
  std::printf("\n");

  // First values depend on the seed and the layers' names, never on the
  // boundaries.
  constexpr uint64_t kSeed = 1;
  const size_t end = layers.size();
  const auto whole = echelon::build_network(layers, 0, end, kSeed);
  const size_t count = whole->parameters().size();
  const auto [first, last] = train({whole});
  std::printf(
      "whole list        %zu parameters        loss %.6f -> %.6f\n", count,
      first, last);
  for (size_t split = 1; split < end; ++split) {
    const auto front = echelon::build_network(layers, 0, split, kSeed);
    const auto back = echelon::build_network(layers, split, end, kSeed);
    const auto counts =
        std::make_pair(front->parameters().size(), back->parameters().size());
    const auto [first, last] = train({front, back});
    std::printf(
        "split at %-8s %zu and %zu parameters  loss %.6f -> %.6f\n",
        layers[split].name.c_str(), counts.first, counts.second, first, last);
  }
}
