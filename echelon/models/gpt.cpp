// GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners",
// 2019; modules and names as Hugging Face's GPT2LMHeadModel.
#include "echelon/models/build.h"
#include "echelon/models/language_layers.h"
#include "echelon/parallel/tensor/mlp.h"
#include "echelon/parallel/tensor/norm.h"
#include "echelon/parallel/tensor/vocab_embedding.h"

namespace echelon::models {
namespace {

class GptBlock : public torch::nn::Module {
 public:
  GptBlock(const LanguageContext& context, std::string name)
      : context_(context), name_(std::move(name)) {
    const auto& shape = context_.shape;
    const auto& parallel = context_.parallel;
    const auto norm = [&] {
      return std::make_shared<LayerNorm>(
          shape.hidden_size, shape.norm_eps, parallel);
    };
    branches_.before_attention = register_module("ln_1", norm());
    branches_.attention = register_module(
        "attn",
        std::make_shared<ParallelAttention>(
            AttentionOptions{
                .shape = {.hidden = shape.hidden_size, .heads = shape.heads},
                .dropout = shape.dropout},
            parallel, name_ + ".attn"));
    branches_.before_mlp = register_module("ln_2", norm());
    branches_.mlp = register_module(
        "mlp", std::make_shared<GeluMlp>(
                   MlpShape{
                       .hidden = shape.hidden_size,
                       .intermediate = shape.intermediate_size},
                   parallel, name_ + ".mlp"));
    branches_.attention_dropout = name_ + ".attn.resid_dropout";
    branches_.mlp_dropout = name_ + ".mlp.dropout";
  }

  Tensors forward(const Tensors& inputs) {
    return branches_.forward(inputs, context_, name_, is_training());
  }

 private:
  LanguageContext context_;
  std::string name_;
  Branches<LayerNorm, GeluMlp> branches_;
};

void add_positions(LayerList& layers, const LanguageContext& context) {
  const std::string name = "transformer.wpe";
  layers.add(
      name,
      [context] {
        return std::make_shared<PositionEmbedding>(
            context.shape.max_positions, context.shape.hidden_size,
            context.parallel);
      },
      [name, context](PositionEmbedding& positions, const Tensors& inputs) {
        const TokenTuple tuple(inputs, name);
        const auto frame = frame_of(tuple, context, name);
        const auto x = positions.forward(
            tuple.x, tuple.documents.defined() ? tuple.documents : tuple.x);
        return tuple.with(drop(
            x, frame, context, "transformer.drop", positions.is_training()));
      });
}

}  // namespace

LayerList
gpt_layers(const LanguageModelShape& shape, const TensorParallel& parallel) {
  const LanguageContext context{shape, parallel};
  LayerList layers;
  const std::string words = "transformer.wte";
  add_embedding(layers, words, context, /*with_dropout=*/false);
  add_positions(layers, context);
  for (int64_t i = 0; i < shape.layers; ++i) {
    const auto name = "transformer.h." + std::to_string(i);
    layers.add(name, [context, name] {
      return std::make_shared<GptBlock>(context, name);
    });
  }
  add_norm<LayerNorm>(layers, "transformer.ln_f", context);
  add_head(layers, context, words);
  return layers;
}

}  // namespace echelon::models
