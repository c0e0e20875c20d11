// A table has the keys that the plan decides; what a user decides (paths,
// steps) is a comment to fill in, and most keys that would equal their default
// are left out, so that the text shows the choices. A plan speaks of
// microbatches and of numbers of recomputed layers, for which a configuration
// has other keys: the batch of a step with its passes, and a budget of
// activations that the trainer fills by its own choice of layers.
#include "echelon/planner/configuration.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "echelon/architecture/language_model.h"
#include "echelon/config/byte_size.h"
#include "echelon/cost/distinct_pipelines.h"
#include "echelon/text/format.h"

namespace echelon::planner {
namespace {

// Shapes for which the trainer has a named size, which also sets what a shape
// does not say (rotary positions). "llama3.1-8b" is called "llama-8b" there.
constexpr std::array kNamedSizes = {
    "gpt2",     "gpt2-medium", "gpt2-large", "gpt2-xl",     "llama-160m",
    "llama-1b", "llama-8b",    "llama-70b",  "llama3.1-8b", "llama3.1-70b"};
constexpr std::array kImageModels = {"simple_cnn", "resnet18",  "resnet34",
                                     "resnet50",   "resnet101", "resnet152"};

// The architecture that trains such a shape; null: none does.
const Architecture* architecture_of(const TransformerShape& shape) {
  const auto& experts = shape.experts;
  if (!shape.causal || shape.embedding_norm || experts.every > 1) {
    return nullptr;
  }
  // As DeepSeek has them.
  const bool partly_dense =
      experts.shared_ffn > 0 || experts.first_dense_layers > 0;
  if (partly_dense && experts.shared_ffn % experts.ffn != 0) return nullptr;
  const bool own_heads =
      shape.head_dim > 0 && shape.head_dim * shape.heads != shape.hidden;
  const bool gpt = !shape.gated && shape.tied && shape.positions > 0 &&
                   shape.biases && !shape.rms_norm && !own_heads &&
                   shape.key_value_heads() == shape.heads;
  const bool llama =
      shape.gated && shape.positions == 0 && !shape.biases && shape.rms_norm;
  for (const Architecture& kind : architectures()) {
    const bool fits =
        (kind.gpt ? gpt : llama) && kind.qkv_biases == shape.qkv_biases &&
        kind.qk_norm == shape.qk_norm && kind.post_norms == shape.post_norms &&
        (kind.post_norms || shape.global_every == 0) &&
        kind.has_experts() == (experts.experts > 0) &&
        kind.latent_attention == shape.latent.has_value() &&
        (kind.biased_router || !partly_dense) &&
        (!kind.always_tied || shape.tied) && (kind.window || shape.window == 0);
    if (fits) return &kind;
  }
  return nullptr;
}

// Lines "key = value" below a heading, which is left out if there are none.
class Table {
 public:
  explicit Table(const std::string& name) : name_(name) {}

  void word(const std::string& key, std::string_view value) {
    line(key, in_quotes(value));
  }
  void number(const std::string& key, int64_t value) {
    line(key, std::to_string(value));
  }
  void numbers(const std::string& key, const std::vector<int64_t>& values) {
    line(key, format("[{}]", join(values, ", ")));
  }
  void bytes(const std::string& key, int64_t value) {
    word(key, config::bytes_text(value));
  }
  void sizes(const std::string& key, const std::vector<int64_t>& values) {
    std::vector<std::string> sizes;
    for (const int64_t value : values) {
      sizes.push_back(config::bytes_text(value));
    }
    words(key, sizes);
  }
  void words(const std::string& key, const std::vector<std::string>& values) {
    line(key, format("[{}]", join(values, ", ", in_quotes)));
  }
  void yes(const std::string& key) { line(key, "true"); }
  void comment(const std::string& text) { lines_ += "# " + text + "\n"; }
  // Degrees of 1 are left out.
  void degree(const std::string& key, int64_t value) {
    if (value > 1) number(key, value);
  }

  std::string text() const {
    return lines_.empty() ? "" : "[" + name_ + "]\n" + lines_ + "\n";
  }

 private:
  void line(const std::string& key, const std::string& value) {
    lines_ += key + " = " + value + "\n";
  }

  std::string name_;
  std::string lines_;
};

int64_t tokens(const PlanRequest& request) {
  return request.seq_len > 0 ? request.seq_len : request.model.seq_len;
}

void put_latent_attention(Table& table, const LatentAttention& latent) {
  table.number("query_rank", latent.query_rank);
  table.number("key_value_rank", latent.key_value_rank);
  table.number("nope_size", latent.nope_dim);
  table.number("rope_size", latent.rope_dim);
  table.number("value_size", latent.value_dim);
}

void put_transformer(Table& table, const PlanRequest& request) {
  const TransformerShape& shape = *request.model.transformer;
  if (std::ranges::find(kNamedSizes, request.model.name) != kNamedSizes.end()) {
    std::string name = request.model.name;
    if (name.starts_with("llama3.1-")) name.replace(0, 9, "llama-");
    table.word("name", name);
    // Longer sequences than the size is usually trained with.
    if (tokens(request) > request.model.seq_len) {
      table.number("max_positions", tokens(request));
    }
    return;
  }
  const Architecture& kind = *architecture_of(shape);
  const bool gpt = kind.gpt;
  table.word("name", kind.name);
  table.number("layers", shape.layers);
  table.number("hidden_size", shape.hidden);
  table.number("heads", shape.heads);
  if (shape.latent) {
    put_latent_attention(table, *shape.latent);
  } else {
    if (!gpt) table.number("kv_heads", shape.key_value_heads());
    if (shape.head_size() * shape.heads != shape.hidden) {
      table.number("head_size", shape.head_size());
    }
  }
  if (shape.window > 0) table.number("window", shape.window);
  if (shape.global_every > 0) table.number("global_every", shape.global_every);
  const bool dense = !kind.has_experts() || kind.biased_router;
  table.number(
      "intermediate_size", dense ? shape.ffn_size() : shape.experts.ffn);
  if (kind.has_experts()) {
    table.number("experts", shape.experts.experts);
    table.number("experts_per_token", shape.experts.experts_per_token);
  }
  if (kind.biased_router) {
    table.number("expert_size", shape.experts.ffn);
    table.number(
        "shared_experts", shape.experts.shared_ffn / shape.experts.ffn);
    table.number("dense_layers", shape.experts.first_dense_layers);
  }
  table.number("vocab_size", shape.vocab);
  table.number("max_positions", std::max(shape.positions, tokens(request)));
  if (!gpt && shape.tied) table.yes("tie_embeddings");
}

// The layer that each stage but the first begins with, as the trainer calls it.
std::vector<std::string> first_layers(
    const cost::ModelShape& model, const std::vector<int64_t>& stage_layers) {
  std::vector<std::string> names;
  const Architecture* kind =
      model.transformer ? architecture_of(*model.transformer) : nullptr;
  int64_t begin = 0;
  for (size_t stage = 0; stage + 1 < stage_layers.size(); ++stage) {
    begin += stage_layers[stage];
    if (!model.transformer) {
      names.push_back(model.layers[static_cast<size_t>(begin)].name);
    } else {
      names.push_back(
          (kind != nullptr && kind->gpt ? "transformer.h." : "model.layers.") +
          std::to_string(begin));
    }
  }
  return names;
}

// The smallest device of each pipeline rank in any pipeline.
std::vector<int64_t>
device_bytes(const cost::Strategy& strategy, const cluster::Cluster& cluster) {
  std::vector<int64_t> bytes(
      static_cast<size_t>(strategy.layout.pp),
      std::numeric_limits<int64_t>::max());
  for (const auto& pipeline : cost::distinct_pipelines(strategy, cluster)) {
    for (size_t rank = 0; rank < bytes.size(); ++rank) {
      const auto group = static_cast<size_t>(pipeline.groups[rank]);
      const double memory = cluster.groups[group].node.device.memory_bytes;
      bytes[rank] = std::min(bytes[rank], static_cast<int64_t>(memory));
    }
  }
  return bytes;
}

void put_partition(
    Table& table, const cost::Strategy& strategy, const PlanRequest& request) {
  if (strategy.stage_layers.empty()) return;
  table.words("cut", first_layers(request.model, strategy.stage_layers));
  table.sizes("device_bytes", device_bytes(strategy, request.cluster));
}

std::string
model_table(const cost::Strategy& strategy, const PlanRequest& request) {
  Table table("model");
  if (!is_trained_here(request.model)) {
    table.comment(
        "this version trains shapes of gpt, llama, mistral, qwen2, qwen3, "
        "gemmas, mixtral, qwen3-moe and deepseek-v3, resnets and simple_cnn; " +
        request.model.name + " is none of them");
  } else if (request.model.transformer) {
    put_transformer(table, request);
  } else {
    table.word("name", request.model.name);
  }
  if (request.precision == cluster::Precision::fp64)
    table.word("dtype", "float64");
  put_partition(table, strategy, request);
  return table.text();
}

std::string data_table(const PlanRequest& request) {
  Table table("data");
  table.word("name", request.model.transformer ? "text" : "images");
  if (request.model.transformer) table.number("sequence", tokens(request));
  if (request.model.name == "simple_cnn") table.number("image_size", 32);
  table.comment("path = \"…\"  # yours");
  return table.text();
}

// Left out where it is the default.
void put_order(Table& table, const Layout& layout) {
  Layout usual = layout;
  usual.order = kAxes;
  if (layout == usual) return;
  std::vector<std::string> names;
  for (const Axis axis : layout.used_axes()) {
    names.emplace_back(short_name(axis));
  }
  table.words("order", names);
}

std::string layout_table(const cost::Strategy& strategy) {
  const Layout& layout = strategy.layout;
  Table table("layout");
  table.degree("dp", layout.dp_replicate);
  table.degree("fsdp", layout.dp_shard);
  table.degree("tp", layout.tp);
  table.degree("pp", layout.pp);
  table.degree("cp", layout.cp);
  table.degree("ep", layout.ep);
  if (layout.cp > 1 && strategy.context.way != ContextWay::automatic) {
    table.word("context", to_string(strategy.context.way));
    if (strategy.context.way == ContextWay::ulysses_ring) {
      table.number("context_ulysses", strategy.context.ulysses);
    }
  }
  put_order(table, layout);
  if (layout.pp > 1) {
    table.number("microbatches", strategy.num_microbatches());
    table.word("schedule", to_string(strategy.schedule));
    if (strategy.stages_per_rank > 0) {
      table.number("stages_per_rank", strategy.stages_per_rank);
    }
  }
  if (strategy.sequence_parallel) table.yes("sequence_parallel");
  return table.text();
}

std::string shard_table(const cost::Strategy& strategy) {
  Table table("shard");
  const bool by_context = strategy.layout.cp > 1 && strategy.zero_stage > 0;
  if (strategy.layout.dp_shard > 1 || by_context) {
    table.number("stage", std::max<int64_t>(1, strategy.zero_stage));
    if (strategy.zero_stage == 3) {
      table.word("gather", strategy.unshard_once ? "step" : "use");
    }
  }
  return table.text();
}

// The activations of the fullest rank, in whole MiB.
int64_t kept_activation_bytes(const cost::StepEstimate& step) {
  int64_t most = 0;
  for (const auto& rank : step.memory.ranks) {
    most = std::max(most, rank[timeline::MemoryKind::activations]);
  }
  // It is rounded up, so that the plan's own choice fits its budget.
  return ((most >> 20) + 1) << 20;
}

std::string memory_table(const Plan& plan) {
  const cost::Strategy& strategy = plan.strategy;
  Table table("memory");
  if (strategy.recompute != cost::Recompute::none &&
      strategy.recompute_layers >= 0) {
    table.word("recompute", "budget");
    table.bytes("activation_bytes", kept_activation_bytes(plan.step));
  } else if (strategy.recompute != cost::Recompute::none) {
    table.word("recompute", cost::to_string(strategy.recompute));
  }
  if (strategy.offload_activations) table.word("activations", "offload");
  if (strategy.offload_optimizer) table.word("offload", "optimizer");
  return table.text();
}

std::string
precision_table(const cost::Strategy& strategy, const cluster::Device& device) {
  Table table("precision");
  if (strategy.precision == cluster::Precision::tf32 ||
      strategy.precision == cluster::Precision::bf16 ||
      strategy.precision == cluster::Precision::fp16 ||
      strategy.precision == cluster::Precision::fp8) {
    table.word("compute", cluster::to_string(strategy.precision));
  } else if (
      strategy.precision == cluster::Precision::fp32 && !device.processor) {
    table.word("compute", "same");  // "auto" would be bf16
  }
  return table.text();
}

std::string train_table(const cost::Strategy& strategy) {
  Table table("train");
  table.number("batch", strategy.global_batch);
  if (strategy.layout.pp == 1 && strategy.num_microbatches() > 1) {
    table.number("accumulate", strategy.num_microbatches());
  }
  if (!strategy.rank_microbatch.empty()) {
    // [train] rank_batch has the samples of a step, a plan those of one pass.
    std::vector<int64_t> batches = strategy.rank_microbatch;
    for (int64_t& batch : batches) batch *= strategy.num_microbatches();
    table.numbers("rank_batch", batches);
  }
  table.comment("steps = …  # yours");
  return table.text();
}

}  // namespace

bool is_trained_here(const cost::ModelShape& model) {
  if (model.transformer) {
    return architecture_of(*model.transformer) != nullptr;
  }
  return std::ranges::find(kImageModels, model.name) != kImageModels.end();
}

std::string to_configuration(const Plan& plan, const PlanRequest& request) {
  std::string text =
      model_table(plan.strategy, request) + data_table(request) +
      layout_table(plan.strategy) + shard_table(plan.strategy) +
      memory_table(plan) +
      precision_table(
          plan.strategy, request.cluster.groups.empty()
                             ? cluster::Device{.processor = true}
                             : request.cluster.node_of(0).device) +
      train_table(plan.strategy);
  text.pop_back();
  return text;
}

}  // namespace echelon::planner
