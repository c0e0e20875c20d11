#include "echelon/train/sample.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/trained_parameters.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/data/sources/random.h"
#include "echelon/data/sources/text.h"
#include "echelon/data/tokenizer/tokenizer.h"
#include "echelon/error.h"
#include "echelon/job/check_job.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/text/format.h"
#include "echelon/train/chosen_ways.h"
#include "echelon/train/strategies/model_source.h"
#include "echelon/train/strategies/objective.h"

namespace echelon {
namespace {

void check(bool holds, const std::string& flag, const std::string& rule) {
  if (!holds) throw ConfigError("sample: " + flag + " " + rule);
}

void check_options(const SampleOptions& options) {
  check(options.tokens >= 1, "--tokens", "must be 1 or more");
  check(
      options.temperature >= 0 && std::isfinite(options.temperature),
      "--temperature", "must be 0 or more");
  check(options.top_k >= 0, "--top-k", "must be 0 (no limit) or more");
  check(
      options.top_p > 0 && options.top_p <= 1, "--top-p",
      "must be more than 0 and at most 1");
}

/// The vocabulary size of the model that wrote `weights`.
int64_t vocabulary_of(const std::string& weights) {
  const WeightsSource source(weights);
  for (const char* name :
       {"transformer.wte.weight", "model.embed_tokens.weight"}) {
    const auto* tensor = source.find(name);
    if (tensor != nullptr) return tensor->facts.shape.at(0);
  }
  throw DataError(
      weights + ": has no token embedding; it is no language model's");
}

/// Where the model is that the run's weights belong to: checkpoints of adapters
/// have it not.
std::string base_of(const Job& job, const std::string& weights) {
  return saves_adapters_alone(job.model) ? job.model.weights : weights;
}

/// Prints what is new in a growing text, in whole characters.
class Printer {
 public:
  explicit Printer(const std::function<void(std::string_view)>& print)
      : print_(print) {}

  void show(const std::string& text, bool last) {
    const size_t end = last ? text.size() : whole_characters(text);
    if (end <= printed_) return;
    print_(valid_utf8(std::string_view(text).substr(printed_, end - printed_)));
    printed_ = end;
  }

 private:
  const std::function<void(std::string_view)>& print_;
  size_t printed_ = 0;
};

torch::Device default_device() {
  return at::globalContext().hasCUDA() ? torch::Device(torch::kCUDA, 0)
                                       : torch::Device(torch::kCPU);
}

TensorParallel parallel_of(const Job& job, World& world) {
  check_sampling(job);
  return tensor_parallel(job, mesh_groups(world, job));
}

/// The row of the token at `position` among the rows of this rank's tokens, on
/// all ranks of `context`. Their parts are of `sequence` tokens.
torch::Tensor row_of_token(
    const torch::Tensor& rows, int64_t position, int64_t sequence,
    const ContextParallel& context) {
  if (!context.is_used()) return rows[position];
  auto row = torch::empty({rows.size(1)}, rows.options());
  int holder = 0;
  for (int rank = 0; rank < context.size(); ++rank) {
    int64_t before = 0;  // rows of the pieces before this one
    for (const auto& piece : context.pieces_of(sequence, rank)) {
      if (position >= piece.begin && position < piece.end) {
        holder = rank;
        if (rank == context.rank()) {
          row.copy_(rows[before + position - piece.begin]);
        }
      }
      before += piece.size();
    }
  }
  context.group.broadcast(row, holder, {.label = "scores of the last token"})
      .wait();
  return row;
}

std::vector<TokenId> encode_prompt(
    const Tokenizer& tokenizer, const std::string& prompt, int64_t vocabulary) {
  const auto ids = tokenizer.encode(prompt);
  if (ids.empty()) {
    throw ConfigError(
        "sample: --prompt \"" + prompt +
        "\" has no tokens; give the text to continue");
  }
  for (const TokenId id : ids) {
    if (id < vocabulary) continue;
    throw ConfigError(format(
        "sample: the tokenizer gives token {} of the prompt, but the model has "
        "{}; it is not the tokenizer that the model was trained with",
        id, vocabulary));
  }
  return ids;
}

void continue_text(
    const Job& job, TextModel& model, const Tokenizer& tokenizer,
    const SampleOptions& options,
    const std::function<void(std::string_view)>& print) {
  auto ids = encode_prompt(tokenizer, options.prompt, model.vocabulary());
  // Ids that the tokenizer has as well.
  const int64_t usable = std::min(model.vocabulary(), tokenizer.vocab_size());
  Printer printer(print);
  printer.show(tokenizer.decode(ids), false);
  const int64_t own_end = job.data.end_of_text_id;
  const int64_t end =
      own_end >= 0 ? own_end : tokenizer.end_of_text().value_or(-1);
  RandomStream random(RandomUse::sample_text, {options.seed});
  for (int64_t i = 0; i < options.tokens; ++i) {
    const auto scores = model.scores({ids.begin(), ids.end()});
    const int64_t next =
        choose_token(scores.narrow(0, 0, usable), options, random.uniform());
    if (next == end) break;
    ids.push_back(static_cast<TokenId>(next));
    printer.show(tokenizer.decode(ids), false);
  }
  printer.show(tokenizer.decode(ids), true);
}

void check_text_is_continued(const Job& job, const SampleOptions& options) {
  check_options(options);
  if (is_language_model(job.model)) return;
  throw ConfigError(
      "sample: the run's model is " + job.model.name +
      ", which is no language model; train a gpt or a llama, say");
}

}  // namespace

TextModel::TextModel(const Job& job, const std::string& weights)
    : TextModel(job, weights, TensorParallel{}, default_device()) {}

TextModel::TextModel(const Job& job, const std::string& weights, World& world)
    : TextModel(job, weights, parallel_of(job, world), world.device()) {}

TextModel::TextModel(
    const Job& job, const std::string& weights, TensorParallel parallel,
    torch::Device device)
    : parallel_(std::move(parallel)),
      device_(device),
      vocabulary_(vocabulary_of(base_of(job, weights))) {
  const auto shape = language_model_shape(job.model, vocabulary_);
  window_ = std::min(job.data.sequence, shape.max_positions);
  const LayerList layers =
      model_layers(job.model, {window_}, vocabulary_, parallel_);
  network_ = build_network(layers, 0, layers.size(), job.train.seed);
  load_weights(*network_, base_of(job, weights));
  if (job.model.lora.used()) load_adapters(*network_, weights);
  network_->to(device_);
  network_->eval();
}

// Ranks of cp need a token each. A text of fewer is made longer: tokens do not
// see those behind them.
torch::Tensor TextModel::scores(const std::vector<int64_t>& ids) {
  const torch::NoGradGuard no_gradients;
  const ContextParallel& context = parallel_.context;
  const auto length =
      std::min<int64_t>(window_, static_cast<int64_t>(ids.size()));
  const int64_t sequence = std::max<int64_t>(length, context.size());
  std::vector<int64_t> seen(ids.end() - length, ids.end());
  seen.resize(static_cast<size_t>(sequence), 0);
  const auto tokens =
      torch::tensor(seen, torch::kInt64).view({1, sequence}).to(device_);
  Tensors inputs = {context.cut(tokens, 1)};
  // Documents, whose shape says how long the whole text is.
  if (context.is_used()) inputs.push_back(torch::zeros_like(tokens));
  const Tensors out = network_->forward(inputs);
  const auto row = row_of_token(out[0][0], length - 1, sequence, context);
  return whole_scores({row}, vocabulary_, parallel_)[0];
}

// Sorts the tokens by score, applies top_k, then top_p, and takes the token at
// which the running sum of probabilities passes `uniform`.
int64_t choose_token(
    const torch::Tensor& scores, const SampleOptions& options, double uniform) {
  check_options(options);
  const auto values =
      scores.detach().to(torch::kCPU, torch::kFloat64).contiguous();
  const std::span<const double> score(
      values.const_data_ptr<double>(), static_cast<size_t>(values.numel()));
  for (const double one : score) {
    if (!std::isnan(one)) continue;
    throw NumericError("sample: the model's scores are not numbers (NaN)");
  }
  std::vector<int64_t> order(score.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const auto score_of = [&](int64_t id) {
    return score[static_cast<size_t>(id)];
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return score_of(a) > score_of(b);
  });
  if (options.temperature == 0) return order.front();
  if (options.top_k > 0 && options.top_k < static_cast<int64_t>(order.size())) {
    order.resize(static_cast<size_t>(options.top_k));
  }
  std::vector<double> weights;
  double sum = 0;
  for (const int64_t id : order) {
    weights.push_back(std::exp(
        (score_of(id) - score_of(order.front())) / options.temperature));
    sum += weights.back();
  }
  // Keeps the fewest tokens with probabilities that reach top_p together.
  size_t kept = 0;
  double part = 0;
  while (kept < weights.size()) {
    part += weights[kept++];
    if (part >= options.top_p * sum) break;
  }
  double left = uniform * part;
  for (size_t i = 0; i + 1 < kept; ++i) {
    left -= weights[i];
    if (left < 0) return order[i];
  }
  return order[kept - 1];
}

void sample_text(
    const Job& job, const std::string& weights, const SampleOptions& options,
    const std::function<void(std::string_view)>& print) {
  check_text_is_continued(job, options);
  const auto tokenizer = open_tokenizer(job.data);
  TextModel model(job, weights);
  continue_text(job, model, *tokenizer, options, print);
}

void sample_text(
    const Job& job, const std::string& weights, World& world,
    const SampleOptions& options,
    const std::function<void(std::string_view)>& print) {
  check_text_is_continued(job, options);
  check_sampling(job);
  at::set_num_threads(world.compute_threads());
  const auto tokenizer = open_tokenizer(job.data);
  TextModel model(with_chosen_ways(job, world, stderr), weights, world);
  continue_text(
      job, model, *tokenizer, options,
      world.rank() == 0 ? print : [](std::string_view) {});
}

}  // namespace echelon
