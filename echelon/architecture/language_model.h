// The shape of a language model, from the name of its size and the options that
// override it. Free of LibTorch.
//
//   gpt    GPT-2: learned positions, LayerNorm, GELU, tied embeddings. Radford
//          et al., "Language Models are Unsupervised Multitask Learners", 2019.
//   llama  RMSNorm, rotary positions, SwiGLU, grouped queries. Touvron et al.,
//          2023, arXiv:2302.13971 and 2307.09288; Grattafiori et al., 2024,
//          arXiv:2407.21783.
//
// The other architectures are a llama with something more (architectures()):
//
//   mistral    a window of attention. Jiang et al., 2023, arXiv:2310.06825.
//   qwen2      biases of queries, keys and values. Yang et al., 2024,
//              arXiv:2407.10671.
//   qwen3      norms of queries and keys. Yang et al., 2025, arXiv:2505.09388.
//   mixtral    a mistral with a mixture of experts in place of each MLP. Jiang
//              et al., 2024, arXiv:2401.04088.
//   qwen3-moe  a qwen3 with a mixture of experts.
//   deepseek-v3
//              latent attention, and a mixture whose router adds a bias to its
//              choice, with groups of experts, shared experts and first blocks
//              without any. DeepSeek-AI, 2024, arXiv:2412.19437. It predicts
//              one token: its modules for multi-token prediction are left out.
//   gemma      scaled embeddings, norms that multiply by 1 + weight, GELU in
//              the gated MLP, tied embeddings. Gemma Team, 2024,
//              arXiv:2403.08295.
//   gemma2     a gemma with norms after attention and MLP too, a window in all
//              blocks but some, and scores and logits that are kept below a
//              number. Gemma Team, 2024, arXiv:2408.00118.
//   gemma3     the same with norms of queries and keys, and rotary positions of
//              their own where there is a window. Gemma Team, 2025,
//              arXiv:2503.19786. Its texts alone, without images.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/architecture/parameter_list.h"
#include "echelon/architecture/transformer_shape.h"
#include "echelon/options/model.h"

namespace echelon {

/// What a block with a mixture of experts calls its parts: parameters are
/// "MODULE.gate.weight" (the router) and "MODULE.experts.7.UP.weight".
struct ExpertNames {
  const char* module = nullptr;  // null: the architecture has an MLP
  const char* gate = nullptr;
  const char* up = nullptr;
  const char* down = nullptr;
  /// In a config.json of transformers.
  const char* count = nullptr;
  const char* size = nullptr;
};

/// A kind of language model: what no number says.
struct Architecture {
  const char* name;          // in [model] name
  const char* type;          // in transformers: "model_type"
  const char* class_name;    // in transformers: "architectures"
  bool gpt = false;          // the layers of GPT-2, else those of Llama
  bool qkv_biases = false;   // of queries, keys and values
  bool qk_norm = false;      // queries and keys are normalised, head by head
  bool window = false;       // may have a window of attention
  ExpertNames experts = {};  // of a mixture
  bool may_not_normalize = false;  // the weights of a token's experts
  bool latent_attention = false;   // by low ranks, as DeepSeek has it
  /// The mixture is DeepSeek-V3's: scores are sigmoids, a bias for each expert
  /// takes part in the choice alone, experts are in groups, some are shared,
  /// and the first blocks have an MLP.
  bool biased_router = false;
  bool gelu = false;               // in the gated MLP, in place of SiLU
  bool norms_add_one = false;      // norms multiply by 1 + weight
  bool scaled_embeddings = false;  // by sqrt(hidden_size)
  bool always_tied = false;        // the input and the output vocabulary
  /// As gemma2 has it: norms after attention and MLP, blocks without the
  /// window, which the others need, and soft caps.
  bool post_norms = false;
  bool local_rotary = false;  // positions of their own in blocks with a window

  bool has_experts() const { return experts.module != nullptr; }
};

/// All of them; gpt and llama are the first.
const std::vector<Architecture>& architectures();

/// The number in ".experts.7." of a parameter's name; none: it belongs to no
/// expert.
std::optional<int64_t> expert_of(std::string_view parameter);

/// Every number is set.
struct LanguageModelShape {
  const Architecture* kind = &architectures().front();  // never null
  int64_t layers = 1;                                   // transformer blocks
  int64_t hidden_size = 1;                              // features of a token
  int64_t heads = 1;                                    // of queries
  int64_t kv_heads = 1;      // of keys and values; gpt: heads
  int64_t head_size = 1;     // features of a head
  int64_t window = 0;        // tokens that attention reaches; 0: all
  int64_t global_every = 0;  // the last of this many blocks has no window
  int64_t query_pre_attn_scalar = 1;  // scores are divided by its root
  double attention_softcap = 0;       // 0: none
  double logit_softcap = 0;
  int64_t intermediate_size = 1;  // of the MLP
  int64_t experts = 0;            // of each block; 0: an MLP
  int64_t experts_per_token = 0;
  int64_t expert_size = 0;     // features within one expert
  int64_t shared_experts = 0;  // that every token passes
  int64_t dense_layers = 0;    // first blocks without experts
  int64_t expert_groups = 1;
  int64_t groups_per_token = 1;
  bool normalize_routing = true;
  double routing_scale = 1;
  double bias_rate = 0;
  double aux_loss = 0;
  double z_loss = 0;
  double capacity_factor = 0;             // 0: no token is dropped
  std::optional<LatentAttention> latent;  // head_size: that of its queries
  int64_t vocab_size = 1;
  int64_t max_positions = 1;    // longest sequence
  RotaryOptions rope;           // llama
  double rope_local_theta = 0;  // of blocks with a window; 0: `rope`
  double norm_eps = 1e-5;
  double dropout = 0.0;
  bool tie_embeddings = false;  // gpt, gemma: true

  bool has_experts(int64_t layer) const {
    return experts > 0 && layer >= dense_layers;
  }
  /// Tokens that attention reaches in a block; 0: all.
  int64_t window_of(int64_t layer) const {
    const bool global = global_every > 0 && (layer + 1) % global_every == 0;
    return global ? 0 : window;
  }
  RotaryOptions rope_of(int64_t layer) const {
    const bool local = rope_local_theta > 0 && window_of(layer) > 0;
    return local ? RotaryOptions{.theta = rope_local_theta} : rope;
  }
  /// What the scores of attention, queries times keys, are multiplied by.
  double score_scale() const;

  bool operator==(const LanguageModelShape&) const = default;
};

/// Whether `options.name` is an architecture or a size of one.
bool is_language_model(const ModelOptions& options);
/// Whether it is one whose blocks have a mixture of experts.
bool has_experts(const ModelOptions& options);

/// The vocabulary size: options.vocab_size, else that of the size which `name`
/// names, else `data_vocabulary`. Throws ConfigError when none of them is set,
/// and when the data has more tokens than the model.
int64_t vocabulary(const ModelOptions& options, int64_t data_vocabulary);

/// Throws ConfigError for numbers that are missing (all of them in one message)
/// or do not fit together: heads that do not divide hidden_size, kv_heads that
/// do not divide heads, a head of odd size with rotary positions, kv_heads of a
/// gpt, more experts_per_token than experts or than its groups have, and
/// numbers that the architecture does not have.
///
///   vocabulary  as vocabulary() returns it
LanguageModelShape
language_model_shape(const ModelOptions& options, int64_t vocabulary);

/// The modules that are mixtures of experts, "model.layers.0.mlp" …; none in a
/// model without experts.
std::vector<std::string> mixture_names(const LanguageModelShape& shape);

/// The same model by the numbers that its cost depends on.
TransformerShape transformer_shape(const LanguageModelShape& shape);

/// Throws ConfigError as language_model_shape does, and for a sequence that is
/// longer than max_positions, fewer heads than tensor-parallel ranks (a head of
/// queries is on one rank; one of keys and values may be on several), and an
/// MLP or a vocabulary with fewer rows than ranks. For use before a rank
/// starts.
///
///   sequence  tokens of one sample
///   tp        ranks that each layer's matrices are sharded over
void check_language_model(
    const ModelOptions& options, int64_t vocabulary, int64_t sequence,
    int64_t tp);

/// Parameters under Hugging Face's names. GPT-2's linear layers keep their
/// matrices [in, out], all others [out, in]. Initial values are those of
/// Hugging Face: normal with standard deviation 0.02 (for the matrices of gpt
/// that add to the residual sum 0.02 / sqrt(2 layers)), biases 0, norms 1.
/// "lm_head.weight" is the last, with tied_to set where it is tied.
std::vector<ParameterInfo>
list_language_parameters(const LanguageModelShape& shape, ModelDtype dtype);

/// "transformer.wte", "transformer.wpe", "transformer.h.0" …,
/// "transformer.ln_f", "lm_head"; or "model.embed_tokens", "model.layers.0" …,
/// "model.norm", "lm_head". Reads only `kind` and `layers`.
std::vector<std::string> list_language_layers(const LanguageModelShape& shape);

}  // namespace echelon
