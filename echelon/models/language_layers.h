// What the layers of gpt and llama have in common: the tuple that passes
// between them, dropout, and the mask of documents.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "echelon/architecture/language_model.h"
#include "echelon/layers/layer_list.h"
#include "echelon/parallel/tensor/attention.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon::models {

/// The masks that documents make: one for all layers of a forward pass. Of the
/// last documents that it was asked for it remembers the mask.
class DocumentMasks {
 public:
  /// document_mask(documents, dtype).
  torch::Tensor get(const torch::Tensor& documents, torch::ScalarType dtype);
  /// The same; undefined where documents are zeros, which stand for no borders.
  torch::Tensor
  get_unless_zeros(const torch::Tensor& documents, torch::ScalarType dtype);

 private:
  template <class Make>
  torch::Tensor remembered(
      const torch::Tensor& documents, torch::ScalarType dtype, Make make);

  std::mutex mutex_;
  c10::weak_intrusive_ptr<c10::TensorImpl> documents_{
      c10::intrusive_ptr<c10::TensorImpl>()};
  torch::ScalarType dtype_ = torch::kFloat32;
  torch::Tensor mask_;
};

/// What each layer of a list is built with.
struct LanguageContext {
  LanguageModelShape shape;
  TensorParallel parallel;
  std::shared_ptr<DocumentMasks> masks = std::make_shared<DocumentMasks>();
};

/// (tokens or x [, documents] [, keys]), as make_network.h describes it.
struct TokenTuple {
  /// `layer` names the layer in errors. Throws ConfigError when there are more
  /// tensors, or others.
  TokenTuple(const Tensors& tensors, const std::string& layer);
  /// With x replaced.
  Tensors with(torch::Tensor x) const;

  torch::Tensor x;
  torch::Tensor documents;  // undefined: none
  torch::Tensor keys;       // undefined: none
};

/// How the tokens lie. The mask is not set. Throws ConfigError when tokens are
/// cut and no documents say how.
AttentionFrame frame_of(
    const TokenTuple& tuple, const LanguageContext& context,
    const std::string& layer);

/// x [batch, sequence, hidden], or its cut tokens, with dropout if `training`.
/// `name` is unique in the model. Throws ConfigError without keys.
torch::Tensor drop(
    const torch::Tensor& x, const AttentionFrame& frame,
    const LanguageContext& context, const std::string& name, bool training);

/// The mask that attention takes.
torch::Tensor mask_of(
    const TokenTuple& tuple, const LanguageContext& context,
    torch::ScalarType dtype);

/// A transformer block: attention, then the MLP, each behind its norm and added
/// to the residual sum. The modules are registered by whoever names them.
template <class Norm, class Mlp>
struct Branches {
  std::shared_ptr<Norm> before_attention;
  std::shared_ptr<ParallelAttention> attention;
  std::shared_ptr<Norm> before_mlp;
  std::shared_ptr<Mlp> mlp;
  std::string attention_dropout;  // names of the masks, unique in the model
  std::string mlp_dropout;

  Tensors forward(
      const Tensors& inputs, const LanguageContext& context,
      const std::string& layer, bool training) const {
    const TokenTuple tuple(inputs, layer);
    auto frame = frame_of(tuple, context, layer);
    frame.mask = mask_of(tuple, context, tuple.x.scalar_type());
    auto x = tuple.x;
    x = x + drop(
                attention->forward(before_attention->forward(x), frame), frame,
                context, attention_dropout, training);
    x = x +
        drop(
            mlp->forward(before_mlp->forward(x), frame.batch * frame.sequence),
            frame, context, mlp_dropout, training);
    return tuple.with(std::move(x));
  }
};

/// A layer of one norm of x.
template <class Norm>
void add_norm(
    LayerList& layers, const std::string& name,
    const LanguageContext& context) {
  layers.add(
      name,
      [context] {
        return std::make_shared<Norm>(
            context.shape.hidden_size, context.shape.norm_eps,
            context.parallel);
      },
      [name](Norm& norm, const Tensors& inputs) {
        const TokenTuple tuple(inputs, name);
        return tuple.with(norm.forward(tuple.x));
      });
}

/// A layer that looks up tokens; with cut tokens it adds documents of zeros
/// where there are none. `with_dropout`: llama's, which has no positions to
/// add.
void add_embedding(
    LayerList& layers, const std::string& name, const LanguageContext& context,
    bool with_dropout);

/// A layer "lm_head", tied to `embedding` where the shape says so.
void add_head(
    LayerList& layers, const LanguageContext& context,
    const std::string& embedding);

}  // namespace echelon::models
