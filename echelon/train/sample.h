// Text from a trained language model, token by token.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "echelon/job/job.h"

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

/// Continues options.prompt by the model of `job` with the weights in `weights`
/// (weights_source.h), on the GPU if there is one. `print` gets the prompt and
/// its continuation, in whole UTF-8 characters, as soon as they are known;
/// bytes that are no text become U+FFFD. Stops early at the end-of-text token.
/// The model sees at most the last [data] sequence tokens; each token takes a
/// full forward pass over them. The same options give the same text.
///
/// Throws ConfigError for a model that is no language model, a prompt without
/// tokens, options out of range, data without a tokenizer, or token ids outside
/// of the model's vocabulary.
void sample_text(
    const Job& job, const std::string& weights, const SampleOptions& options,
    const std::function<void(std::string_view)>& print);

}  // namespace echelon
