// The options of a model that trains, from its shape and the fields that do not
// touch it. What Echelon does not compute is refused.
#include "echelon/architecture/hugging_face_config.h"

#include <cmath>
#include <fstream>
#include <string>

#include "echelon/architecture/hugging_face_fields.h"
#include "echelon/architecture/language_model.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::hugging_face {
namespace {

constexpr size_t kMostBytes = size_t{4} << 20;

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

ModelOptions gpt_options(const Fields& fields, const ConfigShape& shape) {
  ModelOptions options = options_of("gpt", shape);
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

}  // namespace

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
  const ConfigShape shape = read_shape(kind.type, fields);
  const auto options = kind.gpt ? gpt_options(fields, shape)
                                : llama_options(fields, kind, shape);
  try {
    language_model_shape(options, options.vocab_size);
  } catch (const ConfigError& error) {
    throw DataError(path + ": as a model of Echelon: " + error.what());
  }
  return options;
}

}  // namespace echelon::hugging_face
