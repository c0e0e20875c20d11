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
#include <iostream>
#include <iterator>
#include <set>
#include <sstream>

#include "echelon/schedule/options.h"
#include "echelon/train/verify.h"
#include "tests/data/sources/make_tokens.h"
#include "tests/support/places.h"
#include "tests/support/temp_folder.h"

namespace echelon {
namespace composition_test {

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

// ------------------------------------------------------------------- models

// Five heads, three of which one rank has; a vocabulary and an MLP that no
// degree divides.
ModelOptions gpt() {
  ModelOptions model;
  model.name = "gpt";
  model.layers = 2;
  model.hidden_size = 20;
  model.heads = 5;
  model.intermediate_size = 45;
  model.vocab_size = 67;
  model.max_positions = 12;
  return model;
}

// Two heads of keys and values, which more than two ranks hold several times.
ModelOptions llama() {
  ModelOptions model;
  model.name = "llama";
  model.layers = 2;
  model.hidden_size = 24;
  model.heads = 6;
  model.kv_heads = 2;
  model.intermediate_size = 31;
  model.vocab_size = 61;
  model.max_positions = 12;
  return model;
}

ModelOptions simple_cnn() {
  return {.name = "simple_cnn"};
}

ModelOptions resnet18() {
  return {.name = "resnet18", .sync_batch_norm = true};
}

Job job_of(const ModelOptions& model, const std::string& tokens) {
  Job job;
  job.model = model;
  job.train.steps = 2;
  job.train.batch = 24;
  // Plain steps: a wrong norm shows in every parameter.
  job.optimizer.name = "sgd";
  job.optimizer.momentum = 0.9;
  job.optimizer.learning_rate = 0.1;
  job.optimizer.clip_norm = 0.5;
  if (model.name == "simple_cnn") return job;  // on the digits
  if (model.name == "resnet18") {
    job.data.name = "dummy";
    job.data.samples = 32;
    job.data.shape = {3, 16, 16};
    job.train.batch = 8;
    return job;
  }
  job.data.name = "text";
  job.data.sources = {tokens};
  job.data.vocab_size = model.vocab_size;
  job.data.sequence = 11;
  job.data.end_of_text_id = 3;
  job.data.documents = Documents::respected;
  return job;
}

// ------------------------------------------------------------------ layouts

Layout layout_of(int64_t dp, int64_t pp, int64_t tp) {
  return {.dp_replicate = dp, .tp = tp, .pp = pp};
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
          all.push_back(layout_of(dp, pp, tp));
        }
      }
    }
  }
  return all;
}

// ------------------------------------------------------------------ sharded

std::string stage_text(int64_t stage) {
  return "stage " + std::to_string(stage);
}

// Stages 1 to 3 on 2 to 4 ranks, hybrid, and with the other axes.
void add_stages(const std::string& tokens, std::vector<Case>& all) {
  for (const auto& model : {gpt(), llama(), simple_cnn()}) {
    for (const int64_t stage : {1, 2, 3}) {
      for (const Layout& layout :
           {Layout{.dp_shard = 2}, Layout{.dp_shard = 3}, Layout{.dp_shard = 4},
            Layout{.dp_replicate = 2, .dp_shard = 2},
            Layout{.dp_shard = 2, .tp = 2}, Layout{.dp_shard = 2, .pp = 2},
            Layout{.dp_shard = 2, .tp = 2, .pp = 2}}) {
        Case one{job_of(model, tokens), stage_text(stage)};
        one.job.layout = layout;
        one.job.shard.stage = stage;
        all.push_back(one);
        if (layout.tp == 1 || model.name == "simple_cnn") continue;
        one.job.tensor.sequence_parallel = true;
        one.also += ", sequence parallel";
        all.push_back(one);
      }
      Case accumulated{
          job_of(model, tokens), stage_text(stage) + ", 3 backward passes"};
      accumulated.job.layout = {.dp_shard = 2};
      accumulated.job.shard.stage = stage;
      accumulated.job.train.accumulate = 3;
      all.push_back(accumulated);
    }
  }
  for (const int64_t stage : {1, 2, 3}) {
    Case one{job_of(resnet18(), tokens), stage_text(stage)};
    one.job.shard.stage = stage;
    one.job.layout = {.dp_shard = 2};
    all.push_back(one);
  }
  for (const Layout& layout :
       {Layout{.dp_shard = 4}, Layout{.dp_replicate = 2, .dp_shard = 2},
        Layout{.dp_shard = 2, .tp = 2}, Layout{.dp_shard = 2, .pp = 2}}) {
    Case one{job_of(resnet18(), tokens), stage_text(3)};
    one.job.layout = layout;
    one.job.pipeline.microbatches = 1;  // statistics are those of a batch
    all.push_back(one);
  }
}

// Every schedule, with parameters that are gathered for a step and for each
// use.
void add_schedules(const std::string& tokens, std::vector<Case>& all) {
  for (const auto& schedule : schedule_kinds()) {
    for (const char* gather : {"step", "use"}) {
      Case one{
          job_of(gpt(), tokens),
          "schedule " + schedule + ", gathered for a " + gather};
      one.job.layout = {.dp_shard = 2, .pp = 2};
      one.job.pipeline.schedule = schedule;
      one.job.shard.gather = gather;
      all.push_back(one);
    }
    Case one{job_of(llama(), tokens), "schedule " + schedule};
    one.job.layout = {.dp_shard = 2, .tp = 2, .pp = 2};
    one.job.pipeline.schedule = schedule;
    one.job.tensor.sequence_parallel = true;
    all.push_back(one);
  }
  Case tied{job_of(llama(), tokens), "tied embeddings"};
  tied.job.model.tie_embeddings = true;
  tied.job.layout = {.dp_shard = 2, .pp = 3};
  all.push_back(tied);
  for (const auto& model : {gpt(), llama()}) {
    for (const char* optimizer : {"adamw", "sgd"}) {
      Case one{job_of(model, tokens)};
      one.job.layout = {.dp_replicate = 2, .dp_shard = 2, .tp = 2};
      one.job.optimizer.name = optimizer;
      one.job.optimizer.weight_decay = 0.1;
      one.job.optimizer.learning_rate = 1e-3;
      one.also = std::string(optimizer) + ", weight decay 0.1";
      all.push_back(one);
    }
    Case uneven{job_of(model, tokens), "batches of 16 and 8"};
    uneven.job.layout = {.dp_shard = 2, .tp = 2};
    uneven.job.train.rank_batch = {16, 8};
    all.push_back(uneven);
  }
}

struct Memory {
  MemoryOptions options;
  std::string also;
};

std::vector<Memory> memories() {
  return {
      {{.recompute = "all"}, "recompute all"},
      {{.recompute = "selective"}, "recompute selective"},
      {{.recompute = "budget", .activation_bytes = 250'000},
       "recompute to a budget"},
      {{.activations = "offload"}, "activations offloaded"},
      {{.offload = "optimizer"}, "optimizer offloaded"},
      {{.offload = "parameters"}, "parameters offloaded"},
      {{.recompute = "all", .activations = "offload", .offload = "parameters"},
       "recompute all, activations and parameters offloaded"}};
}

// What saves memory, on one device, with each axis, and with all.
void add_memory(const std::string& tokens, std::vector<Case>& all) {
  for (const auto& memory : memories()) {
    for (const auto& model : {gpt(), simple_cnn()}) {
      for (const Layout& layout :
           {Layout{}, Layout{.dp_replicate = 2}, Layout{.dp_shard = 2},
            Layout{.tp = 2}, Layout{.pp = 2},
            Layout{.dp_shard = 2, .tp = 2, .pp = 2}}) {
        Case one{job_of(model, tokens), memory.also};
        one.job.layout = layout;
        one.job.memory = memory.options;
        if (model.name == "gpt") one.job.model.dropout = 0.3;
        all.push_back(one);
      }
    }
    Case one{job_of(resnet18(), tokens), memory.also};
    one.job.layout = {.dp_shard = 2};
    one.job.memory = memory.options;
    one.job.memory.activation_bytes *= 100;
    all.push_back(one);
  }
  for (const auto& schedule : schedule_kinds()) {
    Case one{job_of(gpt(), tokens), "schedule " + schedule + ", recompute all"};
    one.job.layout = {.dp_shard = 2, .pp = 2};
    one.job.pipeline.schedule = schedule;
    one.job.memory.recompute = "all";
    one.job.shard.gather = "use";
    all.push_back(one);
  }
}

// The axes in other orders: those of two axes, and all of three, on up to 8
// ranks.
void add_orders(const std::string& tokens, std::vector<Case>& all) {
  for (const auto& model : {gpt(), llama(), simple_cnn()}) {
    for (const char* layout :
         {"dp=2,tp=2,order=tp:dp", "dp=3,tp=2,order=tp:dp",
          "pp=2,tp=2,order=tp:pp", "pp=3,tp=2,order=tp:pp",
          "dp=2,pp=2,order=pp:dp", "dp=2,pp=3,order=pp:dp",
          "dp=2,fsdp=2,order=fsdp:dp", "dp=2,fsdp=3,order=fsdp:dp",
          "fsdp=2,tp=2,order=tp:fsdp", "fsdp=3,pp=2,order=pp:fsdp"}) {
      Case one{job_of(model, tokens)};
      one.job.layout = parse_layout(layout);
      if (one.job.layout.dp_shard > 1) one.also = stage_text(3);
      all.push_back(one);
    }
  }
  const auto in_every_order = [&](const Case& one) {
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
      all.push_back(other);
    }
  };
  Case one{job_of(gpt(), tokens)};
  one.job.model.dropout = 0.3;
  one.job.tensor.sequence_parallel = true;
  one.also = "dropout 0.3, sequence parallel";
  one.job.layout = {.dp_replicate = 2, .tp = 2, .pp = 2};
  in_every_order(one);
  for (const int64_t stage : {1, 2, 3}) {
    one = {job_of(gpt(), tokens), stage_text(stage)};
    one.job.shard.stage = stage;
    one.job.layout = {.dp_shard = 2, .tp = 2, .pp = 2};
    in_every_order(one);
  }
  one.job.layout = {.dp_replicate = 2, .dp_shard = 2, .pp = 2};
  one.job.pipeline.schedule = "zb-v";
  one.also += ", schedule zb-v";
  in_every_order(one);
  one = {
      job_of(llama(), tokens), stage_text(3) + ", batches of 4, 8, 2 and 10"};
  one.job.train.rank_batch = {4, 8, 2, 10};
  one.job.layout = {.dp_replicate = 2, .dp_shard = 2, .tp = 2};
  in_every_order(one);
}

std::vector<Case> cases(const std::string& tokens) {
  std::vector<Case> all;
  for (const auto& model : {gpt(), llama(), simple_cnn()}) {
    const bool text = model.name != "simple_cnn";
    for (const Layout& layout : layouts(text ? 4 : 3)) {
      Case one{job_of(model, tokens)};
      one.job.layout = layout;
      all.push_back(one);
      if (!text || layout.tp == 1) continue;
      one.job.tensor.sequence_parallel = true;
      one.also = "sequence parallel";
      all.push_back(one);
    }
  }
  for (const auto& schedule : schedule_kinds()) {
    for (const bool cut_tokens : {false, true}) {
      Case one{job_of(gpt(), tokens)};
      one.job.layout = layout_of(2, 2, 2);
      one.job.pipeline.schedule = schedule;
      one.job.tensor.sequence_parallel = cut_tokens;
      one.also =
          "schedule " + schedule + (cut_tokens ? ", sequence parallel" : "");
      all.push_back(one);
    }
  }
  for (const auto& model : {gpt(), llama()}) {
    for (const bool cut_tokens : {false, true}) {
      Case one{job_of(model, tokens)};
      one.job.layout = layout_of(2, 2, 2);
      one.job.tensor.sequence_parallel = cut_tokens;
      const std::string tail = cut_tokens ? ", sequence parallel" : "";
      Case dropout = one;
      dropout.job.model.dropout = 0.3;
      dropout.also = "dropout 0.3" + tail;
      all.push_back(dropout);
      Case packed = one;
      packed.job.data.documents = Documents::packed;
      packed.also = "borders of documents not respected" + tail;
      all.push_back(packed);
      Case uneven = one;
      uneven.job.train.rank_batch = {16, 8};
      uneven.also = "batches of 16 and 8" + tail;
      all.push_back(uneven);
      Case adam = one;
      adam.job.optimizer.name = "adamw";
      adam.job.optimizer.learning_rate = 1e-3;
      adam.also = "adamw" + tail;
      all.push_back(adam);
    }
    Case chunks{job_of(model, tokens)};
    chunks.job.layout = layout_of(1, 1, 3);
    chunks.job.tensor = {.sequence_parallel = true, .overlap_chunks = 3};
    chunks.also = "sequence parallel, overlapped in 3 chunks";
    all.push_back(chunks);
  }
  Case accumulated{job_of(gpt(), tokens)};
  accumulated.job.layout = layout_of(2, 1, 2);
  accumulated.job.train.accumulate = 3;
  accumulated.also = "3 backward passes";
  all.push_back(accumulated);
  Case tied{job_of(llama(), tokens)};
  tied.job.model.tie_embeddings = true;
  tied.job.layout = layout_of(1, 3, 2);
  tied.also = "tied embeddings";
  all.push_back(tied);
  add_stages(tokens, all);
  add_schedules(tokens, all);
  add_memory(tokens, all);
  add_orders(tokens, all);
  return all;
}

// -------------------------------------------------------------------- table

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

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

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
  const auto lines = lines_of(text.substr(std::string(kHead).size()));
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
  std::vector<uint16_t> ids;
  for (uint32_t i = 0; i < 600; ++i) {
    ids.push_back(static_cast<uint16_t>((i * i * 7 + i / 3) % 59));
  }
  const std::string tokens = folder.write("tokens.bin", raw_bytes(ids));
  std::vector<Row> rows;
  const bool update = std::getenv("ECHELON_UPDATE_EXPECTED") != nullptr;
  const bool all = update || std::getenv("ECHELON_EVERY_LAYOUT") != nullptr;
  Coverage coverage;
  for (const auto& one : cases(tokens)) {
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

}  // namespace composition_test
}  // namespace echelon
