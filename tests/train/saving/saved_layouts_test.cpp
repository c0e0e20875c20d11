// Every layout of doc/composition.md saves, and restores what others saved.
//
// Each restores one device's checkpoint, its own, and every 24th of the others,
// beginning with another one for each layout: saving and restoring meet only in
// the slices of a manifest, so not every pair shows something new.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "echelon/error.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/layout/layout.h"
#include "tests/support/places.h"
#include "tests/train/composition_cases.h"
#include "tests/train/saving/saved_run.h"

namespace echelon::saved_layouts_test {

namespace fs = std::filesystem;

// Every save waits for its disk. The tests of this program save thousands of
// times, so their folders are in memory where it is large enough.
const bool kInMemory = [] {
  constexpr uintmax_t kBytes = uintmax_t{4} << 30;
  std::error_code error;
  const auto memory = fs::space("/dev/shm", error);
  return !error && memory.available >= kBytes &&
         ::setenv("TMPDIR", "/dev/shm", /*overwrite=*/0) == 0;
}();

// "a, b" -> "a", "b"
std::vector<std::string> split(const std::string& text, const char* between) {
  std::vector<std::string> parts;
  const size_t width = std::string(between).size();
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(between, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end + width;
  }
  return parts;
}

// Applies what the table's third column says about sharding and offloading; the
// rest, such as recompute, does not change what is saved.
void apply(const std::string& also, Job& job) {
  for (const auto& part : split(also, ", ")) {
    const auto after = [&](const std::string& start) {
      return part.starts_with(start) ? part.substr(start.size()) : "";
    };
    if (part == "sequence parallel") job.tensor.sequence_parallel = true;
    if (const auto stage = after("stage "); !stage.empty()) {
      job.shard.stage = std::stoll(stage);
    }
    if (const auto name = after("schedule "); !name.empty()) {
      job.pipeline.schedule = schedule_kind(name);
    }
    if (const auto use = after("gathered for a "); !use.empty()) {
      job.shard.gather = use == "step" ? Gather::step : Gather::use;
    }
    if (part == "optimizer offloaded") job.memory.offload = Offload::optimizer;
    if (part.ends_with("parameters offloaded"))
      job.memory.offload = Offload::parameters;
  }
}

// The fewest that the schedule takes: what a checkpoint has does not depend on
// their number, but the time of a step does.
int64_t fewest_microbatches(Job job) {
  const int64_t samples = job.train.batch / job.layout.data_ranks();
  for (int64_t count = job.layout.pp; count < samples; ++count) {
    job.pipeline.microbatches = count;
    try {
      pipeline_schedule(job);
      if (samples % count == 0) return count;
    } catch (const ConfigError&) {
      continue;  // not defined for so few
    }
  }
  return samples;
}

std::string axes_of(const Layout& layout) {
  std::string axes;
  for (const auto& [name, degree] :
       {std::pair("dp ", layout.dp_replicate),
        std::pair("fsdp ", layout.dp_shard), std::pair("tp ", layout.tp),
        std::pair("pp ", layout.pp), std::pair("cp ", layout.cp),
        std::pair("ep ", layout.ep)}) {
    if (degree > 1) axes += name;
  }
  return axes.empty() ? "one device" : axes;
}

std::string name_of(const Job& job) {
  std::string name = to_string(job.layout);
  if (job.layout.dp_shard > 1) {
    name += " stage " + std::to_string(job.shard.stage);
    if (job.shard.gather != Gather::automatic)
      name += " gather " + to_string(job.shard.gather);
  }
  if (job.tensor.sequence_parallel) name += " sequence parallel";
  if (job.layout.pp > 1) name += " " + to_string(job.pipeline.schedule);
  if (job.memory.offload != Job().memory.offload) {
    name += " offload " + to_string(job.memory.offload);
  }
  return name;
}

// The distinct layouts of the table's rows of that model; one device first.
std::vector<SmallCase>
layouts_of_table(const std::string& model, const Job& base) {
  std::vector<SmallCase> cases;
  std::set<std::string> seen;
  std::ifstream table(source_path("doc/composition.md"));
  for (std::string line; std::getline(table, line);) {
    const auto columns = split(line, " | ");
    if (columns.size() != 6 || columns[0] != "| " + model) continue;
    if (columns[2] == "tied embeddings")
      continue;  // another model: gpt has that
    SmallCase one{"", base};
    one.job.layout = parse_layout(columns[1]);
    apply(columns[2], one.job);
    if (one.job.layout.pp > 1) {
      one.job.pipeline.microbatches = fewest_microbatches(one.job);
    }
    one.name = name_of(one.job);
    if (seen.insert(one.name).second) cases.push_back(one);
  }
  return cases;
}

// Values that a restore does not overwrite show.
void spoil(SmallRun& run) {
  const torch::NoGradGuard no_grad;
  run.state.model().before_load();
  run.world.group().barrier();
  for (const auto& [name, part] : parts_by_name(run)) {
    torch::Tensor value = part.value;
    value.fill_(-1);
  }
}

struct Saved {
  fs::path at_1;
  SavedValues values_1, values_2;
};

class EveryLayout {
 public:
  EveryLayout(std::vector<SmallCase> cases, fs::path folder)
      : cases_(std::move(cases)), folder_(std::move(folder)) {}

  // Saves step 0 and step 1 in each layout.
  void train() {
    for (const auto& one : cases_) {
      SCOPED_TRACE("saved by " + one.name);
      const fs::path own = folder_ / std::to_string(saved_.size());
      on_ranks(one.job, [&](SmallRun& run) {
        run.train(0, 1);
        save(run, own, 1);
        run.train(1, 2);
        save(run, own, 2);
      });
      const auto places = list_checkpoints(own);
      ASSERT_EQ(places.size(), 2);
      saved_.push_back(
          {places[1].path, read_all(places[1].path), read_all(places[0].path)});
      by_axes_[axes_of(one.job.layout)].push_back(saved_.size() - 1);
    }
  }

  // In layout `to`, restores what others saved, to the last bit, and at last
  // its own, from which step 1 is the same to the last bit. Step 1 after the
  // step 0 of a layout with other axes is one device's.
  void restore(size_t to) {
    auto kind = by_axes_.begin();
    std::advance(kind, to % by_axes_.size());
    const size_t other = kind->second[to % kind->second.size()];
    SCOPED_TRACE("restored by " + cases_[to].name);
    on_ranks(with_seed(cases_[to].job, 99), [&](SmallRun& run) {
      for (size_t from = saved_.size(); from-- > 0;) {
        if (from > 0 && (from + to) % kEvery != 0) continue;
        expect_restored(run, from);
        if (run.world.rank() == 0) ++pairs_;
      }
      save(run, folder_ / ("again" + std::to_string(to)), 1);
      expect_restored(run, to);
      run.train(1, 2);
      expect_equal(run, saved_[to].values_2, 0);
      expect_restored(run, other);
      run.train(1, 2);
      expect_equal(run, saved_[0].values_2, 1e-10);
    });
    // It saved what it had restored of one device's checkpoint.
    EXPECT_EQ(
        content(newest(folder_ / ("again" + std::to_string(to)))),
        content(saved_[0].at_1));
  }

  size_t size() const { return cases_.size(); }
  size_t num_kinds() const { return by_axes_.size(); }
  size_t num_pairs() const { return pairs_; }

 private:
  static constexpr size_t kEvery = 24;

  void expect_restored(SmallRun& run, size_t from) {
    spoil(run);
    load(run, saved_[from].at_1);
    expect_equal(run, saved_[from].values_1, 0);
    if (testing::Test::HasFailure()) {
      ADD_FAILURE() << "saved by " << cases_[from].name;
    }
  }
  static std::string content(const fs::path& checkpoint) {
    return CheckpointReader(checkpoint).manifest().content_hash;
  }

  const std::vector<SmallCase> cases_;
  const fs::path folder_;
  std::vector<Saved> saved_;
  std::map<std::string, std::vector<size_t>> by_axes_;
  size_t pairs_ = 0;
};

void check(
    const std::string& model, const Job& base, const fs::path& folder,
    size_t least_layouts = 40, size_t least_kinds = 12) {
  EveryLayout every(layouts_of_table(model, base), folder);
  ASSERT_NO_FATAL_FAILURE(every.train());
  EXPECT_GE(every.size(), least_layouts);
  EXPECT_GE(every.num_kinds(), least_kinds);
  for (size_t to = 0; to < every.size(); ++to) {
    every.restore(to);
    if (testing::Test::HasFailure()) break;
  }
  std::cout << model << ": " << every.size() << " layouts of "
            << every.num_kinds() << " kinds, " << every.num_pairs()
            << " pairs\n";
}

// One matrix embeds and scores tokens, and so is tied across stages.
TEST(SavedLayouts, OfGptRestoreEachOther) {
  TempFolder folder;
  Job base = small_gpt(write_tokens(folder));
  base.train.batch = 24;
  check("gpt", base, folder.path("gpt"));
}

// Several ranks have the same heads of keys and values.
TEST(SavedLayouts, OfLlamaRestoreEachOther) {
  TempFolder folder;
  Job base = small_gpt(write_tokens(folder));
  base.train.batch = 24;
  base.model.name = "llama";
  base.model.hidden_size = 24;
  base.model.heads = 6;
  base.model.kv_heads = 2;
  base.model.intermediate_size = 31;
  check("llama", base, folder.path("llama"));
}

// Ranks of ep have different experts.
TEST(SavedLayouts, OfMixtralRestoreEachOther) {
  TempFolder folder;
  Job base = small_gpt(write_tokens(folder));
  base.train.batch = 24;
  base.model.name = "mixtral";
  base.model.hidden_size = 24;
  base.model.heads = 6;
  base.model.kv_heads = 2;
  base.model.intermediate_size = 15;
  base.model.experts = 5;
  base.model.experts_per_token = 2;
  check("mixtral", base, folder.path("mixtral"));
}

// Biases of experts, which move with the load of all ranks, are saved too.
TEST(SavedLayouts, OfDeepseekRestoreEachOther) {
  TempFolder folder;
  Job base = small_gpt(write_tokens(folder));
  base.train.batch = 24;
  base.model = composition::deepseek();
  // Ranks of cp have parts of samples, over which these losses are others.
  base.model.aux_loss = 0;
  base.model.z_loss = 0;
  base.model.dtype = ModelDtype::float64;
  base.model.vocab_size = base.data.vocab_size;
  check("deepseek-v3", base, folder.path("deepseek"), 25, 12);
}

TEST(SavedLayouts, OfSimpleCnnRestoreEachOther) {
  TempFolder folder;
  Job base = small_mlp();
  base.model = {.name = "simple_cnn", .dtype = ModelDtype::float64};
  base.train.batch = 24;
  check("simple_cnn", base, folder.path("simple_cnn"));
}

}  // namespace echelon::saved_layouts_test
