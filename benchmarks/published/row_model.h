// The model of a row: from the catalogue by its name, else from its dimensions.
#pragma once

#include "benchmarks/published/step_row.h"
#include "echelon/cost/model_shape.h"

namespace echelon {

/// A name of the catalogue ("llama3.1-405b"; what follows an '@' is left out)
/// gives what no column has: experts, latent attention, gates, norms.
/// Dimensions that the row states count more than the catalogue's ("grok1@4L"
/// has 4 layers). A name that is not there tells the family by its words:
/// llama, mistral, qwen, yi, grok, … are gated with root-mean-square norms and
/// a head of its own; nemotron has no gate and no biases; mpt no biases; bloom
/// no learned positions; every other is a GPT when its feed-forward is four
/// times as wide as the model, and else as llama. Cells left empty: as many
/// key-value heads as heads, GPT-2's vocabulary of 50,257 (llama's 32,000).
///
/// Throws ConfigError when dimensions are missing, or for a mixture of experts
/// that the catalogue does not have and whose name says no "8x7b".
cost::ModelShape model_of(const StepRow& row);

}  // namespace echelon
