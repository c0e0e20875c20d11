// Export and import of checkpoints by the program `echelon`, without LibTorch
// and with the memory of a few pieces.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "echelon/architecture/language_model.h"
#include "echelon/architecture/trained_parameters.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/format/float_convert.h"
#include "echelon/job/job.h"
#include "echelon/layout/shard.h"
#include "tests/checkpoint/files/written_checkpoint.h"
#include "tests/cli/typed.h"
#include "tests/support/error_text.h"
#include "tests/support/process.h"

namespace echelon::export_test {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing_support::Command;

const std::string kEchelon = program("echelon");

ModelOptions model(const std::string& name) {
  ModelOptions options;
  options.name = name;
  options.layers = 2;
  options.hidden_size = 24;
  options.heads = 6;
  if (name == "llama") options.kv_heads = 3;
  options.intermediate_size = 37;
  options.max_positions = 24;
  options.vocab_size = 51;
  if (name == "mixtral") {
    options.experts = 3;
    options.experts_per_token = 2;
  }
  return options;
}

std::string toml_of(const ModelOptions& options) {
  Job job;
  job.model = options;
  return to_toml(job);
}

std::vector<ParameterInfo> parameters_of(const ModelOptions& options) {
  return list_language_parameters(
      language_model_shape(options, options.vocab_size), options.dtype);
}

WholeTensor normal_tensor(const ParameterInfo& info, Random& random) {
  std::normal_distribution<float> normal(0, 0.1f);
  std::vector<float> values(static_cast<size_t>(info.num_elements()));
  for (auto& value : values) value = normal(random);
  WholeTensor tensor{info.name, "F32", info.shape, {}};
  tensor.bytes.resize(4 * values.size());
  std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

// Adds the slices that rank (d, t) of fsdp=2,tp=2 writes: matrices are sharded
// along `dim`, other tensors belong to the first tensor-parallel rank, and fsdp
// splits the elements of each in halves, row by row.
void add_part(
    RankSlices& rank, const WholeTensor& tensor, int d, int t, int dim) {
  const Shard shard = tensor.shape.size() < 2
                          ? replicated(tensor.shape, t)
                          : even_shard(tensor.shape, dim, t, 2);
  const auto local = shard.local_shape();
  const IndexRange range = even_range(whole_box(local).numel(), d, 2);
  for (const auto& placed : placed_boxes(tensor.shape, &shard, &range, true)) {
    rank.add(tensor, placed.box);
  }
}

void write_manifest_of(
    const std::string& folder, const std::vector<RankPart>& parts,
    const std::string& layout, const std::string& config, int64_t step) {
  CheckpointManifest manifest;
  manifest.step = step;
  manifest.layout = layout;
  manifest.ranks = 4;
  manifest.config = config;
  manifest.config_hash = checksum(config.data(), config.size());
  add_parts(manifest, parts);
  write_manifest(folder, manifest);
}

void write_sharded_checkpoint(
    const std::string& folder, const std::vector<WholeTensor>& tensors,
    const std::string& config, int64_t step) {
  std::vector<RankSlices> ranks(4);
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (int rank = 0; rank < 4; ++rank) {
      add_part(
          ranks[static_cast<size_t>(rank)], tensors[i], rank / 2, rank % 2,
          static_cast<int>(i % 2));
    }
  }
  // Optimizer state, which is not exported.
  Random random(3);
  const auto state =
      random_tensor("lm_head.weight/exp_avg", "F32", {5}, random);
  ranks[1].add(state, whole_box(state.shape));
  ranks[1].slices.back().kind = SavedKind::optimizer;

  write_manifest_of(
      folder, write_rank_files(folder, ranks), "fsdp=2,tp=2", config, step);
}

Outcome echelon_command(std::vector<std::string> words) {
  words.insert(words.begin(), kEchelon);
  Command command(words);
  const int code = command.wait();
  return {code, command.out(), command.err()};
}

class Export : public testing::Test {
 protected:
  // Makes a run with the checkpoint of one step; returns its tensors.
  std::vector<WholeTensor>
  make_run(const std::string& name, const ModelOptions& options, int64_t step) {
    Random random(static_cast<uint64_t>(step));
    std::vector<WholeTensor> tensors;
    for (const auto& info : parameters_of(options)) {
      if (info.tied_to.empty()) tensors.push_back(normal_tensor(info, random));
    }
    folder_.write(name + "/config.toml", toml_of(options));
    write_sharded_checkpoint(
        checkpoint(name, step), tensors, toml_of(options), step);
    return tensors;
  }
  std::string checkpoint(const std::string& run, int64_t step) const {
    std::string number = std::to_string(step);
    number.insert(0, 8 - number.size(), '0');
    return folder_.path(run + "/checkpoints/step-" + number);
  }
  std::string path(const std::string& name) const { return folder_.path(name); }

  TempFolder folder_;
};

void expect_equal(
    const std::string& path, const std::vector<WholeTensor>& tensors) {
  const WeightsSource written(path);
  EXPECT_EQ(written.tensors().size(), tensors.size());
  for (const auto& tensor : tensors) {
    const auto* found = written.find(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_EQ(found->facts.shape, tensor.shape) << tensor.name;
    const auto bytes = found->file->bytes(*found->info);
    EXPECT_TRUE(std::equal(
        bytes.begin(), bytes.end(), tensor.bytes.begin(), tensor.bytes.end()))
        << tensor.name;
  }
}

TEST_F(Export, OutAndBackIsTheSameToTheLastBit) {
  auto tied = model("llama");
  tied.tie_embeddings = true;
  for (const auto& [name, options] : std::map<std::string, ModelOptions>{
           {"gpt", model("gpt")}, {"llama", model("llama")}, {"tied", tied}}) {
    SCOPED_TRACE(name);
    const auto tensors = make_run(name, options, 100);
    const auto out = path(name + ".exported");
    const auto exported = printed(echelon_command(
        {"export", path(name), out, "--format", "huggingface",
         "--max-shard-bytes", "20000"}));
    EXPECT_THAT(
        exported, HasAll(
                      " shards of weights; ",
                      "parameters in float32, from " + checkpoint(name, 100)));
    EXPECT_TRUE(fs::exists(out + "/model.safetensors.index.json"));
    expect_equal(out, tensors);
    const auto back = path(name + ".back");
    printed(echelon_command({"import", out, back}));
    expect_equal(back + "/checkpoints/last.safetensors", tensors);
    EXPECT_EQ(
        parameters_of(load_job(back + "/config.toml").model).size(),
        parameters_of(options).size());
    // Exported again, now from the file that import wrote.
    const auto again = path(name + ".again");
    printed(
        echelon_command({"export", back, again, "--format", "huggingface"}));
    expect_equal(again, tensors);
    EXPECT_EQ(
        read_file(again + "/config.json"), read_file(out + "/config.json"));
  }
}

TEST_F(Export, InTheDtypeThatIsAskedFor) {
  auto tensors = make_run("run", model("llama"), 1);
  for (auto& tensor : tensors) {
    std::vector<std::byte> half(tensor.bytes.size() / 2);
    convert_floats(
        "F32", tensor.bytes.data(), "BF16", half.data(),
        static_cast<int64_t>(half.size() / 2));
    tensor.bytes = half;
  }
  printed(echelon_command(
      {"export", path("run"), path("out"), "--format", "huggingface", "--dtype",
       "bfloat16"}));
  EXPECT_THAT(
      names_in(path("out")),
      testing::ElementsAre(
          "config.json", "generation_config.json", "model.safetensors"));
  EXPECT_THAT(
      read_file(path("out/config.json")),
      HasSubstr("\"torch_dtype\": \"bfloat16\""));
  expect_equal(path("out"), tensors);
  printed(echelon_command(
      {"export", path("run"), path("one.safetensors"), "--dtype", "bfloat16"}));
  expect_equal(path("one.safetensors"), tensors);
}

// A checkpoint of adapters, whose model is in a file of its own.
TEST_F(Export, AdaptersAloneOrAddedToTheirModel) {
  const std::map<std::string, std::string> targets = {
      {"gpt", "c_attn"}, {"llama", "q_proj"}, {"mixtral", "w2"}};
  for (const char* name : {"gpt", "llama", "mixtral"}) {
    SCOPED_TRACE(name);
    const std::string base_run = std::string(name) + "-base";
    const auto base = make_run(base_run, model(name), 1);
    const auto weights = path(base_run + ".safetensors");
    printed(echelon_command({"export", path(base_run), weights}));
    auto options = model(name);
    options.weights = weights;
    options.lora = {.rank = 2, .alpha = 3};
    options.lora.targets = {targets.at(name)};
    Random random(5);
    std::vector<WholeTensor> adapters;
    for (const auto& info : list_parameters(options, {24}, 51)) {
      if (is_adapter(info.name))
        adapters.push_back(normal_tensor(info, random));
    }
    const bool experts = name == std::string("mixtral");
    ASSERT_EQ(adapters.size(), experts ? 12u : 4u);
    write_sharded_checkpoint(
        checkpoint(name, 7), adapters, toml_of(options), 7);
    folder_.write(std::string(name) + "/config.toml", toml_of(options));

    const auto peft = path(std::string(name) + ".peft");
    printed(echelon_command({"export", path(name), peft, "--format", "peft"}));
    EXPECT_THAT(
        names_in(peft),
        testing::ElementsAre(
            "adapter_config.json", "adapter_model.safetensors"));
    auto renamed = adapters;
    for (auto& one : renamed) one.name = "base_model.model." + one.name;
    expect_equal(peft + "/adapter_model.safetensors", renamed);
    EXPECT_THAT(
        read_file(peft + "/adapter_config.json"),
        HasAll(
            "\"r\": 2", "\"lora_alpha\": 3.0", options.lora.targets.front(),
            weights));

    const auto merged = path(std::string(name) + ".merged");
    printed(echelon_command(
        {"export", path(name), merged, "--format", "huggingface"}));
    const auto values = [](const WholeTensor& tensor) {
      std::vector<float> all(tensor.bytes.size() / 4);
      std::memcpy(all.data(), tensor.bytes.data(), tensor.bytes.size());
      return all;
    };
    auto expected = base;
    for (auto& one : expected) {
      for (size_t i = 0; i < adapters.size(); i += 2) {
        const auto layer = adapters[i].name.substr(
            0, adapters[i].name.size() - kAdapterA.size());
        if (one.name != layer + ".weight") continue;
        auto w = values(one);
        const auto a = values(adapters[i]);
        const auto b = values(adapters[i + 1]);
        const auto rows = static_cast<size_t>(one.shape[0]);
        const auto columns = static_cast<size_t>(one.shape[1]);
        const bool gpt = name == std::string("gpt");
        for (size_t r = 0; r < rows; ++r) {
          for (size_t c = 0; c < columns; ++c) {
            const size_t out = gpt ? c : r, in = gpt ? r : c;
            double sum = w[r * columns + c];
            for (size_t k = 0; k < 2; ++k) {
              sum += 1.5 * b[out * 2 + k] * a[k * (gpt ? rows : columns) + in];
            }
            w[r * columns + c] = static_cast<float>(sum);
          }
        }
        std::memcpy(one.bytes.data(), w.data(), one.bytes.size());
      }
    }
    const WeightsSource written(merged);
    for (const auto& one : expected) {
      const auto* found = written.find(one.name);
      ASSERT_NE(found, nullptr) << one.name;
      const auto bytes = found->file->bytes(*found->info);
      WholeTensor there = one;
      there.bytes.assign(bytes.begin(), bytes.end());
      const auto mine = values(one), theirs = values(there);
      for (size_t i = 0; i < mine.size(); ++i) {
        ASSERT_NEAR(mine[i], theirs[i], 1e-7) << one.name << " " << i;
      }
    }
    EXPECT_EQ(written.tensors().size(), expected.size());

    fs::remove(weights);
    const auto lost = echelon_command(
        {"export", path(name), path("lost"), "--format", "huggingface"});
    EXPECT_THAT(lost.err, HasSubstr("the adapters' model is not there"));
  }
  const auto none = echelon_command(
      {"export", path("gpt-base"), path("none"), "--format", "peft"});
  EXPECT_THAT(none.err, HasSubstr("has no adapters"));
}

TEST_F(Export, TakesTheNewestCheckpointOrTheOneThatIsNamed) {
  const auto old = make_run("run", model("gpt"), 100);
  const auto newest = make_run("run", model("gpt"), 200);
  folder_.write("run/checkpoints/last.safetensors", "of an older time");
  int number = 0;
  for (const auto& [place, tensors] :
       {std::pair{path("run"), newest},
        {path("run/checkpoints"), newest},
        {checkpoint("run", 200), newest},
        {checkpoint("run", 100) + "/", old}}) {
    SCOPED_TRACE(place);
    const auto out = path(std::to_string(++number) + ".safetensors");
    printed(echelon_command({"export", place, out}));
    expect_equal(out, tensors);
  }
  // A checkpoint includes its configuration.
  fs::rename(checkpoint("run", 100), path("copy"));
  printed(echelon_command(
      {"export", path("copy"), path("alone"), "--format", "huggingface"}));
  expect_equal(path("alone"), old);
}

TEST_F(Export, DamageIsNamedAndLeavesNothing) {
  make_run("run", model("gpt"), 100);
  make_run("run", model("gpt"), 200);
  const auto before = names_in(folder_.path());
  const auto file = checkpoint("run", 200) + "/rank-00002.safetensors";
  {
    std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
    bytes.seekg(-5, std::ios::end);
    const char flipped = static_cast<char>(bytes.get() ^ 1);
    bytes.seekp(-5, std::ios::end);
    bytes.put(flipped);
  }
  for (const char* format : {"huggingface", "safetensors"}) {
    const auto outcome = echelon_command(
        {"export", path("run"), path("out"), "--format", format});
    EXPECT_EQ(outcome.exit_code, 3);
    EXPECT_THAT(
        outcome.err, HasAll(
                         file, "\"transformer.wte.weight\" and others",
                         "; `echelon export " + checkpoint("run", 100) +
                             " …` writes the one before it"));
    EXPECT_EQ(names_in(folder_.path()), before);
  }
  printed(echelon_command({"export", checkpoint("run", 100), path("out")}));
  fs::remove(checkpoint("run", 100) + "/rank-00001.safetensors");
  const auto missing =
      echelon_command({"export", checkpoint("run", 100), path("other")});
  EXPECT_EQ(missing.exit_code, 3);
  EXPECT_THAT(missing.err, HasSubstr("rank-00001.safetensors"));
  EXPECT_THAT(missing.err, Not(HasSubstr("before it")));
}

TEST_F(Export, RefusesWhatIsNoCheckpointOrNoSuchModel) {
  const auto refused = [&](std::vector<std::string> words) {
    words.insert(words.begin(), "export");
    const auto outcome = echelon_command(words);
    EXPECT_THAT(outcome.exit_code, testing::AnyOf(2, 3));
    EXPECT_THAT(outcome.out, IsEmpty());
    return outcome.err;
  };
  const auto out = path("out");
  EXPECT_THAT(
      refused({path("nothing"), out}),
      HasSubstr(path("nothing") + ": there is no such folder"));
  folder_.make_folder("empty");
  EXPECT_THAT(refused({path("empty"), out}), HasSubstr("has no checkpoint"));
  folder_.write("text", "words");
  EXPECT_THAT(refused({path("text"), out}), HasSubstr("is a file"));
  folder_.write("run/config.toml", "");
  EXPECT_THAT(refused({path("run"), out}), HasSubstr("has no checkpoint"));

  // transformers does not have this model, but it can be written as one file.
  Random random(1);
  const auto tensor = random_tensor("fc.weight", "F32", {3, 2}, random);
  write_sharded_checkpoint(
      checkpoint("mlp", 1), {tensor}, "[model]\nname = \"mlp\"\n", 1);
  EXPECT_THAT(
      refused({path("mlp"), out, "--format", "huggingface"}),
      HasSubstr("[model] name=\"mlp\": transformers can load"));
  printed(echelon_command({"export", path("mlp"), path("mlp.safetensors")}));
  // The configuration does not fit the tensors.
  auto other = model("gpt");
  other.layers = 3;
  const auto tensors = make_run("gpt", model("gpt"), 1);
  write_sharded_checkpoint(checkpoint("gpt", 2), tensors, toml_of(other), 2);
  EXPECT_THAT(
      refused({path("gpt"), out, "--format", "huggingface"}),
      AllOf(
          HasSubstr("does not fit the model in 12 places"),
          HasSubstr("\"transformer.h.2.ln_1.weight\" is missing")));

  EXPECT_FALSE(fs::exists(out));
  folder_.write("there/file", "");
  EXPECT_THAT(
      refused({checkpoint("gpt", 1), path("there"), "--format", "huggingface"}),
      HasSubstr("there: exists already; name a new folder"));
  EXPECT_THAT(
      refused({checkpoint("gpt", 1), path("a/b"), "--format", "huggingface"}),
      HasSubstr("make it first"));
  EXPECT_THAT(
      names_in(folder_.path()), testing::Each(Not(HasSubstr(".part-"))));
}

TEST_F(Export, WhatIsNoHuggingFaceFolderIsSaidWithTheWayIn) {
  make_run("run", model("gpt"), 1);
  const auto refused = [&](const std::string& folder) {
    const auto outcome = echelon_command({"import", folder, path("out")});
    EXPECT_THAT(outcome.exit_code, testing::AnyOf(2, 3));
    EXPECT_FALSE(fs::exists(path("out")));
    return outcome.err;
  };
  EXPECT_THAT(
      refused(checkpoint("run", 1)),
      HasSubstr("is a checkpoint of Echelon; `echelon train --resume`"));
  folder_.write("dcp/.metadata", "");
  folder_.write("dcp/__0_0.distcp", "");
  EXPECT_THAT(
      refused(path("dcp")),
      AllOf(
          HasSubstr(path("dcp") + ": is not a Hugging Face folder; "),
          HasSubstr("dcp_to_torch '" + path("dcp") + "'")));
  EXPECT_THAT(
      echelon_command({"export", path("dcp"), path("out")}).err,
      AllOf(HasSubstr("has no checkpoint"), HasSubstr("(DCP)")));
  folder_.write("sharded/shard-00001-model-00001-of-00001.safetensors", "");
  EXPECT_THAT(
      refused(path("sharded")),
      HasSubstr("config.json: is missing; add the config.json of the"));
  folder_.make_folder("empty");
  EXPECT_THAT(refused(path("empty")), HasSubstr("a Hugging Face folder has a"));
}

// An export that is killed before its files are renamed, and another one.
TEST_F(Export, WhatAKilledOneLeftTheNextRemoves) {
  if (std::system("strace -o /dev/null true >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "strace is not there, or may not trace here "
                    "(setup/packages.sh installs it)";
  }
  make_run("run", model("gpt"), 1);
  for (const std::string format : {"safetensors", "huggingface"}) {
    SCOPED_TRACE(format);
    const std::string out = format + "-out";
    const std::vector<std::string> words = {
        "export", path("run"), path(out), "--format", format};
    std::vector<std::string> killed = {
        "strace", "-f",
        "-o",     "/dev/null",
        "-e",     "trace=rename,renameat",
        "-e",     "inject=rename,renameat:signal=KILL",
        kEchelon};
    killed.insert(killed.end(), words.begin(), words.end());
    Command first(killed);
    EXPECT_NE(first.wait(), 0);
    const auto left = names_in(folder_.path());
    EXPECT_EQ(left.size(), 2) << testing::PrintToString(left);
    printed(echelon_command(words));
    EXPECT_THAT(
        names_in(folder_.path()), testing::UnorderedElementsAre(out, "run"));
    fs::remove_all(path(out));
  }
}

TEST_F(Export, AFullDiskIsSaidBeforeAnythingIsWritten) {
  make_run("run", model("gpt"), 1);
  const auto disk = folder_.make_folder("disk");
  const auto on_disk = [&](const std::vector<std::string>& words) {
    std::vector<std::string> all = {
        "unshare",
        "--mount",
        "sh",
        "-c",
        "mount -t tmpfs -o size=16k tmpfs " + disk +
            " && { \"$@\"; code=$?; ls -A " + disk + "; exit $code; }",
        "sh"};
    all.insert(all.end(), words.begin(), words.end());
    Command command(all);
    const int code = command.wait();
    return Outcome{code, command.out(), command.err()};
  };
  if (on_disk({"true"}).exit_code != 0) {
    GTEST_SKIP() << "this system lets us mount no file system of our own "
                    "(`unshare --mount`, as root)";
  }
  for (const char* format : {"huggingface", "safetensors"}) {
    const auto outcome = on_disk(
        {kEchelon, "export", path("run"), disk + "/out", "--format", format});
    EXPECT_EQ(outcome.exit_code, 3);
    EXPECT_THAT(
        outcome.err,
        testing::ContainsRegex("need.? [0-9]+ bytes, [0-9]+ are free"));
    EXPECT_THAT(outcome.out, IsEmpty());
  }
}

// The peak memory of a process; it includes at most our own at its start.
int64_t peak_bytes(const std::vector<std::string>& words) {
  std::vector<char*> arguments;
  for (const auto& word : words) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  int status = 0;
  struct rusage usage = {};
  EXPECT_EQ(::wait4(child, &status, 0, &usage), child);
  EXPECT_EQ(status, 0) << words[1];
  return usage.ru_maxrss * 1024;
}

// 600 MiB of weights; all tensors share their values, so that this process
// needs little memory.
TEST_F(Export, TakesLittleMemoryWhateverTheModel) {
  ModelOptions options = model("gpt");
  options.layers = 13;
  options.hidden_size = 1024;
  options.heads = 8;
  options.intermediate_size = 4096;
  const auto parameters = parameters_of(options);
  std::vector<float> values(5 << 20);
  Random random(1);
  for (auto& value : values) {
    value = static_cast<float>(random_below(random, 1000)) / 1000;
  }
  std::vector<RankPart> parts;
  const auto folder = checkpoint("run", 1);
  fs::create_directories(folder);
  int64_t total = 0;
  for (int rank = 0; rank < 4; ++rank) {
    std::vector<SliceBytes> slices;
    for (const auto& info : parameters) {
      if (!info.tied_to.empty()) continue;
      const Shard shard = even_shard(
          info.shape, static_cast<int64_t>(info.shape.size()) - 1, rank, 4);
      for (const auto& placed :
           placed_boxes(info.shape, &shard, nullptr, true)) {
        const auto bytes = static_cast<size_t>(4 * placed.box.numel());
        const auto all = std::as_bytes(std::span(values));
        ASSERT_LE(bytes, all.size());
        slices.push_back(
            {info.name, SavedKind::parameter, "F32", info.shape, placed.box,
             all.subspan(4 * slices.size(), bytes)});
        total += static_cast<int64_t>(bytes);
      }
    }
    parts.push_back(write_rank_file(folder, rank_file_name(rank), slices));
  }
  ASSERT_GT(total, int64_t{600} << 20);
  write_manifest_of(folder, parts, "tp=4", toml_of(options), 1);
  values = {};

  const int64_t start = peak_bytes({kEchelon, "version"});
  const auto out = path("out");
  const int64_t exporting = peak_bytes(
      {kEchelon, "export", path("run"), out, "--format", "huggingface",
       "--dtype", "bfloat16", "--max-shard-bytes", "100000000"});
  const int64_t importing = peak_bytes({kEchelon, "import", out, path("back")});
  const int64_t wide = peak_bytes(
      {kEchelon, "export", path("back"), path("wide.safetensors"), "--dtype",
       "float32"});
  EXPECT_GT(
      fs::file_size(path("wide.safetensors")), static_cast<uintmax_t>(total));
  constexpr int64_t kMiB = 1 << 20;
  std::cout << (total / kMiB) << " MiB of weights; at the start "
            << start / kMiB << " MiB, above it: export "
            << (exporting - start) / kMiB << ", import "
            << (importing - start) / kMiB << ", export of one file "
            << (wide - start) / kMiB << "\n";
  EXPECT_LT(exporting - start, 200 * kMiB);
  EXPECT_LT(importing - start, 200 * kMiB);
  EXPECT_LT(wide - start, 200 * kMiB);
}

}  // namespace echelon::export_test
