#include "echelon/architecture/hugging_face.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "echelon/checkpoint/format/float_convert.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::hugging_face {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

// The fields that name the architecture, which come first.
ordered_json named_config(const Architecture& kind) {
  return {
      {"architectures", ordered_json::array({kind.class_name})},
      {"model_type", kind.type}};
}

ordered_json gpt_config(const LanguageModelShape& shape) {
  return {{"activation_function", "gelu_new"},
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

// The fields of a mixture, by the names that its architecture has for them.
ordered_json expert_config(const LanguageModelShape& shape) {
  const auto& kind = *shape.kind;
  if (!kind.has_experts()) return ordered_json::object();
  ordered_json config = {
      {kind.experts.count, shape.experts},
      {"num_experts_per_tok", shape.experts_per_token},
      {kind.experts.size, shape.expert_size},
      {"output_router_logits", false}};
  if (kind.may_not_normalize) {
    config["norm_topk_prob"] = shape.normalize_routing;
  }
  if (kind.biased_router) {
    config["n_shared_experts"] = shape.shared_experts;
    config["first_k_dense_replace"] = shape.dense_layers;
    config["n_group"] = shape.expert_groups;
    config["topk_group"] = shape.groups_per_token;
    config["routed_scaling_factor"] = shape.routing_scale;
    config["num_nextn_predict_layers"] = 0;
  } else if (kind.may_not_normalize) {
    config["decoder_sparse_step"] = 1;
    config["mlp_only_layers"] = ordered_json::array();
  }
  return config;
}

ordered_json latent_config(const LanguageModelShape& shape) {
  if (!shape.latent) return ordered_json::object();
  const auto& latent = *shape.latent;
  ordered_json config = {
      {"q_lora_rank", nullptr},
      {"kv_lora_rank", latent.key_value_rank},
      {"qk_nope_head_dim", latent.nope_dim},
      {"qk_rope_head_dim", latent.rope_dim},
      {"v_head_dim", latent.value_dim},
      {"head_dim", latent.rope_dim},
      {"rope_interleave", true}};
  if (latent.query_rank > 0) config["q_lora_rank"] = latent.query_rank;
  return config;
}

ordered_json rope_scaling(const RotaryOptions& rope) {
  if (rope.factor == 0) return nullptr;
  ordered_json scaling = {
      {"rope_type", to_string(rope.scaling)}, {"factor", rope.factor}};
  if (rope.scaling == RopeScaling::linear) return scaling;
  scaling["original_max_position_embeddings"] = rope.original_positions;
  if (rope.scaling == RopeScaling::llama3) {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
    return scaling;
  }
  scaling["beta_fast"] = rope.beta_fast;
  scaling["beta_slow"] = rope.beta_slow;
  if (rope.attention_factor > 0) {
    scaling["attention_factor"] = rope.attention_factor;
  }
  if (rope.mscale_all_dim > 0) scaling["mscale_all_dim"] = rope.mscale_all_dim;
  return scaling;
}

// What gemma2 and gemma3 have in addition.
ordered_json gemma_config(const LanguageModelShape& shape) {
  if (!shape.kind->post_norms) return ordered_json::object();
  auto types = ordered_json::array();
  for (int64_t i = 0; i < shape.layers; ++i) {
    types.push_back(
        shape.window_of(i) > 0 ? "sliding_attention" : "full_attention");
  }
  const auto cap = [](double value) {
    return value > 0 ? ordered_json(value) : ordered_json(nullptr);
  };
  ordered_json config = {
      {"hidden_activation", "gelu_pytorch_tanh"},
      {"layer_types", types},
      {"query_pre_attn_scalar", shape.query_pre_attn_scalar},
      {"attn_logit_softcapping", cap(shape.attention_softcap)},
      {"final_logit_softcapping", cap(shape.logit_softcap)}};
  if (shape.kind->local_rotary) {
    config["rope_local_base_freq"] = shape.rope_local_theta;
  }
  return config;
}

ordered_json llama_config(const LanguageModelShape& shape) {
  ordered_json config = {
      {"hidden_act", shape.kind->gelu ? "gelu_pytorch_tanh" : "silu"},
      {"num_hidden_layers", shape.layers},
      {"hidden_size", shape.hidden_size},
      {"head_dim", shape.head_size},
      {"num_attention_heads", shape.heads},
      {"num_key_value_heads", shape.kv_heads},
      {"intermediate_size", shape.intermediate_size},
      {"max_position_embeddings", shape.max_positions},
      {"vocab_size", shape.vocab_size},
      {"rms_norm_eps", shape.norm_eps},
      {"rope_theta", shape.rope.theta},
      {"rope_scaling", rope_scaling(shape.rope)},
      {"initializer_range", 0.02},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"mlp_bias", false}};
  if (shape.kind->window) {
    config["sliding_window"] = nullptr;
    if (shape.window > 0) config["sliding_window"] = shape.window;
  }
  config.update(expert_config(shape));
  config.update(latent_config(shape));
  config.update(gemma_config(shape));
  return config;
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

std::string
write_config(const LanguageModelShape& shape, const ConfigText& text) {
  ordered_json config = named_config(*shape.kind);
  config.update(shape.kind->gpt ? gpt_config(shape) : llama_config(shape));
  config["tie_word_embeddings"] = shape.tie_embeddings;
  for (const char* token : {"bos_token_id", "eos_token_id"}) {
    config[token] = nullptr;
    if (text.end_of_text) config[token] = *text.end_of_text;
  }
  // Every token trains, also the one that a gemma has for padding.
  config["pad_token_id"] = nullptr;
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
