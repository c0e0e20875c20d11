// gpt and llama against transformers: folders that it writes, imported, and
// ours, exported, give the same logits; training gives the same losses.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/files/rank_file.h"
#include "echelon/checkpoint/tensors/tensor_file.h"
#include "echelon/comm/world.h"
#include "echelon/job/job.h"
#include "echelon/models/make_network.h"
#include "echelon/models/weights.h"
#include "echelon/parallel/tensor/vocab_cross_entropy.h"
#include "tests/support/error_text.h"
#include "tests/support/places.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon {
namespace language_pytorch_test {

constexpr int64_t kWords = 51;
constexpr int64_t kSequence = 17;
constexpr double kTolerance = 1e-5;

torch::Tensor tokens() {
  const auto steps = torch::arange(3 * kSequence, torch::kInt64);
  return (steps * 7 + steps * steps * 5).remainder(kWords).view({3, kSequence});
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

// The largest difference on any rank of `size`, each with its part of the
// words.
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
    const auto mine = parallel.part_of(kWords);
    largest[static_cast<size_t>(world.rank())] = largest_difference(
        network->forward(Tensors{tokens()})[0],
        expected.narrow(-1, mine.begin, mine.size()));
  });
  return *std::max_element(largest.begin(), largest.end());
}

TEST(LanguagePytorch, FoldersOfTransformersGiveTheSameLogits) {
  ECHELON_NEED_TRANSFORMERS();
  const TempFolder folder;
  save_tensors(folder.path("tokens.safetensors"), {{"tokens", tokens()}});
  run_python_script("models/language_reference.py", {"make", folder.path()});
  for (const std::string name :
       {"gpt", "llama", "llama_tied", "llama_stretched", "llama_bf16"}) {
    const auto expected = logits_in(folder.path(name + ".logits.safetensors"));
    EXPECT_GT(expected.std().item<double>(), 0.1) << name;
    const auto imported = folder.path(name + ".imported");
    echelon_command("import " + folder.path(name) + " " + imported);
    const auto options = load_job(imported + "/config.toml").model;
    EXPECT_EQ(options.weights, imported + "/checkpoints/last.safetensors");
    for (const int size : {1, 2, 3}) {
      for (const auto& weights : {options.weights, folder.path(name)}) {
        EXPECT_LE(difference(options, weights, expected, size), kTolerance)
            << name << " of " << weights << " on " << size;
      }
    }
    EXPECT_LE(
        difference(
            options, options.weights, expected, 2, {.sequence_parallel = true}),
        kTolerance)
        << name;
    std::cout << name << ": logits of size "
              << expected.abs().max().item<double>() << ", largest difference "
              << difference(options, options.weights, expected, 1) << "\n";
    if (name == "gpt") {
      EXPECT_LE(
          difference(options, folder.path("gpt_base"), expected, 2),
          kTolerance);
    }
  }
}

ModelOptions model(const std::string& name) {
  ModelOptions options;
  options.name = name;
  options.layers = 2;
  options.hidden_size = 24;
  options.heads = 6;
  options.intermediate_size = 37;
  options.max_positions = 24;
  options.vocab_size = kWords;
  return options;
}

std::string toml_of(const ModelOptions& options) {
  Job job;
  job.model = options;
  return to_toml(job);
}

// A checkpoint of two ranks: of each matrix, rows are cut among them.
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

// A folder as a run leaves it.
std::shared_ptr<Network>
make_run(const TempFolder& folder, const ModelOptions& options) {
  const auto network = make_network(options, {kSequence}, kWords, 3);
  folder.write("config.toml", toml_of(options));
  folder.make_folder("checkpoints");
  save_weights(*network, folder.path("checkpoints/last.safetensors"));
  return network;
}

TEST(LanguagePytorch, TransformersLoadsOurFolders) {
  ECHELON_NEED_TRANSFORMERS();
  const TempFolder folder;
  save_tensors(folder.path("tokens.safetensors"), {{"tokens", tokens()}});
  std::map<std::string, ModelOptions> models;
  models["gpt"] = model("gpt");
  models["llama"] = model("llama");
  models["llama"].kv_heads = 3;
  models["tied"] = models["llama"];
  models["tied"].tie_embeddings = true;
  models["tied"].rope_theta = 700;
  models["stretched"] = models["llama"];
  models["stretched"].rope_factor = 4;
  models["stretched"].rope_original_positions = 8;
  std::map<std::string, torch::Tensor> ours;
  for (const auto& [name, options] : models) {
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
    }
    if (name == "tied" || name == "gpt") {
      // What training saves on its way.
      std::filesystem::remove(run.path("checkpoints/last.safetensors"));
      write_checkpoint(
          run.path("checkpoints/step-00000007"), options,
          owned_tensors(*network));
    } else {
      save_weights(*network, run.path("checkpoints/last.safetensors"));
    }
    network->eval();
    ours[name] = network->forward(Tensors{tokens()})[0].detach();
    echelon_command(
        "export " + run.path() + " " + folder.path(name + ".exported") +
        " --format huggingface --max-shard-bytes " +
        (name == "gpt" ? "20000" : "5000000000"));
  }
  EXPECT_TRUE(std::filesystem::exists(
      folder.path("gpt.exported/model.safetensors.index.json")));
  run_python_script("models/language_reference.py", {"run", folder.path()});
  for (const auto& [name, logits] : ours) {
    const auto theirs = logits_in(folder.path(name + ".back.safetensors"));
    EXPECT_GT(theirs.std().item<double>(), 0.1) << name;
    const double error = largest_difference(logits, theirs);
    EXPECT_LE(error, kTolerance) << name;
    std::cout << name << ": largest difference " << error << "\n";
  }
}

// What torch.distributed.checkpoint saves: from its safetensors files, and from
// its pickles by the commands that the refusal names.
TEST(LanguagePytorch, CheckpointsOfPytorchComeIn) {
  ECHELON_NEED_TRANSFORMERS();
  const TempFolder folder;
  save_tensors(folder.path("tokens.safetensors"), {{"tokens", tokens()}});
  run_python_script("models/language_reference.py", {"dcp", folder.path()});
  const auto expected = logits_in(folder.path("dcp.logits.safetensors"));
  EXPECT_GT(expected.std().item<double>(), 0.1);
  size_t shards = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(folder.path("sharded"))) {
    shards += entry.path().filename().string().starts_with("shard-0000");
  }
  EXPECT_EQ(shards, 2u);
  const auto check = [&](const std::string& name) {
    echelon_command(
        "import " + folder.path(name) + " " + folder.path(name + ".in"));
    const auto options = load_job(folder.path(name + ".in/config.toml")).model;
    EXPECT_LE(difference(options, options.weights, expected, 2), kTolerance);
  };
  check("sharded");

  const auto way_in = error_text<CheckpointError>(
      [&] { WeightsSource(folder.path("pickled")); });
  folder.make_folder("converted");
  std::istringstream lines(way_in);
  int commands = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  python ")) continue;
    const auto command = "cd " + folder.path("converted") + " && " +
                         pytorch_python() + line.substr(8) + " > /dev/null";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    ++commands;
  }
  EXPECT_EQ(commands, 2) << way_in;
  std::filesystem::copy(
      folder.path("sharded/config.json"), folder.path("converted/config.json"));
  check("converted");
}

// The losses of 20 steps: those of transformers and of a model of torch.nn.
TEST(LanguagePytorch, TrainingGivesTheSameLosses) {
  ECHELON_NEED_TRANSFORMERS();
  const TempFolder folder;
  const TempFolder run;
  const auto network = make_run(run, model("gpt"));
  echelon_command(
      "export " + run.path() + " " + folder.path("gpt.exported") +
      " --format huggingface");
  constexpr int64_t kSteps = 20;
  const auto numbers = torch::arange(kSteps * 4 * 18, torch::kInt64);
  const auto batches =
      (numbers * 7 + numbers.square()).remainder(kWords).view({kSteps, 4, 18});
  save_tensors(folder.path("batches.safetensors"), {{"tokens", batches}});
  run_python_script("models/language_reference.py", {"train", folder.path()});

  torch::optim::AdamW optimizer(
      network->parameters(),
      torch::optim::AdamWOptions(3e-3).weight_decay(0.01));
  std::vector<double> losses;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto inputs = batches[step].narrow(1, 0, 17);
    const auto targets = batches[step].narrow(1, 1, 17).contiguous();
    const auto logits = network->forward(Tensors{inputs})[0];
    const auto loss = vocab_cross_entropy(logits, targets, kWords, {}).mean();
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  const auto path = folder.path("losses.safetensors");
  for (const char* name : {"transformers", "torch"}) {
    const auto theirs = load_tensors(path, {name})[0];
    ASSERT_EQ(theirs.numel(), kSteps);
    double largest = 0;
    for (int64_t step = 0; step < kSteps; ++step) {
      largest = std::max(
          largest,
          std::abs(
              theirs[step].item<double>() - losses[static_cast<size_t>(step)]));
    }
    EXPECT_LE(largest, kTolerance) << name;
    std::cout << "losses from " << losses.front() << " to " << losses.back()
              << ", largest difference from " << name << " " << largest << "\n";
  }
  EXPECT_LT(losses.back(), losses.front() - 0.1);
}

}  // namespace language_pytorch_test
}  // namespace echelon
