// Llama: Touvron et al., 2023, arXiv:2302.13971; modules and names as Hugging
// Face's LlamaForCausalLM.
#include "echelon/models/build.h"
#include "echelon/models/language_layers.h"
#include "echelon/parallel/tensor/mlp.h"
#include "echelon/parallel/tensor/norm.h"

namespace echelon::models {
namespace {

class LlamaBlock : public torch::nn::Module {
 public:
  LlamaBlock(const LanguageContext& context, std::string name)
      : context_(context), name_(std::move(name)) {
    const auto& shape = context_.shape;
    const auto& parallel = context_.parallel;
    const auto norm = [&] {
      return std::make_shared<RMSNorm>(
          shape.hidden_size, shape.norm_eps, parallel);
    };
    branches_.attention = register_module(
        "self_attn", std::make_shared<ParallelAttention>(
                         AttentionOptions{
                             .shape =
                                 {.hidden = shape.hidden_size,
                                  .heads = shape.heads,
                                  .kv_heads = shape.kv_heads},
                             .fused = false,
                             .bias = false,
                             .rotary = rotary_of(shape),
                             .dropout = shape.dropout},
                         parallel, name_ + ".self_attn"));
    branches_.mlp = register_module(
        "mlp", std::make_shared<GatedMlp>(
                   MlpShape{
                       .hidden = shape.hidden_size,
                       .intermediate = shape.intermediate_size,
                       .bias = false},
                   parallel, name_ + ".mlp"));
    branches_.before_attention = register_module("input_layernorm", norm());
    branches_.before_mlp = register_module("post_attention_layernorm", norm());
    branches_.attention_dropout = name_ + ".self_attn.dropout";
    branches_.mlp_dropout = name_ + ".mlp.dropout";
  }

  Tensors forward(const Tensors& inputs) {
    return branches_.forward(inputs, context_, name_, is_training());
  }

 private:
  static RotaryOptions rotary_of(const LanguageModelShape& shape) {
    return {
        .theta = shape.rope_theta,
        .factor = shape.rope_factor,
        .low_freq_factor = shape.rope_low_freq_factor,
        .high_freq_factor = shape.rope_high_freq_factor,
        .original_positions = shape.rope_original_positions};
  }

  LanguageContext context_;
  std::string name_;
  Branches<RMSNorm, GatedMlp> branches_;
};

}  // namespace

LayerList
llama_layers(const LanguageModelShape& shape, const TensorParallel& parallel) {
  const LanguageContext context{shape, parallel};
  LayerList layers;
  const std::string words = "model.embed_tokens";
  add_embedding(layers, words, context, /*with_dropout=*/true);
  for (int64_t i = 0; i < shape.layers; ++i) {
    const auto name = "model.layers." + std::to_string(i);
    layers.add(name, [context, name] {
      return std::make_shared<LlamaBlock>(context, name);
    });
  }
  add_norm<RMSNorm>(layers, "model.norm", context);
  add_head(layers, context, words);
  return layers;
}

}  // namespace echelon::models
