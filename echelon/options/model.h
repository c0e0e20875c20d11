// Settings of the model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/options/rotary.h"

namespace echelon {

/// What pipeline stages or devices share evenly: floating-point operations,
/// memory, or the measured time of a few microbatches.
enum class StageBalance { time, memory, measured };

/// ModelOptions::name in the config.toml of a run whose layers a program gave
/// to echelon::train.
inline constexpr const char* kOwnModel = "own";

/// The type of the parameters.
enum class ModelDtype { float32, float64 };

/// Its name in a configuration.
std::string to_string(ModelDtype dtype);
std::string to_string(RopeScaling scaling);

/// Low-rank adapters: Hu et al., 2021, arXiv:2106.09685. The matrix W [out, in]
/// of a target is used as W + alpha / rank * B A, with A [rank, in] and
/// B [out, rank]; A and B train, and all parameters of the model are frozen.
struct LoraOptions {
  int64_t rank = 0;  // 0: no adapters
  double alpha = 0;  // 0: rank
  /// Names of linear layers, or the last parts of names: "q_proj",
  /// "0.self_attn.q_proj"; patterns as in ModelOptions::freeze.
  std::vector<std::string> targets;

  bool used() const { return rank > 0; }
  double scale() const {
    return alpha > 0 ? alpha / static_cast<double>(rank) : 1.0;
  }
};

struct ModelOptions {
  std::string name = "simple_cnn";  // one of model_names(), or kOwnModel
  /// A library with layers, data or a loss of one's own (train/plugin.h): the
  /// layers where name is kOwnModel, the data where [data] name is "own".
  std::string library;
  int64_t classes = 0;                       // 0: as many as the data has
  std::vector<int64_t> hidden = {512, 512};  // mlp: widths of the hidden layers
  std::string weights;  // start from this .safetensors file, or
                        // Hugging Face folder
  ModelDtype dtype = ModelDtype::float32;
  /// Patterns of the names of parameters that do not train
  /// (architecture/trained_parameters.h).
  std::vector<std::string> freeze;
  LoraOptions lora;              // a table of its own
  bool sync_batch_norm = false;  // batch statistics over all ranks

  // Language models. 0 takes the value of the size that `name` names ("gpt2",
  // "llama-1b"). "gpt", "llama" and the other kinds name no size, so each
  // number must be set. What is said of llama holds for all kinds but gpt.
  int64_t layers = 0;        // transformer blocks
  int64_t hidden_size = 0;   // features of a token
  int64_t heads = 0;         // of attention
  int64_t kv_heads = 0;      // llama: of keys and values; 0: heads
  int64_t head_size = 0;     // llama: of a head; 0: hidden_size / heads
  int64_t window = 0;        // mistral, mixtral, gemma2, gemma3: tokens
                             // that attention reaches, itself included;
                             // 0: all
  int64_t global_every = 0;  // gemma2, gemma3: the last of this many
                             // blocks has no window; 0: all have it
  int64_t query_pre_attn_scalar = 0;  // gemma2, gemma3: scores are divided by
                                      // its root; 0: head_size
  double attention_softcap = 0;       // gemma2, gemma3: scores s become
                                      // cap tanh(s / cap); 0: they stay
  double logit_softcap = 0;           // the same of logits
  int64_t intermediate_size = 0;  // of the MLP, or of one expert; gpt, 0: 4 *
                                  // hidden_size
  int64_t experts = 0;            // of each block's mixture
  int64_t experts_per_token = 0;  // that compute a token
  bool normalize_routing = true;  // the weights of a token's experts sum to 1
  double aux_loss = 0;            // coefficient of the load-balancing loss
  double z_loss = 0;              // coefficient of the router's z-loss
  double capacity_factor = 0;     // tokens of a sample that an expert takes,
                                  // over the mean load; 0: all
  // deepseek-v3; the architecture has the formulas (language_model.h).
  int64_t expert_size = 0;       // features within one expert
  int64_t shared_experts = 0;    // that every token passes, each of expert_size
  int64_t dense_layers = 0;      // first blocks, with an MLP of
                                 // intermediate_size
  int64_t expert_groups = 1;     // of equally many experts
  int64_t groups_per_token = 1;  // from which a token's experts are chosen
  double routing_scale = 1;      // multiplies the weights of a token's experts
  double bias_rate = 0.001;      // how far the biases of experts move in a step
  int64_t query_rank = 0;        // of compressed queries; 0: not compressed
  int64_t key_value_rank = 0;    // of compressed keys and values
  int64_t nope_size = 0;         // of a head of queries and keys, not rotated
  int64_t rope_size = 0;         // of a head of queries and keys, rotated
  int64_t value_size = 0;        // of a head of values
  int64_t vocab_size = 0;        // 0: the size's, or the data's
  int64_t max_positions = 0;     // longest sequence
  /// llama; theta 0: the size's, or 10000; factor 0: the size's, or none.
  RotaryOptions rope = {.theta = 0};
  double rope_local_theta = 0;  // gemma3: of the blocks with a window, whose
                                // frequencies are not scaled; 0: 10000
  double norm_eps = 0;          // 0: 1e-5
  double dropout = 0;           // of embeddings, attention, residuals
  bool tie_embeddings = false;  // llama: one matrix for the input and output
                                // vocabulary (gpt and llama-1b always do)

  // How the list of layers is partitioned into pipeline stages or devices.
  /// The first layer of each slice but the first; empty: by `balance`.
  std::vector<std::string> partition_at;
  StageBalance balance = StageBalance::time;
  /// Devices of one process, among which the layers are partitioned: "cpu",
  /// "cuda:1". Empty: the rank's one device.
  std::vector<std::string> devices;
  /// Memory of each of `devices`, or of each pipeline rank; empty: what a GPU
  /// has, no limit on CPUs.
  std::vector<int64_t> device_bytes;
};

/// The names of the models that come with Echelon.
const std::vector<std::string>& model_names();

/// Throws ConfigError for kOwnModel without a library: only the program that
/// has its layers can build them.
void check_model_is_known(const ModelOptions& options);

}  // namespace echelon
