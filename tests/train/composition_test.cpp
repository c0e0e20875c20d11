// Compares combinations of data, sharded, pipeline and tensor parallelism, of
// recompute and offload, with one device: losses, gradients and parameters, by
// name, in float64. Prints a table and compares it with doc/composition.md: its
// rows with the cases, and its bounds with the differences.
//
// Rows that repeat a model's layout, its setting and the setting's axes are run
// with ECHELON_EVERY_LAYOUT=1 alone. ECHELON_UPDATE_EXPECTED=1 runs all rows
// and writes the file; read it before you commit it.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "echelon/schedule/options.h"
#include "echelon/train/verify.h"
#include "tests/support/places.h"
#include "tests/support/temp_folder.h"
#include "tests/train/small_run.h"

namespace echelon::composition_test {

constexpr double kTolerance = 1e-10;

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
ModelOptions llama() {
  ModelOptions model = tiny_gpt();
  model.name = "llama";
  model.hidden_size = 24;
  model.heads = 6;
  model.kv_heads = 2;
  model.intermediate_size = 31;
  model.vocab_size = 61;
  return model;
}

const ModelOptions kSimpleCnn{.name = "simple_cnn"};
const ModelOptions kResnet18{.name = "resnet18", .sync_batch_norm = true};

Job job_of(const ModelOptions& model, const std::string& tokens) {
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
std::vector<Layout> layouts(int64_t most_stages) {
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

std::string stage_text(int64_t stage) {
  return "stage " + std::to_string(stage);
}

std::string tokens_text(bool sharded) {
  return sharded ? ", sequence parallel" : "";
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
void add_stages(Cases& cases) {
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
void add_schedules(Cases& cases) {
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
void add_memory(Cases& cases) {
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
void in_every_order(Cases& cases) {
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
void add_orders(Cases& cases) {
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

std::vector<Case> all_cases(const std::string& tokens) {
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
  return std::move(cases.all);
}

// A row that was not run: nothing is compared.
Row row_of(const Case& one) {
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

Row run(const Case& one) {
  Row row = row_of(one);
  run_ranks(static_cast<int>(row.ranks), [&](World& world) {
    at::set_num_threads(1);
    const VerifyOptions options{.steps = 2, .tolerance = kTolerance};
    const VerifyResult result = verify(one.job, world, options);
    if (world.rank() != 0) return;
    row.compared = result.num_compared;
    row.largest = result.worst.front().relative;
    EXPECT_TRUE(result.passed)
        << row.model << " " << row.layout << " " << row.also << "\n"
        << to_text(result, options);
  });
  return row;
}

// Without its last column, which differs between machines, and without that
// before it where the row was not run.
std::string text_of(const Row& row) {
  const std::string text = "| " + row.model + " | " + row.layout + " | " +
                           row.also + " | " + std::to_string(row.ranks) + " | ";
  return row.compared == 0 ? text
                           : text + std::to_string(row.compared) + " | < ";
}

// The power of ten that the difference stays well below.
double bound_of(double largest) {
  return std::pow(10, std::ceil(std::log10(std::max(largest * 5, 1e-12))));
}

std::string exponent(double value) {
  char text[24];
  std::snprintf(text, sizeof(text), "%.0e", value);
  return text;
}

constexpr const char* kHead = R"(# What is proved equal to one device

Each row of this table is a layout that was compared with one device. To do the same for a model of your own:

    echelon verify examples/configs/digits.toml -n 4

A row is a run of `verify`: the first 2 steps of a small model, on one device and in the layout, in float64. On every rank, the losses, the
gradients before the update and the parameters after it are compared by name. The column "compared" counts them, and the last column bounds the
largest relative difference, which comes from another order of summation. In every row, gradients are clipped by their global norm. Document
boundaries in texts are respected, so tokens without a target do not count in the loss.

- gpt: 2 blocks, 5 heads of 4, an MLP of 45, a vocabulary of 67, tied embeddings
- llama: 2 blocks, 6 heads of 4 that share 2 heads of keys and values, an MLP of 31, a vocabulary of 61
- simple_cnn: 16 and 32 channels, on 8 x 8 images
- resnet18: on 16 x 16 images, with batch statistics over all ranks

The degrees therefore do not divide the heads, the features or the vocabulary, and llama has fewer heads of keys and values than ranks.

The stage says what `fsdp` shards: 1 optimizer state, 2 also gradients, 3 also parameters. It is 3 where none is named. "gathered for a step" means
that parameters stay unsharded until the step ends, and "gathered for a use" that they are resharded after each use (`[shard] gather`). gpt has a
dropout of 0.3 in the rows that save memory. `order` names the axes, outermost first, where it is not the default (dp, fsdp, pp, tp).

`tests/train/composition_test.cpp` writes and runs all rows.

| model | layout | also | ranks | compared | difference |
| --- | --- | --- | ---: | ---: | --- |
)";

void write_table(
    const std::filesystem::path& path, const std::vector<Row>& rows) {
  std::ofstream file(path);
  file << kHead;
  for (const auto& row : rows) {
    file << text_of(row) << exponent(bound_of(row.largest)) << " |\n";
  }
}

void compare_table(
    const std::filesystem::path& path, const std::vector<Row>& rows) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  ASSERT_EQ(text.substr(0, std::string(kHead).size()), kHead) << path;
  std::istringstream table(text.substr(std::string(kHead).size()));
  std::vector<std::string> lines;
  for (std::string line; std::getline(table, line);) lines.push_back(line);
  const char* update = "; ECHELON_UPDATE_EXPECTED=1 writes it";
  ASSERT_EQ(lines.size(), rows.size()) << path << update;
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string begin = text_of(rows[i]);
    ASSERT_EQ(lines[i].substr(0, begin.size()), begin) << path << update;
    if (rows[i].compared == 0) continue;
    const double bound = std::strtod(lines[i].c_str() + begin.size(), nullptr);
    EXPECT_LE(bound, kTolerance) << lines[i];
    EXPECT_LT(rows[i].largest, bound) << lines[i];
  }
}

TEST(Composition, EveryLayoutEqualsOneDevice) {
  TempFolder folder;
  const std::string tokens = write_tokens(folder);
  std::vector<Row> rows;
  const bool update = std::getenv("ECHELON_UPDATE_EXPECTED") != nullptr;
  const bool all = update || std::getenv("ECHELON_EVERY_LAYOUT") != nullptr;
  Coverage coverage;
  for (const auto& one : all_cases(tokens)) {
    if (!coverage.adds(one) && !all) {
      rows.push_back(row_of(one));
      continue;
    }
    rows.push_back(run(one));
    std::printf(
        "%-11s %-15s %2lld ranks  %4lld compared  %.1e  %s\n",
        rows.back().model.c_str(), rows.back().layout.c_str(),
        static_cast<long long>(rows.back().ranks),
        static_cast<long long>(rows.back().compared), rows.back().largest,
        rows.back().also.c_str());
    std::fflush(stdout);
  }
  const auto path = source_path("doc/composition.md");
  if (update) write_table(path, rows);
  compare_table(path, rows);
}

}  // namespace echelon::composition_test
