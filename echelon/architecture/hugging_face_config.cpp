// The readers of a Hugging Face config.json, one for each family. What would
// change the shape and is not understood is refused; what does not touch it
// (token numbers, dropout, angles of positions) is read for training alone.
#include "echelon/architecture/hugging_face_config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/nearest.h"

namespace echelon::hugging_face {
namespace {

using nlohmann::json;

constexpr size_t kMostBytes = size_t{4} << 20;
constexpr int64_t kMostCount = int64_t{1} << 24;

// The members of one object; `place` names it in errors. `known` begins the
// rule that a flag of the wrong value breaks.
class Fields {
 public:
  Fields(const json& object, std::string place, const char* known = "known is")
      : object_(object), place_(std::move(place)), known_(known) {}

  [[noreturn]] void
  refuse(const std::string& key, const std::string& rule) const {
    std::string value = "is missing";
    if (const auto found = object_.find(key); found != object_.end()) {
      value = found->dump();
      if (value.size() > 60) value = value.substr(0, 57) + "...";
    }
    throw DataError(format("{}: \"{}\": {}; {}", place_, key, value, rule));
  }

  bool has(const std::string& key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }

  /// Also where it is null.
  bool is_there(const std::string& key) const { return object_.contains(key); }

  int64_t count(const std::string& key) const { return whole(key, 1); }
  int64_t count(const std::string& key, int64_t otherwise) const {
    return has(key) ? whole(key, 1) : otherwise;
  }
  /// 0 or more.
  int64_t number(const std::string& key, int64_t otherwise) const {
    return has(key) ? whole(key, 0) : otherwise;
  }
  /// The first of two spellings that is there.
  int64_t count_of(const std::string& key, const std::string& other) const {
    return has(key) ? count(key) : count(other);
  }

  double real(const std::string& key, double otherwise) const {
    if (!has(key)) return otherwise;
    const json& value = object_.at(key);
    if (!value.is_number() || value.get<double>() < 0) {
      refuse(key, "must be a number, 0 or more");
    }
    return value.get<double>();
  }

  bool flag(const std::string& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!object_.at(key).is_boolean()) refuse(key, "must be true or false");
    return object_.at(key).get<bool>();
  }

  void need(const std::string& key, bool value) const {
    if (flag(key, value) == value) return;
    refuse(key, format("{} {} alone", known_, value));
  }

  std::string text(const std::string& key) const {
    if (!has(key) || !object_.at(key).is_string())
      refuse(key, "must be a string");
    return object_.at(key).get<std::string>();
  }
  std::string text(const std::string& key, const char* otherwise) const {
    return has(key) ? text(key) : otherwise;
  }

  const json& list(const std::string& key) const {
    if (!object_.at(key).is_array()) refuse(key, "must be a list");
    return object_.at(key);
  }

  Fields object(const std::string& key) const {
    if (!object_.at(key).is_object()) refuse(key, "must be an object");
    return {object_.at(key), format("{}: \"{}\"", place_, key)};
  }

 private:
  int64_t whole(const std::string& key, int64_t least) const {
    const auto found = object_.find(key);
    const bool fits = found != object_.end() && found->is_number_integer() &&
                      (!found->is_number_unsigned() ||
                       found->get<uint64_t>() <= uint64_t{kMostCount}) &&
                      found->get<int64_t>() >= least &&
                      found->get<int64_t>() <= kMostCount;
    if (fits) return found->get<int64_t>();
    refuse(
        key, format("must be a whole number from {} to {}", least, kMostCount));
  }

  const json& object_;
  std::string place_;
  const char* known_;
};

ConfigShape read_gpt2(const Fields& fields) {
  fields.need("add_cross_attention", false);
  const int64_t positions = fields.count("n_positions");
  return {
      {.layers = fields.count("n_layer"),
       .hidden = fields.count("n_embd"),
       .heads = fields.count("n_head"),
       .ffn = fields.count("n_inner", 0),
       .vocab = fields.count("vocab_size"),
       .tied = fields.flag("tie_word_embeddings", true),
       .positions = positions},
      positions};
}

// The shape of a config.json that uses Llama's names for its fields, as most
// families do.
TransformerShape llama_like(const Fields& fields) {
  return {
      .layers = fields.count("num_hidden_layers"),
      .hidden = fields.count("hidden_size"),
      .heads = fields.count("num_attention_heads"),
      .kv_heads = fields.count("num_key_value_heads", 0),
      .head_dim = fields.count("head_dim", 0),
      .ffn = fields.count("intermediate_size"),
      .vocab = fields.count("vocab_size"),
      .gated = true,
      .tied = fields.flag("tie_word_embeddings", false),
      .biases = false,
      .rms_norm = true};
}

int64_t context(const Fields& fields) {
  return fields.count("max_position_embeddings", 2048);
}

ConfigShape read_llama(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  fields.need("mlp_bias", false);
  shape.qkv_biases = fields.flag("attention_bias", false);
  return {shape, context(fields)};
}

ConfigShape read_mistral(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  shape.window = fields.count("sliding_window", 0);
  return {shape, context(fields)};
}

ConfigShape read_mixtral(const Fields& fields) {
  ConfigShape model = read_mistral(fields);
  model.shape.experts = {
      .experts = fields.count("num_local_experts"),
      .experts_per_token = fields.count("num_experts_per_tok"),
      .ffn = model.shape.ffn};
  return model;
}

ConfigShape read_qwen2(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  fields.need("use_sliding_window", false);
  shape.qkv_biases = true;
  return {shape, context(fields)};
}

ConfigShape read_qwen3(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  fields.need("use_sliding_window", false);
  shape.head_dim = fields.count("head_dim", 128);
  shape.qkv_biases = fields.flag("attention_bias", false);
  shape.qk_norm = true;
  return {shape, context(fields)};
}

ConfigShape read_qwen3_moe(const Fields& fields) {
  ConfigShape model = read_qwen3(fields);
  if (fields.has("mlp_only_layers") &&
      !fields.list("mlp_only_layers").empty()) {
    fields.refuse("mlp_only_layers", "known is an empty list");
  }
  model.shape.experts = {
      .experts = fields.count_of("num_experts", "num_local_experts"),
      .experts_per_token = fields.count("num_experts_per_tok"),
      .ffn = fields.count("moe_intermediate_size"),
      .every = fields.count("decoder_sparse_step", 1)};
  return model;
}

ConfigShape read_gemma(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  shape.head_dim = fields.count("head_dim", 256);
  shape.tied = fields.flag("tie_word_embeddings", true);
  shape.qkv_biases = fields.flag("attention_bias", false);
  return {shape, context(fields)};
}

// Whether the attention of layer `i` has a window, which `layer_types` lists
// one by one: all have it but the last of so many. 0: all have it. `usual` is
// what a file without the list means.
int64_t global_every(const Fields& fields, int64_t layers, int64_t usual) {
  if (!fields.has("layer_types")) return usual;
  const json& types = fields.list("layer_types");
  const auto count = static_cast<int64_t>(types.size());
  int64_t every = 0;
  bool regular = count == layers;
  for (int64_t i = 0; regular && i < count; ++i) {
    const json& type = types[static_cast<size_t>(i)];
    const bool global = type == "full_attention";
    if (global && every == 0) every = i + 1;
    regular = (global || type == "sliding_attention") &&
              global == (every > 0 && (i + 1) % every == 0);
  }
  if (!regular) {
    fields.refuse(
        "layer_types",
        "must have sliding_attention or full_attention for each layer, and "
        "full_attention in the last of each group of so many layers");
  }
  return every;
}

// What gemma 2 and 3 have in common; the window is in all layers but the last
// of `usual`.
ConfigShape read_gemma_window(const Fields& fields, int64_t usual) {
  ConfigShape model = read_gemma(fields);
  TransformerShape& shape = model.shape;
  if (fields.is_there("sliding_window") && !fields.has("sliding_window")) {
    fields.refuse("sliding_window", "must be a number of tokens");
  }
  shape.window = fields.count("sliding_window", 4096);
  shape.global_every = global_every(fields, shape.layers, usual);
  shape.post_norms = true;
  return model;
}

ConfigShape read_gemma2(const Fields& fields) {
  return read_gemma_window(fields, 2);
}

ConfigShape read_gemma3(const Fields& fields) {
  ConfigShape model =
      read_gemma_window(fields, fields.count("sliding_window_pattern", 6));
  model.shape.qk_norm = true;
  return model;
}

ConfigShape read_deepseek(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  fields.need("attention_bias", false);
  shape.head_dim = 0;
  shape.latent = {
      .query_rank = fields.count("q_lora_rank", 0),
      .key_value_rank = fields.count("kv_lora_rank"),
      .rope_dim = fields.count("qk_rope_head_dim"),
      .nope_dim = fields.count("qk_nope_head_dim"),
      .value_dim = fields.count("v_head_dim")};
  const int64_t ffn = fields.count("moe_intermediate_size");
  shape.experts = {
      .experts = fields.count("n_routed_experts"),
      .experts_per_token = fields.count("num_experts_per_tok"),
      .ffn = ffn,
      .shared_ffn = ffn * fields.number("n_shared_experts", 0),
      .first_dense_layers = fields.number("first_k_dense_replace", 0),
      .every = fields.count("moe_layer_freq", 1)};
  return {shape, context(fields)};
}

ConfigShape read_gpt_oss(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  fields.need("attention_bias", true);
  shape.biases = true;
  shape.window = fields.count("sliding_window", 0);
  if (shape.window > 0) {
    shape.global_every = global_every(fields, shape.layers, 2);
  }
  shape.experts = {
      .experts = fields.count("num_local_experts"),
      .experts_per_token =
          fields.count_of("num_experts_per_tok", "experts_per_token"),
      .ffn = shape.ffn};
  return {shape, context(fields)};
}

ConfigShape read_bloom(const Fields& fields) {
  return {
      {.layers = fields.count_of("n_layer", "num_hidden_layers"),
       .hidden = fields.count_of("hidden_size", "n_embed"),
       .heads = fields.count_of("n_head", "num_attention_heads"),
       .vocab = fields.count("vocab_size"),
       .tied = fields.flag("tie_word_embeddings", true),
       .embedding_norm = true},
      fields.count("seq_length", 2048)};
}

ConfigShape read_mpt(const Fields& fields) {
  const int64_t hidden = fields.count("d_model");
  const int64_t positions = fields.count("max_seq_len", 2048);
  TransformerShape shape{
      .layers = fields.count("n_layers"),
      .hidden = hidden,
      .heads = fields.count("n_heads"),
      .ffn = hidden * fields.count("expansion_ratio", 4),
      .vocab = fields.count("vocab_size"),
      .tied = fields.flag("tie_word_embeddings", true),
      .biases = !fields.flag("no_bias", false)};
  bool alibi = false;
  if (fields.has("attn_config")) {
    const Fields attention = fields.object("attn_config");
    alibi = attention.flag("alibi", false);
    shape.kv_heads = attention.count("kv_n_heads", 0);
  }
  if (!alibi && fields.flag("learned_pos_emb", true))
    shape.positions = positions;
  return {shape, positions};
}

ConfigShape read_gpt_neox(const Fields& fields) {
  return {
      {.layers = fields.count("num_hidden_layers"),
       .hidden = fields.count("hidden_size"),
       .heads = fields.count("num_attention_heads"),
       .ffn = fields.count("intermediate_size"),
       .vocab = fields.count("vocab_size"),
       .tied = fields.flag("tie_word_embeddings", false)},
      context(fields)};
}

ConfigShape read_opt(const Fields& fields) {
  const int64_t positions = fields.count("max_position_embeddings");
  const int64_t hidden = fields.count("hidden_size");
  if (fields.count("word_embed_proj_dim", hidden) != hidden) {
    fields.refuse("word_embed_proj_dim", "known is the hidden_size alone");
  }
  return {
      {.layers = fields.count("num_hidden_layers"),
       .hidden = hidden,
       .heads = fields.count("num_attention_heads"),
       .ffn = fields.count("ffn_dim"),
       .vocab = fields.count("vocab_size"),
       .tied = fields.flag("tie_word_embeddings", true),
       .positions = positions + 2,  // its numbers begin at 2
       .biases = fields.flag("enable_bias", true)},
      positions};
}

struct Family {
  const char* type;          // "model_type"
  const char* architecture;  // without "ForCausalLM" and the like
  ConfigShape (*read)(const Fields&);
};

constexpr Family kFamilies[] = {
    {"gpt2", "GPT2LMHeadModel", read_gpt2},
    {"llama", "LlamaForCausalLM", read_llama},
    {"mistral", "MistralForCausalLM", read_mistral},
    {"mixtral", "MixtralForCausalLM", read_mixtral},
    {"qwen2", "Qwen2ForCausalLM", read_qwen2},
    {"qwen3", "Qwen3ForCausalLM", read_qwen3},
    {"qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe},
    {"gemma", "GemmaForCausalLM", read_gemma},
    {"gemma2", "Gemma2ForCausalLM", read_gemma2},
    {"gemma3_text", "Gemma3ForCausalLM", read_gemma3},
    {"deepseek_v2", "DeepseekV2ForCausalLM", read_deepseek},
    {"deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek},
    {"kimi_k2", "KimiK2ForCausalLM", read_deepseek},
    {"gpt_oss", "GptOssForCausalLM", read_gpt_oss},
    {"bloom", "BloomForCausalLM", read_bloom},
    {"mpt", "MPTForCausalLM", read_mpt},
    {"gpt_neox", "GPTNeoXForCausalLM", read_gpt_neox},
    {"opt", "OPTForCausalLM", read_opt},
};

const Family& family_of(const Fields& fields) {
  if (fields.has("model_type")) {
    const std::string type = fields.text("model_type");
    std::vector<std::string> types;
    for (const Family& family : kFamilies) {
      if (type == family.type) return family;
      types.push_back(family.type);
    }
    fields.refuse(
        "model_type", format(
                          "known are {}{}", join(types, ", "),
                          config::did_you_mean(type, types)));
  }
  if (fields.has("architectures")) {
    const json& names = fields.list("architectures");
    for (const Family& family : kFamilies) {
      if (!names.empty() && names[0] == family.architecture) return family;
    }
    fields.refuse("architectures", "is no family that is known");
  }
  fields.refuse("model_type", "it names the family, such as gpt2 or llama");
}

// What transformers takes for fields that are missing, by model_type.
const json& defaults_of(const std::string& type) {
  static const json defaults = json::parse(R"({
    "gpt2": {
      "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
      "n_positions": 1024},
    "llama": {
      "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
      "intermediate_size": 11008, "vocab_size": 32000,
      "max_position_embeddings": 2048},
    "mistral": {
      "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
      "num_key_value_heads": 8, "intermediate_size": 14336,
      "vocab_size": 32000, "max_position_embeddings": 131072},
    "qwen2": {
      "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
      "num_key_value_heads": 32, "intermediate_size": 22016,
      "vocab_size": 151936, "max_position_embeddings": 32768},
    "qwen3": {
      "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
      "num_key_value_heads": 32, "head_dim": 128, "intermediate_size": 22016,
      "vocab_size": 151936, "max_position_embeddings": 32768},
    "mixtral": {
      "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
      "num_key_value_heads": 8, "intermediate_size": 14336,
      "vocab_size": 32000, "max_position_embeddings": 131072,
      "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
      "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 32,
      "num_key_value_heads": 4, "intermediate_size": 6144,
      "vocab_size": 151936, "max_position_embeddings": 32768,
      "moe_intermediate_size": 768, "num_experts_per_tok": 8,
      "norm_topk_prob": false},
    "deepseek_v3": {
      "num_hidden_layers": 61, "hidden_size": 7168,
      "num_attention_heads": 128, "intermediate_size": 18432,
      "vocab_size": 129280, "max_position_embeddings": 4096,
      "moe_intermediate_size": 2048, "n_routed_experts": 256,
      "n_shared_experts": 1, "num_experts_per_tok": 8,
      "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
      "norm_topk_prob": true, "routed_scaling_factor": 2.5,
      "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
      "v_head_dim": 128},
    "gemma": {
      "num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 16,
      "num_key_value_heads": 16, "head_dim": 256, "intermediate_size": 24576,
      "vocab_size": 256000, "max_position_embeddings": 8192,
      "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": true},
    "gemma2": {
      "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8,
      "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
      "vocab_size": 256000, "max_position_embeddings": 8192,
      "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
      "final_logit_softcapping": 30.0, "tie_word_embeddings": true},
    "gemma3_text": {
      "num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8,
      "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 9216,
      "vocab_size": 262208, "max_position_embeddings": 131072,
      "query_pre_attn_scalar": 256, "tie_word_embeddings": true}})");
  return defaults.at(type);
}

// The base of rotary positions in the same releases; null: 10000.
double default_theta(const std::string& type) {
  return type == "mixtral" || type == "gemma3_text" ? 1e6 : 1e4;
}

ModelOptions options_of(const char* name, const ConfigShape& config) {
  ModelOptions options;
  options.name = name;
  options.layers = config.shape.layers;
  options.hidden_size = config.shape.hidden;
  options.heads = config.shape.heads;
  options.intermediate_size = config.shape.ffn_size();
  options.vocab_size = config.shape.vocab;
  options.max_positions = config.positions;
  return options;
}

ModelOptions gpt_options(const Fields& fields) {
  ModelOptions options = options_of("gpt", read_gpt2(fields));
  options.norm_eps = fields.real("layer_norm_epsilon", 1e-5);
  options.dropout = fields.real("resid_pdrop", 0.1);
  for (const char* other : {"attn_pdrop", "embd_pdrop"}) {
    if (fields.real(other, 0.1) == options.dropout) continue;
    fields.refuse(other, "must be that of resid_pdrop: there is one dropout");
  }
  const auto activation = fields.text("activation_function", "gelu_new");
  if (activation != "gelu_new" && activation != "gelu_pytorch_tanh") {
    fields.refuse("activation_function", "known is gelu_new");
  }
  fields.need("scale_attn_weights", true);
  fields.need("scale_attn_by_inverse_layer_idx", false);
  fields.need("tie_word_embeddings", true);
  return options;
}

// YaRN's numbers. What multiplies the rotated features may be given by two
// others, which also multiply the scores of DeepSeek's attention.
void read_yarn(
    const Fields& rope, const Architecture& kind, RotaryOptions& options) {
  options.beta_fast = rope.real("beta_fast", 32);
  options.beta_slow = rope.real("beta_slow", 1);
  options.attention_factor = rope.real("attention_factor", 0);
  rope.need("truncate", true);
  const double all = rope.real("mscale_all_dim", 0);
  const double some = rope.real("mscale", 0);
  if (options.attention_factor == 0 && some > 0 && all > 0) {
    const auto scale = [&](double weight) {
      return options.factor > 1 ? 0.1 * weight * std::log(options.factor) + 1
                                : 1;
    };
    options.attention_factor = scale(some) / scale(all);
  }
  if (kind.latent_attention) options.mscale_all_dim = all;
}

// One set of rotary positions.
void read_rope_parameters(
    const Fields& fields, const Fields& rope, const Architecture& kind,
    RotaryOptions& options) {
  options.theta = rope.real("rope_theta", options.theta);
  if (options.theta <= 0) rope.refuse("rope_theta", "must be above 0");
  if (rope.real("partial_rotary_factor", 1) != 1) {
    rope.refuse("partial_rotary_factor", "all of a head is rotated here");
  }
  const std::string key = rope.has("rope_type") ? "rope_type" : "type";
  const auto type = rope.text(key, "default");
  if (type == "default") return;
  if (type != "llama3" && type != "yarn" && type != "linear") {
    rope.refuse(key, "known are default, linear, llama3 and yarn");
  }
  options.original_positions =
      rope.count("original_max_position_embeddings", context(fields));
  // A DeepSeek may leave the factor to its two lengths.
  const double usual = static_cast<double>(context(fields)) /
                       static_cast<double>(options.original_positions);
  options.factor = rope.real("factor", type == "llama3" ? 8 : usual);
  if (options.factor <= 0) rope.refuse("factor", "must be above 0");
  if (type == "linear") {
    options.scaling = RopeScaling::linear;
    options.original_positions = RotaryOptions().original_positions;
  } else if (type == "yarn") {
    options.scaling = RopeScaling::yarn;
    read_yarn(rope, kind, options);
  } else {
    options.low_freq_factor = rope.real("low_freq_factor", 1);
    options.high_freq_factor = rope.real("high_freq_factor", 4);
    options.original_positions =
        rope.count("original_max_position_embeddings", 8192);
  }
}

// Rotary positions: rope_theta and rope_scaling of transformers, or, from
// version 5 on, rope_parameters, which has all of it. gemma3 has one set for
// each type of layer.
void read_rope(
    const Fields& fields, const Architecture& kind, ModelOptions& options) {
  options.rope = {.theta = fields.real("rope_theta", default_theta(kind.type))};
  if (options.rope.theta <= 0) fields.refuse("rope_theta", "must be above 0");
  if (kind.local_rotary) {
    options.rope_local_theta = fields.real("rope_local_base_freq", 10000);
  }
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (!fields.has(name)) continue;
    const auto rope = fields.object(name);
    if (!kind.local_rotary || !rope.has("full_attention")) {
      read_rope_parameters(fields, rope, kind, options.rope);
      continue;
    }
    read_rope_parameters(
        fields, rope.object("full_attention"), kind, options.rope);
    if (!rope.has("sliding_attention")) continue;
    const auto local = rope.object("sliding_attention");
    RotaryOptions own{.theta = options.rope_local_theta};
    read_rope_parameters(fields, local, kind, own);
    if (own.factor > 0) {
      local.refuse("rope_type", "known is default for layers with a window");
    }
    options.rope_local_theta = own.theta;
  }
  if (kind.local_rotary && options.rope_local_theta <= 0) {
    fields.refuse("rope_local_base_freq", "must be above 0");
  }
}

// A window may be in all layers or in none, but for gemma2 and gemma3.
void read_window(
    const Fields& fields, const Architecture& kind,
    const TransformerShape& shape, ModelOptions& options) {
  if (kind.post_norms) {
    options.window = shape.window;
    options.global_every = shape.global_every;
    return;
  }
  if (kind.window) {
    // A mistral has one where the field is missing; null says that it has none.
    const bool usual = kind.type == std::string("mistral") &&
                       !fields.is_there("sliding_window");
    options.window = usual ? 4096 : fields.count("sliding_window", 0);
  }
  if (!fields.has("layer_types")) return;
  const char* expected =
      options.window > 0 ? "sliding_attention" : "full_attention";
  for (const json& type : fields.list("layer_types")) {
    if (type == expected) continue;
    fields.refuse(
        "layer_types",
        format("Echelon computes such models with {} in each layer", expected));
  }
}

// What DeepSeek-V3 has in addition.
void read_biased_router(
    const Fields& fields, const ExpertShape& shape, ModelOptions& options) {
  options.shared_experts = shape.shared_ffn / shape.ffn;
  options.dense_layers = shape.first_dense_layers;
  options.expert_groups = fields.count("n_group", 1);
  options.groups_per_token = fields.count("topk_group", 1);
  options.routing_scale = fields.real("routed_scaling_factor", 1);
  if (options.routing_scale <= 0) {
    fields.refuse("routed_scaling_factor", "must be above 0");
  }
  // Fields of the published configuration, which transformers does not read.
  if (fields.text("scoring_func", "sigmoid") != "sigmoid") {
    fields.refuse("scoring_func", "known is sigmoid");
  }
  if (fields.text("topk_method", "noaux_tc") != "noaux_tc") {
    fields.refuse("topk_method", "known is noaux_tc");
  }
  if (shape.every != 1) {
    fields.refuse("moe_layer_freq", "known is 1: experts in each later layer");
  }
}

void read_latent_attention(
    const Fields& fields, const LatentAttention& latent,
    ModelOptions& options) {
  options.query_rank = latent.query_rank;
  options.key_value_rank = latent.key_value_rank;
  options.nope_size = latent.nope_dim;
  options.rope_size = latent.rope_dim;
  options.value_size = latent.value_dim;
  fields.need("rope_interleave", true);
  // transformers sets it to this number, whatever was written.
  const int64_t own = fields.count("head_dim", latent.rope_dim);
  if (own != latent.rope_dim) {
    fields.refuse("head_dim", "must be that of qk_rope_head_dim");
  }
}

void read_experts(
    const Fields& fields, const Architecture& kind, const ExpertShape& shape,
    ModelOptions& options) {
  if (!kind.has_experts()) return;
  options.experts = shape.experts;
  options.experts_per_token = shape.experts_per_token;
  (kind.biased_router ? options.expert_size : options.intermediate_size) =
      shape.ffn;
  if (kind.may_not_normalize) {
    options.normalize_routing = fields.flag("norm_topk_prob", false);
  }
  if (kind.biased_router) read_biased_router(fields, shape, options);
  if (shape.every != 1) {
    fields.refuse("decoder_sparse_step", "known is 1: experts in each layer");
  }
  if (fields.real("router_jitter_noise", 0) != 0) {
    fields.refuse("router_jitter_noise", "known is 0: routing without noise");
  }
  if (fields.flag("output_router_logits", false)) {
    fields.refuse(
        "output_router_logits",
        "it adds the loss of router_aux_loss_coef; set it to false, and "
        "[model] aux_loss for training");
  }
}

// gemma's first files say "gelu", which transformers reads as the other name.
void read_activation(const Fields& fields, const Architecture& kind) {
  const char* key = kind.post_norms ? "hidden_activation" : "hidden_act";
  const std::string usual = kind.gelu ? "gelu_pytorch_tanh" : "silu";
  const auto activation = fields.text(key, usual.c_str());
  const bool first = kind.gelu && !kind.post_norms;
  if (activation == usual || (first && activation == "gelu")) return;
  fields.refuse(key, "known is " + usual);
}

// What gemma2 and gemma3 have in addition.
void read_caps(
    const Fields& fields, const Architecture& kind, ModelOptions& options) {
  if (!kind.post_norms) return;
  options.query_pre_attn_scalar = fields.count("query_pre_attn_scalar", 256);
  options.attention_softcap = fields.real("attn_logit_softcapping", 0);
  options.logit_softcap = fields.real("final_logit_softcapping", 0);
}

ModelOptions llama_options(
    const Fields& fields, const Architecture& kind, const ConfigShape& config) {
  ModelOptions options = options_of(kind.name, config);
  options.kv_heads = config.shape.key_value_heads();
  options.norm_eps = fields.real("rms_norm_eps", 1e-6);
  options.tie_embeddings = config.shape.tied;
  read_rope(fields, kind, options);
  const int64_t own = fields.count("head_dim", 0);
  const bool usual = own == 0 || own * options.heads == options.hidden_size;
  if (!usual && !kind.latent_attention) options.head_size = own;
  read_window(fields, kind, config.shape, options);
  read_caps(fields, kind, options);
  read_experts(fields, kind, config.shape.experts, options);
  if (config.shape.latent) {
    read_latent_attention(fields, *config.shape.latent, options);
  }
  read_activation(fields, kind);
  if (kind.always_tied) fields.need("tie_word_embeddings", true);
  fields.need("use_bidirectional_attention", false);
  fields.need("attention_bias", false);
  fields.need("mlp_bias", false);
  if (fields.real("attention_dropout", 0) != 0) {
    fields.refuse(
        "attention_dropout",
        "dropout of attention alone is not known; set it to 0, and [model] "
        "dropout for training");
  }
  return options;
}

// "GPT2LMHeadModel, LlamaForCausalLM … and Qwen3MoeForCausalLM"
std::string known_classes() {
  std::string names;
  const auto& all = architectures();
  for (size_t i = 0; i < all.size(); ++i) {
    if (i > 0) names += i + 1 == all.size() ? " and " : ", ";
    names += all[i].class_name;
  }
  return names;
}

// A configuration that was saved without its model names only the family.
const Architecture& architecture_of(const json& config, const Fields& fields) {
  const auto type = config.find("model_type");
  const json names = config.value("architectures", json());
  for (const auto& kind : architectures()) {
    if (names.is_null() && type != config.end() && *type == kind.type) {
      return kind;
    }
  }
  if (!names.is_array() || names.size() != 1 || !names[0].is_string()) {
    fields.refuse(
        "architectures", "does not name one; known are " + known_classes());
  }
  for (const auto& kind : architectures()) {
    if (names[0] == kind.class_name) return kind;
  }
  fields.refuse("architectures", "known are " + known_classes());
}

json parse_object(std::string_view text, const std::string& name) {
  if (text.size() > kMostBytes) {
    throw DataError(format(
        "{}: is {} bytes; no config.json is above {}", name, text.size(),
        kMostBytes));
  }
  json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) {
    throw DataError(name + ": is no JSON object, or cut off");
  }
  return value;
}

}  // namespace

std::string read_config_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text(kMostBytes + 1, '\0');
  if (!in || !in.read(text.data(), 1)) {
    throw DataError(
        path.string() +
        ": cannot be read; a Hugging Face folder has a config.json");
  }
  in.read(text.data() + 1, static_cast<std::streamsize>(kMostBytes));
  text.resize(1 + static_cast<size_t>(in.gcount()));
  return text;
}

ConfigShape parse_shape(std::string_view text, const std::string& name) {
  const json value = parse_object(text, name);
  const Fields fields(value, name);
  return family_of(fields).read(fields);
}

ModelOptions read_config(const std::string& path) {
  json config = parse_object(read_config_text(path), path);
  const Fields fields(config, path, "Echelon computes such models with");
  const auto& kind = architecture_of(config, fields);
  if (fields.has("quantization_config")) {
    fields.refuse("quantization_config", "quantised weights are not read");
  }
  for (const auto& [key, value] : defaults_of(kind.type).items()) {
    if (!fields.is_there(key)) config[key] = value;
  }
  const auto* family = std::ranges::find_if(kFamilies, [&](const Family& one) {
    return one.type == std::string(kind.type);
  });
  const auto options = kind.gpt
                           ? gpt_options(fields)
                           : llama_options(fields, kind, family->read(fields));
  try {
    language_model_shape(options, options.vocab_size);
  } catch (const ConfigError& error) {
    throw DataError(path + ": as a model of Echelon: " + error.what());
  }
  return options;
}

}  // namespace echelon::hugging_face
