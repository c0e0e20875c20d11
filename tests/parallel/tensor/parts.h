// Layers of which each rank holds a part, against the whole on one device:
// parameters and gradients by name, in float64.
//
//   on_ranks(way, [&](const TensorParallel& tp) {
//     Layer layer(…, tp, "layer");
//     const auto whole = parity::give_parts(layer, seed);
//     parity::expect_layer(
//         layer, tp, whole, {.x = x, .cotangent = cotangent},
//         [&](const Tensor& x) { … the same of whole.at("weight") … },
//         [&](const Tensor& x) { return layer.forward(x); });
//   });
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/layers/sharded_module.h"
#include "echelon/parallel/tensor/shared_gradients.h"
#include "echelon/parallel/tensor/tensor_parallel.h"
#include "tests/support/parity.h"

namespace echelon::parity {

/// How a test runs: on so many ranks, with tokens sharded or not.
struct Way {
  int ranks = 1;
  TensorParallelOptions options;
  BackendKind backend = BackendKind::local;
};

inline void PrintTo(const Way& way, std::ostream* out) {
  *out << "ranks_" << way.ranks
       << (way.options.sequence_parallel ? "_tokens_cut" : "");
  if (way.options.overlap_chunks > 1) {
    *out << "_chunks_" << way.options.overlap_chunks;
  }
  if (way.backend == BackendKind::gloo) *out << "_gloo";
}

/// Degrees 1 to 4, with tokens sharded or not; in chunks; and over another
/// backend.
inline std::vector<Way> ways() {
  std::vector<Way> all;
  for (const int ranks : {1, 2, 3, 4}) {
    all.push_back({ranks, {}});
    all.push_back({ranks, {.sequence_parallel = true}});
  }
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t chunks : {2, 5}) {
      all.push_back(
          {ranks, {.sequence_parallel = true, .overlap_chunks = chunks}});
    }
    all.push_back({ranks, {.overlap_chunks = 2}});
    all.push_back(
        {ranks,
         {.sequence_parallel = true, .overlap_chunks = ranks - 1},
         BackendKind::gloo});
  }
  return all;
}

/// The body of a test on the threads of `way`.
inline void on_ranks(
    const Way& way, const std::function<void(const TensorParallel&)>& body) {
  run_ranks(
      way.ranks,
      [&](World& world) {
        at::set_num_threads(1);
        body({world.group(), way.options});
      },
      {.backend = way.backend, .timeout = std::chrono::minutes(2)});
}

/// The part of `whole` [tokens, …] (or [batch, sequence, …], flattened to
/// tokens) that this rank has between layers: all of it in its own shape, or
/// its tokens.
inline torch::Tensor
part_of_tokens(const torch::Tensor& whole, const TensorParallel& parallel) {
  if (!parallel.splits_tokens()) return whole;
  const auto rows = whole.dim() == 3 ? whole.flatten(0, 1) : whole;
  const auto mine = parallel.part_of(rows.size(0));
  return rows.narrow(0, mine.begin, mine.size());
}

/// The shard of each parameter of `module`; parameters that are registered as
/// usual are whole.
inline std::map<std::string, Shard> parts_of(const torch::nn::Module& module) {
  std::map<std::string, Shard> parts;
  const auto shards = shards_of(module);
  for (const auto& item : module.named_parameters()) {
    const auto found = shards.find(item.key());
    parts[item.key()] = found != shards.end()
                            ? found->second.shard
                            : replicated(item.value().sizes().vec(), 0);
  }
  return parts;
}

/// Gives `module` its parts of parameters that depend on names and `seed`
/// alone, in float64. Returns the whole ones, as leaves that require gradients.
inline NamedTensors give_parts(torch::nn::Module& module, uint64_t seed) {
  NamedTensors whole;
  module.to(torch::kFloat64);
  const auto parts = parts_of(module);
  for (auto& item : module.named_parameters()) {
    const auto& part = parts.at(item.key());
    const auto value =
        random(part.shape, seed + std::hash<std::string>()(item.key())) * 0.3;
    const torch::NoGradGuard no_grad;
    item.value().copy_(slice_of(value, part));
    whole[item.key()] = value.detach().requires_grad_();
  }
  return whole;
}

/// Places the parameters one after the other in memory, matrices first, as the
/// flat buffers of parallel/shard do.
inline void join_parameters(torch::nn::Module& module) {
  std::vector<torch::Tensor> all;
  int64_t size = 0;
  for (const bool matrices : {true, false}) {
    for (const auto& parameter : module.parameters()) {
      if ((parameter.dim() >= 2) != matrices) continue;
      all.push_back(parameter);
      size += parameter.numel();
    }
  }
  const torch::NoGradGuard no_grad;
  const auto flat = torch::empty(size, all[0].options());
  int64_t begin = 0;
  for (auto& one : all) {
    const auto to = flat.narrow(0, begin, one.numel()).view(one.sizes());
    to.copy_(one);
    one.set_data(to);
    begin += one.numel();
  }
}

/// Whether one matmul made the gradients of these parameters: they share
/// memory.
inline bool were_joined(
    const torch::nn::Module& module, const std::string& a,
    const std::string& b) {
  const auto all = module.named_parameters();
  return all[a].grad().is_alias_of(all[b].grad());
}

/// Expects each gradient to equal this rank's shard of the gradient in `whole`.
inline void expect_parts(
    const torch::nn::Module& module, const NamedTensors& whole,
    double tolerance = kRounding) {
  NamedTensors expected;
  NamedTensors actual;
  const auto parts = parts_of(module);
  for (const auto& item : module.named_parameters()) {
    const auto gradient = whole.at(item.key()).grad();
    expected[item.key()] = gradient.defined()
                               ? slice_of(gradient, parts.at(item.key()))
                               : gradient;
    actual[item.key()] = item.value().grad();
  }
  expect_same("gradient of", expected, actual, tolerance);
}

/// One tensor; relative to its largest value.
inline void expect_tensor(
    const std::string& what, const torch::Tensor& expected,
    const torch::Tensor& actual, double tolerance = kRounding) {
  detail::expect_close(what, expected, actual, 1e-2, tolerance);
}

/// What goes into a layer, and the gradient of what comes out: both whole.
struct Whole {
  torch::Tensor x;
  torch::Tensor cotangent;
  /// This rank's part of x and of y; null: part_of_tokens.
  std::function<torch::Tensor(const torch::Tensor&)> part_of_x = nullptr;
  std::function<torch::Tensor(const torch::Tensor&)> part_of_y = nullptr;
};

/// Runs `plain` on one device, and `own` on this rank, forward and backward.
/// Expects the parts of y, of the gradient of x and of all parameters'.
template <class Plain, class Own>
void expect_layer(
    const torch::nn::Module& layer, const TensorParallel& parallel,
    const NamedTensors& parameters, const Whole& whole, const Plain& plain,
    const Own& own, double tolerance = kRounding) {
  const auto part = [&](const auto& function, const torch::Tensor& tensor) {
    return function ? function(tensor) : part_of_tokens(tensor, parallel);
  };
  const auto x = whole.x.detach().requires_grad_();
  const auto y = plain(x);
  y.backward(whole.cotangent);
  const auto mine =
      part(whole.part_of_x, whole.x.detach()).clone().requires_grad_();
  const auto result = own(mine);
  expect_tensor("y", part(whole.part_of_y, y.detach()), result, tolerance);
  result.backward(part(whole.part_of_y, whole.cotangent));
  SharedGradients(layer, parallel).finish();
  expect_parts(layer, parameters);
  expect_tensor("gradient of x", part(whole.part_of_x, x.grad()), mine.grad());
}

}  // namespace echelon::parity
