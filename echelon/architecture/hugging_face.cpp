#include "echelon/architecture/hugging_face.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/checkpoint/format/float_convert.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::hugging_face {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

// The fields of one JSON object. `path` names the file in errors.
class Fields {
 public:
  Fields(const json& object, std::string path)
      : object_(object), path_(std::move(path)) {}

  [[noreturn]] void
  refuse(const std::string& field, const std::string& rule) const {
    throw DataError(format(
        "{}: \"{}\": {}; {}", path_, field,
        object_.contains(field) ? object_[field].dump() : "is missing", rule));
  }

  bool has(const std::string& field) const {
    return object_.contains(field) && !object_[field].is_null();
  }

  int64_t count(const std::string& field, int64_t otherwise) const {
    if (!has(field)) return otherwise;
    const auto& value = object_[field];
    const bool fits = value.is_number_integer() && value.get<int64_t>() >= 1 &&
                      value.get<int64_t>() <= int64_t{1} << 24;
    if (!fits) refuse(field, "must be a whole number from 1 to 16777216");
    return value.get<int64_t>();
  }

  double number(const std::string& field, double otherwise) const {
    if (!has(field)) return otherwise;
    const bool fits =
        object_[field].is_number() && object_[field].get<double>() >= 0;
    if (!fits) refuse(field, "must be a number, 0 or more");
    return object_[field].get<double>();
  }

  std::string text(const std::string& field, const char* otherwise) const {
    if (!has(field)) return otherwise;
    if (!object_[field].is_string()) refuse(field, "must be a string");
    return object_[field].get<std::string>();
  }

  bool flag(const std::string& field, bool otherwise) const {
    if (!has(field)) return otherwise;
    if (!object_[field].is_boolean()) refuse(field, "must be true or false");
    return object_[field].get<bool>();
  }

  Fields object(const std::string& field) const {
    if (!object_[field].is_object()) refuse(field, "must be an object");
    return {object_[field], path_ + ": \"" + field + "\""};
  }

  void need(const std::string& field, bool value, bool otherwise) const {
    if (flag(field, otherwise) == value) return;
    refuse(field, format("Echelon computes such models with {} alone", value));
  }

 private:
  const json& object_;
  std::string path_;
};

json read_json(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    throw DataError(
        path + ": cannot be read; a Hugging Face folder has a config.json");
  }
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded() || !value.is_object()) {
    throw DataError(path + ": is no JSON object, or cut off");
  }
  return value;
}

ModelOptions read_gpt(const Fields& fields) {
  ModelOptions options;
  options.name = "gpt";
  options.layers = fields.count("n_layer", 12);
  options.hidden_size = fields.count("n_embd", 768);
  options.heads = fields.count("n_head", 12);
  options.intermediate_size = fields.count("n_inner", 4 * options.hidden_size);
  options.vocab_size = fields.count("vocab_size", 50257);
  options.max_positions = fields.count("n_positions", 1024);
  options.norm_eps = fields.number("layer_norm_epsilon", 1e-5);
  options.dropout = fields.number("resid_pdrop", 0.1);
  for (const char* other : {"attn_pdrop", "embd_pdrop"}) {
    if (fields.number(other, 0.1) == options.dropout) continue;
    fields.refuse(other, "must be that of resid_pdrop: there is one dropout");
  }
  const auto activation = fields.text("activation_function", "gelu_new");
  if (activation != "gelu_new" && activation != "gelu_pytorch_tanh") {
    fields.refuse("activation_function", "known is gelu_new");
  }
  fields.need("scale_attn_weights", true, true);
  fields.need("scale_attn_by_inverse_layer_idx", false, false);
  fields.need("add_cross_attention", false, false);
  fields.need("tie_word_embeddings", true, true);
  return options;
}

// The scaling of rotary positions: rope_scaling of transformers, or, from
// version 5 on, rope_parameters, which also has rope_theta.
void read_rope(const Fields& fields, ModelOptions& options) {
  options.rope_theta = fields.number("rope_theta", 10000);
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (!fields.has(name)) continue;
    const auto rope = fields.object(name);
    options.rope_theta = rope.number("rope_theta", options.rope_theta);
    const std::string key = rope.has("rope_type") ? "rope_type" : "type";
    const auto kind = rope.text(key, "default");
    if (kind == "default") continue;
    if (kind != "llama3") rope.refuse(key, "known are default and llama3");
    options.rope_factor = rope.number("factor", 8);
    options.rope_low_freq_factor = rope.number("low_freq_factor", 1);
    options.rope_high_freq_factor = rope.number("high_freq_factor", 4);
    options.rope_original_positions =
        rope.count("original_max_position_embeddings", 8192);
    if (options.rope_factor <= 0) rope.refuse("factor", "must be above 0");
  }
  if (options.rope_theta <= 0) fields.refuse("rope_theta", "must be above 0");
}

ModelOptions read_llama(const Fields& fields) {
  ModelOptions options;
  options.name = "llama";
  options.layers = fields.count("num_hidden_layers", 32);
  options.hidden_size = fields.count("hidden_size", 4096);
  options.heads = fields.count("num_attention_heads", 32);
  options.kv_heads = fields.count("num_key_value_heads", options.heads);
  options.intermediate_size = fields.count("intermediate_size", 11008);
  options.vocab_size = fields.count("vocab_size", 32000);
  options.max_positions = fields.count("max_position_embeddings", 2048);
  options.norm_eps = fields.number("rms_norm_eps", 1e-6);
  options.tie_embeddings = fields.flag("tie_word_embeddings", false);
  read_rope(fields, options);
  const int64_t size = options.hidden_size / options.heads;
  if (fields.count("head_dim", size) != size) {
    fields.refuse(
        "head_dim",
        format("must be hidden_size / num_attention_heads = {}", size));
  }
  if (fields.text("hidden_act", "silu") != "silu") {
    fields.refuse("hidden_act", "known is silu");
  }
  fields.need("attention_bias", false, false);
  fields.need("mlp_bias", false, false);
  if (fields.number("attention_dropout", 0) != 0) {
    fields.refuse(
        "attention_dropout",
        "dropout of attention alone is not known; set it to 0, and [model] "
        "dropout for training");
  }
  return options;
}

// A configuration that was saved without its model names only the family.
std::string architecture_of(const json& config, const std::string& path) {
  const auto family = config.find("model_type");
  const bool silent =
      !config.contains("architectures") || config["architectures"].is_null();
  if (silent && family != config.end()) {
    if (*family == "gpt2") return "GPT2LMHeadModel";
    if (*family == "llama") return "LlamaForCausalLM";
  }
  const bool named = config.contains("architectures") &&
                     config["architectures"].is_array() &&
                     config["architectures"].size() == 1 &&
                     config["architectures"][0].is_string();
  if (!named) {
    throw DataError(
        path +
        ": \"architectures\" does not name one; known are "
        "[\"GPT2LMHeadModel\"] and [\"LlamaForCausalLM\"]");
  }
  return config["architectures"][0].get<std::string>();
}

ordered_json gpt_config(const LanguageModelShape& shape) {
  return {
      {"architectures", ordered_json::array({"GPT2LMHeadModel"})},
      {"model_type", "gpt2"},
      {"activation_function", "gelu_new"},
      {"n_layer", shape.layers},
      {"n_embd", shape.hidden_size},
      {"n_head", shape.heads},
      {"n_inner", shape.intermediate_size},
      {"n_positions", shape.max_positions},
      {"vocab_size", shape.vocab_size},
      {"layer_norm_epsilon", shape.norm_eps},
      {"initializer_range", 0.02},
      {"attn_pdrop", shape.dropout},
      {"embd_pdrop", shape.dropout},
      {"resid_pdrop", shape.dropout},
      {"scale_attn_weights", true}};
}

ordered_json llama_config(const LanguageModelShape& shape) {
  ordered_json scaling = nullptr;
  if (shape.rope_factor > 0) {
    scaling = {
        {"rope_type", "llama3"},
        {"factor", shape.rope_factor},
        {"low_freq_factor", shape.rope_low_freq_factor},
        {"high_freq_factor", shape.rope_high_freq_factor},
        {"original_max_position_embeddings", shape.rope_original_positions}};
  }
  return {
      {"architectures", ordered_json::array({"LlamaForCausalLM"})},
      {"model_type", "llama"},
      {"hidden_act", "silu"},
      {"num_hidden_layers", shape.layers},
      {"hidden_size", shape.hidden_size},
      {"head_dim", shape.head_size()},
      {"num_attention_heads", shape.heads},
      {"num_key_value_heads", shape.kv_heads},
      {"intermediate_size", shape.intermediate_size},
      {"max_position_embeddings", shape.max_positions},
      {"vocab_size", shape.vocab_size},
      {"rms_norm_eps", shape.norm_eps},
      {"rope_theta", shape.rope_theta},
      {"rope_scaling", scaling},
      {"initializer_range", 0.02},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"mlp_bias", false}};
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out << text;
  if (!out.flush()) {
    throw CheckpointError(path.string() + ": cannot be written");
  }
}

// A tensor of a source.
struct Found {
  size_t number = 0;
  const TensorFacts* facts = nullptr;
};

constexpr int64_t kComparedElements = 1 << 20;

bool same_value(TensorSource& source, const Found& a, const Found& b) {
  if (a.facts->dtype != b.facts->dtype || a.facts->shape != b.facts->shape) {
    return false;
  }
  const auto width = safetensors::dtype_bytes(a.facts->dtype);
  std::vector<std::byte> left(kComparedElements * width);
  std::vector<std::byte> right(left.size());
  const int64_t numel = a.facts->numel();
  for (int64_t begin = 0; begin < numel; begin += kComparedElements) {
    const IndexRange range = {
        begin, std::min(numel, begin + kComparedElements)};
    source.read(
        {{a.number, range, left.data()}, {b.number, range, right.data()}});
    const auto bytes = static_cast<size_t>(range.size()) * width;
    if (!std::equal(left.data(), left.data() + bytes, right.data())) {
      return false;
    }
  }
  return true;
}

void check_disk_space(const std::string& folder, int64_t bytes) {
  std::error_code error;
  const auto space = fs::space(folder, error);
  if (error || space.available >= static_cast<uintmax_t>(bytes)) return;
  throw CheckpointError(format(
      "{}: the weights need {} bytes, {} are free there; make room, or name a "
      "folder on another disk",
      folder, bytes, space.available));
}

}  // namespace

ModelOptions read_config(const std::string& path) {
  const json config = read_json(path);
  const auto architecture = architecture_of(config, path);
  const Fields fields(config, path);
  if (fields.has("quantization_config")) {
    fields.refuse("quantization_config", "quantised weights are not read");
  }
  const bool gpt = architecture == "GPT2LMHeadModel";
  if (!gpt && architecture != "LlamaForCausalLM") {
    fields.refuse(
        "architectures", "known are GPT2LMHeadModel and LlamaForCausalLM");
  }
  const auto options = gpt ? read_gpt(fields) : read_llama(fields);
  try {
    language_model_shape(options, options.vocab_size);
  } catch (const ConfigError& error) {
    throw DataError(path + ": as a model of Echelon: " + error.what());
  }
  return options;
}

std::string
write_config(const LanguageModelShape& shape, const ConfigText& text) {
  ordered_json config = shape.family == LanguageModelShape::Family::gpt
                            ? gpt_config(shape)
                            : llama_config(shape);
  config["tie_word_embeddings"] = shape.tie_embeddings;
  for (const char* token : {"bos_token_id", "eos_token_id"}) {
    config[token] = nullptr;
    if (text.end_of_text) config[token] = *text.end_of_text;
  }
  config["torch_dtype"] = text.dtype;
  config["use_cache"] = true;
  return config.dump(2) + "\n";
}

std::string generation_config(const ConfigText& text) {
  ordered_json config = {{"_from_model_config", true}};
  if (text.end_of_text) {
    config["bos_token_id"] = *text.end_of_text;
    config["eos_token_id"] = *text.end_of_text;
  }
  return config.dump(2) + "\n";
}

std::vector<std::pair<size_t, size_t>>
pack_shards(const std::vector<int64_t>& bytes, int64_t max_bytes) {
  std::vector<std::pair<size_t, size_t>> shards;
  int64_t filled = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i == 0 || filled + bytes[i] > max_bytes) {
      shards.emplace_back(i, i);
      filled = 0;
    }
    shards.back().second = i + 1;
    filled += bytes[i];
  }
  return shards;
}

std::vector<TensorToWrite> owned_tensors(
    TensorSource& source, const std::vector<ParameterInfo>& parameters,
    const std::string& dtype) {
  std::map<std::string, Found> there;
  for (size_t i = 0; i < source.tensors().size(); ++i) {
    there[source.tensors()[i].name] = {i, &source.tensors()[i]};
  }
  std::vector<TensorToWrite> tensors;
  for (const auto& parameter : parameters) {
    if (!parameter.tied_to.empty()) continue;
    std::vector<std::string> names = {parameter.name};
    for (const auto& other : parameters) {
      if (other.tied_to == parameter.name) names.push_back(other.name);
    }
    const Found* first = nullptr;
    for (const auto& name : names) {
      const auto found = there.find(name);
      if (found == there.end()) continue;
      if (first == nullptr) {
        first = &found->second;
        continue;
      }
      if (same_value(source, *first, found->second)) continue;
      throw DataError(format(
          "{}: \"{}\" and \"{}\" differ, but are tied in the model; leave one "
          "of "
          "them out",
          source.path(), names[0], name));
    }
    if (first == nullptr) {
      throw DataError(
          format("{}: has no \"{}\"", source.path(), parameter.name));
    }
    const auto& own = first->facts->dtype;
    const bool converts = !dtype.empty() && is_float_dtype(own);
    tensors.push_back({first->number, parameter.name, converts ? dtype : own});
  }
  return tensors;
}

std::vector<std::string> write_weights(
    TensorSource& source, const std::vector<TensorToWrite>& tensors,
    const std::string& folder, int64_t max_shard_bytes) {
  const safetensors::Metadata metadata = {{"format", "pt"}};
  std::vector<int64_t> bytes;
  int64_t total = 0;
  for (const auto& tensor : tensors) {
    bytes.push_back(bytes_to_write(source, tensor));
    total += bytes.back();
  }
  check_disk_space(folder, total);
  const auto shards = pack_shards(bytes, max_shard_bytes);
  std::vector<std::string> files;
  ordered_json weight_map = ordered_json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto name =
        shards.size() == 1
            ? "model.safetensors"
            : format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    const auto [begin, end] = shards[i];
    const std::vector<TensorToWrite> part(
        tensors.begin() + static_cast<int64_t>(begin),
        tensors.begin() + static_cast<int64_t>(end));
    write_tensors((fs::path(folder) / name).string(), source, part, metadata);
    for (const auto& tensor : part) weight_map[tensor.name] = name;
    files.push_back(name);
  }
  if (shards.size() > 1) {
    const ordered_json index = {
        {"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
    files.push_back("model.safetensors.index.json");
    write_text(fs::path(folder) / files.back(), index.dump(2) + "\n");
  }
  return files;
}

}  // namespace echelon::hugging_face
