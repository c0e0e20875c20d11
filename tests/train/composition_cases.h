// The rows of doc/composition.md: each is a job that must equal one device.
#pragma once

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "echelon/models/build.h"
#include "echelon/schedule/options.h"
#include "echelon/text/format.h"
#include "tests/train/small_run.h"

namespace echelon::composition {

struct Case {
  Job job;
  std::string also;  // what is special about it
};

struct Row {
  std::string model, layout, also;
  int64_t ranks = 1;
  int64_t compared = 0;
  double largest = 0;
};

// Two heads of keys and values, which more than two ranks hold several times.
inline ModelOptions llama() {
  ModelOptions model = tiny_gpt();
  model.name = "llama";
  model.hidden_size = 24;
  model.heads = 6;
  model.kv_heads = 2;
  model.intermediate_size = 31;
  model.vocab_size = 61;
  return model;
}

// Llama's kind, with what tells `name` apart.
inline ModelOptions architecture(const std::string& name) {
  ModelOptions model = llama();
  model.name = name;
  if (name == "qwen3" || name == "qwen3-moe") model.head_size = 6;
  if (name == "mistral" || name == "mixtral") model.window = 4;
  if (name == "gemma2" || name == "gemma3") {
    model.window = 4;
    model.global_every = 2;
    model.query_pre_attn_scalar = 5;
  }
  if (name == "gemma2") {
    model.attention_softcap = 0.5;
    model.logit_softcap = 2;
  }
  if (name == "gemma3") {
    model.rope = {.theta = 900, .scaling = RopeScaling::yarn, .factor = 4};
    model.rope_local_theta = 60;
  }
  return model;
}

// Five experts, which no degree divides, of which a token takes two; the losses
// of the router count.
inline ModelOptions mixture(const std::string& name) {
  ModelOptions model = architecture(name);
  model.intermediate_size = 15;
  model.experts = 5;
  model.experts_per_token = 2;
  model.aux_loss = 0.1;
  model.z_loss = 0.01;
  return model;
}

// A block with an MLP and two with experts: six in three groups, of which a
// token takes three in two groups, and a shared one. Their biases move.
inline ModelOptions deepseek() {
  ModelOptions model = llama();
  model.name = "deepseek-v3";
  model.layers = 3;
  model.kv_heads = 0;
  model.dense_layers = 1;
  model.experts = 6;
  model.expert_groups = 3;
  model.groups_per_token = 2;
  model.experts_per_token = 3;
  model.expert_size = 15;
  model.shared_experts = 1;
  model.routing_scale = 1.5;
  model.bias_rate = 0.05;
  model.query_rank = 11;
  model.key_value_rank = 9;
  model.nope_size = 5;
  model.rope_size = 4;
  model.value_size = 7;
  model.aux_loss = 0.1;
  return model;
}

inline const ModelOptions kSimpleCnn{.name = "simple_cnn"};
inline const ModelOptions kResnet18{
    .name = "resnet18", .sync_batch_norm = true};

inline Job job_of(const ModelOptions& model, const std::string& tokens) {
  Job job;
  job.model = model;
  job.train.steps = 2;
  job.train.batch = 24;
  // Plain steps: a wrong norm shows in every parameter.
  job.optimizer.name = OptimizerKind::sgd;
  job.optimizer.momentum = 0.9;
  job.optimizer.learning_rate = 0.1;
  job.optimizer.clip_norm = 0.5;
  if (model.name == "simple_cnn") return job;  // on the digits
  if (model.name == "resnet18") {
    job.data.name = DataKind::dummy;
    job.data.samples = 32;
    job.data.shape = {3, 16, 16};
    job.train.batch = 8;
    return job;
  }
  job.data.name = DataKind::text;
  job.data.sources = {tokens};
  job.data.vocab_size = model.vocab_size;
  job.data.sequence = 11;
  job.data.end_of_text_id = 3;
  job.data.documents = Documents::respected;
  return job;
}

// Degree 1 on each axis, one axis, two, and three, on up to 8 ranks; axes alone
// up to 4.
inline std::vector<Layout> layouts(int64_t most_stages) {
  std::vector<Layout> all;
  for (int64_t axes = 0; axes <= 3; ++axes) {
    for (int64_t dp = 1; dp <= 4; ++dp) {
      for (int64_t pp = 1; pp <= std::min<int64_t>(4, most_stages); ++pp) {
        for (int64_t tp = 1; tp <= 4; ++tp) {
          const int64_t used = (dp > 1) + (pp > 1) + (tp > 1);
          if (used != axes || dp * pp * tp > 8) continue;
          all.push_back({.dp_replicate = dp, .tp = tp, .pp = pp});
        }
      }
    }
  }
  return all;
}

inline std::string stage_text(int64_t stage) {
  return "stage " + std::to_string(stage);
}

inline std::string tokens_text(bool sharded) {
  return sharded ? ", sequence parallel" : "";
}

// The whole resnet18 has eleven million parameters. Its stem, a block and a
// block that halves the image have all that is special about it; verify_test
// has the whole.
inline LayerFactory layers_of(const Job& job) {
  if (job.model.name != "resnet18") return {};
  return [classes = job.data.classes](const TensorParallel& parallel) {
    return models::resnet_layers({.blocks = {1, 1}}, 3, classes, parallel);
  };
}

class Cases {
 public:
  explicit Cases(std::string tokens) : tokens_(std::move(tokens)) {}

  Job&
  add(const ModelOptions& model, const Layout& layout,
      const std::string& also = "") {
    all.push_back({job_of(model, tokens_), also});
    all.back().job.layout = layout;
    return all.back().job;
  }
  Job& add_stage(
      const ModelOptions& model, const Layout& layout, int64_t stage,
      const std::string& also = "") {
    Job& job = add(model, layout, stage_text(stage) + also);
    job.shard.stage = stage;
    return job;
  }

  std::vector<Case> all;

 private:
  std::string tokens_;
};

// Stages 1 to 3 on 2 to 4 ranks, hybrid, and with the other axes.
inline void add_stages(Cases& cases) {
  for (const auto& model : {tiny_gpt(), llama(), kSimpleCnn}) {
    for (const int64_t stage : {1, 2, 3}) {
      for (const Layout& layout : parse_layouts(
               {"fsdp=2", "fsdp=3", "fsdp=4", "dp=2,fsdp=2", "fsdp=2,tp=2",
                "fsdp=2,pp=2", "fsdp=2,tp=2,pp=2"})) {
        cases.add_stage(model, layout, stage);
        if (layout.tp == 1 || model.name == "simple_cnn") continue;
        cases.add_stage(model, layout, stage, tokens_text(true))
            .tensor.sequence_parallel = true;
      }
      cases.add_stage(model, {.dp_shard = 2}, stage, ", 3 backward passes")
          .train.accumulate = 3;
    }
  }
  for (const int64_t stage : {1, 2, 3}) {
    cases.add_stage(kResnet18, {.dp_shard = 2}, stage);
  }
  for (const Layout& layout :
       parse_layouts({"fsdp=4", "dp=2,fsdp=2", "fsdp=2,tp=2", "fsdp=2,pp=2"})) {
    // Statistics are those of a batch.
    cases.add(kResnet18, layout, stage_text(3)).pipeline.microbatches = 1;
  }
}

// Every schedule, with parameters that are gathered for a step and for each
// use.
inline void add_schedules(Cases& cases) {
  for (const auto& schedule : schedule_names()) {
    for (const auto gather : {Gather::step, Gather::use}) {
      Job& job = cases.add(
          tiny_gpt(), {.dp_shard = 2, .pp = 2},
          "schedule " + schedule + ", gathered for a " + to_string(gather));
      job.pipeline.schedule = schedule_kind(schedule);
      job.shard.gather = gather;
    }
    Job& job = cases.add(
        llama(), {.dp_shard = 2, .tp = 2, .pp = 2}, "schedule " + schedule);
    job.pipeline.schedule = schedule_kind(schedule);
    job.tensor.sequence_parallel = true;
  }
  cases.add(llama(), {.dp_shard = 2, .pp = 3}, "tied embeddings")
      .model.tie_embeddings = true;
  for (const auto& model : {tiny_gpt(), llama()}) {
    for (const auto optimizer : {OptimizerKind::adamw, OptimizerKind::sgd}) {
      Job& job = cases.add(
          model, {.dp_replicate = 2, .dp_shard = 2, .tp = 2},
          to_string(optimizer) + ", weight decay 0.1");
      job.optimizer.name = optimizer;
      job.optimizer.weight_decay = 0.1;
      job.optimizer.learning_rate = 1e-3;
    }
    cases.add(model, {.dp_shard = 2, .tp = 2}, "batches of 16 and 8")
        .train.rank_batch = {16, 8};
  }
}

// What saves memory, on one device, with each axis, and with all.
inline void add_memory(Cases& cases) {
  const std::pair<MemoryOptions, const char*> memories[] = {
      {{.recompute = Recompute::all}, "recompute all"},
      {{.recompute = Recompute::selective}, "recompute selective"},
      {{.recompute = Recompute::budget, .activation_bytes = 250'000},
       "recompute to a budget"},
      {{.activations = Activations::offload}, "activations offloaded"},
      {{.offload = Offload::optimizer}, "optimizer offloaded"},
      {{.offload = Offload::parameters}, "parameters offloaded"},
      {{.recompute = Recompute::all,
        .activations = Activations::offload,
        .offload = Offload::parameters},
       "recompute all, activations and parameters offloaded"}};
  for (const auto& [options, also] : memories) {
    for (const auto& model : {tiny_gpt(), kSimpleCnn}) {
      for (const Layout& layout : parse_layouts(
               {"dp=1", "dp=2", "fsdp=2", "tp=2", "pp=2",
                "fsdp=2,tp=2,pp=2"})) {
        Job& job = cases.add(model, layout, also);
        job.memory = options;
        if (model.name == "gpt") job.model.dropout = 0.3;
      }
    }
    Job& job = cases.add(kResnet18, {.dp_shard = 2}, also);
    job.memory = options;
    job.memory.activation_bytes *= 100;
  }
  for (const auto& schedule : schedule_names()) {
    Job& job = cases.add(
        tiny_gpt(), {.dp_shard = 2, .pp = 2},
        "schedule " + schedule + ", recompute all");
    job.pipeline.schedule = schedule_kind(schedule);
    job.memory.recompute = Recompute::all;
    job.shard.gather = Gather::use;
  }
}

// Replaces the last case by one for each other order of its axes.
inline void in_every_order(Cases& cases) {
  const Case one = cases.all.back();
  cases.all.pop_back();
  auto axes = one.job.layout.used_axes();
  std::sort(axes.begin(), axes.end());
  while (std::next_permutation(axes.begin(), axes.end())) {
    Case other = one;
    auto& order = other.job.layout.order;
    std::stable_partition(order.begin(), order.end(), [&](Axis axis) {
      return other.job.layout.degree(axis) == 1;
    });
    std::copy(
        axes.begin(), axes.end(),
        order.end() - static_cast<std::ptrdiff_t>(axes.size()));
    cases.all.push_back(other);
  }
}

// The axes in other orders: those of two axes, and all of three, on up to 8
// ranks.
inline void add_orders(Cases& cases) {
  for (const auto& model : {tiny_gpt(), llama(), kSimpleCnn}) {
    for (const char* text :
         {"dp=2,tp=2,order=tp:dp", "dp=3,tp=2,order=tp:dp",
          "pp=2,tp=2,order=tp:pp", "pp=3,tp=2,order=tp:pp",
          "dp=2,pp=2,order=pp:dp", "dp=2,pp=3,order=pp:dp",
          "dp=2,fsdp=2,order=fsdp:dp", "dp=2,fsdp=3,order=fsdp:dp",
          "fsdp=2,tp=2,order=tp:fsdp", "fsdp=3,pp=2,order=pp:fsdp"}) {
      const Layout layout = parse_layout(text);
      cases.add(model, layout, layout.dp_shard > 1 ? stage_text(3) : "");
    }
  }
  Job& dropout = cases.add(
      tiny_gpt(), {.dp_replicate = 2, .tp = 2, .pp = 2},
      "dropout 0.3, sequence parallel");
  dropout.model.dropout = 0.3;
  dropout.tensor.sequence_parallel = true;
  in_every_order(cases);
  for (const int64_t stage : {1, 2, 3}) {
    cases.add_stage(tiny_gpt(), {.dp_shard = 2, .tp = 2, .pp = 2}, stage);
    in_every_order(cases);
  }
  cases
      .add_stage(
          tiny_gpt(), {.dp_replicate = 2, .dp_shard = 2, .pp = 2}, 3,
          ", schedule zb-v")
      .pipeline.schedule = ScheduleKind::zb_v;
  in_every_order(cases);
  cases
      .add_stage(
          llama(), {.dp_replicate = 2, .dp_shard = 2, .tp = 2}, 3,
          ", batches of 4, 8, 2 and 10")
      .train.rank_batch = {4, 8, 2, 10};
  in_every_order(cases);
}

// Sequences of 11 tokens cut over ranks, in each way; with borders of documents
// and without, where other kernels compute; and with the other axes.
inline void add_context(Cases& cases) {
  const auto add = [&](const ModelOptions& model, const Layout& layout,
                       ContextWay way, const std::string& also = "") -> Job& {
    Job& job = cases.add(model, layout, to_string(way) + also);
    job.context.way = way;
    return job;
  };
  constexpr ContextWay kWays[] = {
      ContextWay::ring, ContextWay::all_gather, ContextWay::ulysses};
  const char* packed = ", borders of documents not respected";
  for (const auto& model : {tiny_gpt(), llama()}) {
    for (const auto way : kWays) {
      for (const int64_t cp : {2, 3, 4}) {
        add(model, {.cp = cp}, way);
        add(model, {.cp = cp}, way, packed).data.documents = Documents::packed;
      }
      for (const Layout& layout : parse_layouts(
               {"dp=2,cp=2", "tp=2,cp=2", "pp=2,cp=2", "fsdp=2,cp=2",
                "dp=2,pp=2,cp=2", "pp=2,tp=2,cp=2"})) {
        add(model, layout, way);
        if (layout.tp > 1) {
          add(model, layout, way, tokens_text(true)).tensor.sequence_parallel =
              true;
        }
      }
      add(model, {.cp = 2}, way, ", dropout 0.3").model.dropout = 0.3;
      Job& all =
          add(model, {.cp = 2, .tp = 2}, way,
              ", dropout 0.3, sequence parallel, documents packed");
      all.model.dropout = 0.3;
      all.tensor.sequence_parallel = true;
      all.data.documents = Documents::packed;
    }
  }
  for (const auto way : kWays) {
    for (const int64_t stage : {1, 2, 3}) {
      add(tiny_gpt(), {.dp_shard = 2, .cp = 2}, way, ", " + stage_text(stage))
          .shard.stage = stage;
      add(llama(), {.dp_shard = 3, .cp = 2}, way, ", " + stage_text(stage))
          .shard.stage = stage;
    }
    add(llama(), {.dp_shard = 2, .cp = 2, .pp = 2}, way, ", tied embeddings")
        .model.tie_embeddings = true;
    add(tiny_gpt(), {.dp_replicate = 2, .cp = 2}, way, ", 3 backward passes")
        .train.accumulate = 3;
    Job& recomputed =
        add(tiny_gpt(), {.dp_shard = 2, .cp = 2, .tp = 2}, way,
            ", dropout 0.3, recompute all");
    recomputed.model.dropout = 0.3;
    recomputed.memory.recompute = Recompute::all;
    for (const auto recompute : {Recompute::all, Recompute::selective}) {
      Job& job =
          add(llama(), {.cp = 3}, way,
              ", recompute " + to_string(recompute) + ", packed");
      job.memory.recompute = recompute;
      job.data.documents = Documents::packed;
    }
    Job& offloaded = add(
        tiny_gpt(), {.cp = 2}, way, ", activations and parameters offloaded");
    offloaded.memory.activations = Activations::offload;
    offloaded.memory.offload = Offload::parameters;
    Job& adam = add(llama(), {.dp_shard = 2, .cp = 2}, way, ", adamw");
    adam.optimizer.name = OptimizerKind::adamw;
    adam.optimizer.learning_rate = 1e-3;
  }
  // Groups exchange heads, and pass keys round between them.
  const auto grouped = [&](const ModelOptions& model, const char* layout,
                           const std::string& also = "",
                           int64_t ranks = 2) -> Job& {
    Job& job =
        add(model, parse_layout(layout), ContextWay::ulysses_ring,
            format(" in groups of {}", ranks) + also);
    job.context.ulysses = ranks;
    return job;
  };
  // Windows, which end within pieces and reach beyond them.
  const ModelOptions windowed = architecture("mistral");
  for (const auto way : kWays) {
    for (const int64_t cp : {2, 3, 4}) {
      add(windowed, {.cp = cp}, way);
      add(windowed, {.cp = cp}, way, packed).data.documents = Documents::packed;
    }
    for (const Layout& layout : parse_layouts(
             {"tp=2,cp=2", "pp=2,cp=2", "fsdp=2,cp=2", "dp=2,pp=2,cp=2"})) {
      add(windowed, layout, way);
    }
    Job& all =
        add(windowed, {.cp = 2, .tp = 2}, way,
            ", dropout 0.3, sequence parallel, recompute all, packed");
    all.model.dropout = 0.3;
    all.tensor.sequence_parallel = true;
    all.memory.recompute = Recompute::all;
    all.data.documents = Documents::packed;
    add(windowed, {.dp_replicate = 2, .cp = 2}, way, ", 3 backward passes")
        .train.accumulate = 3;
  }
  for (const char* layout : {"cp=4", "cp=6", "fsdp=2,cp=4"}) {
    grouped(windowed, layout);
  }
  for (const auto& model : {tiny_gpt(), llama()}) {
    grouped(model, "cp=4");
    grouped(model, "cp=4", packed).data.documents = Documents::packed;
    grouped(model, "cp=4", ", dropout 0.3").model.dropout = 0.3;
    grouped(model, "cp=6");
    for (const char* layout :
         {"dp=2,cp=4", "tp=2,cp=4", "pp=2,cp=4", "fsdp=2,cp=4"}) {
      grouped(model, layout);
    }
    Job& all = grouped(
        model, "tp=2,cp=4", ", dropout 0.3, sequence parallel, recompute all");
    all.model.dropout = 0.3;
    all.tensor.sequence_parallel = true;
    all.memory.recompute = Recompute::all;
  }
  grouped(llama(), "cp=6", "", 3);
  grouped(llama(), "cp=6", packed, 3).data.documents = Documents::packed;
  // The partition counts layers without data.
  add(tiny_gpt(), {.cp = 2, .pp = 2}, ContextWay::ring, ", dropout 0.3")
      .model.dropout = 0.3;
  for (const auto& schedule : schedule_names()) {
    add(llama(), {.dp_shard = 2, .cp = 2, .pp = 2}, ContextWay::ring,
        ", schedule " + schedule)
        .pipeline.schedule = schedule_kind(schedule);
  }
  for (const char* text :
       {"dp=2,cp=2,order=cp:dp", "cp=2,tp=2,order=tp:cp",
        "pp=2,cp=2,order=cp:pp", "fsdp=2,cp=3,order=cp:fsdp"}) {
    add(llama(), parse_layout(text), ContextWay::ring);
  }
}

// What tells the architectures apart, with each axis.
inline void add_architectures(Cases& cases) {
  for (const char* name :
       {"mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"}) {
    for (const Layout& layout : parse_layouts(
             {"dp=1", "dp=2", "tp=2", "tp=3", "tp=4", "pp=2", "fsdp=2",
              "fsdp=2,tp=2,pp=2"})) {
      cases.add(architecture(name), layout);
      if (layout.tp == 1) continue;
      cases.add(architecture(name), layout, "sequence parallel")
          .tensor.sequence_parallel = true;
    }
  }
  // Sequences cut over ranks; add_context has those of mistral.
  for (const char* name : {"qwen2", "qwen3", "gemma", "gemma2", "gemma3"}) {
    cases.add(architecture(name), {.cp = 2}, "ring");
    cases.add(architecture(name), {.cp = 2, .tp = 2}, "ring, sequence parallel")
        .tensor.sequence_parallel = true;
  }
}

// Mixtures whose ranks each have all experts.
inline void add_mixtures(Cases& cases) {
  for (const char* name : {"mixtral", "qwen3-moe"}) {
    const ModelOptions model = mixture(name);
    for (const Layout& layout : parse_layouts(
             {"dp=1", "dp=2", "dp=3", "tp=2", "tp=3", "pp=2", "pp=3",
              "dp=2,tp=2", "dp=2,pp=2"})) {
      cases.add(model, layout);
      if (layout.tp == 1) continue;
      cases.add(model, layout, "sequence parallel").tensor.sequence_parallel =
          true;
    }
    for (const int64_t stage : {1, 2, 3}) {
      cases.add_stage(model, {.dp_shard = 2}, stage);
      cases.add_stage(model, {.dp_shard = 2, .tp = 2, .pp = 2}, stage)
          .tensor.sequence_parallel = true;
    }
  }
  const ModelOptions model = mixture("mixtral");
  for (const auto& schedule : schedule_names()) {
    Job& job =
        cases.add(model, {.dp_shard = 2, .pp = 2}, "schedule " + schedule);
    job.pipeline.schedule = schedule_kind(schedule);
  }
  cases.add(model, {.dp_replicate = 2}, "3 backward passes").train.accumulate =
      3;
  cases.add(model, {.dp_replicate = 2}, "batches of 16 and 8")
      .train.rank_batch = {16, 8};
  cases.add(model, {.dp_replicate = 2}, "recompute all").memory.recompute =
      Recompute::all;
  cases.add(model, {.dp_shard = 2}, "recompute selective").memory.recompute =
      Recompute::selective;
}

// Experts spread over ranks, with each other axis.
inline void add_expert_ranks(Cases& cases) {
  for (const char* name : {"mixtral", "qwen3-moe"}) {
    const ModelOptions model = mixture(name);
    for (const Layout& layout : parse_layouts(
             {"ep=2", "ep=3", "ep=4", "dp=2,ep=2", "dp=3,ep=2", "tp=2,ep=2",
              "pp=2,ep=2", "dp=2,pp=2,ep=2", "tp=2,pp=2,ep=2"})) {
      cases.add(model, layout);
    }
    for (const int64_t stage : {1, 2, 3}) {
      for (const Layout& layout : parse_layouts(
               {"fsdp=2,ep=2", "dp=2,fsdp=2,ep=2", "fsdp=2,pp=2,ep=2",
                "fsdp=2,tp=2,ep=2"})) {
        cases.add_stage(model, layout, stage);
      }
    }
  }
  const ModelOptions model = mixture("mixtral");
  cases.add(model, {.dp_replicate = 2, .tp = 2, .ep = 2}, "sequence parallel")
      .tensor.sequence_parallel = true;
  for (const auto& schedule : schedule_names()) {
    Job& job = cases.add(model, {.pp = 2, .ep = 2}, "schedule " + schedule);
    job.pipeline.schedule = schedule_kind(schedule);
    Job& sharded = cases.add(
        model, {.dp_shard = 2, .pp = 2, .ep = 2}, "schedule " + schedule);
    sharded.pipeline.schedule = schedule_kind(schedule);
  }
  cases.add(model, {.ep = 2}, "3 backward passes").train.accumulate = 3;
  cases.add(model, {.ep = 2}, "batches of 16 and 8").train.rank_batch = {16, 8};
  cases.add(model, {.ep = 2}, "tied embeddings").model.tie_embeddings = true;
  cases.add(model, {.ep = 2}, "dropout 0.3").model.dropout = 0.3;
  for (const Layout& layout : parse_layouts({"ep=2", "fsdp=2,ep=2"})) {
    cases.add(model, layout, "recompute all").memory.recompute = Recompute::all;
    cases.add(model, layout, "recompute selective").memory.recompute =
        Recompute::selective;
    cases.add(model, layout, "parameters offloaded").memory.offload =
        Offload::parameters;
    cases.add(model, layout, "activations offloaded").memory.activations =
        Activations::offload;
    cases.add(model, layout, "adamw, weight decay 0.1").optimizer = {
        .name = OptimizerKind::adamw,
        .learning_rate = 1e-3,
        .weight_decay = 0.1,
        .clip_norm = 0.5};
  }
  cases.add(model, parse_layout("dp=2,ep=2,order=ep:dp"));
  cases.add(model, parse_layout("fsdp=2,ep=2,order=ep:fsdp"), stage_text(3));
}

// An expert takes three tokens of a sample at most, of which it has 4.4 on
// average.
inline void add_capacities(Cases& cases) {
  ModelOptions model = mixture("mixtral");
  model.capacity_factor = 0.6;
  const std::string name = "capacity 0.6";
  for (const Layout& layout : parse_layouts(
           {"dp=2", "dp=3", "tp=2", "pp=2", "fsdp=2", "ep=2", "ep=3",
            "dp=2,ep=2", "tp=2,ep=2", "pp=2,ep=2", "fsdp=2,ep=2"})) {
    cases.add(model, layout, name);
    if (layout.tp == 1) continue;
    cases.add(model, layout, name + ", sequence parallel")
        .tensor.sequence_parallel = true;
  }
  cases.add(model, {.ep = 2}, name + ", 3 backward passes").train.accumulate =
      3;
  cases.add(model, {.ep = 2}, name + ", batches of 16 and 8")
      .train.rank_batch = {16, 8};
  cases.add(model, {.ep = 2}, name + ", recompute all").memory.recompute =
      Recompute::all;
  ModelOptions biased = deepseek();
  biased.capacity_factor = 0.6;
  for (const Layout& layout : parse_layouts({"dp=2", "ep=2"})) {
    cases.add(biased, layout, name);
  }
}

// Sequences cut over ranks, whose mixtures have losses and capacities of whole
// samples, and experts spread over other ranks.
inline void add_context_and_experts(Cases& cases) {
  const ModelOptions plain = mixture("qwen3-moe");
  ModelOptions limited = plain;
  limited.capacity_factor = 0.6;
  const auto add = [&](const ModelOptions& model, const Layout& layout,
                       ContextWay way = ContextWay::ring,
                       const std::string& also = "") -> Job& {
    Job& job = cases.add(
        model, layout,
        to_string(way) + (model.capacity_factor > 0 ? ", capacity 0.6" : "") +
            also);
    job.context.way = way;
    return job;
  };
  for (const auto& model : {plain, limited}) {
    for (const auto way :
         {ContextWay::ring, ContextWay::all_gather, ContextWay::ulysses}) {
      for (const Layout& layout :
           parse_layouts({"cp=2", "cp=3", "cp=4", "cp=2,ep=2"})) {
        add(model, layout, way);
      }
    }
    for (const Layout& layout : parse_layouts(
             {"cp=3,ep=2", "cp=2,ep=3", "fsdp=2,cp=2", "tp=2,cp=2", "pp=2,cp=2",
              "dp=2,cp=2,ep=2", "fsdp=2,cp=2,ep=2", "cp=2,tp=2,ep=2",
              "cp=2,pp=2,ep=2"})) {
      add(model, layout);
      if (layout.tp == 1) continue;
      add(model, layout, ContextWay::ring, tokens_text(true))
          .tensor.sequence_parallel = true;
    }
    for (const int64_t stage : {1, 3}) {
      add(model, {.dp_shard = 2, .cp = 2, .ep = 2}, ContextWay::ring,
          ", " + stage_text(stage))
          .shard.stage = stage;
    }
    const Layout both{.cp = 2, .ep = 2};
    add(model, both, ContextWay::ring, ", recompute all").memory.recompute =
        Recompute::all;
    add(model, both, ContextWay::ring, ", 3 backward passes").train.accumulate =
        3;
    add(model, both, ContextWay::ring, ", batches of 16 and 8")
        .train.rank_batch = {16, 8};
    for (const auto& schedule : schedule_names()) {
      add(model, {.cp = 2, .pp = 2}, ContextWay::ring, ", schedule " + schedule)
          .pipeline.schedule = schedule_kind(schedule);
    }
  }
  // Which has a window, too.
  ModelOptions mixtral = mixture("mixtral");
  add(mixtral, {.cp = 2, .ep = 2});
  mixtral.capacity_factor = 0.6;
  add(mixtral, {.dp_shard = 2, .cp = 2, .ep = 2});
  ModelOptions biased = deepseek();
  add(biased, {.cp = 2, .ep = 2});
  biased.capacity_factor = 0.6;
  add(biased, {.cp = 2, .ep = 2});
}

// Latent attention, and biases of experts that all ranks count for.
inline void add_deepseek(Cases& cases) {
  const ModelOptions model = deepseek();
  for (const Layout& layout : parse_layouts(
           {"dp=1", "dp=2", "dp=3", "dp=4", "tp=2", "tp=3", "tp=4", "pp=2",
            "pp=3", "ep=2", "ep=3", "ep=4", "dp=2,tp=2", "dp=2,pp=2",
            "pp=2,tp=2", "dp=2,ep=2", "tp=2,ep=2", "pp=2,ep=2"})) {
    cases.add(model, layout);
    if (layout.tp == 1) continue;
    cases.add(model, layout, "sequence parallel").tensor.sequence_parallel =
        true;
  }
  for (const Layout& layout :
       parse_layouts({"fsdp=2", "fsdp=3", "fsdp=2,pp=2", "fsdp=2,ep=2"})) {
    cases.add_stage(model, layout, 1);
  }
}

// Parameters that do not train: first and last layers, those of a whole stage,
// a tied one, some of each block, experts, and all but experts.
inline void add_frozen(Cases& cases) {
  const auto add = [&](const ModelOptions& model, const Layout& layout,
                       const std::vector<std::string>& patterns,
                       const std::string& also = "") -> Job& {
    std::string text = "frozen";
    for (const auto& pattern : patterns) text += " " + pattern;
    Job& job = cases.add(model, layout, text + also);
    job.model.freeze = patterns;
    return job;
  };
  const std::vector<std::string> first = {
      "transformer.w?e.*", "transformer.h.0.*"};
  const std::vector<std::string> last = {"model.layers.1.*", "*norm*"};
  const std::vector<std::string> parts = {"*.c_attn.*", "*.mlp.c_proj.bias"};
  for (const Layout& layout : parse_layouts(
           {"dp=2", "tp=2", "tp=3", "pp=2", "pp=3", "cp=2", "fsdp=2",
            "fsdp=2,tp=2,pp=2"})) {
    add(tiny_gpt(), layout, first);
    add(tiny_gpt(), layout, parts);
    add(llama(), layout, last);
    if (layout.tp == 1) continue;
    for (const auto& patterns : {first, parts}) {
      add(tiny_gpt(), layout, patterns, tokens_text(true))
          .tensor.sequence_parallel = true;
    }
  }
  for (const int64_t stage : {1, 2, 3}) {
    for (const Layout& layout : parse_layouts({"fsdp=3", "dp=2,fsdp=2,pp=2"})) {
      add(tiny_gpt(), layout, parts, ", " + stage_text(stage)).shard.stage =
          stage;
    }
  }
  for (const auto& schedule : schedule_names()) {
    Job& job =
        add(tiny_gpt(), {.dp_replicate = 2, .pp = 2}, first,
            ", schedule " + schedule);
    job.pipeline.schedule = schedule_kind(schedule);
  }
  add(llama(), {.dp_shard = 2, .pp = 2}, {"lm_head.*"}, ", tied embeddings")
      .model.tie_embeddings = true;
  for (const auto recompute : {Recompute::all, Recompute::selective}) {
    add(tiny_gpt(), {.dp_shard = 2, .tp = 2}, first,
        ", recompute " + to_string(recompute))
        .memory.recompute = recompute;
  }
  add(tiny_gpt(), {.dp_shard = 2}, first, ", parameters offloaded")
      .memory.offload = Offload::parameters;
  add(tiny_gpt(), {.dp_replicate = 2}, first, ", 3 backward passes")
      .train.accumulate = 3;
  Job& adam = add(llama(), {.dp_shard = 2}, last, ", adamw, weight decay 0.1");
  adam.optimizer.name = OptimizerKind::adamw;
  adam.optimizer.weight_decay = 0.1;
  adam.optimizer.learning_rate = 1e-3;
  const std::vector<std::string> experts = {"*.experts.*"};
  const std::vector<std::string> others = {
      "model.embed_tokens.*", "*norm*", "*.self_attn.*", "*.gate.*",
      "lm_head.*"};
  for (const Layout& layout :
       parse_layouts({"dp=2", "ep=2", "fsdp=2,ep=2", "pp=2,ep=2"})) {
    add(mixture("mixtral"), layout, experts);
    add(mixture("mixtral"), layout, others);
  }
  for (const Layout& layout : parse_layouts({"dp=3", "fsdp=2", "tp=2"})) {
    add(kSimpleCnn, layout, {"conv1.*", "*.bias"});
  }
}

// Adapters on matrices that are sharded by their outputs and by their inputs.
inline void add_adapters(Cases& cases) {
  const std::vector<std::string> gpt = {"c_attn", "c_fc", "c_proj"};
  const std::vector<std::string> other = {
      "q_proj", "v_proj", "o_proj", "gate_proj", "0.mlp.down_proj"};
  const auto add = [&](const ModelOptions& model, const Layout& layout,
                       const std::string& also = "") -> Job& {
    Job& job = cases.add(model, layout, "adapters" + also);
    job.model.lora = {
        .rank = 3, .alpha = 6, .targets = model.name == "gpt" ? gpt : other};
    return job;
  };
  for (const auto& model : {tiny_gpt(), llama()}) {
    for (const Layout& layout : parse_layouts(
             {"dp=2", "dp=3", "dp=4", "tp=2", "tp=3", "tp=4", "pp=2", "pp=3",
              "cp=2", "fsdp=2", "fsdp=3", "fsdp=4", "dp=2,tp=2", "fsdp=2,tp=2",
              "tp=2,pp=2", "fsdp=2,cp=2", "fsdp=2,tp=2,pp=2"})) {
      add(model, layout);
      if (layout.tp == 1) continue;
      add(model, layout, tokens_text(true)).tensor.sequence_parallel = true;
    }
    for (const int64_t stage : {1, 2}) {
      add(model, {.dp_shard = 2}, ", " + stage_text(stage)).shard.stage = stage;
    }
    Job& recomputed =
        add(model, {.dp_shard = 2, .tp = 2}, ", dropout 0.3, recompute all");
    recomputed.model.dropout = 0.3;
    recomputed.memory.recompute = Recompute::all;
    add(model, {.dp_shard = 2}, ", recompute selective").memory.recompute =
        Recompute::selective;
    add(model, {.dp_shard = 2}, ", parameters offloaded").memory.offload =
        Offload::parameters;
    Job& adam = add(model, {.dp_replicate = 2, .pp = 2}, ", adamw");
    adam.optimizer.name = OptimizerKind::adamw;
    adam.optimizer.learning_rate = 1e-3;
  }
  add(tiny_gpt(), {.dp_replicate = 2}, ", 3 backward passes").train.accumulate =
      3;
  for (const auto& schedule : schedule_names()) {
    Job& job =
        add(llama(), {.tp = 2, .pp = 2},
            ", schedule " + schedule + tokens_text(true));
    job.pipeline.schedule = schedule_kind(schedule);
    job.tensor.sequence_parallel = true;
  }
  for (const Layout& layout : parse_layouts({"ep=2", "fsdp=2,ep=2"})) {
    add(mixture("qwen3-moe"), layout).model.lora.targets = {"*attn.[kv]_proj"};
  }
  // Adapters of each expert, beside others and alone.
  const auto add_experts = [&](const ModelOptions& model, const Layout& layout,
                               const std::string& also = "") -> Job& {
    Job& job = add(model, layout, " of experts" + also);
    job.model.lora.targets = {"o_proj", "*.experts.*", "*.mlp.down_proj"};
    if (model.name == "mixtral") job.model.lora.targets = {"w1", "w2", "w3"};
    return job;
  };
  for (const auto& model : {mixture("mixtral"), deepseek()}) {
    for (const Layout& layout : parse_layouts(
             {"dp=2", "tp=2", "tp=3", "pp=2", "ep=2", "ep=3", "fsdp=2",
              "fsdp=3", "cp=2", "dp=2,ep=2", "tp=2,ep=2", "pp=2,ep=2",
              "fsdp=2,ep=2", "cp=2,ep=2", "fsdp=2,tp=2", "fsdp=2,tp=2,ep=2",
              "dp=2,fsdp=2,ep=2"})) {
      add_experts(model, layout);
      if (layout.tp == 1) continue;
      add_experts(model, layout, tokens_text(true)).tensor.sequence_parallel =
          true;
    }
    for (const int64_t stage : {1, 2}) {
      add_experts(model, {.dp_shard = 2, .ep = 2}, ", " + stage_text(stage))
          .shard.stage = stage;
    }
  }
  const Layout sharded{.dp_shard = 2, .ep = 2};
  const ModelOptions mixtral = mixture("mixtral");
  for (const auto recompute : {Recompute::all, Recompute::selective}) {
    add_experts(mixtral, sharded, ", recompute " + to_string(recompute))
        .memory.recompute = recompute;
  }
  add_experts(mixtral, sharded, ", parameters offloaded").memory.offload =
      Offload::parameters;
  add_experts(mixtral, {.ep = 2}, ", 3 backward passes").train.accumulate = 3;
  Job& adam = add_experts(mixtral, {.tp = 2, .ep = 2}, ", adamw");
  adam.optimizer.name = OptimizerKind::adamw;
  adam.optimizer.learning_rate = 1e-3;
  for (const auto& schedule : schedule_names()) {
    add_experts(mixtral, {.pp = 2, .ep = 2}, ", schedule " + schedule)
        .pipeline.schedule = schedule_kind(schedule);
  }
}

// Texts of which some tokens count in the loss, so that ranks have different
// numbers of them, or none.
inline void add_masks(Cases& cases) {
  const auto add = [&](const Layout& layout,
                       const std::string& also = "") -> Job& {
    Job& job = cases.add(llama(), layout, "masked tokens" + also);
    auto& source = job.data.sources.front();
    source = source.substr(0, source.rfind('/')) + "/masked.bin";
    return job;
  };
  for (const Layout& layout : parse_layouts(
           {"dp=2", "dp=3", "dp=4", "fsdp=2", "tp=2", "pp=2", "cp=2",
            "dp=2,tp=2,pp=2", "fsdp=2,cp=2"})) {
    add(layout);
  }
  add({.dp_replicate = 2}, ", 3 backward passes").train.accumulate = 3;
  add({.dp_replicate = 2}, ", batches of 16 and 8").train.rank_batch = {16, 8};
  add({.dp_replicate = 2, .tp = 2}, tokens_text(true))
      .tensor.sequence_parallel = true;
  add({.dp_replicate = 3}, ", borders of documents not respected")
      .data.documents = Documents::packed;
}

inline std::vector<Case> all_cases(const std::string& tokens) {
  Cases cases(tokens);
  for (const auto& model : {tiny_gpt(), llama(), kSimpleCnn}) {
    const bool text = model.name != "simple_cnn";
    for (const Layout& layout : layouts(text ? 4 : 3)) {
      cases.add(model, layout);
      if (!text || layout.tp == 1) continue;
      cases.add(model, layout, "sequence parallel").tensor.sequence_parallel =
          true;
    }
  }
  const Layout all_axes{.dp_replicate = 2, .tp = 2, .pp = 2};
  for (const auto& schedule : schedule_names()) {
    for (const bool shard_tokens : {false, true}) {
      Job& job = cases.add(
          tiny_gpt(), all_axes,
          "schedule " + schedule + tokens_text(shard_tokens));
      job.pipeline.schedule = schedule_kind(schedule);
      job.tensor.sequence_parallel = shard_tokens;
    }
  }
  for (const auto& model : {tiny_gpt(), llama()}) {
    for (const bool shard_tokens : {false, true}) {
      const auto add = [&](const std::string& also) -> Job& {
        Job& job = cases.add(model, all_axes, also + tokens_text(shard_tokens));
        job.tensor.sequence_parallel = shard_tokens;
        return job;
      };
      add("dropout 0.3").model.dropout = 0.3;
      add("borders of documents not respected").data.documents =
          Documents::packed;
      add("batches of 16 and 8").train.rank_batch = {16, 8};
      Job& adam = add("adamw");
      adam.optimizer.name = OptimizerKind::adamw;
      adam.optimizer.learning_rate = 1e-3;
    }
    cases.add(model, {.tp = 3}, "sequence parallel, overlapped in 3 chunks")
        .tensor = {.sequence_parallel = true, .overlap_chunks = 3};
  }
  cases.add(tiny_gpt(), {.dp_replicate = 2, .tp = 2}, "3 backward passes")
      .train.accumulate = 3;
  cases.add(llama(), {.tp = 2, .pp = 3}, "tied embeddings")
      .model.tie_embeddings = true;
  add_stages(cases);
  add_schedules(cases);
  add_memory(cases);
  add_orders(cases);
  add_context(cases);
  add_architectures(cases);
  add_mixtures(cases);
  add_expert_ranks(cases);
  add_deepseek(cases);
  add_capacities(cases);
  add_context_and_experts(cases);
  add_frozen(cases);
  add_adapters(cases);
  add_masks(cases);
  return std::move(cases.all);
}

// A row that was not run: nothing is compared.
inline Row row_of(const Case& one) {
  return {
      .model = one.job.model.name,
      .layout = to_string(one.job.layout),
      .also = one.also,
      .ranks = one.job.layout.num_ranks()};
}

// Tells whether a row has a layout or a setting that its model did not have
// yet, or a setting on other axes.
class Coverage {
 public:
  bool adds(const Case& one) {
    const Row row = row_of(one);
    std::string axes;
    for (const Axis axis : one.job.layout.used_axes()) {
      axes += std::to_string(static_cast<int>(axis));
    }
    const size_t before = seen_.size();
    seen_.insert("layout " + row.model + " " + row.layout);
    seen_.insert("setting " + row.model + " " + row.also);
    seen_.insert("axes " + axes + " " + row.also);
    return seen_.size() > before;
  }

 private:
  std::set<std::string> seen_;
};

}  // namespace echelon::composition
