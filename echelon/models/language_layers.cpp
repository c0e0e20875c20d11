#include "echelon/models/language_layers.h"

#include <torch/types.h>

#include <utility>

#include "echelon/error.h"
#include "echelon/parallel/tensor/dropout.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/vocab_embedding.h"

namespace echelon::models {

using torch::Tensor;

template <class Make>
Tensor DocumentMasks::remembered(
    const Tensor& documents, torch::ScalarType dtype, Make make) {
  const std::lock_guard lock(mutex_);
  auto* asked = documents.unsafeGetTensorImpl();
  const bool known = documents_.lock().get() == asked && dtype_ == dtype;
  if (!known) {
    mask_ = make();
    documents_ = c10::weak_intrusive_ptr<c10::TensorImpl>(
        c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(asked));
    dtype_ = dtype;
  }
  return mask_;
}

Tensor DocumentMasks::get(const Tensor& documents, torch::ScalarType dtype) {
  return remembered(
      documents, dtype, [&] { return document_mask(documents, dtype); });
}

Tensor DocumentMasks::get_unless_zeros(
    const Tensor& documents, torch::ScalarType dtype) {
  return remembered(documents, dtype, [&] {
    // Where shapes alone are known there are no values to ask for.
    const bool borders = !documents.is_meta() && documents.any().item<bool>();
    return borders ? document_mask(documents, dtype) : Tensor();
  });
}

TokenTuple::TokenTuple(const Tensors& tensors, const std::string& layer) {
  const auto fail = [&] {
    throw ConfigError(
        "layer \"" + layer + "\" is given " + describe(tensors) +
        "; it takes tokens, then documents [batch, sequence] and keys [batch], "
        "both int64, where there are such");
  };
  if (tensors.empty() || tensors.size() > 3) fail();
  x = tensors[0];
  for (size_t i = 1; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    if (tensor.scalar_type() != torch::kInt64) fail();
    if (tensor.dim() == 2 && i == 1) {
      documents = tensor;
    } else if (tensor.dim() == 1 && i + 1 == tensors.size()) {
      keys = tensor;
    } else {
      fail();
    }
  }
}

Tensors TokenTuple::with(Tensor replaced) const {
  Tensors tensors;
  tensors.push_back(std::move(replaced));
  if (documents.defined()) tensors.push_back(documents);
  if (keys.defined()) tensors.push_back(keys);
  return tensors;
}

AttentionFrame frame_of(
    const TokenTuple& tuple, const LanguageContext& context,
    const std::string& layer) {
  const auto& like = tuple.documents.defined() ? tuple.documents : tuple.x;
  const bool laid = tuple.documents.defined() ||
                    (!context.parallel.cuts_tokens() && like.dim() >= 2);
  if (!laid) {
    throw ConfigError(
        "layer \"" + layer + "\" is given " + describe(tuple.with(tuple.x)) +
        "; it takes tokens [batch, sequence, …], or cut ones and documents "
        "[batch, sequence], which tell how they lie");
  }
  return {.batch = like.size(0), .sequence = like.size(1), .keys = tuple.keys};
}

Tensor drop(
    const Tensor& x, const AttentionFrame& frame,
    const LanguageContext& context, const std::string& name, bool training) {
  if (!training || context.shape.dropout == 0) return x;
  if (!frame.keys.defined()) {
    throw ConfigError(
        name + ": dropout=" + std::to_string(context.shape.dropout) +
        " draws from the samples' keys, an int64 tensor [batch] behind the "
        "tokens; give it, or call eval()");
  }
  return dropout(
      x, frame.keys,
      {.probability = context.shape.dropout, .stream = dropout_stream(name)},
      place_of_tokens(context.parallel, frame.batch, frame.sequence));
}

Tensor mask_of(
    const TokenTuple& tuple, const LanguageContext& context,
    torch::ScalarType dtype) {
  if (!tuple.documents.defined()) return {};
  return context.parallel.cuts_tokens()
             ? context.masks->get_unless_zeros(tuple.documents, dtype)
             : context.masks->get(tuple.documents, dtype);
}

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
        if (context.parallel.cuts_tokens() && !tuple.documents.defined()) {
          tuple.documents =
              torch::zeros_like(tokens, tokens.options().dtype(torch::kInt64));
        }
        auto x = embedding.forward(tokens);
        if (with_dropout) {
          const auto frame = frame_of(tuple, context, name);
          x = drop(x, frame, context, name, embedding.is_training());
        }
        return tuple.with(std::move(x));
      });
}

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
        const auto logits = head.forward(tuple.x, frame.batch * frame.sequence);
        return logits.view({frame.batch, frame.sequence, logits.size(-1)});
      });
  if (context.shape.tie_embeddings) {
    layers.tie(embedding + ".weight", name + ".weight");
  }
}

}  // namespace echelon::models
