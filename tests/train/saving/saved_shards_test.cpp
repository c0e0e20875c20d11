// The ranks of a layout write each element of the model once, in even shares.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <map>
#include <mutex>
#include <set>

#include "echelon/checkpoint/tensors/tensor_file.h"
#include "tests/train/small_run.h"

namespace echelon::saved_shards_test {

using testing::ElementsAre;
using torch::Tensor;

// The full tensors that slices of all ranks make up, and how often each element
// was among them.
struct Whole {
  std::map<std::string, Tensor> values;
  std::map<std::string, Tensor> counts;
  std::vector<int64_t> rank_bytes;
};

void add(Whole& whole, const SliceBytes& slice) {
  auto& value = whole.values[slice.name];
  auto& count = whole.counts[slice.name];
  if (!value.defined()) {
    value = torch::zeros(slice.shape, dtype_from_safetensors(slice.dtype));
    count = torch::zeros(slice.shape, torch::kInt64);
  }
  ASSERT_EQ(value.sizes(), slice.shape) << slice.name;
  Tensor to = value, number = count;
  for (size_t d = 0; d < slice.shape.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    to = to.narrow(dim, slice.box.offset[d], slice.box.sizes[d]);
    number = number.narrow(dim, slice.box.offset[d], slice.box.sizes[d]);
  }
  ASSERT_EQ(slice.bytes.size(), to.nbytes()) << slice.name;
  to.copy_(torch::from_blob(
      const_cast<std::byte*>(slice.bytes.data()), slice.box.sizes,
      value.options()));
  number += 1;
}

// Runs `steps` steps in the job's layout, collects the slices, and compares
// what each rank has with them.
Whole saved(const Job& job, int64_t steps, const LayerFactory& layers = {}) {
  Whole whole;
  whole.rank_bytes.resize(static_cast<size_t>(job.layout.num_ranks()));
  std::mutex mutex;
  on_ranks(
      job,
      [&](SmallRun& run) {
        run.train(0, steps);
        StateSnapshot snapshot;
        // The second snapshot reuses memory.
        for (int i = 0; i < 2; ++i) {
          snapshot.take(parts_to_save(run));
        }
        int64_t bytes = 0;
        {
          const std::lock_guard lock(mutex);
          for (const auto& slice : snapshot.slices()) {
            bytes += static_cast<int64_t>(slice.bytes.size());
            if (slice.kind == SavedKind::random) continue;
            add(whole, slice);
            whole.rank_bytes[static_cast<size_t>(run.world.rank())] +=
                static_cast<int64_t>(slice.bytes.size());
          }
        }
        EXPECT_EQ(snapshot.bytes(), bytes);
        run.world.group().barrier();
        const std::lock_guard lock(mutex);
        for (const auto& [name, part] : parts_by_name(run)) {
          const Tensor here = local_values(whole.values.at(name), part);
          EXPECT_TRUE(torch::equal(here, part.value.detach()))
              << name << " of rank " << run.world.rank();
        }
      },
      layers);
  return whole;
}

std::set<std::string> names_of(const Whole& whole) {
  std::set<std::string> names;
  for (const auto& [name, _] : whole.values) names.insert(name);
  return names;
}

void expect_each_once(const Whole& whole) {
  for (const auto& [name, count] : whole.counts) {
    EXPECT_TRUE((count == 1).all().item<bool>()) << name << "\n" << count;
  }
}

void expect_close(const Whole& one, const Whole& other) {
  EXPECT_EQ(names_of(one), names_of(other));
  for (const auto& [name, value] : one.values) {
    EXPECT_TRUE(torch::allclose(value, other.values.at(name), 1e-9, 1e-11))
        << name;
  }
}

TEST(SavedShards, WriteEachElementOnceInEveryLayout) {
  TempFolder folder;
  for (const Job& base : {small_gpt(write_tokens(folder)), small_mlp()}) {
    const Whole one = saved(base, 2);
    expect_each_once(one);
    for (const auto& [name, job] : small_cases(base)) {
      SCOPED_TRACE(base.model.name + " " + name);
      const Whole whole = saved(job, 2);
      expect_each_once(whole);
      expect_close(one, whole);
    }
  }
}

// Names of Hugging Face's checkpoints, and of the optimizer's state.
TEST(SavedShards, NamesAreThoseOfOneDevice) {
  TempFolder folder;
  const auto names = names_of(saved(small_gpt(write_tokens(folder)), 1));
  for (const char* name :
       {"transformer.wte.weight", "transformer.wte.weight/exp_avg",
        "transformer.wte.weight/exp_avg_sq", "transformer.wte.weight/step",
        "transformer.h.1.attn.c_attn.bias"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_FALSE(names.contains("lm_head.weight")) << "is tied";
}

// Bytes of the largest and the smallest share.
std::pair<int64_t, int64_t> shares(const Whole& whole) {
  const auto [least, most] =
      std::minmax_element(whole.rank_bytes.begin(), whole.rank_bytes.end());
  return {*least, *most};
}

TEST(SavedShards, ReplicasShareTheWork) {
  TempFolder folder;
  const Job gpt = small_gpt(write_tokens(folder));
  for (const int64_t degree : {2, 3}) {
    Job job = gpt;
    job.layout = {.dp_replicate = degree};
    job.train.batch = 12;
    const auto [least, most] = shares(saved(job, 1));
    EXPECT_LE(most - least, 16) << degree;  // two elements
  }
  // Each pair of replicas shares what the two have.
  Job hybrid = gpt;
  hybrid.layout = {.dp_replicate = 2, .dp_shard = 2};
  const auto bytes = saved(hybrid, 1).rank_bytes;
  EXPECT_NEAR(bytes[0], bytes[2], 16);
  EXPECT_NEAR(bytes[1], bytes[3], 16);
}

std::vector<std::string> random_names(SmallRun& run) {
  std::vector<std::string> names;
  for (const auto& part : parts_to_save(run)) {
    if (part.kind == SavedKind::random) names.push_back(part.name);
  }
  return names;
}

TEST(SavedShards, EachRankWritesItsRandomState) {
  Job job = small_mlp();
  job.layout = {.dp_replicate = 2};
  on_ranks(job, [&](SmallRun& run) {
    EXPECT_THAT(
        random_names(run),
        ElementsAre("random/cpu/" + std::to_string(run.world.rank())));
  });
}

// Another order of the axes does not change the names.
TEST(SavedShards, RandomStateIsNamedByThePlaceInTheMesh) {
  Job job = small_mlp();
  job.layout = parse_layout("dp=2,tp=2,order=tp:dp");
  on_ranks(job, [&](SmallRun& run) {
    const auto& groups = run.groups;
    const std::string place = std::to_string(
        2 * groups.along(Axis::dp_replicate).rank() +
        groups.along(Axis::tp).rank());
    EXPECT_THAT(random_names(run), ElementsAre("random/cpu/" + place));
    EXPECT_EQ(groups.along(Axis::tp).rank(), run.world.rank() / 2);
  });
}

TEST(SavedShards, TheFirstRankWritesBuffers) {
  Job job = small_mlp();
  job.optimizer.name = OptimizerKind::adamw;
  for (const Layout& layout : parse_layouts(
           {"dp=1", "dp=2", "fsdp=2", "dp=2,fsdp=2", "fsdp=2,pp=2"})) {
    SCOPED_TRACE(to_string(layout));
    job.layout = layout;
    Whole whole;
    std::mutex mutex;
    on_ranks(
        job,
        [&](SmallRun& run) {
          for (auto& part : run.state.model().buffers()) {
            part.value.fill_(static_cast<double>(run.groups.data_index()));
          }
          StateSnapshot snapshot;
          snapshot.take(parts_to_save(run));
          const std::lock_guard lock(mutex);
          for (const auto& slice : snapshot.slices()) {
            if (slice.kind != SavedKind::random) add(whole, slice);
          }
        },
        whole_layers(own_layers()));
    expect_each_once(whole);
    for (const char* name :
         {"norm.running_mean", "norm.running_var",
          "norm.num_batches_tracked"}) {
      EXPECT_TRUE((whole.values.at(name) == 0).all().item<bool>()) << name;
    }
    EXPECT_TRUE(whole.values.contains("frozen.weight"));
    EXPECT_FALSE(whole.values.contains("frozen.weight/exp_avg"));
    EXPECT_TRUE(whole.values.contains("frozen.bias/exp_avg"));
  }
}

// Layers that tensor-parallel ranks replicate, with and without flat shards of
// two ranks.
TEST(SavedShards, TensorParallelRanksShareReplicatedParameters) {
  Job job = small_mlp();
  const LayerFactory layers = [](const TensorParallel&) {
    return own_layers();
  };
  for (const Layout& layout :
       parse_layouts({"tp=2", "tp=3", "fsdp=2,tp=2", "dp=2,tp=2"})) {
    SCOPED_TRACE(to_string(layout));
    job.layout = layout;
    const Whole whole = saved(job, 0, layers);
    expect_each_once(whole);
    const auto [least, most] = shares(whole);
    // Elements are counted, whether there is state of them or not; buffers are
    // the first rank's. One rank alone would write all.
    EXPECT_LT(most - least, layout.dp_shard > 1 ? 9000 : 1000);
    EXPECT_GT(least, 0);
  }
}

}  // namespace echelon::saved_shards_test
