// A small model of each architecture, with inputs, for tests of language
// models.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <string>

#include "echelon/models/make_network.h"
#include "echelon/parallel/tensor/vocab.h"

namespace echelon::language_case {

constexpr int64_t kBatch = 3;
constexpr int64_t kSequence = 7;
constexpr int64_t kVocabulary = 23;

/// A name of architectures(); sizes that do not divide by 2, 3 or 4 wherever
/// they need not.
inline ModelOptions options_of(const std::string& name) {
  ModelOptions options;
  options.name = name;
  options.dtype = ModelDtype::float64;
  options.layers = 2;
  options.max_positions = 9;
  if (name == "gpt") {
    options.hidden_size = 20;
    options.heads = 5;
    options.intermediate_size = 27;
  } else {
    options.hidden_size = 24;
    options.heads = 6;
    options.kv_heads = 2;
    options.intermediate_size = 37;
  }
  if (name == "mistral" || name == "mixtral") options.window = 3;
  if (name == "qwen3" || name == "qwen3-moe") options.head_size = 10;
  if (name == "gemma2" || name == "gemma3") {
    options.head_size = 10;
    options.window = 3;
    options.global_every = 2;
    options.query_pre_attn_scalar = 7;
    options.attention_softcap = 0.3;
    options.logit_softcap = 0.5;
  }
  if (name == "gemma3") options.rope_local_theta = 60;
  if (name == "mixtral" || name == "qwen3-moe") {
    options.intermediate_size = 13;
    options.experts = 5;
    options.experts_per_token = 2;
  }
  if (name == "deepseek-v3") {
    options.kv_heads = 0;
    options.dense_layers = 1;
    options.experts = 6;
    options.expert_groups = 3;
    options.groups_per_token = 2;
    options.experts_per_token = 3;
    options.expert_size = 13;
    options.shared_experts = 2;
    options.routing_scale = 1.5;
    options.query_rank = 11;
    options.key_value_rank = 9;
    options.nope_size = 7;
    options.rope_size = 4;
    options.value_size = 5;
  }
  return options;
}

struct Inputs {
  torch::Tensor tokens;     // [batch, sequence]
  torch::Tensor targets;    // [batch, sequence]
  torch::Tensor documents;  // [batch, sequence]
  torch::Tensor keys;       // [batch]

  Inputs to(torch::Device device) const {
    return {
        tokens.to(device), targets.to(device), documents.to(device),
        keys.to(device)};
  }
};

inline Inputs make_inputs() {
  const auto steps = torch::arange(kBatch * kSequence + 1, torch::kInt64);
  const auto ids = (steps * 7 + steps * steps * 3).remainder(kVocabulary);
  return {
      ids.narrow(0, 0, kBatch * kSequence).view({kBatch, kSequence}),
      ids.narrow(0, 1, kBatch * kSequence).view({kBatch, kSequence}),
      torch::tensor(
          {{0, 0, 0, 1, 1, 2, 2}, {4, 4, 4, 4, 4, 4, 4}, {0, 1, 1, 1, 1, 1, 3}},
          torch::kInt64),
      torch::tensor({17, 3, 1000001}, torch::kInt64)};
}

inline std::shared_ptr<Network>
build(const ModelOptions& options, const TensorParallel& parallel = {}) {
  const auto layers = model_layers(options, {kSequence}, kVocabulary, parallel);
  return build_network(layers, 0, layers.size(), /*seed=*/5);
}

inline torch::Tensor mean_loss(
    const torch::Tensor& logits, const Inputs& inputs,
    const TensorParallel& parallel) {
  return vocab_cross_entropy(logits, inputs.targets, kVocabulary, parallel)
      .mean();
}

}  // namespace echelon::language_case
