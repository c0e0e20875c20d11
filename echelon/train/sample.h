// Text from a trained language model, token by token.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/job/job.h"
#include "echelon/layers/network.h"
#include "echelon/parallel/tensor/tensor_parallel.h"

namespace echelon {

struct SampleOptions {
  std::string prompt;
  int64_t tokens = 200;      // new ones, at most
  double temperature = 0.8;  // logits are divided by it; 0: the likeliest token
  int64_t top_k = 0;         // choose among so many of the likeliest; 0: all
  double top_p = 1.0;        // choose among the likeliest with this probability
  uint64_t seed = 0;
};

/// Draws a token from logits. `uniform` is in [0, 1). Equal logits are ordered
/// by token id. Throws ConfigError for options out of range and NumericError
/// when a logit is NaN.
///
///   scores  [vocabulary] float or double, on any device
int64_t choose_token(
    const torch::Tensor& scores, const SampleOptions& options, double uniform);

/// A trained language model that scores the tokens which may follow a text. It
/// sees the last [data] sequence tokens of it, and each call takes a full
/// forward pass over them.
class TextModel {
 public:
  /// The model of `job` with the weights in `weights` (weights_source.h), on
  /// the GPU if there is one. job.layout is not used.
  TextModel(const Job& job, const std::string& weights);
  /// The same on the ranks of job.layout: those of cp have parts of the text,
  /// those of tp parts of the layers. Every rank of the world makes one. Throws
  /// ConfigError as check_sampling() does.
  TextModel(const Job& job, const std::string& weights, World& world);

  /// Scores of the tokens that may follow `ids`, of which there is one or more:
  /// [vocabulary], on the model's device. All ranks call this with the same ids
  /// and get the same scores.
  torch::Tensor scores(const std::vector<int64_t>& ids);

  int64_t vocabulary() const { return vocabulary_; }

 private:
  TextModel(
      const Job& job, const std::string& weights, TensorParallel parallel,
      torch::Device device);

  TensorParallel parallel_;
  torch::Device device_;
  int64_t vocabulary_;
  int64_t window_ = 0;
  std::shared_ptr<Network> network_;
};

/// Continues options.prompt by the TextModel of these arguments. `print` gets
/// the prompt and its continuation, in whole UTF-8 characters, as soon as they
/// are known; bytes that are no text become U+FFFD. Stops early at the
/// end-of-text token. The same options give the same text.
///
/// Throws ConfigError for a model that is no language model, a prompt without
/// tokens, options out of range, data without a tokenizer, or token ids outside
/// of the model's vocabulary.
void sample_text(
    const Job& job, const std::string& weights, const SampleOptions& options,
    const std::function<void(std::string_view)>& print);

/// The same on the ranks of job.layout. Every rank of the world calls this;
/// `print` is called on rank 0. Where [layout] context is "auto", rank 0 tells
/// on standard error which way it chooses.
void sample_text(
    const Job& job, const std::string& weights, World& world,
    const SampleOptions& options,
    const std::function<void(std::string_view)>& print);

}  // namespace echelon
