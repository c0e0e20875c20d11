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
    ln_1_ = register_module("ln_1", norm());
    attn_ = register_module(
        "attn",
        std::make_shared<ParallelAttention>(
            AttentionOptions{
                .shape = {.hidden = shape.hidden_size, .heads = shape.heads},
                .dropout = shape.dropout},
            parallel,
            name_ + ".attn"));
    ln_2_ = register_module("ln_2", norm());
    mlp_ = register_module(
        "mlp",
        std::make_shared<GeluMlp>(
            MlpShape{
                .hidden = shape.hidden_size,
                .intermediate = shape.intermediate_size},
            parallel,
            name_ + ".mlp"));
  }

  Tensors forward(const Tensors& inputs) {
    const TokenTuple tuple(inputs, name_);
    auto frame = frame_of(tuple, context_, name_);
    frame.mask = mask_of(tuple, context_, tuple.x.scalar_type());
    const auto dropped = [&](const torch::Tensor& x, const char* place) {
      return drop(x, frame, context_, name_ + place, is_training());
    };
    auto x = tuple.x;
    x = x + dropped(
                attn_->forward(ln_1_->forward(x), frame),
                ".attn.resid_dropout");
    x = x + dropped(
                mlp_->forward(
                    ln_2_->forward(x), frame.batch * frame.sequence),
                ".mlp.dropout");
    return tuple.with(std::move(x));
  }

 private:
  LanguageContext context_;
  std::string name_;
  std::shared_ptr<LayerNorm> ln_1_;
  std::shared_ptr<ParallelAttention> attn_;
  std::shared_ptr<LayerNorm> ln_2_;
  std::shared_ptr<GeluMlp> mlp_;
};

void add_positions(LayerList& layers, const LanguageContext& context) {
  const std::string name = "transformer.wpe";
  layers.add(
      name,
      [context] {
        return std::make_shared<PositionEmbedding>(
            context.shape.max_positions,
            context.shape.hidden_size,
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
  layers.add(
      "transformer.ln_f",
      [context] {
        return std::make_shared<LayerNorm>(
            context.shape.hidden_size,
            context.shape.norm_eps,
            context.parallel);
      },
      [](LayerNorm& norm, const Tensors& inputs) {
        const TokenTuple tuple(inputs, "transformer.ln_f");
        return tuple.with(norm.forward(tuple.x));
      });
  add_head(layers, context, words);
  return layers;
}

}  // namespace echelon::models
