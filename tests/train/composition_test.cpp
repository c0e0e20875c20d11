// Compares combinations of data, sharded, context, pipeline and tensor
// parallelism, of recompute and offload, with one device: losses, gradients and
// parameters, by name, in float64. Prints a table and compares it with
// doc/composition.md: its rows with the cases, and its bounds with the
// differences.
//
// Rows that repeat a model's layout, its setting and the setting's axes are run
// with ECHELON_EVERY_LAYOUT=1 alone. ECHELON_UPDATE_EXPECTED=1 runs all rows
// and writes the file; read it before you commit it. ECHELON_LAYOUTS=cp runs
// the rows alone whose model, layout or setting has that text.
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

#include "echelon/layers/channels_last.h"
#include "echelon/train/verify.h"
#include "tests/support/places.h"
#include "tests/support/temp_folder.h"
#include "tests/train/composition_cases.h"

namespace echelon::composition_test {

using namespace composition;

constexpr double kTolerance = 1e-10;

Row run(const Case& one) {
  Row row = row_of(one);
  run_ranks(static_cast<int>(row.ranks), [&](World& world) {
    at::set_num_threads(1);
    const VerifyOptions options{.steps = 2, .tolerance = kTolerance};
    const VerifyResult result =
        verify(one.job, world, options, layers_of(one.job));
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
- mistral: the llama with a window of 4 tokens; qwen2: with biases of queries, keys and values; qwen3: with their norms, and heads of 6
- gemma: the llama with scaled embeddings, norms that multiply by 1 + weight, and GELU
- mixtral, qwen3-moe: 5 experts of 15 features, 2 for a token, with the losses of the router
- deepseek-v3: 3 blocks, 6 heads of latent attention (ranks 11 and 9), an MLP in the first block, then 6 experts of 15 features in 3 groups, 3 for
  a token from 2 groups, a shared one, biases that move by 0.05 a step, with the balance loss
- simple_cnn: 16 and 32 channels, on 8 x 8 images
- resnet18: its stem, its first block and its first block that halves the image, on 16 x 16 images, with batch statistics over all ranks

The degrees therefore do not divide the heads, the features or the vocabulary, and llama has fewer heads of keys and values than ranks.

The stage says what `fsdp` shards: 1 optimizer state, 2 also gradients, 3 also parameters. It is 3 where none is named. "gathered for a step" means
that parameters stay unsharded until the step ends, and "gathered for a use" that they are resharded after each use (`[shard] gather`). gpt has a
dropout of 0.3 in the rows that save memory. `order` names the axes, outermost first, where it is not the default (dp, fsdp, pp, cp, ep, tp). With
`cp` sequences of 11 tokens are cut; "ring", "all_gather", "ulysses" and "ulysses_ring" are the ways of its attention. "frozen" names parameters that
do not train. "adapters" are of rank 3, beside queries, values, outputs and the MLP, "adapters of experts" beside the matrices of each expert. With
"masked tokens", a quarter of them count in the loss. With "capacity 0.6" an expert takes 3 tokens of a sample, of which 4.4 choose it on average; the
others are dropped.

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
  const char* only = std::getenv("ECHELON_LAYOUTS");
  Coverage coverage;
  for (const auto& one : all_cases(tokens)) {
    const Row row = row_of(one);
    const bool skipped =
        only != nullptr &&
        (row.model + " " + row.layout).find(only) == std::string::npos &&
        one.also.find(only) == std::string::npos;
    if ((!coverage.adds(one) && !all) || skipped) {
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

// GPUs compute so in 16 bits: through tensor-parallel convolutions, pipelines,
// statistics over ranks, and recompute.
TEST(Composition, ImagesWithChannelsLastEqualOneDevice) {
  const ChannelsLastEverywhere everywhere;
  for (const auto& model : {kSimpleCnn, kResnet18}) {
    for (const char* layout : {"dp=2", "tp=2,pp=2", "pp=3", "fsdp=2,tp=2"}) {
      Job job = job_of(model, "");
      job.layout = parse_layout(layout);
      job.pipeline.microbatches = model.name == "resnet18" ? 1 : 4;
      for (const auto recompute : {Recompute::none, Recompute::all}) {
        job.memory.recompute = recompute;
        run({job, "channels last"});
      }
    }
  }
}

}  // namespace echelon::composition_test
