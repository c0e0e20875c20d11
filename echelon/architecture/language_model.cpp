// A size is a shape by name, and options override it number by number, where 0
// means not set. Numbers that follow from another one (the MLP of a gpt,
// kv_heads that equal heads) are dropped when that one is overridden, and
// derived again. The result is checked as a whole: numbers that are missing are
// in one message, so that a user sets them in one go.
#include "echelon/architecture/language_model.h"

#include <charconv>
#include <cmath>
#include <map>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr ExpertNames kMixtralExperts = {
    .module = "block_sparse_moe",
    .gate = "w1",
    .up = "w3",
    .down = "w2",
    .count = "num_local_experts",
    .size = "intermediate_size"};
constexpr ExpertNames kQwenExperts = {
    .module = "mlp",
    .gate = "gate_proj",
    .up = "up_proj",
    .down = "down_proj",
    .count = "num_experts",
    .size = "moe_intermediate_size"};

constexpr ExpertNames kDeepseekExperts = {
    .module = "mlp",
    .gate = "gate_proj",
    .up = "up_proj",
    .down = "down_proj",
    .count = "n_routed_experts",
    .size = "moe_intermediate_size"};

const Architecture* architecture_named(const std::string& name) {
  for (const auto& one : architectures()) {
    if (name == one.name) return &one;
  }
  return nullptr;
}

LanguageModelShape gpt2(int64_t layers, int64_t hidden, int64_t heads) {
  return {
      .kind = architecture_named("gpt"),
      .layers = layers,
      .hidden_size = hidden,
      .heads = heads,
      .kv_heads = heads,
      .intermediate_size = 4 * hidden,
      .vocab_size = 50257,
      .max_positions = 1024,
      .tie_embeddings = true};
}

LanguageModelShape llama3(
    int64_t layers, int64_t hidden, int64_t heads, int64_t kv_heads,
    int64_t intermediate) {
  return {
      .kind = architecture_named("llama"),
      .layers = layers,
      .hidden_size = hidden,
      .heads = heads,
      .kv_heads = kv_heads,
      .intermediate_size = intermediate,
      .vocab_size = 128256,
      .max_positions = 8192,
      .rope = {.theta = 500000.0}};
}

std::map<std::string, LanguageModelShape> make_sizes() {
  std::map<std::string, LanguageModelShape> all = {
      {"gpt2", gpt2(12, 768, 12)},
      {"gpt2-medium", gpt2(24, 1024, 16)},
      {"gpt2-large", gpt2(36, 1280, 20)},
      {"gpt2-xl", gpt2(48, 1600, 25)},
      {"llama-160m", llama3(12, 768, 12, 12, 3072)},
      {"llama-1b", llama3(16, 2048, 32, 8, 8192)},
      {"llama-8b", llama3(32, 4096, 32, 8, 14336)},
      {"llama-70b", llama3(80, 8192, 64, 8, 28672)}};
  LanguageModelShape& oldest = all.at("llama-160m");
  oldest.vocab_size = 32000;
  oldest.max_positions = 2048;
  oldest.rope.theta = 10000.0;
  // Llama 3.2's, with tied embeddings and longer sequences.
  LanguageModelShape& newest = all.at("llama-1b");
  newest.tie_embeddings = true;
  newest.max_positions = 131072;
  newest.rope.factor = 32.0;
  return all;
}

const LanguageModelShape* size_of(const std::string& name) {
  static const auto sizes = make_sizes();
  const auto found = sizes.find(name);
  return found == sizes.end() ? nullptr : &found->second;
}

std::string place(const ModelOptions& options) {
  return format("[model] name=\"{}\"", options.name);
}

int64_t or_else(int64_t value, int64_t otherwise) {
  return value != 0 ? value : otherwise;
}

void take_biased_router(
    const ModelOptions& options, LanguageModelShape& shape) {
  shape.expert_size = options.expert_size;
  shape.shared_experts = options.shared_experts;
  shape.dense_layers = options.dense_layers;
  shape.expert_groups = options.expert_groups;
  shape.groups_per_token = options.groups_per_token;
  shape.routing_scale = options.routing_scale;
  shape.bias_rate = options.bias_rate;
}

void take_latent_attention(
    const ModelOptions& options, LanguageModelShape& shape) {
  shape.latent = {
      .query_rank = options.query_rank,
      .key_value_rank = options.key_value_rank,
      .rope_dim = options.rope_size,
      .nope_dim = options.nope_size,
      .value_dim = options.value_size};
  shape.head_size = options.nope_size + options.rope_size;
}

// The numbers that are set, else those of the named size, else 0.
LanguageModelShape collected(const ModelOptions& options, int64_t vocabulary) {
  const auto* size = size_of(options.name);
  LanguageModelShape base;
  if (size != nullptr) {
    base = *size;
    // Numbers that follow from another one, unless they are set themselves.
    if (options.hidden_size != 0 && base.kind->gpt) {
      base.intermediate_size = 0;
    }
    if (options.heads != 0 && base.kv_heads == base.heads) base.kv_heads = 0;
  } else {
    base = {
        .kind = architecture_named(options.name),
        .layers = 0,
        .hidden_size = 0,
        .heads = 0,
        .kv_heads = 0,
        .intermediate_size = 0,
        .max_positions = 0};
  }
  base.layers = or_else(options.layers, base.layers);
  base.hidden_size = or_else(options.hidden_size, base.hidden_size);
  base.heads = or_else(options.heads, base.heads);
  base.kv_heads = or_else(or_else(options.kv_heads, base.kv_heads), base.heads);
  base.head_size = options.head_size;
  if (base.head_size == 0 && base.heads > 0) {
    base.head_size = base.hidden_size / base.heads;
  }
  base.window = options.window;
  base.global_every = options.global_every;
  base.query_pre_attn_scalar =
      or_else(options.query_pre_attn_scalar, base.head_size);
  base.attention_softcap = options.attention_softcap;
  base.logit_softcap = options.logit_softcap;
  base.intermediate_size =
      or_else(options.intermediate_size, base.intermediate_size);
  if (base.kind->gpt && base.intermediate_size == 0) {
    base.intermediate_size = 4 * base.hidden_size;
  }
  base.experts = options.experts;
  base.experts_per_token = options.experts_per_token;
  if (base.kind->has_experts()) {
    base.normalize_routing = options.normalize_routing;
    base.aux_loss = options.aux_loss;
    base.z_loss = options.z_loss;
    base.capacity_factor = options.capacity_factor;
    base.expert_size = base.intermediate_size;
  }
  if (base.kind->biased_router) take_biased_router(options, base);
  if (base.kind->latent_attention) {
    take_latent_attention(options, base);
    base.query_pre_attn_scalar = base.head_size;
  }
  base.vocab_size = vocabulary;
  base.max_positions = or_else(options.max_positions, base.max_positions);
  const double theta =
      options.rope.theta > 0 ? options.rope.theta : base.rope.theta;
  if (options.rope.factor > 0) base.rope = options.rope;
  base.rope.theta = theta;
  if (base.kind->local_rotary) {
    base.rope_local_theta =
        options.rope_local_theta > 0 ? options.rope_local_theta : 10000.0;
  }
  if (options.norm_eps > 0) base.norm_eps = options.norm_eps;
  base.dropout = options.dropout;
  base.tie_embeddings = base.tie_embeddings || options.tie_embeddings ||
                        base.kind->gpt || base.kind->always_tied;
  return base;
}

void check_complete(
    const ModelOptions& options, const LanguageModelShape& shape) {
  std::string missing;
  const auto need = [&](const char* key, int64_t value) {
    if (value > 0) return;
    missing += (missing.empty() ? "" : ", ") + std::string(key);
  };
  need("layers", shape.layers);
  need("hidden_size", shape.hidden_size);
  need("heads", shape.heads);
  // A gpt's is 4 * hidden_size, so that hidden_size is what is missing.
  if (!shape.kind->gpt || shape.hidden_size > 0) {
    need("intermediate_size", shape.intermediate_size);
  }
  if (shape.kind->has_experts()) {
    need("experts", shape.experts);
    need("experts_per_token", shape.experts_per_token);
    if (shape.kind->biased_router) need("expert_size", shape.expert_size);
  }
  if (shape.latent) {
    need("key_value_rank", shape.latent->key_value_rank);
    need("nope_size", shape.latent->nope_dim);
    need("rope_size", shape.latent->rope_dim);
    need("value_size", shape.latent->value_dim);
  }
  if (shape.kind->post_norms) need("window", shape.window);
  need("max_positions", shape.max_positions);
  if (missing.empty()) return;
  const std::string kind = shape.kind->name;
  const std::string sized = kind == "gpt"     ? "gpt2"
                            : kind == "llama" ? "llama-160m"
                                              : "";
  throw ConfigError(format(
      "{} has no numbers of its own: set {}{}", place(options), missing,
      sized.empty() ? ""
                    : format(", or name a size, as in name=\"{}\"", sized)));
}

// "mixtral", "qwen3-moe" or "deepseek-v3": the architectures for which `has`
// holds.
template <class Has>
std::string kinds_with(const Has& has) {
  std::vector<std::string> names;
  for (const auto& kind : architectures()) {
    if (has(kind)) names.push_back(format("\"{}\"", kind.name));
  }
  const std::string last = names.back();
  names.pop_back();
  return names.empty() ? last : join(names, ", ") + " or " + last;
}

// The first of some numbers that is set although the architecture has no use
// for it.
struct Foreign {
  const char* key;
  bool is_set;
};
void refuse_foreign(
    const ModelOptions& options, std::initializer_list<Foreign> keys,
    const std::string& known) {
  for (const auto& [key, is_set] : keys) {
    if (!is_set) continue;
    throw ConfigError(format(
        "{}: {} is set, and this model has no such number; leave it out, or "
        "use name={}",
        place(options), key, known));
  }
}

// Groups of experts.
void check_groups(
    const ModelOptions& options, const LanguageModelShape& shape) {
  const int64_t groups = shape.expert_groups;
  if (groups == 1 && shape.groups_per_token == 1) return;
  const int64_t in_group = shape.experts / groups;
  if (shape.experts % groups != 0 || in_group < 2) {
    throw ConfigError(format(
        "{}: expert_groups={} does not divide experts={} into groups of two or "
        "more; a group's score is the sum of its two highest",
        place(options), groups, shape.experts));
  }
  if (shape.groups_per_token > groups) {
    throw ConfigError(format(
        "{}: groups_per_token={}, but there are expert_groups={}; set {} or "
        "fewer",
        place(options), shape.groups_per_token, groups, groups));
  }
  const int64_t most = shape.groups_per_token * in_group;
  if (shape.experts_per_token > most) {
    throw ConfigError(format(
        "{}: experts_per_token={}, but groups_per_token={} groups have {} "
        "experts; set {} or fewer, or more groups",
        place(options), shape.experts_per_token, shape.groups_per_token, most,
        most));
  }
}

// Numbers of DeepSeek's, and those that it has none of.
void check_deepseek(
    const ModelOptions& options, const LanguageModelShape& shape) {
  const ModelOptions none;
  const auto& kind = *shape.kind;
  if (!kind.biased_router) {
    refuse_foreign(
        options,
        {{"expert_size", options.expert_size != none.expert_size},
         {"shared_experts", options.shared_experts != none.shared_experts},
         {"dense_layers", options.dense_layers != none.dense_layers},
         {"expert_groups", options.expert_groups != none.expert_groups},
         {"groups_per_token",
          options.groups_per_token != none.groups_per_token},
         {"routing_scale", options.routing_scale != none.routing_scale},
         {"bias_rate", options.bias_rate != none.bias_rate}},
        kinds_with([](const auto& one) { return one.biased_router; }));
  }
  if (!kind.latent_attention) {
    refuse_foreign(
        options,
        {{"query_rank", options.query_rank != none.query_rank},
         {"key_value_rank", options.key_value_rank != none.key_value_rank},
         {"nope_size", options.nope_size != none.nope_size},
         {"rope_size", options.rope_size != none.rope_size},
         {"value_size", options.value_size != none.value_size},
         {"rope_mscale_all_dim", options.rope.mscale_all_dim != 0}},
        kinds_with([](const auto& one) { return one.latent_attention; }));
  } else {
    if (options.head_size != 0) {
      throw ConfigError(format(
          "{}: head_size={}, but heads have nope_size + rope_size features; "
          "leave head_size out",
          place(options), options.head_size));
    }
    if (shape.kv_heads != shape.heads) {
      throw ConfigError(format(
          "{}: kv_heads={}, but latent attention has keys and values for each "
          "of its heads={}; leave kv_heads out",
          place(options), shape.kv_heads, shape.heads));
    }
    if (shape.latent->rope_dim % 2 != 0) {
      throw ConfigError(format(
          "{}: rope_size={}, but rotary positions turn pairs of features; it "
          "must be even",
          place(options), shape.latent->rope_dim));
    }
  }
  if (kind.biased_router) check_groups(options, shape);
}

void check_rotary(
    const ModelOptions& options, const LanguageModelShape& shape) {
  if (shape.rope.low_freq_factor >= shape.rope.high_freq_factor) {
    throw ConfigError(
        place(options) +
        ": rope_low_freq_factor is not below rope_high_freq_factor; Llama 3 "
        "has 1 and 4");
  }
  if (shape.rope.beta_slow >= shape.rope.beta_fast) {
    throw ConfigError(
        place(options) +
        ": rope_beta_slow is not below rope_beta_fast; usual are 1 and 32");
  }
  if (options.rope.scaling != RopeScaling::llama3 && shape.rope.factor == 0) {
    throw ConfigError(format(
        "{}: rope_scaling=\"{}\" has no effect without rope_factor; set "
        "rope_factor, or leave rope_scaling out",
        place(options), to_string(options.rope.scaling)));
  }
}

// Numbers of gemma2 and gemma3, and those that they have none of.
void check_gemma(const ModelOptions& options, const LanguageModelShape& shape) {
  const auto& kind = *shape.kind;
  if (!kind.post_norms) {
    refuse_foreign(
        options,
        {{"global_every", options.global_every != 0},
         {"query_pre_attn_scalar", options.query_pre_attn_scalar != 0},
         {"attention_softcap", options.attention_softcap != 0},
         {"logit_softcap", options.logit_softcap != 0}},
        kinds_with([](const auto& one) { return one.post_norms; }));
  }
  if (!kind.local_rotary) {
    refuse_foreign(
        options, {{"rope_local_theta", options.rope_local_theta != 0}},
        kinds_with([](const auto& one) { return one.local_rotary; }));
  }
  if (kind.post_norms && shape.global_every == 1) {
    throw ConfigError(
        place(options) +
        ": global_every=1 leaves no block with the window; set 0 for a window "
        "in all blocks, or 2 or more");
  }
}

// Numbers that the architecture does not have.
void check_kind(const ModelOptions& options, const LanguageModelShape& shape) {
  const auto& kind = *shape.kind;
  if (shape.window > 0 && !kind.window) {
    throw ConfigError(format(
        "{}: window={}, but attention reaches all tokens there; leave window "
        "out, or use name={}",
        place(options), shape.window,
        kinds_with([](const auto& one) { return one.window; })));
  }
  const bool any = shape.experts > 0 || shape.experts_per_token > 0;
  if (any && !kind.has_experts()) {
    throw ConfigError(format(
        "{}: experts={} and experts_per_token={}, but its blocks have one MLP; "
        "leave them out, or use name={}",
        place(options), shape.experts, shape.experts_per_token,
        kinds_with([](const auto& one) { return one.has_experts(); })));
  }
  if (shape.experts_per_token > shape.experts) {
    throw ConfigError(format(
        "{}: experts_per_token={}, but there are experts={}; a token goes to "
        "each at most once, so set {} or fewer",
        place(options), shape.experts_per_token, shape.experts, shape.experts));
  }
  if (!shape.normalize_routing && !kind.may_not_normalize) {
    throw ConfigError(format(
        "{}: normalize_routing=false, but the weights of its experts always "
        "sum to 1; leave it out, or use name={}",
        place(options),
        kinds_with([](const auto& one) { return one.may_not_normalize; })));
  }
  check_deepseek(options, shape);
  check_gemma(options, shape);
}

void check_heads(const ModelOptions& options, const LanguageModelShape& shape) {
  const bool own =
      (options.head_size > 0 && !shape.kind->gpt) || shape.latent.has_value();
  if (!own && shape.hidden_size % shape.heads != 0) {
    const int64_t below = shape.hidden_size / shape.heads * shape.heads;
    throw ConfigError(format(
        "{}: hidden_size={} does not divide by heads={}; {} or {} does",
        place(options), shape.hidden_size, shape.heads, below,
        below + shape.heads));
  }
  if (shape.kind->gpt) {
    if (shape.head_size * shape.heads != shape.hidden_size) {
      throw ConfigError(format(
          "{}: head_size={}, but the {} heads of a gpt share hidden_size={}; "
          "leave head_size out, or use name=\"llama\"",
          place(options), shape.head_size, shape.heads, shape.hidden_size));
    }
    if (shape.kv_heads == shape.heads) return;
    throw ConfigError(format(
        "{}: kv_heads={}, but each of a gpt's {} heads has its own keys and "
        "values; leave kv_heads out, or use name=\"llama\"",
        place(options), shape.kv_heads, shape.heads));
  }
  if (shape.kv_heads > shape.heads || shape.heads % shape.kv_heads != 0) {
    throw ConfigError(format(
        "{}: heads={} is not a multiple of kv_heads={}; as many heads must "
        "share "
        "each head of keys and values",
        place(options), shape.heads, shape.kv_heads));
  }
  // Of latent heads a part is rotated, which check_deepseek() looks at.
  if (!shape.latent && shape.head_size % 2 != 0) {
    throw ConfigError(format(
        "{}: {}, but rotary positions turn pairs of features; it must be even",
        place(options),
        own ? format("head_size={}", shape.head_size)
            : format(
                  "hidden_size={} / heads={} = {}", shape.hidden_size,
                  shape.heads, shape.head_size)));
  }
}

}  // namespace

const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> all = {
      {.name = "gpt",
       .type = "gpt2",
       .class_name = "GPT2LMHeadModel",
       .gpt = true},
      {.name = "llama", .type = "llama", .class_name = "LlamaForCausalLM"},
      {.name = "mistral",
       .type = "mistral",
       .class_name = "MistralForCausalLM",
       .window = true},
      {.name = "qwen2",
       .type = "qwen2",
       .class_name = "Qwen2ForCausalLM",
       .qkv_biases = true},
      {.name = "qwen3",
       .type = "qwen3",
       .class_name = "Qwen3ForCausalLM",
       .qk_norm = true},
      {.name = "mixtral",
       .type = "mixtral",
       .class_name = "MixtralForCausalLM",
       .window = true,
       .experts = kMixtralExperts},
      {.name = "qwen3-moe",
       .type = "qwen3_moe",
       .class_name = "Qwen3MoeForCausalLM",
       .qk_norm = true,
       .experts = kQwenExperts,
       .may_not_normalize = true},
      {.name = "deepseek-v3",
       .type = "deepseek_v3",
       .class_name = "DeepseekV3ForCausalLM",
       .experts = kDeepseekExperts,
       .may_not_normalize = true,
       .latent_attention = true,
       .biased_router = true},
      {.name = "gemma",
       .type = "gemma",
       .class_name = "GemmaForCausalLM",
       .gelu = true,
       .norms_add_one = true,
       .scaled_embeddings = true,
       .always_tied = true},
      {.name = "gemma2",
       .type = "gemma2",
       .class_name = "Gemma2ForCausalLM",
       .window = true,
       .gelu = true,
       .norms_add_one = true,
       .scaled_embeddings = true,
       .always_tied = true,
       .post_norms = true},
      {.name = "gemma3",
       .type = "gemma3_text",
       .class_name = "Gemma3ForCausalLM",
       .qk_norm = true,
       .window = true,
       .gelu = true,
       .norms_add_one = true,
       .scaled_embeddings = true,
       .always_tied = true,
       .post_norms = true,
       .local_rotary = true}};
  return all;
}

std::optional<int64_t> expert_of(std::string_view parameter) {
  constexpr std::string_view kExperts = ".experts.";
  const size_t at = parameter.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  parameter.remove_prefix(at + kExperts.size());
  int64_t number = 0;
  const auto* end = parameter.data() + parameter.size();
  const auto [rest, error] = std::from_chars(parameter.data(), end, number);
  if (error != std::errc() || rest == end || *rest != '.') return std::nullopt;
  return number;
}

bool is_language_model(const ModelOptions& options) {
  return architecture_named(options.name) != nullptr ||
         size_of(options.name) != nullptr;
}

bool has_experts(const ModelOptions& options) {
  const auto* kind = architecture_named(options.name);
  return kind != nullptr && kind->has_experts();
}

int64_t vocabulary(const ModelOptions& options, int64_t data_vocabulary) {
  const auto* size = size_of(options.name);
  const int64_t known =
      or_else(options.vocab_size, size != nullptr ? size->vocab_size : 0);
  if (known == 0 && data_vocabulary < 1) {
    throw ConfigError(
        place(options) +
        ": neither vocab_size nor the data gives the size of the vocabulary; "
        "set vocab_size");
  }
  if (known != 0 && data_vocabulary > known) {
    throw ConfigError(format(
        "{}: vocab_size={}, but the data has {} tokens; set vocab_size={} or "
        "more",
        place(options), known, data_vocabulary, data_vocabulary));
  }
  return or_else(known, data_vocabulary);
}

LanguageModelShape
language_model_shape(const ModelOptions& options, int64_t vocabulary) {
  if (!is_language_model(options)) {
    throw ConfigError(place(options) + " is not a language model");
  }
  const auto shape = collected(options, vocabulary);
  check_complete(options, shape);
  check_kind(options, shape);
  check_rotary(options, shape);
  check_heads(options, shape);
  return shape;
}

double LanguageModelShape::score_scale() const {
  return rope.score_scale() /
         std::sqrt(static_cast<double>(query_pre_attn_scalar));
}

std::vector<std::string> mixture_names(const LanguageModelShape& shape) {
  std::vector<std::string> names;
  for (int64_t i = 0; i < shape.layers; ++i) {
    if (!shape.has_experts(i)) continue;
    names.push_back(
        format("model.layers.{}.{}", i, shape.kind->experts.module));
  }
  return names;
}

TransformerShape transformer_shape(const LanguageModelShape& shape) {
  const auto& kind = *shape.kind;
  const bool gpt = kind.gpt;
  const bool own_heads =
      !shape.latent && shape.head_size * shape.heads != shape.hidden_size;
  return {
      .layers = shape.layers,
      .hidden = shape.hidden_size,
      .heads = shape.heads,
      .kv_heads = gpt ? 0 : shape.kv_heads,
      .head_dim = own_heads ? shape.head_size : 0,
      .ffn = shape.intermediate_size,
      .vocab = shape.vocab_size,
      .gated = !gpt,
      .tied = shape.tie_embeddings,
      .positions = gpt ? shape.max_positions : 0,
      .biases = gpt,
      .qkv_biases = kind.qkv_biases,
      .rms_norm = !gpt,
      .qk_norm = kind.qk_norm,
      .post_norms = kind.post_norms,
      .window = shape.window,
      .global_every = shape.global_every,
      .experts =
          kind.has_experts()
              ? ExpertShape{.experts = shape.experts, .experts_per_token = shape.experts_per_token, .ffn = shape.expert_size, .shared_ffn = shape.shared_experts * shape.expert_size, .first_dense_layers = shape.dense_layers}
              : ExpertShape{},
      .latent = shape.latent};
}

void check_language_model(
    const ModelOptions& options, int64_t vocabulary, int64_t sequence,
    int64_t tp) {
  const auto shape = language_model_shape(options, vocabulary);
  if (sequence > shape.max_positions) {
    throw ConfigError(format(
        "{}: a sample has {} tokens, but max_positions={}; set [data] "
        "sequence={} or less, or max_positions={}",
        place(options), sequence, shape.max_positions, shape.max_positions,
        sequence));
  }
  const auto need = [&](const char* what, int64_t count) {
    if (tp <= count) return;
    throw ConfigError(format(
        "{}: [layout] tp={}, but there are {} {} to share out; tp may be {} at "
        "most",
        place(options), tp, count, what, count));
  };
  need("heads", shape.heads);
  const bool biased = shape.kind->biased_router;
  if (shape.kind->has_experts()) {
    need(
        biased ? "features of an expert (expert_size)"
               : "features of an expert (intermediate_size)",
        shape.expert_size);
  }
  if (!shape.kind->has_experts() || shape.dense_layers > 0) {
    need("features of the MLP (intermediate_size)", shape.intermediate_size);
  }
  need("tokens of the vocabulary (vocab_size)", shape.vocab_size);
}

}  // namespace echelon
