// Every layout restores what others saved: the same values to the last bit, and
// the same steps from there.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/memory_plan/memory_plan.h"
#include "echelon/train/strategies/count_job.h"
#include "tests/support/error_text.h"
#include "tests/train/saving/saved_run.h"

namespace echelon::saved_state_test {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using torch::Tensor;
using Values = SavedValues;

// Saves after step 1 and after step 3 in each layout.
struct Trained {
  fs::path at_2, at_4;
  Values values_2, values_4;
};

Trained train_and_save(
    const Job& job, const fs::path& folder, const LayerFactory& layers = {}) {
  on_ranks(
      job,
      [&](SmallRun& run) {
        run.train(0, 2);
        save(run, folder, 2);
        run.train(2, 4);
        save(run, folder, 4);
      },
      layers);
  const auto places = list_checkpoints(folder);
  return {
      places[1].path, places[0].path, read_all(places[1].path),
      read_all(places[0].path)};
}

// Each case restores one device's checkpoint (the first case), its own, and
// every third of the others.
void check_pairs(
    const std::vector<SmallCase>& cases, const fs::path& folder,
    double tolerance, const LayerFactory& layers = {}) {
  std::vector<Trained> trained;
  for (const auto& one : cases) {
    SCOPED_TRACE("saved by " + one.name);
    trained.push_back(train_and_save(one.job, folder / one.name, layers));
  }
  for (size_t from = 0; from < cases.size(); ++from) {
    for (size_t to = 0; to < cases.size(); ++to) {
      if (from > 0 && from != to && (from + to) % 3 != 0) continue;
      SCOPED_TRACE(cases[from].name + ", then " + cases[to].name);
      on_ranks(
          with_seed(cases[to].job, 99),
          [&](SmallRun& run) {
            load(run, trained[from].at_2);
            expect_equal(run, trained[from].values_2, 0);
            // Training continues as if it had not stopped: to the last bit in
            // the layout that saved.
            run.train(2, 4);
            expect_equal(
                run, trained[from == to ? from : 0].values_4,
                from == to ? 0 : tolerance);
          },
          layers);
    }
  }
  // Each layout restores and saves one checkpoint unchanged.
  const auto hash = CheckpointReader(trained[0].at_2).manifest().content_hash;
  EXPECT_FALSE(hash.empty());
  for (const auto& one : cases) {
    SCOPED_TRACE(one.name);
    const fs::path again = folder / (one.name + " again");
    on_ranks(
        with_seed(one.job, 99),
        [&](SmallRun& run) {
          load(run, trained[0].at_2);
          save(run, again, 2);
        },
        layers);
    EXPECT_EQ(CheckpointReader(newest(again)).manifest().content_hash, hash);
  }
}

TEST(SavedState, EveryLayoutResumesFromOthers) {
  TempFolder folder;
  check_pairs(
      small_cases(small_gpt(write_tokens(folder))), folder.path("gpt"), 1e-10);
}

TEST(SavedState, ClassifiersResumeFromOtherLayouts) {
  TempFolder folder;
  auto cases = small_cases(small_mlp());
  cases.push_back({"two devices", small_mlp()});
  cases.back().job.model.devices = {"cpu", "cpu"};
  check_pairs(cases, folder.path("mlp"), 1e-10);
}

// Statistics, frozen parameters, and layers that tensor-parallel ranks
// replicate.
TEST(SavedState, ResumesUserLayers) {
  TempFolder folder;
  Job base = small_mlp();
  base.optimizer = {.name = OptimizerKind::adamw, .learning_rate = 1e-3};
  base.model.sync_batch_norm = true;
  base.pipeline.microbatches = 1;
  std::vector<SmallCase> cases;
  for (const auto& one : small_cases(base)) {
    // Three layers have parameters.
    if (one.name != "pp=2, interleaved") cases.push_back(one);
  }
  for (const auto offload : {Offload::optimizer, Offload::parameters}) {
    add_case(
        cases, base, "fsdp=2, offload " + to_string(offload), {.dp_shard = 2})
        .memory.offload = offload;
  }
  check_pairs(cases, folder.path("own"), 1e-10, [](const TensorParallel&) {
    return own_layers();
  });
}

// Master parameters in float32 for a computation in bf16.
TEST(SavedState, ResumesMasterParameters) {
  TempFolder folder;
  Job base = small_gpt(write_tokens(folder));
  base.model.dtype = ModelDtype::float32;
  base.precision.compute = ComputeDtype::bf16;
  std::vector<SmallCase> cases;
  const auto add = [&](const std::string& name, const Layout& layout) -> Job& {
    return add_case(cases, base, name, layout);
  };
  add("one device", {});
  add("dp=2", {.dp_replicate = 2});
  add("tp=2", {.tp = 2});
  for (const int64_t stage : {1, 3}) {
    add("fsdp=2 stage " + std::to_string(stage), {.dp_shard = 2}).shard.stage =
        stage;
  }
  for (const auto offload : {Offload::optimizer, Offload::parameters}) {
    add("fsdp=2 offload " + to_string(offload), {.dp_shard = 2})
        .memory.offload = offload;
  }
  check_pairs(cases, folder.path("bf16"), 0.02);
}

TEST(SavedState, ResumesStatisticsOfShardedChannels) {
  TempFolder folder;
  Job base;
  base.model = {.name = "resnet18", .sync_batch_norm = true};
  base.data.name = DataKind::dummy;
  base.data.samples = 16;
  base.data.shape = {3, 8, 8};
  base.train.batch = 4;
  base.train.steps = 1;
  base.pipeline.microbatches = 1;
  base.optimizer.name = OptimizerKind::sgd;
  const std::vector<Layout> layouts = {
      {.tp = 3}, {.dp_shard = 2}, {.tp = 2}, {}, {.dp_shard = 2, .pp = 2}};
  fs::path before;
  Values values;
  for (size_t i = 0; i < layouts.size(); ++i) {
    SCOPED_TRACE(to_string(layouts[i]));
    Job job = base;
    job.layout = layouts[i];
    const fs::path own = folder.path(std::to_string(i));
    on_ranks(with_seed(job, i), [&](SmallRun& run) {
      if (before.empty()) {
        run.train(0, 1);
      } else {
        load(run, before);
        expect_equal(run, values, 0);
      }
      save(run, own, 1);
    });
    before = newest(own);
    if (values.empty()) values = read_all(before);
  }
}

TEST(SavedState, OneFlatShardCountsTheMostUpdates) {
  TempFolder folder;
  Job job = small_gpt(write_tokens(folder));
  const std::string less = "transformer.h.0.ln_1.bias/step";
  on_ranks(job, [&](SmallRun& run) {
    for (const auto& [name, tensor] : run.state.optimizer().state()) {
      if (name.ends_with("/step")) Tensor(tensor).fill_(name == less ? 4 : 5);
    }
    save(run, folder.path("run"), 5);
  });
  const auto saved = newest(folder.path("run"));
  on_ranks(job, [&](SmallRun& run) {
    EXPECT_THAT(load(run, saved), IsEmpty());
    for (const auto& [name, tensor] : run.state.optimizer().state()) {
      if (name == less) {
        EXPECT_EQ(tensor.item<double>(), 4);
      }
    }
  });
  job.layout = {.dp_shard = 2};
  on_ranks(job, [&](SmallRun& run) {
    // The same on both ranks, though one of them has the parameter.
    EXPECT_THAT(
        load(run, saved),
        ElementsAre(HasSubstr("random state"), HasAll(less, "was 4", "5")));
    for (const auto& [name, tensor] : run.state.optimizer().state()) {
      if (name == "transformer.h.0/no_decay/step") {
        EXPECT_EQ(tensor.item<double>(), 5);
      }
    }
  });
}

TEST(SavedState, RandomNumbersContinueOnTheSameRanks) {
  TempFolder folder;
  Job job = small_mlp();
  Tensor expected;
  on_ranks(job, [&](SmallRun& run) {
    torch::manual_seed(7);
    torch::rand({3});
    save(run, folder.path("one"), 1);
    expected = torch::rand({5});
  });
  on_ranks(job, [&](SmallRun& run) {
    EXPECT_THAT(load(run, newest(folder.path("one"))), IsEmpty());
    EXPECT_TRUE(torch::equal(torch::rand({5}), expected));
  });
  job.layout = {.dp_replicate = 2};
  on_ranks(job, [&](SmallRun& run) {
    EXPECT_THAT(
        load(run, newest(folder.path("one"))),
        ElementsAre(HasSubstr("1 rank, here are 2")));
  });
}

TEST(SavedState, ValuesAreConverted) {
  TempFolder folder;
  Job job = small_gpt(write_tokens(folder));
  const auto trained = train_and_save(job, folder.path("float64"));
  job.model.dtype = ModelDtype::float32;
  for (const Layout& layout : parse_layouts({"dp=1", "fsdp=2", "tp=3"})) {
    SCOPED_TRACE(to_string(layout));
    job.layout = layout;
    Values rounded;
    for (const auto& [name, value] : trained.values_2) {
      rounded[name] = value.to(torch::kFloat32);
    }
    on_ranks(job, [&](SmallRun& run) {
      load(run, trained.at_2);
      expect_equal(run, rounded, 0);
    });
  }
}

// A rank reads what it needs, and the rest of the blocks at its edges.
TEST(SavedState, ReadsOnlyNeededBlocks) {
  TempFolder folder;
  Job job = small_mlp();
  job.model.hidden = {2048, 4096};  // 32 MiB in float32, and as much momentum
  job.model.dtype = ModelDtype::float32;
  job.layout = {.dp_replicate = 2};
  on_ranks(job, [&](SmallRun& run) { save(run, folder.path("dp"), 1); });
  const auto saved = newest(folder.path("dp"));
  for (const Layout& layout :
       parse_layouts({"fsdp=4", "pp=3", "fsdp=2,pp=2"})) {
    SCOPED_TRACE(to_string(layout));
    job.layout = layout;
    on_ranks(job, [&](SmallRun& run) {
      int64_t needed = 0;
      for (const auto& part : shards_to_load(run.state, run.source)) {
        for (const auto& placed : part.boxes) {
          needed += placed.box.numel() * part.tensor.element_size();
        }
      }
      CheckpointReader reader(saved);
      load_state(run.state, reader, run.source, run.world, run.groups);
      EXPECT_GE(reader.bytes_read(), needed);
      // Two edges of two large tensors, in two files; small ones in between.
      EXPECT_LE(reader.bytes_read(), needed + 8 * kChecksumBlockBytes);
    });
  }
}

// A save that training waits for writes live values.
TEST(SavedState, ReferencesAreNotCopied) {
  Job job = small_mlp();
  job.layout = {.dp_replicate = 2};
  on_ranks(job, [&](SmallRun& run) {
    const auto parts = parts_to_save(run);
    StateSnapshot copied, referred;
    copied.take(parts);
    referred.refer_to(parts);
    EXPECT_EQ(copied.bytes(), referred.bytes());
    ASSERT_EQ(copied.slices().size(), referred.slices().size());
    size_t at = 0;
    for (const auto& part : parts) {
      const auto* begin =
          static_cast<const std::byte*>(part.tensor.const_data_ptr());
      for (size_t i = 0; i < part.boxes.size(); ++i, ++at) {
        const auto& one = referred.slices()[at];
        const auto& copy = copied.slices()[at].bytes;
        EXPECT_GE(one.bytes.data(), begin) << one.name;
        EXPECT_LE(
            one.bytes.data() + one.bytes.size(), begin + part.tensor.nbytes())
            << one.name;
        ASSERT_EQ(one.bytes.size(), copy.size());
        EXPECT_EQ(std::memcmp(one.bytes.data(), copy.data(), copy.size()), 0)
            << one.name;
      }
    }
  });
}

// Forward and backward may run meanwhile, and change statistics.
TEST(SavedState, WhatChangesBeforeTheUpdateIsCopied) {
  Job job;
  job.model.name = "resnet18";
  job.data.name = DataKind::dummy;
  job.data.shape = {3, 8, 8};
  on_ranks(job, [&](SmallRun& run) {
    const auto parts = parts_to_save(run);
    StateSnapshot snapshot;
    snapshot.refer_until_update(parts);
    std::map<SavedKind, int> kinds;
    size_t at = 0;
    for (const auto& part : parts) {
      const auto* begin =
          static_cast<const std::byte*>(part.tensor.const_data_ptr());
      for (size_t i = 0; i < part.boxes.size(); ++i, ++at) {
        const auto* bytes = snapshot.slices()[at].bytes.data();
        const bool lives =
            bytes >= begin && bytes < begin + part.tensor.nbytes();
        EXPECT_EQ(
            lives, part.kind == SavedKind::parameter ||
                       part.kind == SavedKind::optimizer)
            << part.name;
        ++kinds[part.kind];
      }
    }
    EXPECT_GT(kinds[SavedKind::parameter], 0);
    EXPECT_GT(kinds[SavedKind::buffer], 0);
  });
}

// In each kind of layout the plan is never below what is copied, and not much
// above it.
TEST(SavedState, ThePlanCountsTheCopy) {
  TempFolder folder;
  for (const auto& one : small_cases(small_gpt(write_tokens(folder)))) {
    SCOPED_TRACE(one.name);
    Job job = one.job;
    job.checkpoint.every_steps = 1;
    // All ranks are summed, because tensors of a model this small are shared
    // unevenly.
    std::atomic<int64_t> copied = 0;
    std::atomic<int64_t> planned = 0;
    on_ranks(job, [&](SmallRun& run) {
      StateSnapshot snapshot;
      snapshot.take(parts_to_save(run));
      const auto plan =
          memory_plan::plan_memory(count_memory(job, run.source), job);
      const auto stage = static_cast<size_t>(run.groups.along(Axis::pp).rank());
      copied += snapshot.bytes();
      planned += plan.ranks[stage].snapshot_bytes;
    });
    // Random state, and how often each parameter was updated.
    const int64_t small = (8 << 10) * job.layout.num_ranks();
    EXPECT_GE(planned + small, copied);
    if (job.layout.tp > 1) continue;  // the first one's, which has most
    EXPECT_LE(planned, copied * 21 / 20);
  }
}

TEST(SavedState, AllDifferencesOfAnotherModelAreListed) {
  TempFolder folder;
  Job job = small_mlp();
  on_ranks(job, [&](SmallRun& run) { save(run, folder.path("run"), 3); });
  const auto saved = newest(folder.path("run"));
  job.model.hidden = {17, 14, 11, 7, 5};
  job.optimizer = {.name = OptimizerKind::adamw};
  for (const Layout& layout : parse_layouts({"dp=1", "fsdp=2,pp=2"})) {
    job.layout = layout;
    std::atomic<int> failed = 0;
    on_ranks(job, [&](SmallRun& run) {
      const auto text = error_text<CheckpointError>([&] { load(run, saved); });
      for (const char* part :
           {"step 3", "fc2.weight: has shape [13, 17], here [14, 17]",
            "fc3.weight: has shape", "fc6.weight: missing",
            "fc1.weight/exp_avg: missing", "fc1.bias/step: missing"}) {
        EXPECT_THAT(text, HasSubstr(part));
      }
      EXPECT_THAT(text, Not(HasSubstr("momentum"))) << "is no concern";
      EXPECT_THAT(text, Not(HasSubstr("fc1.weight: "))) << "is as here";
      ++failed;
    });
    EXPECT_EQ(failed, layout.num_ranks());
  }
  // The other way round.
  Job small = small_mlp();
  small.model.hidden = {17};
  on_ranks(small, [&](SmallRun& run) {
    const auto text = error_text<CheckpointError>([&] { load(run, saved); });
    EXPECT_THAT(text, HasSubstr("fc5.bias: unexpected"));
  });
}

TEST(SavedState, KindsAndDtypesAreCompared) {
  on_ranks(small_mlp(), [&](SmallRun& run) {
    CheckpointManifest manifest;
    for (const auto& part : shards_to_load(run.state, run.source)) {
      manifest.tensors.push_back(
          {.name = part.name,
           .kind = part.kind,
           .dtype = "F32",
           .shape = part.shape});
    }
    const auto check = [&] {
      return error_text<CheckpointError>(
          [&] { check_state(manifest, run.source, run.state.optimizer()); });
    };
    EXPECT_EQ(check(), "no error");
    auto& first = manifest.tensors.front();
    first.dtype = "I64";
    EXPECT_THAT(check(), HasSubstr(first.name + ": has dtype I64"));
    first.dtype = "BF16";
    first.kind = SavedKind::buffer;
    EXPECT_THAT(
        check(), HasSubstr(first.name + ": is a tensor of kind buffer"));
  });
}

// Flips a bit of one rank's file, which the others do not read.
TEST(SavedState, DamageOnOneRankFailsAllRanks) {
  TempFolder folder;
  Job job = small_mlp();
  job.layout = {.pp = 2};
  on_ranks(job, [&](SmallRun& run) { save(run, folder.path("run"), 1); });
  const auto saved = newest(folder.path("run"));
  const auto path = saved / rank_file_name(1);
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('\x55');
  file.close();
  std::atomic<int> failed = 0;
  on_ranks(job, [&](SmallRun& run) {
    EXPECT_THAT(
        error_text<CheckpointError>([&] { load(run, saved); }),
        HasSubstr(rank_file_name(1)));
    ++failed;
  });
  EXPECT_EQ(failed, 2);
}

}  // namespace echelon::saved_state_test
