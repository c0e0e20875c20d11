#include "echelon/options/model.h"

#include <cmath>

#include "echelon/error.h"
#include "echelon/options/bind.h"

namespace echelon {

namespace {

// The largest number of a language model: no product of two overflows.
constexpr double kMost = 1 << 24;
constexpr double kMostExperts = 1 << 16;

constexpr config::Names<ModelDtype> kModelDtypeNames = {
    {"float32", ModelDtype::float32}, {"float64", ModelDtype::float64}};

constexpr config::Names<RopeScaling> kRopeScalingNames = {
    {"llama3", RopeScaling::llama3},
    {"yarn", RopeScaling::yarn},
    {"linear", RopeScaling::linear}};

// The growth of attention's scores that Peng et al. found best.
double mscale(double factor, double weight) {
  return factor > 1 ? 0.1 * weight * std::log(factor) + 1 : 1;
}

void bind_experts(config::Section& section, ModelOptions& options) {
  section.field(
      "experts", options.experts,
      "mixtral, qwen3-moe, deepseek-v3: experts of each block",
      {.at_least = 0, .at_most = kMostExperts});
  section.field(
      "experts_per_token", options.experts_per_token,
      "mixtral, qwen3-moe, deepseek-v3: experts that compute a token",
      {.at_least = 0, .at_most = kMostExperts});
  section.field(
      "normalize_routing", options.normalize_routing,
      "qwen3-moe, deepseek-v3: the weights of a token's experts sum to 1; "
      "mixtral's always do");
  section.field(
      "aux_loss", options.aux_loss,
      "mixtral, qwen3-moe, deepseek-v3: coefficient of the loss that balances "
      "the load of the experts",
      {.at_least = 0});
  section.field(
      "z_loss", options.z_loss,
      "mixtral, qwen3-moe, deepseek-v3: coefficient of the loss that keeps the "
      "router's scores small",
      {.at_least = 0});
  section.field(
      "capacity_factor", options.capacity_factor,
      "mixtral, qwen3-moe, deepseek-v3: the most tokens of a sample that an "
      "expert takes in training, over its share of an even load; others are "
      "dropped; 0: none is",
      {.at_least = 0});
}

void bind_deepseek(config::Section& section, ModelOptions& options) {
  const auto count = [&](const char* key, int64_t& target, const char* help,
                         double at_least, double at_most) {
    section.field(
        key, target, std::string("deepseek-v3: ") + help,
        {.at_least = at_least, .at_most = at_most});
  };
  count(
      "expert_size", options.expert_size, "features within one expert", 0,
      kMost);
  count(
      "shared_experts", options.shared_experts,
      "experts of expert_size that every token passes", 0, kMostExperts);
  count(
      "dense_layers", options.dense_layers,
      "first blocks, which have an MLP of intermediate_size and no experts", 0,
      1 << 16);
  count(
      "expert_groups", options.expert_groups,
      "groups of equally many experts; a token's experts are in "
      "groups_per_token of them",
      1, kMostExperts);
  count(
      "groups_per_token", options.groups_per_token,
      "groups with the highest scores, from which a token's experts are chosen",
      1, kMostExperts);
  section.field(
      "routing_scale", options.routing_scale,
      "deepseek-v3: multiplies the weights of a token's experts", {.above = 0});
  section.field(
      "bias_rate", options.bias_rate,
      "deepseek-v3: how far the bias of each expert moves in a step, towards "
      "an even load; 0: biases stay",
      {.at_least = 0});
  count(
      "query_rank", options.query_rank,
      "features that queries are compressed to; 0: they are not", 0, kMost);
  count(
      "key_value_rank", options.key_value_rank,
      "features that keys and values are compressed to", 0, kMost);
  count(
      "nope_size", options.nope_size,
      "features of a head of queries and keys without positions", 0, kMost);
  count(
      "rope_size", options.rope_size,
      "features of a head of queries and keys with rotary positions", 0, kMost);
  count(
      "value_size", options.value_size, "features of a head of values", 0,
      kMost);
}

void bind_rope(config::Section& section, ModelOptions& options) {
  auto& rope = options.rope;
  section.field(
      "rope_theta", rope.theta,
      "llama: base of the rotary positions; 0: the size's, or 10000",
      {.at_least = 0});
  section.field(
      "rope_local_theta", options.rope_local_theta,
      "gemma3: the same for blocks with a window, which rope_factor leaves "
      "alone; 0: 10000",
      {.at_least = 0});
  section.field(
      "rope_scaling", rope.scaling,
      "with rope_factor: how frequencies are slowed, as config.json of Hugging "
      "Face calls it",
      kRopeScalingNames);
  section.field(
      "rope_factor", rope.factor,
      "llama: slows rotary positions for longer texts (Llama 3.1: 8; 3.2: 32); "
      "0: the size's, or none",
      {.at_least = 0});
  section.field(
      "rope_low_freq_factor", rope.low_freq_factor,
      "llama3: fewest turns within rope_original_positions that are not slowed "
      "in full",
      {.above = 0});
  section.field(
      "rope_high_freq_factor", rope.high_freq_factor,
      "llama3: turns from which nothing is slowed", {.above = 0});
  section.field(
      "rope_original_positions", rope.original_positions,
      "llama3, yarn: tokens of the texts that the model was trained on",
      {.at_least = 1, .at_most = kMost});
  section.field(
      "rope_beta_slow", rope.beta_slow,
      "yarn: turns within rope_original_positions up to which frequencies are "
      "slowed in full",
      {.above = 0});
  section.field(
      "rope_beta_fast", rope.beta_fast,
      "yarn: turns from which nothing is slowed", {.above = 0});
  section.field(
      "rope_attention_factor", rope.attention_factor,
      "yarn: multiplies the rotated features; 0: 0.1 ln(rope_factor) + 1",
      {.at_least = 0});
  section.field(
      "rope_mscale_all_dim", rope.mscale_all_dim,
      "yarn, deepseek-v3: scores of attention are multiplied by the square of "
      "0.1 * rope_mscale_all_dim * ln(rope_factor) + 1; 0: they are not",
      {.at_least = 0});
}

void bind_language_model(config::Section& section, ModelOptions& options) {
  const auto count = [&](const char* key, int64_t& target, const char* help) {
    section.field(key, target, help, {.at_least = 0, .at_most = kMost});
  };
  section.field(
      "layers", options.layers,
      "gpt, llama: transformer blocks; 0, here and below: that of the named "
      "model, such as gpt2",
      {.at_least = 0, .at_most = 1 << 16});
  count("hidden_size", options.hidden_size, "gpt, llama: features of a token");
  count("heads", options.heads, "gpt, llama: attention heads");
  count(
      "kv_heads", options.kv_heads,
      "llama: heads of keys and values, shared by groups of heads; 0: heads");
  count(
      "head_size", options.head_size,
      "llama: features of a head; 0: hidden_size / heads");
  count(
      "window", options.window,
      "mistral, mixtral, gemma2, gemma3: tokens that attention reaches, itself "
      "included; 0: all");
  section.field(
      "global_every", options.global_every,
      "gemma2, gemma3: the last of this many blocks has no window (2 and 6 "
      "there); 0: all have it",
      {.at_least = 0, .at_most = 1 << 16});
  count(
      "query_pre_attn_scalar", options.query_pre_attn_scalar,
      "gemma2, gemma3: scores of attention are divided by its square root; 0: "
      "head_size");
  section.field(
      "attention_softcap", options.attention_softcap,
      "gemma2, gemma3: keeps scores of attention below this number, as "
      "cap * tanh(score / cap); 0: no cap",
      {.at_least = 0});
  section.field(
      "logit_softcap", options.logit_softcap,
      "gemma2, gemma3: the same for logits; 0: no cap", {.at_least = 0});
  count(
      "intermediate_size", options.intermediate_size,
      "gpt, llama: features within the MLP, or within one expert; gpt, 0: 4 * "
      "hidden_size");
  bind_experts(section, options);
  bind_deepseek(section, options);
  count(
      "vocab_size", options.vocab_size,
      "gpt, llama: tokens of the vocabulary; 0: the size's, or the data's");
  count(
      "max_positions", options.max_positions,
      "gpt, llama: tokens of the longest sequence");
  bind_rope(section, options);
  section.field(
      "norm_eps", options.norm_eps,
      "gpt, llama: added to variances in norms; 0: 1e-5",
      {.at_least = 0, .below = 1});
  section.field(
      "dropout", options.dropout,
      "gpt, llama: dropout probability of embeddings, attention weights and "
      "residual branches",
      {.at_least = 0, .below = 1});
  section.field(
      "tie_embeddings", options.tie_embeddings,
      "llama: one matrix for the input and output vocabulary; gpt, llama-1b "
      "and "
      "the gemmas always do");
}

}  // namespace

std::string to_string(ModelDtype dtype) {
  return config::name_of(dtype, kModelDtypeNames);
}

std::string to_string(RopeScaling scaling) {
  return config::name_of(scaling, kRopeScalingNames);
}

double RotaryOptions::attention_scale() const {
  if (factor == 0 || scaling != RopeScaling::yarn) return 1;
  return attention_factor > 0 ? attention_factor : mscale(factor, 1);
}

double RotaryOptions::score_scale() const {
  if (factor == 0 || scaling != RopeScaling::yarn) return 1;
  const double root = mscale(factor, mscale_all_dim);
  return root * root;
}

const std::vector<std::string>& model_names() {
  static const std::vector<std::string> names = {
      "simple_cnn", "mlp",       "resnet18",    "resnet34",   "resnet50",
      "resnet101",  "resnet152", "gpt",         "gpt2",       "gpt2-medium",
      "gpt2-large", "gpt2-xl",   "llama",       "llama-160m", "llama-1b",
      "llama-8b",   "llama-70b", "mistral",     "qwen2",      "qwen3",
      "mixtral",    "qwen3-moe", "deepseek-v3", "gemma",      "gemma2",
      "gemma3"};
  return names;
}

void check_model_is_known(const ModelOptions& options) {
  if (options.name != kOwnModel || !options.library.empty()) return;
  throw ConfigError(
      "[model] name = \"own\": the layers are those of the program that "
      "trained the run; start that program, name the library that has them in "
      "library, or name one of Echelon's models");
}

void bind(config::Section& section, LoraOptions& options) {
  section.field(
      "rank", options.rank,
      "rank of the adapters, which train in place of the model; 0: none",
      {.at_least = 0, .at_most = 1 << 16});
  section.field(
      "alpha", options.alpha,
      "the product of two adapters is scaled by alpha / rank; 0: rank",
      {.at_least = 0});
  section
      .field(
          "targets", options.targets,
          "linear layers with adapters: the last parts of their names, such as "
          "\"q_proj\", or patterns of whole names")
      .length(0, 1024);
}

void bind(config::Section& section, ModelOptions& options) {
  std::vector<std::string> names = model_names();
  names.emplace_back(kOwnModel);
  section
      .field(
          "name", options.name,
          "the model; what is said below of llama holds for mistral, qwen2, "
          "qwen3, gemma, gemma2, gemma3, mixtral, qwen3-moe and deepseek-v3 "
          "too; own: the "
          "layers of the library, or those that a program gave to "
          "echelon::train")
      .one_of(names);
  section.field(
      "library", options.library,
      "a shared library with a model, data or a loss of one's own, built with "
      "ECHELON_PLUGIN; empty: none");
  section.field(
      "classes", options.classes,
      "number of classes; 0: as many as the data has",
      {.at_least = 0, .at_most = 1 << 24});
  section
      .field(
          "hidden", options.hidden, "mlp: widths of the hidden layers",
          {.at_least = 1, .at_most = 1 << 24})
      .length(0, 1024);
  section.field(
      "weights", options.weights,
      "start from this .safetensors file, Hugging Face folder, run (its newest "
      "checkpoint) or checkpoint; empty: from train.seed");
  section.field(
      "dtype", options.dtype, "type of the parameters", kModelDtypeNames);
  section
      .field(
          "freeze", options.freeze,
          "parameters that do not train: names, or patterns such as "
          "\"transformer.wte.*\", where * stands for any text")
      .length(0, 1024);
  section.field(
      "sync_batch_norm", options.sync_batch_norm,
      "batch normalization takes its statistics over all ranks");
  bind_language_model(section, options);
  section.field(
      "cut", options.partition_at,
      "the first layer of each stage or device but the first; empty: by "
      "balance");
  section.field(
      "balance", options.balance,
      "what stages or devices share evenly: floating-point operations, memory, "
      "or the measured time of a few microbatches",
      {{"time", StageBalance::time},
       {"memory", StageBalance::memory},
       {"measured", StageBalance::measured}});
  section
      .field(
          "devices", options.devices,
          "model parallel: devices of each process that share the layers, such "
          "as \"cuda:0\", \"cuda:1\"; empty: one device")
      .length(0, 1024);
  section
      .field(
          "device_bytes", config::BytesList(options.device_bytes),
          "memory of each of the devices, or of each pipeline rank; empty: "
          "what a GPU has, no limit on CPUs",
          {.at_least = 1})
      .length(0, 1024);
}

}  // namespace echelon
