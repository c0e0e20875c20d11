// The shape of a language model, from the name of its size and the options that
// override it. Free of LibTorch.
//
//   gpt    GPT-2: learned positions, LayerNorm, GELU, tied embeddings. Radford
//          et al., "Language Models are Unsupervised Multitask Learners", 2019.
//   llama  RMSNorm, rotary positions, SwiGLU, grouped queries. Touvron et al.,
//          2023, arXiv:2302.13971 and 2307.09288; Grattafiori et al., 2024,
//          arXiv:2407.21783.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/architecture/parameter_list.h"
#include "echelon/architecture/transformer_shape.h"
#include "echelon/options/model.h"

namespace echelon {

/// Every number is set.
struct LanguageModelShape {
  enum class Family { gpt, llama };
  Family family = Family::gpt;
  int64_t layers = 1;             // transformer blocks
  int64_t hidden_size = 1;        // heads * head_size()
  int64_t heads = 1;              // of queries
  int64_t kv_heads = 1;           // of keys and values; gpt: heads
  int64_t intermediate_size = 1;  // of the MLP
  int64_t vocab_size = 1;
  int64_t max_positions = 1;    // longest sequence
  double rope_theta = 10000.0;  // llama; see parallel/tensor/rotary.h
  double rope_factor = 0.0;     // 0: frequencies are not scaled
  double rope_low_freq_factor = 1.0;
  double rope_high_freq_factor = 4.0;
  int64_t rope_original_positions = 8192;
  double norm_eps = 1e-5;
  double dropout = 0.0;
  bool tie_embeddings = false;  // gpt: true

  int64_t head_size() const { return hidden_size / heads; }
  bool operator==(const LanguageModelShape&) const = default;
};

/// Whether `options.name` is one of gpt*, llama*.
bool is_language_model(const ModelOptions& options);

/// The vocabulary size: options.vocab_size, else that of the size which `name`
/// names, else `data_vocabulary`. Throws ConfigError when none of them is set,
/// and when the data has more tokens than the model.
int64_t vocabulary(const ModelOptions& options, int64_t data_vocabulary);

/// Throws ConfigError for numbers that are missing (all of them in one message)
/// or do not fit together: heads that do not divide hidden_size, kv_heads that
/// do not divide heads, a head of odd size with rotary positions, kv_heads of a
/// gpt.
///
///   vocabulary  as vocabulary() returns it
LanguageModelShape
language_model_shape(const ModelOptions& options, int64_t vocabulary);

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
/// "model.norm", "lm_head". Reads only `family` and `layers`.
std::vector<std::string> list_language_layers(const LanguageModelShape& shape);

}  // namespace echelon
