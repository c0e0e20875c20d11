// The shapes of models, one reader for each family. What would change the shape
// and is not understood is refused; what does not touch it (token numbers,
// dropout, angles of positions) is read for training alone.
#include <algorithm>
#include <string>
#include <vector>

#include "echelon/architecture/hugging_face_fields.h"
#include "echelon/text/nearest.h"

namespace echelon::hugging_face {
namespace {

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

}  // namespace

int64_t context(const Fields& fields) {
  return fields.count("max_position_embeddings", 2048);
}

ConfigShape read_shape(std::string_view type, const Fields& fields) {
  const auto* family = std::ranges::find_if(
      kFamilies, [&](const Family& one) { return type == one.type; });
  return family->read(fields);
}

ConfigShape parse_shape(std::string_view text, const std::string& name) {
  const json value = parse_object(text, name);
  const Fields fields(value, name);
  return family_of(fields).read(fields);
}

}  // namespace echelon::hugging_face
