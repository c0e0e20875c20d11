// Language models compared with transformers: imported folders of transformers
// and exported ones of ours give the same logits, and training the same losses.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/files/rank_file.h"
#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/comm/world.h"
#include "echelon/job/job.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/parallel/tensor/vocab.h"
#include "tests/support/error_text.h"
#include "tests/support/places.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::language_pytorch_test {

constexpr int64_t kVocabulary = 51;
constexpr int64_t kSequence = 17;
constexpr double kTolerance = 1e-5;

torch::Tensor tokens() {
  const auto steps = torch::arange(3 * kSequence, torch::kInt64);
  return (steps * 7 + steps * steps * 5)
      .remainder(kVocabulary)
      .view({3, kSequence});
}

void echelon_command(const std::string& arguments) {
  const std::string command =
      program("echelon") + " " + arguments + " > /dev/null";
  ASSERT_EQ(std::system(command.c_str()), 0) << command;
}

double largest_difference(const torch::Tensor& a, const torch::Tensor& b) {
  if (a.sizes() != b.sizes()) return INFINITY;
  return (a - b).abs().max().item<double>();
}

torch::Tensor logits_in(const std::string& path) {
  return load_tensors(path, {"logits"})[0];
}

// The largest difference on any rank of `size`, each with its shard of the
// vocabulary.
double difference(
    const ModelOptions& options, const std::string& weights,
    const torch::Tensor& expected, int size,
    const TensorParallelOptions& how = {}) {
  std::vector<double> largest(static_cast<size_t>(size));
  run_ranks(size, [&](World& world) {
    const TensorParallel parallel{world.group(), how};
    const auto layers =
        model_layers(options, {kSequence}, vocabulary(options, 0), parallel);
    const auto network = build_network(layers, 0, layers.size());
    load_weights(*network, weights);
    network->eval();
    const torch::NoGradGuard no_grad;
    const auto mine = parallel.part_of(kVocabulary);
    largest[static_cast<size_t>(world.rank())] = largest_difference(
        network->forward(Tensors{tokens()})[0],
        expected.narrow(-1, mine.begin, mine.size()));
  });
  return *std::max_element(largest.begin(), largest.end());
}

ModelOptions model(const std::string& name) {
  ModelOptions options;
  options.name = name;
  options.layers = 2;
  options.hidden_size = 24;
  options.heads = 6;
  options.intermediate_size = 37;
  options.max_positions = 24;
  options.vocab_size = kVocabulary;
  return options;
}

std::string toml_of(const ModelOptions& options) {
  Job job;
  job.model = options;
  return to_toml(job);
}

// A checkpoint of two ranks, which shard each tensor by rows.
void write_checkpoint(
    const std::string& folder, const ModelOptions& options,
    const std::vector<NamedTensor>& tensors) {
  std::filesystem::create_directories(folder);
  CheckpointManifest manifest;
  manifest.step = 7;
  manifest.layout = "fsdp=2";
  manifest.ranks = 2;
  manifest.config = toml_of(options);
  manifest.config_hash =
      checksum(manifest.config.data(), manifest.config.size());
  std::vector<RankPart> parts;
  for (int64_t rank = 0; rank < 2; ++rank) {
    std::vector<torch::Tensor> kept;
    std::vector<SliceBytes> slices;
    for (const auto& [name, tensor] : tensors) {
      const auto shape = tensor.sizes().vec();
      const auto rows = even_range(shape[0], rank, 2);
      Box box = whole_box(shape);
      box.offset[0] = rows.begin;
      box.sizes[0] = rows.size();
      kept.push_back(tensor.narrow(0, rows.begin, rows.size()).contiguous());
      slices.push_back(
          {name,
           SavedKind::parameter,
           "F32",
           shape,
           box,
           {static_cast<const std::byte*>(kept.back().data_ptr()),
            kept.back().nbytes()}});
    }
    parts.push_back(write_rank_file(folder, rank_file_name(rank), slices));
  }
  add_parts(manifest, parts);
  std::ofstream(folder + "/manifest.json", std::ios::binary)
      << to_json(manifest);
}

// Makes the folder of a finished run.
std::shared_ptr<Network>
make_run(const TempFolder& folder, const ModelOptions& options) {
  const auto network = make_network(options, {kSequence}, kVocabulary, 3);
  folder.write("config.toml", toml_of(options));
  folder.make_folder("checkpoints");
  save_weights(*network, folder.path("checkpoints/last.safetensors"));
  return network;
}

// The models that transformers reads.
std::map<std::string, ModelOptions> exported_models() {
  std::map<std::string, ModelOptions> models;
  models["gpt"] = model("gpt");
  models["llama"] = model("llama");
  models["llama"].kv_heads = 3;
  models["tied"] = models["llama"];
  models["tied"].tie_embeddings = true;
  models["tied"].rope.theta = 700;
  models["stretched"] = models["llama"];
  models["stretched"].rope.factor = 4;
  models["stretched"].rope.original_positions = 8;
  for (const char* name : {"mistral", "qwen2", "qwen3"}) {
    models[name] = model(name);
    models[name].kv_heads = 3;
  }
  models["mistral"].window = 5;
  models["qwen3"].head_size = 10;
  for (const char* name : {"mixtral", "qwen3-moe"}) {
    models[name] = model(name);
    models[name].kv_heads = 2;
    models[name].experts = 5;
    models[name].experts_per_token = 2;
  }
  models["mixtral"].window = 6;
  models["shares"] = models["qwen3-moe"];
  models["shares"].normalize_routing = false;
  auto& deepseek = models["deepseek-v3"] = model("deepseek-v3");
  deepseek.dense_layers = 1;
  deepseek.experts = 6;
  deepseek.expert_groups = 3;
  deepseek.groups_per_token = 2;
  deepseek.experts_per_token = 3;
  deepseek.expert_size = 13;
  deepseek.shared_experts = 1;
  deepseek.routing_scale = 2.5;
  deepseek.query_rank = 11;
  deepseek.key_value_rank = 9;
  deepseek.nope_size = 7;
  deepseek.rope_size = 4;
  deepseek.value_size = 5;
  models["unranked"] = deepseek;
  models["unranked"].query_rank = 0;
  models["unranked"].rope.factor = 4;
  models["unranked"].rope.original_positions = 8;
  models["unranked"].rope.scaling = RopeScaling::yarn;
  models["unranked"].rope.mscale_all_dim = 1.5;
  models["yarn"] = models["stretched"];
  models["yarn"].rope.scaling = RopeScaling::yarn;
  models["yarn"].rope.attention_factor = 1.2;
  models["gemma"] = model("gemma");
  models["gemma"].kv_heads = 3;
  models["gemma"].head_size = 10;
  for (const char* name : {"gemma2", "gemma3"}) {
    models[name] = models["gemma"];
    models[name].name = name;
    models[name].layers = 3;
    models[name].window = 5;
    models[name].global_every = 2;
    models[name].query_pre_attn_scalar = 7;
  }
  models["gemma2"].attention_softcap = 2;
  models["gemma2"].logit_softcap = 3;
  models["gemma3"].rope = {
      .theta = 900, .scaling = RopeScaling::linear, .factor = 8};
  models["gemma3"].rope_local_theta = 60;
  // Adapters, which export adds to their matrices.
  models["adapted_gpt"] = models["gpt"];
  models["adapted_gpt"].lora = {
      .rank = 3, .alpha = 6, .targets = {"c_attn", "c_proj", "0.mlp.c_fc"}};
  models["adapted_qwen2"] = models["qwen2"];
  models["adapted_qwen2"].lora = {
      .rank = 3, .alpha = 4, .targets = {"q_proj", "v_proj", "down_proj"}};
  return models;
}

// The models whose training is compared.
constexpr const char* kTrained[] = {
    "gpt",     "mistral",   "qwen2",       "qwen3",  "gemma",
    "mixtral", "qwen3-moe", "deepseek-v3", "gemma2", "gemma3"};

constexpr int64_t kSteps = 20;

torch::Tensor batches() {
  const auto numbers = torch::arange(kSteps * 4 * 18, torch::kInt64);
  return (numbers * 7 + numbers.square())
      .remainder(kVocabulary)
      .view({kSteps, 4, 18});
}

// One Python process, whose imports take longest, does the work of all tests.
class LanguagePytorch : public testing::Test {
 protected:
  struct Prepared {
    TempFolder folder;
    std::map<std::string, torch::Tensor> logits;  // of exported_models()
    std::map<std::string, std::shared_ptr<Network>> trained;  // no step yet
  };

  void SetUp() override {
    ECHELON_NEED_TRANSFORMERS();
    if (prepared_) return;
    prepared_ = std::make_unique<Prepared>();
    save_tensors(path("tokens.safetensors"), {{"tokens", tokens()}});
    save_tensors(path("batches.safetensors"), {{"tokens", batches()}});
    for (const auto& [name, options] : exported_models()) {
      export_model(name, options);
    }
    for (const std::string name : kTrained) {
      const TempFolder run;
      prepared_->trained[name] = make_run(run, exported_models().at(name));
      echelon_command(
          "export " + run.path() + " " + path(name + ".trained") +
          " --format huggingface");
    }
    run_python_script(
        "models/language_reference.py", {"make,run,dcp,train", path("")});
  }
  static void TearDownTestSuite() { prepared_.reset(); }

  static std::string path(const std::string& name) {
    return prepared_->folder.path(name);
  }
  static const Prepared& prepared() { return *prepared_; }

 private:
  static void
  export_model(const std::string& name, const ModelOptions& options) {
    const TempFolder run;
    const auto network = make_run(run, options);
    {
      // Values that make every part matter.
      const torch::NoGradGuard no_grad;
      torch::manual_seed(1);
      for (auto& value : network->parameters()) {
        value.mul_(value.dim() > 1 ? 10 : 1)
            .add_(0.1 * torch::rand_like(value));
      }
      for (auto& bias : network->buffers()) bias.uniform_(-0.2, 0.2);
    }
    if (name == "tied" || name == "gpt") {
      // A checkpoint, as training saves it.
      std::filesystem::remove(run.path("checkpoints/last.safetensors"));
      write_checkpoint(
          run.path("checkpoints/step-00000007"), options,
          owned_tensors(*network));
    } else {
      save_weights(*network, run.path("checkpoints/last.safetensors"));
    }
    network->eval();
    prepared_->logits[name] = network->forward(Tensors{tokens()})[0].detach();
    echelon_command(
        "export " + run.path() + " " + path(name + ".exported") +
        " --format huggingface --max-shard-bytes " +
        (name == "gpt" ? "20000" : "5000000000"));
  }

  static inline std::unique_ptr<Prepared> prepared_;
};

TEST_F(LanguagePytorch, FoldersOfTransformersGiveTheSameLogits) {
  for (const std::string name : {"gpt",         "llama",
                                 "llama_tied",  "llama_stretched",
                                 "llama_bf16",  "mistral",
                                 "qwen2",       "qwen3",
                                 "mixtral",     "mixtral_window",
                                 "qwen3_moe",   "qwen3_moe_shares",
                                 "deepseek_v3", "deepseek_v3_plain",
                                 "gemma",       "gemma2",
                                 "gemma3",      "gemma3_stretched",
                                 "llama_yarn",  "deepseek_v3_yarn"}) {
    const auto expected = logits_in(path(name + ".logits.safetensors"));
    EXPECT_GT(expected.std().item<double>(), 0.1) << name;
    const auto imported = path(name + ".imported");
    echelon_command("import " + path(name) + " " + imported);
    const auto options = load_job(imported + "/config.toml").model;
    EXPECT_EQ(options.weights, imported + "/checkpoints/last.safetensors");
    for (const int size : {1, 2, 3}) {
      EXPECT_LE(
          difference(options, options.weights, expected, size), kTolerance)
          << name << " imported, on " << size;
    }
    EXPECT_LE(difference(options, path(name), expected, 2), kTolerance) << name;
    EXPECT_LE(
        difference(
            options, options.weights, expected, 2, {.sequence_parallel = true}),
        kTolerance)
        << name;
    if (name == "gpt") {
      EXPECT_LE(difference(options, path("gpt_base"), expected, 2), kTolerance);
    }
  }
}

TEST_F(LanguagePytorch, TransformersLoadsOurFolders) {
  EXPECT_TRUE(std::filesystem::exists(
      path("gpt.exported/model.safetensors.index.json")));
  for (const auto& [name, logits] : prepared().logits) {
    const auto theirs = logits_in(path(name + ".back.safetensors"));
    EXPECT_GT(theirs.std().item<double>(), 0.1) << name;
    EXPECT_LE(largest_difference(logits, theirs), kTolerance) << name;
  }
}

// Checkpoints of torch.distributed.checkpoint are imported from its safetensors
// files, and from its pickles by the commands that the refusal names.
TEST_F(LanguagePytorch, ImportsCheckpointsOfPytorch) {
  const auto expected = logits_in(path("dcp.logits.safetensors"));
  EXPECT_GT(expected.std().item<double>(), 0.1);
  size_t shards = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(path("sharded"))) {
    shards += entry.path().filename().string().starts_with("shard-0000");
  }
  EXPECT_EQ(shards, 2u);
  const auto check = [&](const std::string& name) {
    echelon_command("import " + path(name) + " " + path(name + ".in"));
    const auto options = load_job(path(name + ".in/config.toml")).model;
    EXPECT_LE(difference(options, options.weights, expected, 2), kTolerance);
  };
  check("sharded");

  const auto way_in = error_text<CheckpointError>(
      [&] { WeightsSource source(path("pickled")); });
  std::filesystem::create_directory(path("converted"));
  std::istringstream lines(way_in);
  int commands = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  python ")) continue;
    const auto command = "cd " + path("converted") + " && " + pytorch_python() +
                         line.substr(8) + " > /dev/null";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    ++commands;
  }
  EXPECT_EQ(commands, 2) << way_in;
  std::filesystem::copy(
      path("sharded/config.json"), path("converted/config.json"));
  check("converted");
}

std::vector<double> losses_of_steps(Network& network) {
  const auto all_batches = batches();
  torch::optim::AdamW optimizer(
      network.parameters(),
      torch::optim::AdamWOptions(3e-3).weight_decay(0.01));
  std::vector<double> losses;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto inputs = all_batches[step].narrow(1, 0, 17);
    const auto targets = all_batches[step].narrow(1, 1, 17).contiguous();
    const auto logits = network.forward(Tensors{inputs})[0];
    const auto loss =
        vocab_cross_entropy(logits, targets, kVocabulary, {}).mean();
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

// The losses of 20 steps equal those of transformers, and of a torch.nn model.
TEST_F(LanguagePytorch, TrainingGivesTheSameLosses) {
  for (const std::string model : kTrained) {
    const auto losses = losses_of_steps(*prepared().trained.at(model));
    const auto file = path(model + ".losses.safetensors");
    for (const std::string name : {"transformers", "torch"}) {
      if (name == "torch" && model != "gpt") continue;
      const auto theirs = load_tensors(file, {name})[0];
      ASSERT_EQ(theirs.numel(), kSteps);
      double largest = 0;
      for (int64_t step = 0; step < kSteps; ++step) {
        const double own = losses[static_cast<size_t>(step)];
        largest =
            std::max(largest, std::abs(theirs[step].item<double>() - own));
      }
      EXPECT_LE(largest, kTolerance) << model << " " << name;
    }
    EXPECT_LT(losses.back(), losses.front() - 0.1) << model;
  }
}

}  // namespace echelon::language_pytorch_test
