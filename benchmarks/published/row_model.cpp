#include "benchmarks/published/row_model.h"

#include <algorithm>
#include <cctype>
#include <optional>
#include <regex>
#include <string>

#include "echelon/cost/model_catalogue.h"
#include "echelon/error.h"

namespace echelon {
namespace {

/// "Llama 3 8B@4L" -> "llama-3-8b".
std::string plain_name(const std::string& model) {
  std::string name;
  for (const unsigned char c : model.substr(0, model.find('@'))) {
    name += c == ' ' || c == '_' ? '-' : static_cast<char>(std::tolower(c));
  }
  return name;
}

bool has(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(), [&](const char* word) {
    return text.find(word) != std::string::npos;
  });
}

std::optional<cost::ModelShape>
from_catalogue(const StepRow& row, const std::string& name) {
  const auto& names = cost::catalogue_names();
  if (std::find(names.begin(), names.end(), name) == names.end()) return {};
  cost::ModelShape model = cost::find_model(name);
  if (!model.transformer) {
    throw ConfigError(
        "model " + name + " is no transformer: rows of images have no columns");
  }
  // The name belongs to another model.
  if (row.hidden > 0 && row.hidden != model.transformer->hidden) return {};
  return model;
}

void need_dimensions(const StepRow& row) {
  std::string missing;
  for (const auto& [column, value] :
       {std::pair("layers", row.layers), std::pair("hidden", row.hidden),
        std::pair("heads", row.heads)}) {
    if (value <= 0)
      missing += (missing.empty() ? "" : ", ") + std::string(column);
  }
  if (missing.empty()) return;
  throw ConfigError(
      "model \"" + row.model.substr(0, 60) +
      "\" is not of the catalogue, and the row does not say its " + missing);
}

bool is_gated(const StepRow& row, const std::string& name) {
  if (has(name, {"llama", "mistral", "mixtral", "qwen", "deepseek", "grok",
                 "yi-", "kimi", "gpt-oss", "gemma", "phi", "palm", "glm",
                 "internlm", "baichuan"})) {
    return true;
  }
  if (has(name, {"gpt", "opt", "bloom", "megatron", "nemotron", "mpt", "bert",
                 "falcon", "pythia", "neox", "turing", "mt-nlg"})) {
    return false;
  }
  return row.ffn > 0 && row.ffn != 4 * row.hidden;
}

/// "8x7b": 8 experts, two of them for each token.
void read_experts(
    const StepRow& row, const std::string& name, TransformerShape& shape) {
  std::smatch found;
  if (std::regex_search(name, found, std::regex(R"((\d{1,4})x\d)"))) {
    shape.experts.experts = std::stoll(found[1]);
    shape.experts.experts_per_token = 2;
    shape.experts.ffn = shape.ffn_size();
    return;
  }
  if (row.ep > 1 || std::regex_search(name, std::regex(R"(-a\d+(\.\d+)?b)")) ||
      has(name, {"moe", "switch"})) {
    throw ConfigError(
        "model \"" + row.model.substr(0, 60) +
        "\" has experts, and neither the catalogue nor its name says how many");
  }
}

/// "padded vocab 50304": what the products see; 0: not said.
int64_t padded_vocab(const std::string& text) {
  static const std::regex padded(R"(padded vocab (\d{1,7}))");
  std::smatch found;
  return std::regex_search(text, found, padded) ? std::stoll(found[1]) : 0;
}

cost::ModelShape from_dimensions(const StepRow& row, const std::string& name) {
  need_dimensions(row);
  TransformerShape shape;
  shape.ffn = row.ffn > 0 ? row.ffn : 4 * row.hidden;
  shape.gated = is_gated(row, name);
  const bool nemotron = has(name, {"nemotron"});
  shape.rms_norm = shape.gated;
  shape.tied = !shape.gated && !nemotron;
  shape.biases = !shape.gated && !nemotron && !has(name, {"mpt"});
  const bool learned = shape.tied && !has(name, {"bloom", "falcon", "neox"});
  shape.positions = learned ? row.seq : 0;
  shape.vocab = shape.gated ? 32000 : 50257;
  read_experts(row, name, shape);
  cost::ModelShape model;
  model.transformer = shape;
  return model;
}

}  // namespace

cost::ModelShape model_of(const StepRow& row) {
  if (row.seq <= 0) throw ConfigError("the row does not say its seq");
  const std::string name = plain_name(row.model);
  auto known = from_catalogue(row, name);
  cost::ModelShape model = known ? *known : from_dimensions(row, name);
  model.name = row.model;
  auto& shape = *model.transformer;
  const auto state = [](int64_t stated, int64_t& value) {
    if (stated > 0) value = stated;
  };
  state(row.layers, shape.layers);
  state(row.hidden, shape.hidden);
  state(row.heads, shape.heads);
  state(row.kv_heads, shape.kv_heads);
  state(row.vocab, shape.vocab);
  state(padded_vocab(row.text()), shape.vocab);
  if (shape.experts.experts == 0) state(row.ffn, shape.ffn);
  shape.experts.first_dense_layers =
      std::min(shape.experts.first_dense_layers, shape.layers);
  model.seq_len = row.seq;
  if (shape.positions > 0) shape.positions = row.seq;
  cost::check(model);
  return model;
}

}  // namespace echelon
