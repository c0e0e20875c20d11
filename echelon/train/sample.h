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
  int64_t tokens = 200;      // at most so many new ones
  double temperature = 0.8;  // scores are divided by it; 0: the likeliest token
  int64_t top_k = 0;         // of so many of the likeliest; 0: of all
  double top_p = 1.0;        // of the likeliest that have this part together
  uint64_t seed = 0;
};

/// One token by its scores. `uniform` is in [0, 1). Scores of equal height are
/// taken in the order of their ids. Throws ConfigError for options out of range
/// and NumericError when a score is not a number.
///
///   scores  [words] float or double, on any device
int64_t choose_token(
    const torch::Tensor& scores, const SampleOptions& options, double uniform);

/// Goes on with options.prompt by the model of `job`, whose weights lie in
/// `weights` (weights_source.h), on the GPU if there is one. `print` gets the
/// prompt and what follows, in whole UTF-8 characters, as soon as they are
/// there; bytes that are no text arrive as U+FFFD. Ends early with the token
/// that ends a text. The model sees the last [data] sequence tokens at most,
/// computed anew for each token. The same options give the same text.
///
/// Throws ConfigError: no language model, a prompt without tokens, options out
/// of range, data without a tokenizer, tokens that the model does not have.
void sample_text(
    const Job& job, const std::string& weights, const SampleOptions& options,
    const std::function<void(std::string_view)>& print);

}  // namespace echelon
