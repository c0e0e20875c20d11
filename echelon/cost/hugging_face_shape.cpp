// The shape that a Hugging Face config.json describes: one small reader for
// each family. What would change the shape and is not understood is refused;
// what does not touch it (token numbers, dropout, angles of positions) is not
// read.
#include <algorithm>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/cost/model_catalogue.h"
#include "echelon/error.h"
#include "echelon/text/nearest.h"

namespace echelon {
namespace {

using nlohmann::json;

constexpr size_t kMostBytes = size_t{4} << 20;
constexpr int64_t kMostCount = int64_t{1} << 24;
// A longer context than this is not what most of the training is done with.
constexpr int64_t kMostUsualTokens = 8192;

// The members of one object; `place` names it in errors.
class Fields {
 public:
  Fields(const json& object, std::string place)
      : object_(object), place_(std::move(place)) {}

  [[noreturn]] void
  refuse(const std::string& key, const std::string& rule) const {
    std::string value = "is missing";
    if (const auto found = object_.find(key); found != object_.end()) {
      value = found->dump();
      if (value.size() > 60) value = value.substr(0, 57) + "...";
    }
    throw DataError(place_ + ": \"" + key + "\": " + value + "; " + rule);
  }

  bool has(const std::string& key) const {
    const auto found = object_.find(key);
    return found != object_.end() && !found->is_null();
  }

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

  bool flag(const std::string& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!object_.at(key).is_boolean()) refuse(key, "must be true or false");
    return object_.at(key).get<bool>();
  }

  void need(const std::string& key, bool value) const {
    if (flag(key, value) == value) return;
    refuse(
        key, std::string("known is ") + (value ? "true" : "false") + " alone");
  }

  std::string text(const std::string& key) const {
    if (!has(key) || !object_.at(key).is_string())
      refuse(key, "must be a string");
    return object_.at(key).get<std::string>();
  }

  const json& list(const std::string& key) const {
    if (!object_.at(key).is_array()) refuse(key, "must be a list");
    return object_.at(key);
  }

  Fields object(const std::string& key) const {
    if (!object_.at(key).is_object()) refuse(key, "must be an object");
    return {object_.at(key), place_ + ": \"" + key + "\""};
  }

 private:
  int64_t whole(const std::string& key, int64_t least) const {
    const auto found = object_.find(key);
    const bool fits = found != object_.end() && found->is_number_integer() &&
                      (!found->is_number_unsigned() ||
                       found->get<uint64_t>() <= uint64_t{kMostCount}) &&
                      found->get<int64_t>() >= least &&
                      found->get<int64_t>() <= kMostCount;
    if (!fits) {
      refuse(
          key, "must be a whole number from " + std::to_string(least) + " to " +
                   std::to_string(kMostCount));
    }
    return found->get<int64_t>();
  }

  const json& object_;
  std::string place_;
};

ModelShape shape_of(TransformerShape shape, int64_t positions) {
  return {
      .transformer = shape, .seq_len = std::min(positions, kMostUsualTokens)};
}

ModelShape read_gpt2(const Fields& fields) {
  fields.need("add_cross_attention", false);
  const int64_t positions = fields.count("n_positions");
  return shape_of(
      {.layers = fields.count("n_layer"),
       .hidden = fields.count("n_embd"),
       .heads = fields.count("n_head"),
       .ffn = fields.count("n_inner", 0),
       .vocab = fields.count("vocab_size"),
       .tied = fields.flag("tie_word_embeddings", true),
       .positions = positions},
      positions);
}

// What Llama and all that came of it call alike.
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

ModelShape read_llama(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  fields.need("mlp_bias", false);
  shape.qkv_biases = fields.flag("attention_bias", false);
  return shape_of(shape, context(fields));
}

ModelShape read_mistral(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  shape.window = fields.count("sliding_window", 0);
  return shape_of(shape, context(fields));
}

ModelShape read_mixtral(const Fields& fields) {
  ModelShape model = read_mistral(fields);
  model.transformer->experts = {
      .experts = fields.count("num_local_experts"),
      .experts_per_token = fields.count("num_experts_per_tok"),
      .ffn = model.transformer->ffn};
  return model;
}

ModelShape read_qwen2(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  fields.need("use_sliding_window", false);
  shape.qkv_biases = true;
  return shape_of(shape, context(fields));
}

ModelShape read_qwen3(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  fields.need("use_sliding_window", false);
  shape.head_dim = fields.count("head_dim", 128);
  shape.qkv_biases = fields.flag("attention_bias", false);
  shape.qk_norm = true;
  return shape_of(shape, context(fields));
}

ModelShape read_qwen3_moe(const Fields& fields) {
  ModelShape model = read_qwen3(fields);
  if (fields.has("mlp_only_layers") &&
      !fields.list("mlp_only_layers").empty()) {
    fields.refuse("mlp_only_layers", "known is an empty list");
  }
  model.transformer->experts = {
      .experts = fields.count_of("num_experts", "num_local_experts"),
      .experts_per_token = fields.count("num_experts_per_tok"),
      .ffn = fields.count("moe_intermediate_size"),
      .every = fields.count("decoder_sparse_step", 1)};
  return model;
}

ModelShape read_deepseek(const Fields& fields) {
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
  return shape_of(shape, context(fields));
}

// Windows in every second layer, which `layer_types` lists one by one.
int64_t window_every(const Fields& fields, int64_t layers) {
  if (!fields.has("layer_types")) return 2;
  const json& types = fields.list("layer_types");
  const auto windows =
      std::count(types.begin(), types.end(), "sliding_attention");
  const auto full = std::count(types.begin(), types.end(), "full_attention");
  const auto all = static_cast<int64_t>(types.size());
  if (all != layers || windows + full != all || windows == 0 ||
      all % windows != 0) {
    fields.refuse(
        "layer_types",
        "must have sliding_attention or full_attention for each layer, the "
        "first in one of so many");
  }
  return all / windows;
}

ModelShape read_gpt_oss(const Fields& fields) {
  TransformerShape shape = llama_like(fields);
  fields.need("attention_bias", true);
  shape.biases = true;
  shape.window = fields.count("sliding_window", 0);
  if (shape.window > 0) shape.window_every = window_every(fields, shape.layers);
  shape.experts = {
      .experts = fields.count("num_local_experts"),
      .experts_per_token =
          fields.count_of("num_experts_per_tok", "experts_per_token"),
      .ffn = shape.ffn};
  return shape_of(shape, context(fields));
}

ModelShape read_bloom(const Fields& fields) {
  return shape_of(
      {.layers = fields.count_of("n_layer", "num_hidden_layers"),
       .hidden = fields.count_of("hidden_size", "n_embed"),
       .heads = fields.count_of("n_head", "num_attention_heads"),
       .vocab = fields.count("vocab_size"),
       .tied = fields.flag("tie_word_embeddings", true),
       .embedding_norm = true},
      fields.count("seq_length", 2048));
}

ModelShape read_mpt(const Fields& fields) {
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
  return shape_of(shape, positions);
}

ModelShape read_gpt_neox(const Fields& fields) {
  return shape_of(
      {.layers = fields.count("num_hidden_layers"),
       .hidden = fields.count("hidden_size"),
       .heads = fields.count("num_attention_heads"),
       .ffn = fields.count("intermediate_size"),
       .vocab = fields.count("vocab_size"),
       .tied = fields.flag("tie_word_embeddings", false)},
      context(fields));
}

ModelShape read_opt(const Fields& fields) {
  const int64_t positions = fields.count("max_position_embeddings");
  const int64_t hidden = fields.count("hidden_size");
  if (fields.count("word_embed_proj_dim", hidden) != hidden) {
    fields.refuse("word_embed_proj_dim", "known is the hidden_size alone");
  }
  return shape_of(
      {.layers = fields.count("num_hidden_layers"),
       .hidden = hidden,
       .heads = fields.count("num_attention_heads"),
       .ffn = fields.count("ffn_dim"),
       .vocab = fields.count("vocab_size"),
       .tied = fields.flag("tie_word_embeddings", true),
       .positions = positions + 2,  // its numbers begin at 2
       .biases = fields.flag("enable_bias", true)},
      positions);
}

struct Family {
  const char* type;          // "model_type"
  const char* architecture;  // without "ForCausalLM" and the like
  ModelShape (*read)(const Fields&);
};

constexpr Family kFamilies[] = {
    {"gpt2", "GPT2LMHeadModel", read_gpt2},
    {"llama", "LlamaForCausalLM", read_llama},
    {"mistral", "MistralForCausalLM", read_mistral},
    {"mixtral", "MixtralForCausalLM", read_mixtral},
    {"qwen2", "Qwen2ForCausalLM", read_qwen2},
    {"qwen3", "Qwen3ForCausalLM", read_qwen3},
    {"qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe},
    {"deepseek_v2", "DeepseekV2ForCausalLM", read_deepseek},
    {"deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek},
    {"kimi_k2", "KimiK2ForCausalLM", read_deepseek},
    {"gpt_oss", "GptOssForCausalLM", read_gpt_oss},
    {"bloom", "BloomForCausalLM", read_bloom},
    {"mpt", "MPTForCausalLM", read_mpt},
    {"gpt_neox", "GPTNeoXForCausalLM", read_gpt_neox},
    {"opt", "OPTForCausalLM", read_opt},
};

std::vector<std::string> family_types() {
  std::vector<std::string> types;
  for (const Family& family : kFamilies) types.push_back(family.type);
  return types;
}

const Family& family_of(const Fields& fields) {
  if (fields.has("model_type")) {
    const std::string type = fields.text("model_type");
    for (const Family& family : kFamilies) {
      if (type == family.type) return family;
    }
    std::string known;
    for (const Family& family : kFamilies) {
      known += std::string(known.empty() ? "" : ", ") + family.type;
    }
    fields.refuse(
        "model_type",
        "known are " + known + config::did_you_mean(type, family_types()));
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

ModelShape
parse_hugging_face_config(std::string_view text, const std::string& name) {
  if (text.size() > kMostBytes) {
    throw DataError(
        name + ": is " + std::to_string(text.size()) +
        " bytes; no config.json is above " + std::to_string(kMostBytes));
  }
  const json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!value.is_object()) {
    throw DataError(name + ": is no JSON object, or cut off");
  }
  const Fields fields(value, name);
  ModelShape model = family_of(fields).read(fields);
  model.name = name;
  try {
    check(model);
  } catch (const ConfigError& error) {
    throw DataError(error.what());
  }
  return model;
}

ModelShape read_hugging_face_config(const std::filesystem::path& path) {
  std::error_code unreadable;
  const bool folder = std::filesystem::is_directory(path, unreadable);
  const std::filesystem::path file = folder ? path / "config.json" : path;
  std::ifstream in(file, std::ios::binary);
  std::string text(kMostBytes + 1, '\0');
  if (!in || !in.read(text.data(), 1)) {
    throw DataError(
        file.string() + ": cannot be read" +
        (folder ? "; a Hugging Face folder has a config.json" : ""));
  }
  in.read(text.data() + 1, static_cast<std::streamsize>(kMostBytes));
  text.resize(1 + static_cast<size_t>(in.gcount()));
  return parse_hugging_face_config(text, file.string());
}

}  // namespace echelon
