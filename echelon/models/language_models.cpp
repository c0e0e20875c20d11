// The layers of gpt, and of llama and what is built like it. A layer takes and
// returns a tuple: the tokens or hidden states, then the documents and keys of
// the batch where it has them (make_network.h), then, behind a mixture of
// experts whose losses count, their sum for each sample so far. In a
// tensor-parallel group that shards tokens (sequence parallelism) the hidden
// states are this rank's tokens, flat; their batch and sequence length are then
// known from the documents, which the embedding adds as zeros where the batch
// has none.
//
// GPT-2: Radford et al., "Language Models are Unsupervised Multitask Learners",
// 2019; modules and names as Hugging Face's GPT2LMHeadModel.
// Llama: Touvron et al., 2023, arXiv:2302.13971; modules and names as Hugging
// Face's LlamaForCausalLM. language_model.h has the papers of the others.
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "echelon/error.h"
#include "echelon/models/build.h"
#include "echelon/models/mixture.h"
#include "echelon/parallel/tensor/attention.h"
#include "echelon/parallel/tensor/dropout.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/mlp.h"
#include "echelon/parallel/tensor/norm.h"
#include "echelon/parallel/tensor/vocab.h"
#include "echelon/text/format.h"

namespace echelon::models {
namespace {

using torch::Tensor;

// The mask that keeps documents apart, one for all layers of a forward pass: it
// caches the mask of the last documents that it was asked for.
class DocumentMasks {
 public:
  // Whether there are several documents: some number is not zero.
  bool has_borders(const Tensor& documents) {
    const std::lock_guard lock(mutex_);
    auto* asked = documents.unsafeGetTensorImpl();
    if (asked_borders_.lock().get() != asked) {
      borders_ = !documents.is_meta() && documents.any().item<bool>();
      asked_borders_ = weak(asked);
    }
    return borders_;
  }

  // document_mask(documents, dtype). `zeros_have_none`: documents of zeros,
  // which stand for no borders, have no mask; the result is then undefined.
  Tensor
  get(const Tensor& documents, torch::ScalarType dtype, bool zeros_have_none) {
    const std::lock_guard lock(mutex_);
    auto* asked = documents.unsafeGetTensorImpl();
    if (documents_.lock().get() == asked && dtype_ == dtype) return mask_;
    // On the meta device there are no values to look at.
    const bool masked = !zeros_have_none ||
                        (!documents.is_meta() && documents.any().item<bool>());
    mask_ = masked ? document_mask(documents, dtype) : Tensor();
    documents_ = weak(asked);
    dtype_ = dtype;
    return mask_;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl>;

  static Weak weak(c10::TensorImpl* tensor) {
    return Weak(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(tensor));
  }

  std::mutex mutex_;
  Weak asked_borders_{c10::intrusive_ptr<c10::TensorImpl>()};
  bool borders_ = false;
  Weak documents_{c10::intrusive_ptr<c10::TensorImpl>()};
  torch::ScalarType dtype_ = torch::kFloat32;
  Tensor mask_;
};

// The context that all layers of a list are built with.
struct LanguageContext {
  LanguageModelShape shape;
  TensorParallel parallel;
  std::shared_ptr<DocumentMasks> masks = std::make_shared<DocumentMasks>();
};

// (tokens or x [, documents] [, keys] [, losses]), as make_network.h describes
// it.
struct TokenTuple {
  // `layer` names the layer in errors. Throws ConfigError when there are more
  // tensors, or others.
  TokenTuple(const Tensors& tensors, const std::string& layer) {
    const auto fail = [&] {
      throw ConfigError(format(
          "layer \"{}\" is given {}; it takes tokens, then documents [batch, "
          "sequence] and keys [batch], both int64, where there are such",
          layer, describe(tensors)));
    };
    if (tensors.empty() || tensors.size() > 4) fail();
    x = tensors[0];
    size_t end = tensors.size();
    if (end > 1 && tensors.back().is_floating_point()) {
      losses = tensors[--end];
      if (losses.dim() != 1) fail();
    }
    for (size_t i = 1; i < end; ++i) {
      const auto& tensor = tensors[i];
      if (tensor.scalar_type() != torch::kInt64) fail();
      if (tensor.dim() == 2 && i == 1) {
        documents = tensor;
      } else if (tensor.dim() == 1 && i + 1 == end) {
        keys = tensor;
      } else {
        fail();
      }
    }
  }

  // The tuple with x replaced.
  Tensors with(Tensor replaced) const {
    Tensors tensors;
    tensors.push_back(std::move(replaced));
    if (documents.defined()) tensors.push_back(documents);
    if (keys.defined()) tensors.push_back(keys);
    if (losses.defined()) tensors.push_back(losses);
    return tensors;
  }

  // Adds those of a layer.
  void add_losses(const Tensor& more) {
    if (!more.defined()) return;
    losses = losses.defined() ? losses + more : more;
  }

  Tensor x;
  Tensor documents;  // undefined: none
  Tensor keys;       // undefined: none
  Tensor losses;     // [batch] of mixtures; undefined: none
};

// Batch and sequence length of the tokens. The mask is not set. Throws
// ConfigError when tokens are sharded or cut and there are no documents.
AttentionFrame frame_of(
    const TokenTuple& tuple, const LanguageContext& context,
    const std::string& layer) {
  const auto& like = tuple.documents.defined() ? tuple.documents : tuple.x;
  const auto& cut = context.parallel.context;
  const bool known =
      tuple.documents.defined() ||
      (!context.parallel.splits_tokens() && !cut.is_used() && like.dim() >= 2);
  if (!known) {
    throw ConfigError(format(
        "layer \"{}\" is given {}; it takes tokens [batch, sequence, …], or "
        "sharded or cut ones and documents [batch, sequence], which give their "
        "shape",
        layer, describe(tuple.with(tuple.x))));
  }
  AttentionFrame frame{
      .batch = like.size(0), .sequence = like.size(1), .keys = tuple.keys};
  if (cut.is_used()) {  // documents are whole, tokens are this rank's
    frame.total = frame.sequence;
    frame.sequence = cut.length_of(frame.total);
  }
  return frame;
}

// x [batch, sequence, hidden], or its sharded tokens, with dropout if
// `training`, plus `residual` unless it is undefined. `name` is unique in the
// model. Throws ConfigError without keys.
Tensor drop(
    const Tensor& x, const AttentionFrame& frame,
    const LanguageContext& context, const std::string& name, bool training,
    const Tensor& residual = {}) {
  if (!training || context.shape.dropout == 0) {
    return residual.defined() ? residual + x : x;
  }
  if (!frame.keys.defined()) {
    throw ConfigError(format(
        "{}: dropout={:f} draws from the samples' keys, an int64 tensor "
        "[batch] "
        "behind the tokens; give it, or call eval()",
        name, context.shape.dropout));
  }
  const bool flat = context.parallel.context.is_used() && x.dim() == 3;
  const auto rows_of = [&](const Tensor& x) {
    return flat && x.defined() ? x.flatten(0, 1) : x;
  };
  const auto dropped = dropout(
      rows_of(x), frame.keys,
      {.probability = context.shape.dropout, .stream = dropout_stream(name)},
      place_of_tokens(
          context.parallel, frame.batch, frame.sequence, frame.total),
      rows_of(residual));
  return flat ? dropped.view(x.sizes()) : dropped;
}

// A norm over the features of tokens.
template <class Norm>
std::shared_ptr<Norm> norm_of(const LanguageContext& context) {
  const auto& shape = context.shape;
  if constexpr (std::is_same_v<Norm, RMSNorm>) {
    return std::make_shared<RMSNorm>(
        shape.hidden_size, shape.norm_eps, context.parallel,
        /*of_heads=*/false, shape.kind->norms_add_one);
  } else {
    return std::make_shared<Norm>(
        shape.hidden_size, shape.norm_eps, context.parallel);
  }
}

std::optional<LatentShape> latent_of(const LanguageModelShape& shape) {
  if (!shape.latent) return std::nullopt;
  return LatentShape{
      .query_rank = shape.latent->query_rank,
      .key_value_rank = shape.latent->key_value_rank,
      .nope_size = shape.latent->nope_dim,
      .rope_size = shape.latent->rope_dim,
      .value_size = shape.latent->value_dim};
}

// A transformer block: attention, then the MLP, each after its norm and added
// to the residual sum, after a second norm where the model has one. A derived
// class registers the modules under its names.
template <class Norm, class Mlp>
class TransformerBlock : public torch::nn::Module {
 public:
  TransformerBlock(const LanguageContext& context, std::string name)
      : context_(context), name_(std::move(name)) {}

  Tensors forward(const Tensors& inputs) {
    TokenTuple tuple(inputs, name_);
    auto frame = frame_of(tuple, context_, name_);
    if (context_.parallel.context.is_used()) {
      if (context_.parallel.document_borders &&
          context_.masks->has_borders(tuple.documents)) {
        frame.documents = tuple.documents;
      }
    } else if (
        tuple.documents.defined() && context_.parallel.document_borders) {
      frame.mask = context_.masks->get(
          tuple.documents, tuple.x.scalar_type(),
          context_.parallel.splits_tokens());
    }
    const auto input = before_attention_->forward_sum(tuple.x, Tensor());
    auto attended = attention_->forward(input.norm, frame);
    if (after_attention_) attended = after_attention_->forward(attended);
    // The norm adds up, unless dropout does.
    const bool drops = is_training() && context_.shape.dropout > 0;
    const auto middle =
        drops ? before_mlp_->forward_sum(
                    drop(
                        attended, frame, context_, attention_dropout_,
                        /*training=*/true, input.sum),
                    Tensor())
              : before_mlp_->forward_sum(input.sum, attended);
    auto y = feed_forward(middle.norm, frame, tuple);
    if (after_mlp_) y = after_mlp_->forward(y);
    return tuple.with(drop(
        y, frame, context_, name_ + ".mlp.dropout", is_training(), middle.sum));
  }

 protected:
  // The MLP's result; the losses of a mixture are added to the tuple's.
  Tensor feed_forward(
      const Tensor& x, const AttentionFrame& frame, TokenTuple& tuple) {
    if constexpr (std::is_same_v<Mlp, MixtureOfExperts>) {
      auto result = mlp_->forward(
          x, frame.batch,
          context_.parallel.context.is_used() ? frame.total : frame.sequence);
      tuple.add_losses(result.losses);
      return std::move(result.y);
    } else {
      return mlp_->forward(x, frame.batch * frame.sequence);
    }
  }

  std::shared_ptr<Norm> new_norm() const { return norm_of<Norm>(context_); }
  std::shared_ptr<Mlp> new_mlp(bool bias) const {
    return std::make_shared<Mlp>(
        MlpShape{
            .hidden = context_.shape.hidden_size,
            .intermediate = context_.shape.intermediate_size,
            .bias = bias,
            .gelu = context_.shape.kind->gelu},
        context_.parallel, name_ + ".mlp");
  }

  LanguageContext context_;
  std::string name_;
  std::shared_ptr<Norm> before_attention_;
  std::shared_ptr<ParallelAttention> attention_;
  std::shared_ptr<Norm> before_mlp_;
  std::shared_ptr<Mlp> mlp_;
  std::shared_ptr<Norm> after_attention_, after_mlp_;  // null: none
  std::string attention_dropout_;  // the stream's name, unique in the model
};

class GptBlock : public TransformerBlock<LayerNorm, GeluMlp> {
 public:
  GptBlock(const LanguageContext& context, const std::string& name)
      : TransformerBlock(context, name) {
    const auto& shape = context.shape;
    before_attention_ = register_module("ln_1", new_norm());
    attention_ = register_module(
        "attn",
        std::make_shared<ParallelAttention>(
            AttentionOptions{
                .shape = {.hidden = shape.hidden_size, .heads = shape.heads},
                .dropout = shape.dropout},
            context.parallel, name + ".attn"));
    before_mlp_ = register_module("ln_2", new_norm());
    mlp_ = register_module("mlp", new_mlp(/*bias=*/true));
    attention_dropout_ = name + ".attn.resid_dropout";
  }
};

template <class Mlp>
class LlamaBlock : public TransformerBlock<RMSNorm, Mlp> {
  using Base = TransformerBlock<RMSNorm, Mlp>;
  using Base::after_attention_, Base::after_mlp_, Base::attention_,
      Base::before_attention_, Base::before_mlp_, Base::mlp_, Base::new_mlp,
      Base::new_norm;

 public:
  LlamaBlock(
      const LanguageContext& context, const std::string& name, int64_t number)
      : Base(context, name) {
    const auto& shape = context.shape;
    const auto& kind = *shape.kind;
    attention_ = this->register_module(
        "self_attn", std::make_shared<ParallelAttention>(
                         AttentionOptions{
                             .shape =
                                 {.hidden = shape.hidden_size,
                                  .heads = shape.heads,
                                  .kv_heads = shape.kv_heads,
                                  .head_size = shape.head_size},
                             .fused = false,
                             .bias = false,
                             .qkv_bias = kind.qkv_biases,
                             .qk_norm_eps = kind.qk_norm ? shape.norm_eps : 0,
                             .window = shape.window_of(number),
                             .rotary = shape.rope_of(number),
                             .scale = shape.score_scale(),
                             .softcap = shape.attention_softcap,
                             .qk_norm_adds_one = kind.norms_add_one,
                             .latent = latent_of(shape),
                             .dropout = shape.dropout},
                         context.parallel, name + ".self_attn"));
    if constexpr (std::is_same_v<Mlp, MixtureOfExperts>) {
      const std::string module = kind.experts.module;
      mlp_ = this->register_module(
          module, std::make_shared<MixtureOfExperts>(
                      shape, context.parallel, name + "." + module));
    } else {
      mlp_ = this->register_module("mlp", new_mlp(/*bias=*/false));
    }
    before_attention_ = this->register_module("input_layernorm", new_norm());
    const auto add_norm = [&](const char* part) {
      return this->register_module(part, new_norm());
    };
    if (kind.post_norms) {
      after_attention_ = add_norm("post_attention_layernorm");
      before_mlp_ = add_norm("pre_feedforward_layernorm");
      after_mlp_ = add_norm("post_feedforward_layernorm");
    } else {
      before_mlp_ = add_norm("post_attention_layernorm");
    }
    this->attention_dropout_ = name + ".self_attn.dropout";
  }
};

// A layer that looks up tokens. When tokens are sharded it adds documents of
// zeros where there are none. `with_dropout`: for llama, which has no position
// layer.
void add_embedding(
    LayerList& layers, const std::string& name, const LanguageContext& context,
    bool with_dropout) {
  layers.add(
      name,
      [name, context] {
        return std::make_shared<VocabParallelEmbedding>(
            context.shape.vocab_size, context.shape.hidden_size,
            context.parallel, name);
      },
      [name, context, with_dropout](
          VocabParallelEmbedding& embedding, const Tensors& inputs) {
        TokenTuple tuple(inputs, name);
        const auto& tokens = tuple.x;
        if (context.parallel.splits_tokens() && !tuple.documents.defined()) {
          tuple.documents =
              torch::zeros_like(tokens, tokens.options().dtype(torch::kInt64));
        }
        auto x = embedding.forward(tokens);
        if (context.shape.kind->scaled_embeddings) {
          // Rounded as the weights are, as transformers does.
          const double scale =
              std::sqrt(static_cast<double>(context.shape.hidden_size));
          x = x * torch::full({}, scale, x.options().requires_grad(false));
        }
        if (with_dropout) {
          const auto frame = frame_of(tuple, context, name);
          x = drop(x, frame, context, name, embedding.is_training());
        }
        return tuple.with(std::move(x));
      });
}

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

// `arguments`: of the block's constructor, behind its name.
template <class Block, class... Arguments>
void add_block(
    LayerList& layers, const std::string& name, const LanguageContext& context,
    Arguments... arguments) {
  layers.add(name, [context, name, arguments...] {
    return std::make_shared<Block>(context, name, arguments...);
  });
}

template <class Norm>
void add_norm(
    LayerList& layers, const std::string& name,
    const LanguageContext& context) {
  layers.add(
      name, [context] { return norm_of<Norm>(context); },
      [name](Norm& norm, const Tensors& inputs) {
        const TokenTuple tuple(inputs, name);
        return tuple.with(norm.forward(tuple.x));
      });
}

// The layer "lm_head", tied to `embedding` where the shape says so.
void add_head(
    LayerList& layers, const LanguageContext& context,
    const std::string& embedding) {
  const std::string name = "lm_head";
  layers.add(
      name,
      [name, context] {
        return std::make_shared<ColumnParallelLinear>(
            LinearShape{
                .in = context.shape.hidden_size,
                .out = context.shape.vocab_size,
                .bias = false},
            context.parallel, name);
      },
      [name, context](ColumnParallelLinear& head, const Tensors& inputs) {
        const TokenTuple tuple(inputs, name);
        const auto frame = frame_of(tuple, context, name);
        auto logits = vocab_logits(
            tuple.x, head.weight, context.parallel,
            frame.batch * frame.sequence, name);
        if (const double cap = context.shape.logit_softcap; cap > 0) {
          logits = at::tanh(logits / cap) * cap;
        }
        Tensors outputs = {
            logits.view({frame.batch, frame.sequence, logits.size(-1)})};
        if (tuple.losses.defined()) outputs.push_back(tuple.losses);
        return outputs;
      });
  if (context.shape.tie_embeddings) {
    layers.tie(embedding + ".weight", name + ".weight");
  }
}

}  // namespace

LayerList
gpt_layers(const LanguageModelShape& shape, const TensorParallel& parallel) {
  const LanguageContext context{shape, parallel};
  LayerList layers;
  const std::string embedding = "transformer.wte";
  add_embedding(layers, embedding, context, /*with_dropout=*/false);
  add_positions(layers, context);
  for (int64_t i = 0; i < shape.layers; ++i) {
    add_block<GptBlock>(layers, format("transformer.h.{}", i), context);
  }
  add_norm<LayerNorm>(layers, "transformer.ln_f", context);
  add_head(layers, context, embedding);
  return layers;
}

LayerList
llama_layers(const LanguageModelShape& shape, const TensorParallel& parallel) {
  const LanguageContext context{shape, parallel};
  LayerList layers;
  const std::string embedding = "model.embed_tokens";
  add_embedding(layers, embedding, context, /*with_dropout=*/true);
  for (int64_t i = 0; i < shape.layers; ++i) {
    const auto name = format("model.layers.{}", i);
    if (shape.has_experts(i)) {
      add_block<LlamaBlock<MixtureOfExperts>>(layers, name, context, i);
    } else {
      add_block<LlamaBlock<GatedMlp>>(layers, name, context, i);
    }
  }
  add_norm<RMSNorm>(layers, "model.norm", context);
  add_head(layers, context, embedding);
  return layers;
}

}  // namespace echelon::models
