// The parameters and layers of a language model, in the order and by the names
// of Hugging Face's state dict.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "echelon/architecture/language_model.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

using Kind = InitialValue::Kind;

// Collects the parameters in the order of a state dict.
class Parameters {
 public:
  explicit Parameters(std::string dtype) : dtype_(std::move(dtype)) {}

  void add(std::string name, std::vector<int64_t> shape, InitialValue initial) {
    list_.push_back(
        {.name = std::move(name),
         .shape = std::move(shape),
         .dtype = dtype_,
         .initial = initial});
    if (list_.back().num_elements() >= 0) return;
    throw ConfigError(format(
        "[model] \"{}\" would have more elements than can be counted; lower "
        "the "
        "model's numbers",
        list_.back().name));
  }
  void matrix(std::string name, int64_t rows, int64_t columns) {
    add(std::move(name), {rows, columns}, {Kind::normal, kDeviation});
  }
  // The matrix of a linear layer that can have adapters.
  void linear(std::string name, int64_t rows, int64_t columns) {
    matrix(std::move(name), rows, columns);
    list_.back().takes_adapter = true;
  }
  // The same, as a matrix [in, out], and a bias.
  void
  conv1d(const std::string& name, int64_t in, int64_t out, double deviation) {
    add(name + ".weight", {in, out}, {Kind::normal, deviation});
    list_.back().takes_adapter = true;
    add(name + ".bias", {out}, {Kind::constant, 0});
  }
  void
  norm(const std::string& name, int64_t size, bool bias, double value = 1) {
    add(name + ".weight", {size}, {Kind::constant, value});
    if (bias) add(name + ".bias", {size}, {Kind::constant, 0});
  }
  // Zeros that are saved and not trained.
  void buffer(std::string name, int64_t size) {
    add(std::move(name), {size}, {Kind::constant, 0});
    list_.back().kind = ParameterInfo::Kind::buffer;
  }
  std::vector<ParameterInfo> take() { return std::move(list_); }

  static constexpr double kDeviation = 0.02;

 private:
  std::string dtype_;
  std::vector<ParameterInfo> list_;
};

void list_gpt(Parameters& list, const LanguageModelShape& shape) {
  const int64_t hidden = shape.hidden_size;
  // Each block adds two branches to the residual sum, and the variance of the
  // sum must not grow with their number.
  const double residual = Parameters::kDeviation /
                          std::sqrt(2.0 * static_cast<double>(shape.layers));
  list.matrix("transformer.wte.weight", shape.vocab_size, hidden);
  list.matrix("transformer.wpe.weight", shape.max_positions, hidden);
  for (int64_t i = 0; i < shape.layers; ++i) {
    const std::string block = format("transformer.h.{}.", i);
    list.norm(block + "ln_1", hidden, true);
    list.conv1d(
        block + "attn.c_attn", hidden, 3 * hidden, Parameters::kDeviation);
    list.conv1d(block + "attn.c_proj", hidden, hidden, residual);
    list.norm(block + "ln_2", hidden, true);
    list.conv1d(
        block + "mlp.c_fc", hidden, shape.intermediate_size,
        Parameters::kDeviation);
    list.conv1d(
        block + "mlp.c_proj", shape.intermediate_size, hidden, residual);
  }
  list.norm("transformer.ln_f", hidden, true);
}

// The MLP of a block, or its experts.
void list_feed_forward(
    Parameters& list, const LanguageModelShape& shape, int64_t layer,
    const std::string& block) {
  const int64_t hidden = shape.hidden_size;
  const auto mlp = [&](auto add, const std::string& prefix, int64_t inner,
                       const char* gate, const char* up, const char* down) {
    (list.*add)(format("{}{}.weight", prefix, gate), inner, hidden);
    (list.*add)(format("{}{}.weight", prefix, up), inner, hidden);
    (list.*add)(format("{}{}.weight", prefix, down), hidden, inner);
  };
  if (!shape.has_experts(layer)) {
    return mlp(
        &Parameters::linear, block + "mlp.", shape.intermediate_size,
        "gate_proj", "up_proj", "down_proj");
  }
  const auto& names = shape.kind->experts;
  const std::string mixture = format("{}{}.", block, names.module);
  list.matrix(mixture + "gate.weight", shape.experts, hidden);
  if (shape.kind->biased_router) {
    list.buffer(mixture + "gate.e_score_correction_bias", shape.experts);
  }
  for (int64_t i = 0; i < shape.experts; ++i) {
    mlp(&Parameters::linear, format("{}experts.{}.", mixture, i),
        shape.expert_size, names.gate, names.up, names.down);
  }
  if (shape.shared_experts > 0) {
    mlp(&Parameters::linear, mixture + "shared_experts.",
        shape.shared_experts * shape.expert_size, names.gate, names.up,
        names.down);
  }
}

// The matrices of a block's attention, in `attention` = "….self_attn.".
void list_heads(
    Parameters& list, const LanguageModelShape& shape,
    const std::string& attention) {
  const int64_t hidden = shape.hidden_size;
  const int64_t queries = shape.heads * shape.head_size;
  const int64_t kv = shape.kv_heads * shape.head_size;
  const auto projection = [&](const char* name, int64_t out) {
    list.linear(format("{}{}.weight", attention, name), out, hidden);
    if (!shape.kind->qkv_biases) return;
    list.add(format("{}{}.bias", attention, name), {out}, {Kind::constant, 0});
  };
  projection("q_proj", queries);
  projection("k_proj", kv);
  projection("v_proj", kv);
  list.linear(attention + "o_proj.weight", hidden, queries);
  if (shape.kind->qk_norm) {
    const double one = shape.kind->norms_add_one ? 0 : 1;
    list.norm(attention + "q_norm", shape.head_size, false, one);
    list.norm(attention + "k_norm", shape.head_size, false, one);
  }
}

void list_latent_heads(
    Parameters& list, const LanguageModelShape& shape,
    const std::string& attention) {
  const auto& latent = *shape.latent;
  const int64_t hidden = shape.hidden_size;
  const int64_t queries = shape.heads * shape.head_size;
  // The products of low rank are computed from their matrices alone, without
  // adapters.
  const auto matrix = [&](const char* name, int64_t out, int64_t in) {
    list.matrix(format("{}{}.weight", attention, name), out, in);
  };
  if (latent.query_rank == 0) {
    list.linear(attention + "q_proj.weight", queries, hidden);
  } else {
    matrix("q_a_proj", latent.query_rank, hidden);
    list.norm(attention + "q_a_layernorm", latent.query_rank, false);
    matrix("q_b_proj", queries, latent.query_rank);
  }
  matrix("kv_a_proj_with_mqa", latent.key_value_rank + latent.rope_dim, hidden);
  list.norm(attention + "kv_a_layernorm", latent.key_value_rank, false);
  matrix(
      "kv_b_proj", shape.heads * (latent.nope_dim + latent.value_dim),
      latent.key_value_rank);
  list.linear(
      attention + "o_proj.weight", hidden, shape.heads * latent.value_dim);
}

void list_llama(Parameters& list, const LanguageModelShape& shape) {
  const int64_t hidden = shape.hidden_size;
  const double one = shape.kind->norms_add_one ? 0 : 1;
  list.matrix("model.embed_tokens.weight", shape.vocab_size, hidden);
  for (int64_t i = 0; i < shape.layers; ++i) {
    const std::string block = format("model.layers.{}.", i);
    (shape.latent ? list_latent_heads : list_heads)(
        list, shape, block + "self_attn.");
    list_feed_forward(list, shape, i, block);
    list.norm(block + "input_layernorm", hidden, false, one);
    list.norm(block + "post_attention_layernorm", hidden, false, one);
    if (!shape.kind->post_norms) continue;
    list.norm(block + "pre_feedforward_layernorm", hidden, false, one);
    list.norm(block + "post_feedforward_layernorm", hidden, false, one);
  }
  list.norm("model.norm", hidden, false, one);
}

}  // namespace

std::vector<ParameterInfo>
list_language_parameters(const LanguageModelShape& shape, ModelDtype dtype) {
  Parameters list(to_string(dtype));
  (shape.kind->gpt ? list_gpt : list_llama)(list, shape);
  list.matrix("lm_head.weight", shape.vocab_size, shape.hidden_size);
  auto parameters = list.take();
  if (shape.tie_embeddings) {
    parameters.back().tied_to = parameters.front().name;
  }
  return parameters;
}

std::vector<std::string> list_language_layers(const LanguageModelShape& shape) {
  const bool gpt = shape.kind->gpt;
  std::vector<std::string> names = {"model.embed_tokens"};
  if (gpt) names = {"transformer.wte", "transformer.wpe"};
  for (int64_t i = 0; i < shape.layers; ++i) {
    names.push_back(
        (gpt ? "transformer.h." : "model.layers.") + std::to_string(i));
  }
  names.push_back(gpt ? "transformer.ln_f" : "model.norm");
  names.push_back("lm_head");
  return names;
}

}  // namespace echelon
