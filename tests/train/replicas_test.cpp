#include "echelon/train/replicas.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <random>
#include <string>
#include <vector>

#include "tests/support/error_text.h"
#include "tests/train/composition_cases.h"
#include "tests/train/small_run.h"
#include "tests/train/trained_runs.h"

namespace echelon::replicas_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(FindDivergence, NamesTheMinority) {
  std::mt19937 random(1);
  for (int i = 0; i < 100; ++i) {
    const int sets = 1 + static_cast<int>(random() % 3);
    const int replicas = 3 + static_cast<int>(random() % 4);
    std::vector<int64_t> digests, numbers;
    for (int rank = 0; rank < sets * replicas; ++rank) {
      numbers.push_back(rank % sets);
      digests.push_back(1000 + rank % sets);
    }
    EXPECT_FALSE(find_divergence(digests, numbers));
    const int wrong = static_cast<int>(random() % digests.size());
    digests[static_cast<size_t>(wrong)] ^= int64_t{1} << random() % 64;
    const auto found = find_divergence(digests, numbers);
    ASSERT_TRUE(found);
    EXPECT_EQ(std::ssize(found->ranks), replicas);
    EXPECT_THAT(found->wrong, ElementsAre(wrong));
  }
}

TEST(FindDivergence, WithoutAMajorityNoneIsNamed) {
  const auto found = find_divergence({7, 5, 5, 6, 7, 6}, {0, 1, 1, 3, 0, 3});
  EXPECT_FALSE(found);
  const auto two = find_divergence({7, 5, 8, 5}, {0, 1, 0, 1});
  ASSERT_TRUE(two);
  EXPECT_THAT(two->ranks, ElementsAre(0, 2));
  EXPECT_THAT(two->wrong, IsEmpty());
  EXPECT_THAT(find_divergence({1, 1, 2, 2}, {0, 0, 0, 0})->wrong, IsEmpty());
  EXPECT_THAT(find_divergence({1, 2, 3}, {0, 0, 0})->wrong, IsEmpty());
  EXPECT_THAT(
      find_divergence({1, 1, 1, 2, 3}, {0, 0, 0, 0, 0})->wrong,
      ElementsAre(3, 4));
}

TEST(ReplicaCheck, SumsOfRowsChangeWithEachBit) {
  std::mt19937 random(2);
  for (const auto dtype :
       {torch::kFloat64, torch::kFloat32, torch::kBFloat16}) {
    for (const int64_t size : {1, 1023, 1024, 5000}) {
      auto tensor = torch::randn({size}).to(dtype);
      const auto before = at::cat(detail::sums_of_rows(tensor)).clone();
      EXPECT_EQ(before.numel(), size / 1024 + 1);
      for (int i = 0; i < 20; ++i) {
        auto* byte = static_cast<uint8_t*>(tensor.mutable_data_ptr()) +
                     random() % tensor.nbytes();
        const auto bit = static_cast<uint8_t>(1 << random() % 8);
        *byte ^= bit;
        EXPECT_FALSE(at::cat(detail::sums_of_rows(tensor)).equal(before));
        *byte ^= bit;
      }
      EXPECT_TRUE(at::cat(detail::sums_of_rows(tensor)).equal(before));
    }
  }
}

/// Flips a bit of element 0 of the named parameter, or of the first one.
void flip(const SmallRun& run, const std::string& name = "") {
  for (const auto& part : run.state.model().parameters()) {
    if (part.value.numel() == 0 || (!name.empty() && part.name != name)) {
      continue;
    }
    static_cast<uint8_t*>(part.value.mutable_data_ptr())[0] ^= 1;
    return;
  }
}

TEST(ReplicaCheck, AFlippedBitNamesItsRankAndParameter) {
  on_ranks(
      [] {
        Job job = small_mlp();
        job.layout.dp_replicate = 3;
        return job;
      }(),
      [](SmallRun& run) {
        const ReplicaCheck check(run.world, run.groups, run.state.model());
        ASSERT_TRUE(check.has_replicas());
        std::mt19937 random(3);  // the same on all ranks
        const auto parts = run.state.model().parameters();
        for (int i = 0; i < 100; ++i) {
          EXPECT_FALSE(check.compare());
          const auto& part = parts[random() % parts.size()];
          const auto wrong = static_cast<int>(random() % 3);
          auto* byte = static_cast<uint8_t*>(part.value.mutable_data_ptr()) +
                       random() % part.value.nbytes();
          const auto bit = static_cast<uint8_t>(1 << random() % 8);
          if (run.world.rank() == wrong) *byte ^= bit;
          EXPECT_THAT(
              check.compare().value_or("none"),
              HasAll(
                  "the parameters of rank " + std::to_string(wrong) +
                      " differ from those of ranks ",
                  ", which agree: " + part.name));
          if (run.world.rank() == wrong) *byte ^= bit;
        }
      });
}

// What the check finds when, after some steps, a bit flips on the last rank.
std::string found_after_flip(
    const Job& job, const std::string& name, const std::string& parameter) {
  std::string text = "nothing";
  on_ranks(job, [&](SmallRun& run) {
    const ReplicaCheck check(run.world, run.groups, run.state.model());
    run.train(0, 4);
    EXPECT_EQ(check.compare().value_or("equal"), "equal") << name;
    if (run.world.rank() + 1 == run.world.size()) flip(run, parameter);
    const auto found = check.compare();
    if (run.world.rank() == 0 && found) text = *found;
  });
  return text;
}

// No layout lets replicas drift apart, and each finds a bit that has flipped.
TEST(ReplicaCheck, AllLayouts) {
  TempFolder folder;
  for (const Job& base : {small_mlp(), small_gpt(write_tokens(folder))}) {
    for (const auto& [name, job] : small_cases(base)) {
      SCOPED_TRACE(base.model.name + " " + name);
      const std::string text = found_after_flip(job, name, "");
      if (job.layout.dp_replicate > 1) {
        EXPECT_THAT(text, HasSubstr("which should be the same, differ: "));
      }
    }
    Job job = base;
    job.layout = parse_layout("dp=3,pp=2");
    EXPECT_THAT(
        found_after_flip(job, "dp=3,pp=2", ""), HasSubstr("of rank 5 differ"));
  }
  // What tensor-parallel ranks replicate.
  Job job = small_gpt(write_tokens(folder));
  for (const bool sequence : {false, true}) {
    job.layout = parse_layout("tp=3");
    job.tensor.sequence_parallel = sequence;
    EXPECT_THAT(
        found_after_flip(job, "tp=3", "transformer.ln_f.weight"),
        HasSubstr("of rank 2 differ from those of ranks 0 and 1, which agree: "
                  "transformer.ln_f.weight"));
  }
  job.layout = parse_layout("dp=2,tp=2");
  EXPECT_THAT(
      found_after_flip(job, "dp=2,tp=2", "transformer.ln_f.weight"),
      HasSubstr("of rank 3 differ from those of ranks 0, 1 and 2"));
}

// Ranks of ep have different experts, and all else alike.
TEST(ReplicaCheck, ExpertsSpreadOverRanks) {
  TempFolder folder;
  Job job = small_gpt(write_tokens(folder));
  job.model = composition::mixture("mixtral");
  job.model.dtype = ModelDtype::float64;
  job.model.vocab_size = job.data.vocab_size;
  job.train.batch = 12;
  const std::string expert =
      "model.layers.1.block_sparse_moe.experts.4.w1.weight";
  const auto compare = [&](const char* layout, const std::string& parameter) {
    job.layout = parse_layout(layout);
    return found_after_flip(job, layout, parameter);
  };
  const auto norm = HasSubstr(
      "of rank 2 differ from those of ranks 0 and 1, which agree: "
      "model.norm.weight");
  EXPECT_THAT(compare("ep=3", "model.norm.weight"), norm);
  EXPECT_EQ(compare("ep=3", expert), "nothing");
  EXPECT_THAT(
      compare("dp=3,ep=2", expert),
      HasSubstr(
          "of rank 5 differ from those of ranks 1 and 3, which agree: " +
          expert));
  // In flat buffers: replicas of all of them, and shards.
  job.memory.offload = Offload::parameters;
  EXPECT_THAT(compare("ep=3", "model.norm.weight"), norm);
  EXPECT_EQ(compare("ep=3", expert), "nothing");
  job.memory.offload = Offload::none;
  EXPECT_EQ(compare("fsdp=2,ep=2", ""), "nothing");
}

class Replicas : public TrainedRuns {};

thread_local int own_rank = 0;
thread_local int calls = 0;

// Flips a bit of the last rank in the forward pass of step `at`.
LayerList layers_that_flip(int at, int last) {
  LayerList list;
  list.add(
      "first", [] { return torch::nn::Linear(64, 8); },
      [at, last](auto& module, const torch::Tensor& x) {
        if (!x.is_meta() && own_rank == last && ++calls == at) {
          static_cast<uint8_t*>(module.weight.mutable_data_ptr())[3] ^= 1;
        }
        return module.forward(x.flatten(1));
      });
  list.add("out", [] { return torch::nn::Linear(8, 10); });
  return list;
}

TEST_F(Replicas, AJobEndsAtTheNextComparison) {
  Job job = small_mlp();
  job.train.check_replicas_every = 3;
  const auto error = [&](int ranks, int at, const std::string& name) {
    job.layout.dp_replicate = ranks;
    const LayerList list = layers_that_flip(at, ranks - 1);
    const auto folder = folder_.make_folder(name);
    return error_text<Error>([&] {
      run_ranks(ranks, [&](World& world) {
        own_rank = world.rank();
        calls = 0;
        train(job, world, folder, &list);
      });
    });
  };
  EXPECT_THAT(
      error(3, 4, "three"),
      HasAll(
          "step 6: the parameters of rank 2 differ from those of ranks 0 and "
          "1, which agree: first.weight",
          "They were equal after step 3", "There is no checkpoint from before",
          "check_replicas_every = 0"));
  // Before a checkpoint too, and the last one here is that of step 8.
  EXPECT_THAT(
      error(2, 7, "end"),
      HasAll(
          "step 8: the parameters of ranks 0 and 1, which should be the same, "
          "differ: first.weight",
          "two copies do not show which of them is wrong"));
  EXPECT_FALSE(std::filesystem::exists(
      folder_.path("end/checkpoints/last.safetensors")));
  job.train.check_replicas_every = 0;
  EXPECT_EQ(error(2, 7, "off"), "no error");
}

}  // namespace echelon::replicas_test
