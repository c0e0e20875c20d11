// Parameters that do not train keep their values, have no gradients and no
// optimizer state, and are not reduced; the others train as they do without.
// Adapters begin as the model that they are added to, are saved alone, and can
// be added to its matrices.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "echelon/architecture/adapters.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/files/folder.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/train/strategies/count_job.h"
#include "echelon/train/verify.h"
#include "tests/support/error_text.h"
#include "tests/train/small_run.h"

namespace echelon::fine_tuning_test {

using testing::HasSubstr;

const std::vector<std::string> kPatterns = {
    "transformer.w?e.*", "transformer.h.0.*", "*.bias"};

bool is_frozen(const std::string& name) {
  return name.starts_with("transformer.wte.") ||
         name.starts_with("transformer.wpe.") ||
         name.starts_with("transformer.h.0.") || name.ends_with(".bias");
}

std::map<std::string, torch::Tensor> values_of(const SmallRun& run) {
  std::map<std::string, torch::Tensor> values;
  for (const auto& part : run.state.model().parameters()) {
    values[run.source.first_name(part.name)] = part.value.detach().clone();
  }
  return values;
}

// Numbers of this rank's parameters that train, and of those that its optimizer
// has.
std::pair<int64_t, int64_t> sizes_of(const SmallRun& run) {
  int64_t trained = 0;
  for (const auto& part : run.state.model().parameters()) {
    const auto& name = run.source.first_name(part.name);
    if (!is_frozen(name)) trained += part.value.numel();
  }
  int64_t updated = 0;
  for (const auto& parameter : run.state.optimizer().parameters()) {
    updated += parameter.numel();
  }
  return {trained, updated};
}

// Bytes of gradients that this rank gave to reductions over data-parallel ranks
// since the call number `from`.
int64_t reduced_since(const World& world, uint64_t from) {
  const auto all = world.history().snapshot();
  int64_t bytes = 0;
  for (size_t i = all.size() - (world.history().count() - from); i < all.size();
       ++i) {
    const auto& one = all[i];
    if (one.label.starts_with("bucket ") || one.label.starts_with("reduce ")) {
      bytes += one.bytes;
    }
  }
  return bytes;
}

class FrozenTraining : public testing::Test {
 protected:
  Job job_of(const Layout& layout) {
    Job job = small_gpt(tokens_);
    job.layout = layout;
    return job;
  }

  TempFolder folder_;
  const std::string tokens_ = write_tokens(folder_);
};

TEST_F(FrozenTraining, KeepsValuesAndNoStateInEveryLayout) {
  for (const Layout& layout :
       parse_layouts({"dp=1", "dp=2", "fsdp=2", "tp=2", "pp=2", "cp=2"})) {
    Job job = job_of(layout);
    job.model.freeze = kPatterns;
    if (layout.pp > 1) job.model.partition_at = {"transformer.h.1"};
    on_ranks(job, [&](SmallRun& run) {
      const auto before = values_of(run);
      run.train(0, 2);
      int changed = 0;
      for (const auto& [name, value] : values_of(run)) {
        const bool equal = torch::equal(value, before.at(name));
        changed += !equal;
        if (is_frozen(name)) {
          EXPECT_TRUE(equal) << to_string(layout) << " " << name;
        }
      }
      // A pipeline's first stage is frozen as a whole.
      const bool first = run.groups.along(Axis::pp).rank() == 0;
      EXPECT_EQ(changed > 0, layout.pp == 1 || !first) << to_string(layout);
      // Shards are padded to whole cache lines.
      const auto [trained, updated] = sizes_of(run);
      EXPECT_GE(updated, trained) << to_string(layout);
      EXPECT_LT(updated, trained + 100) << to_string(layout);
    });
  }
}

// The others have the gradients that they have without it.
TEST_F(FrozenTraining, LeavesTheOtherGradientsAsTheyAre) {
  std::map<std::string, torch::Tensor> whole;
  const auto each_gradient = [&](const Job& job, const auto& visit) {
    on_ranks(job, [&](SmallRun& run) {
      run.state.model().forward_backward(run.next_batch(), run.counts_units());
      for (const auto& part : run.state.model().parameters()) {
        visit(part.name, part.gradient);
      }
    });
  };
  Job job = job_of({});
  each_gradient(job, [&](const std::string& name, const auto& gradient) {
    whole[name] = gradient.clone();
  });
  job.model.freeze = kPatterns;
  int compared = 0;
  each_gradient(job, [&](const std::string& name, const auto& gradient) {
    ASSERT_EQ(gradient.defined(), !is_frozen(name)) << name;
    if (!gradient.defined()) return;
    EXPECT_TRUE(torch::allclose(gradient, whole.at(name), 1e-12, 1e-14))
        << name;
    ++compared;
  });
  EXPECT_GT(compared, 5);
}

TEST_F(FrozenTraining, ReducesWhatTrainsAlone) {
  for (const Layout& layout : parse_layouts({"dp=2", "fsdp=2"})) {
    Job job = job_of(layout);
    // The second block's MLP trains alone.
    job.model.freeze = {
        "transformer.w?e.*", "transformer.h.0.*", "transformer.ln_f.*",
        "*.1.attn.*", "*.1.ln_?.*"};
    on_ranks(job, [&](SmallRun& run) {
      int64_t trained = 0;
      for (const auto& info : run.source.parameters) {
        if (!run.source.frozen.contains(info.name)) {
          EXPECT_THAT(info.name, HasSubstr("h.1.mlp."));
          trained += info.num_elements();
        }
      }
      run.train(0, 1);
      const uint64_t from = run.world.history().count();
      run.train(1, 2);
      const int64_t bytes = reduced_since(run.world, from);
      EXPECT_GE(bytes, 8 * trained) << to_string(layout);
      EXPECT_LT(bytes, 8 * (trained + 100)) << to_string(layout);
    });
  }
}

TEST_F(FrozenTraining, ThePlanHasNoStateOfFrozenParameters) {
  Job job = job_of({.dp_replicate = 2});
  const SampleSpec sample = open_data(job.data, 0).train->spec();
  const auto resting = [&] {
    const auto source = model_source(job, sample);
    return memory_plan::plan_memory(count_memory(job, source), job)
        .ranks[0]
        .resting;
  };
  const auto whole = resting();
  job.model.freeze = {"transformer.wte.*"};
  const auto frozen = resting();
  using timeline::MemoryKind;
  EXPECT_EQ(frozen[MemoryKind::parameters], whole[MemoryKind::parameters]);
  EXPECT_EQ(
      whole[MemoryKind::optimizer_state] - frozen[MemoryKind::optimizer_state],
      2 * 8 * 67 * 20);
}

// Layers of a program's own take patterns too.
TEST_F(FrozenTraining, OwnLayersAreFrozenByName) {
  Job job = small_mlp();
  job.model.freeze = {"out.*"};
  const SampleSpec digits{.input_shape = {1, 8, 8}, .classes = 10};
  const auto source = model_source(job, whole_layers(own_layers()), digits);
  EXPECT_EQ(
      source.frozen,
      (std::set<std::string>{"frozen.weight", "out.bias", "out.weight"}));
  job.model.freeze = {"aut.*"};
  EXPECT_THAT(
      error_text<ConfigError>(
          [&] { model_source(job, whole_layers(own_layers()), digits); }),
      HasSubstr("did you mean \"out.*\"?"));
}

// Random weights that a base model has in a file.
class Adapters : public FrozenTraining {
 protected:
  Adapters() {
    for (const char* name : kNames) {
      const auto network = make_network(plain(name), {11}, 67, 9);
      save_weights(*network, base(name));
    }
  }

  static constexpr const char* kNames[] = {"gpt", "llama", "mixtral"};

  static ModelOptions plain(const std::string& name) {
    ModelOptions model = tiny_gpt();
    model.name = name;
    model.dtype = ModelDtype::float64;
    if (name == "gpt") return model;
    model.hidden_size = 24;
    model.heads = 6;
    model.kv_heads = 2;
    model.intermediate_size = 31;
    if (name == "mixtral") {
      model.experts = 3;
      model.experts_per_token = 2;
    }
    return model;
  }
  static ModelOptions adapted(const std::string& name) {
    ModelOptions model = plain(name);
    model.lora = {.rank = 3, .alpha = 6};
    if (name == "gpt") {
      model.lora.targets = {"c_attn", "c_proj", "c_fc"};
    } else if (name == "mixtral") {
      model.lora.targets = {"q_proj", "w1", "w2"};
    } else {
      model.lora.targets = {"q_proj", "v_proj", "o_proj", "down_proj"};
    }
    return model;
  }
  std::string base(const std::string& name) const {
    return folder_.path(name + ".safetensors");
  }
  Job adapting(const std::string& name, const Layout& layout) {
    Job job = job_of(layout);
    job.model = adapted(name);
    job.model.weights = base(name);
    return job;
  }
};

TEST_F(Adapters, BeginAsTheModelThatTheyAreAddedTo) {
  const auto first_loss = [&](const Job& job) {
    double loss = 0;
    std::mutex mutex;
    on_ranks(job, [&](SmallRun& run) {
      const auto totals =
          run.state.model()
              .forward_backward(run.next_batch(), run.counts_units())
              .totals();
      const std::lock_guard lock(mutex);
      loss += totals.loss_sum;
    });
    return loss;
  };
  for (const char* name : kNames) {
    Job job = adapting(name, {});
    job.model = plain(name);
    job.model.weights = base(name);
    const double expected = first_loss(job);
    EXPECT_EQ(first_loss(adapting(name, {})), expected) << name;
    EXPECT_NEAR(
        first_loss(adapting(name, {.dp_shard = 2, .tp = 2})), expected,
        1e-9 * expected)
        << name;
  }
}

TEST_F(Adapters, AreSavedAloneAndLoadInOtherLayouts) {
  for (const char* name : kNames) {
    const std::string folder = folder_.make_folder(std::string(name) + "-run");
    const bool experts = name == std::string("mixtral");
    const Job saved = adapting(
        name,
        experts ? parse_layout("fsdp=2,ep=2") : parse_layout("fsdp=2,tp=2"));
    run_ranks(4, [&](World& world) {
      at::set_num_threads(1);
      save_steps(saved, world, 2, folder);
    });
    const auto places = find_checkpoints(folder);
    ASSERT_EQ(places.size(), 1u);
    CheckpointReader reader(places[0].path.string());
    int64_t adapters = 0;
    for (const auto& tensor : reader.manifest().tensors) {
      if (tensor.kind == SavedKind::random) continue;
      const auto own = tensor.name.substr(0, tensor.name.find('/'));
      EXPECT_TRUE(is_adapter(own)) << tensor.name;
      adapters += tensor.kind == SavedKind::parameter;
    }
    // Of each block; c_proj is in attention and the MLP, w1 in each expert.
    EXPECT_EQ(adapters, 2 * 2 * (experts ? 1 + 3 * 2 : 4));
    auto layouts = parse_layouts({"pp=2", "tp=2"});
    if (experts) layouts.push_back({.ep = 3});
    for (const Layout& layout : layouts) {
      const Job job = adapting(name, layout);
      run_ranks(static_cast<int>(layout.num_ranks()), [&](World& world) {
        at::set_num_threads(1);
        const VerifyOptions options{.steps = 1, .resume = folder};
        const auto result = verify(job, world, options);
        if (world.rank() > 0) return;
        EXPECT_TRUE(result.passed)
            << name << " " << to_string(layout) << to_text(result, options);
      });
    }
    // The model that they belong to is not in the checkpoint.
    const auto refusal = [&](const Job& other) {
      std::string text;
      run_ranks(1, [&](World& world) {
        text = error_text<CheckpointError>(
            [&] { verify(other, world, {.steps = 1, .resume = folder}); });
      });
      return text;
    };
    Job other = adapting(name, {});
    other.model.lora.alpha = 5;
    EXPECT_THAT(refusal(other), HasSubstr("trained with [lora] alpha = 6"));
    other = adapting(name, {});
    other.model.weights = folder_.path("another.safetensors");
    std::filesystem::copy_file(base(name), other.model.weights);
    EXPECT_THAT(refusal(other), HasSubstr("trained with [model] weights = "));
    std::filesystem::remove(other.model.weights);
  }
}

// Adapters with random values, added to their matrices, give the same scores.
TEST_F(Adapters, AddedToTheMatricesGiveTheSameScores) {
  for (const char* name : kNames) {
    const auto network = make_network(adapted(name), {11}, 67, 9);
    load_weights(*network, base(name));
    {
      const torch::NoGradGuard no_grad;
      for (auto& item : network->named_parameters()) {
        if (is_adapter(item.key())) item.value().normal_(0, 0.3);
      }
    }
    save_weights(*network, folder_.path("adapters.safetensors"));
    const auto source = [](const std::string& path) {
      return std::make_shared<MappedTensors>(WeightsSource(path));
    };
    AdaptedTensors all(
        source(base(name)), source(folder_.path("adapters.safetensors")), 2,
        name == std::string("gpt"));
    std::vector<TensorToWrite> tensors;
    for (size_t i = 0; i < all.tensors().size(); ++i) {
      tensors.push_back({i, all.tensors()[i].name, all.tensors()[i].dtype});
    }
    write_tensors(folder_.path("merged.safetensors"), all, tensors);
    const auto merged = make_network(plain(name), {11}, 67, 1);
    load_weights(*merged, folder_.path("merged.safetensors"));
    const auto loaded = make_network(adapted(name), {11}, 67, 2);
    load_weights(*loaded, base(name));
    const torch::NoGradGuard no_grad;
    const Tensors tokens = {torch::arange(22).view({2, 11}) % 59};
    const auto scores = network->forward(tokens)[0];
    EXPECT_FALSE(torch::allclose(loaded->forward(tokens)[0], scores, 1e-3));
    load_adapters(*loaded, folder_.path("adapters.safetensors"));
    EXPECT_TRUE(torch::equal(loaded->forward(tokens)[0], scores));
    EXPECT_TRUE(
        torch::allclose(merged->forward(tokens)[0], scores, 1e-11, 1e-11))
        << name;
    EXPECT_THAT(
        error_text<DataError>([&] { load_adapters(*loaded, base(name)); }),
        HasSubstr("has no adapter"));
  }
}

}  // namespace echelon::fine_tuning_test
