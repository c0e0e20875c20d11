// The real `echelon` with a stand-in for echelon-train that prints its
// arguments, so that the command line is tested without LibTorch too.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "echelon/architecture/hugging_face_config.h"
#include "echelon/architecture/parameter_list.h"
#include "echelon/checkpoint/format/hashes.h"
#include "echelon/checkpoint/format/safetensors.h"
#include "echelon/text/text_file.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/metrics.h"
#include "tests/cli/typed.h"
#include "tests/support/error_text.h"
#include "tests/support/process.h"

namespace echelon::cli_test {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::Contains;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr const char* kStandIn = R"SH(#!/bin/sh
echo "rank ${RANK:-none} of ${WORLD_SIZE:-none}: $*"
echo "line for the log of rank $RANK" >&2
if [ "$1" = verify ]; then echo "config: $2"; grep "^name" "$2"; fi
if [ -f exit_code ]; then exit "$(cat exit_code)"; fi
)SH";

class CommandLine : public testing::Test {
 protected:
  CommandLine() {
    write("bin/echelon-train", kStandIn);
    ::chmod(folder_.path("bin/echelon-train").c_str(), 0755);
    fs::copy_file(program("echelon"), folder_.path("bin/echelon"));
    write(
        "first.toml", "[train]\nsteps = 5\nbatch = 12\nrun = \"runs/first\"\n");
  }

  // Runs a line of the shell in the test's folder.
  Outcome shell(const std::string& command) {
    return echelon::shell(folder_, command);
  }
  Outcome run(const std::string& arguments) {
    return shell("bin/echelon " + arguments);
  }
  void expect_error(const std::string& arguments, const std::string& part) {
    EXPECT_THAT(run(arguments).err, HasSubstr(part)) << arguments;
  }
  std::string path(const std::string& name) const { return folder_.path(name); }
  std::string read(const std::string& name) const {
    return read_file(path(name));
  }
  void write(const std::string& name, const std::string& text) const {
    folder_.write(name, text);
  }

  TempFolder folder_;
};

TEST_F(CommandLine, SaysItsVersion) {
  EXPECT_THAT(run("version").out, StartsWith("echelon "));
  EXPECT_EQ(run("--version").out, run("version").out);
  const auto json_version = json::parse(run("version --json").out);
  EXPECT_EQ(
      "echelon " + json_version["version"].get<std::string>() + "\n",
      run("version").out);
}

TEST_F(CommandLine, HelpStartsWithExamples) {
  std::vector<std::string> commands = {
      "",           "train",  "run",      "verify", "compare",
      "explain",    "export", "import",   "bench",  "checkpoint",
      "schedule",   "plan",   "simulate", "doctor", "config",
      "completion", "help",   "version",  "deploy", "submit"};
  commands.insert(
      commands.end(),
      {"watch", "report", "bench collectives", "checkpoint list",
       "checkpoint show", "checkpoint verify", "checkpoint diff", "config show",
       "config reference"});
  for (const auto& command : commands) {
    const auto outcome = run(command + " --help");
    EXPECT_EQ(outcome.exit_code, 0) << command;
    EXPECT_THAT(outcome.out, StartsWith("Examples\n  ")) << command;
    EXPECT_THAT(outcome.out, HasAll("echelon " + command, "--help")) << command;
    for (const auto& line : lines_of(outcome.out)) {
      EXPECT_LE(line.size(), 82u) << line;
    }
  }
}

TEST_F(CommandLine, WithoutACommandItHelps) {
  const auto outcome = run("");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.out, StartsWith("Examples"));
}

TEST_F(CommandLine, NamesTheNearestCommandAndFlag) {
  for (const auto& [arguments, message] :
       std::vector<std::pair<std::string, std::string>>{
           {"trian first.toml",
            "echelon: unknown command \"trian\"; did you mean \"train\"?\n"},
           {"zebra",
            "echelon: unknown command \"zebra\"; `echelon --help` lists the "
            "choices\n"},
           {"config shwo first.toml",
            "echelon config: unknown command \"shwo\"; did you mean "
            "\"show\"?\n"},
           {"train first.toml --overwrit",
            "echelon train: unknown flag --overwrit; did you mean "
            "\"--overwrite\"?\n"},
           {"train first.toml --lay-out=dp=2",
            "echelon train: unknown flag --lay-out; did you mean "
            "\"--layout\"?\n"},
           {"run -n 2 --log-dri x -- true",
            "echelon run: unknown flag --log-dri; did you mean "
            "\"--log-dir\"?\n"},
           {"doctor now",
            "echelon doctor: unexpected argument \"now\"; `echelon doctor "
            "--help` lists the choices\n"}}) {
    const auto outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(outcome.err, message);
    EXPECT_EQ(outcome.out, "") << arguments;
  }
}

TEST_F(CommandLine, SaysWhichArgumentIsMissing) {
  for (const std::string arguments :
       {"train", "export runs/first", "completion", "run -n 2", "run -n 2 --",
        "config", "bench", "train first.toml --set", "train first.toml -n"}) {
    const auto outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_THAT(outcome.err, StartsWith("echelon ")) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr("--help` has examples")) << arguments;
  }
}

TEST_F(CommandLine, FailsWhenOutputCannotBeWritten) {
  EXPECT_NE(shell("bin/echelon config reference > /dev/full").exit_code, 0);
  EXPECT_NE(shell("bin/echelon --help > /dev/full").exit_code, 0);
}

TEST_F(CommandLine, ShowsEveryValueAndItsSource) {
  const auto text = printed(
      run("config show first.toml -n 2 --set optimizer.learning_rate=0.5"));
  EXPECT_THAT(
      text,
      AllOf(
          HasSubstr("[train]\nsteps "), HasSubstr("first.toml:2\n"),
          HasSubstr("--set optimizer.learning_rate=0.5\n"), HasSubstr("-n 2\n"),
          HasSubstr("default\n"), Not(HasSubstr("\033"))));

  const auto rows =
      json::parse(run("config show first.toml --set train.seed=7 --json").out);
  const json seed = {
      {"table", "train"},
      {"key", "seed"},
      {"value", 7},
      {"default", 0},
      {"set_by", "--set train.seed=7"}};
  const json batch = {
      {"table", "train"},
      {"key", "batch"},
      {"value", 12},
      {"default", 64},
      {"set_by", "first.toml:3"}};
  EXPECT_THAT(rows, AllOf(Contains(seed), Contains(batch)));
}

TEST_F(CommandLine, ShowsARunsNameAndItsPattern) {
  write(
      "sweep.toml",
      "[model]\nname = \"simple_cnn\"\n[train]\nsteps = 1\n"
      "run = \"runs/{name}-{set}\"\n");
  const auto show = [&](const std::string& flags) {
    return printed(run("config show sweep.toml --set train.seed=7 " + flags));
  };
  EXPECT_THAT(
      show(""), ContainsRegex("run +\"runs/sweep-seed=7\" +sweep.toml:5, "
                              "run = \"runs/\\{name\\}-\\{set\\}\"\n"));
  const json row = {
      {"table", "train"},
      {"key", "run"},
      {"value", "runs/sweep-seed=7"},
      {"default", "runs/run"},
      {"set_by", "sweep.toml:5"},
      {"pattern", "runs/{name}-{set}"}};
  EXPECT_THAT(json::parse(show("--json")), Contains(row));
}

TEST_F(CommandLine, ShowsTomlThatReadsBack) {
  const auto first = run("config show first.toml --set train.seed=7 --toml");
  write("second.toml", first.out);
  EXPECT_EQ(run("config show second.toml --toml").out, first.out);
  EXPECT_THAT(first.out, HasSubstr("seed = 7\n"));
}

TEST_F(CommandLine, TheReferenceIsTheCommittedPage) {
  EXPECT_EQ(
      run("config reference").out,
      read_file(source_path("doc/configuration.md")))
      << "echelon config reference > doc/configuration.md";
  EXPECT_GT(json::parse(run("config reference --json").out).size(), 50u);
}

TEST_F(CommandLine, TrainStartsRanksWithTheResolvedConfiguration) {
  const auto text = printed(run("train first.toml -n 3 --set train.seed=9"));
  EXPECT_EQ(text, "rank 0 of 3: train runs/first/config.toml --made\n");
  for (const std::string rank : {"0", "1", "2"}) {
    EXPECT_THAT(
        read("runs/first/log/rank-" + rank + ".log"),
        HasSubstr("line for the log of rank " + rank));
  }
  const std::string config = read("runs/first/config.toml");
  EXPECT_THAT(config, HasAll("dp = 3\n", "seed = 9\n", "classes = 10\n"));
  EXPECT_EQ(run("config show runs/first/config.toml --toml").out, config);
}

TEST_F(CommandLine, TrainStartsOneProcessForThreads) {
  const auto out = printed(run("train first.toml -n 3 --ranks threads"));
  EXPECT_EQ(
      out, "rank 0 of 1: train runs/first/config.toml --made --threads 3\n");
}

TEST_F(CommandLine, TrainStartsRanksOfSeveralHosts) {
  const std::string hosts =
      " -n 2 --nnodes 2 --master-addr 127.0.0.1 --master-port " +
      std::to_string(testing_support::free_port());
  const auto outcome = shell(
      "bin/echelon train first.toml" + hosts +
      " --node-rank 1 & bin/echelon train first.toml" + hosts +
      " --node-rank 0; first=$?; wait $! && exit $first");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  // Rank 0 alone has the terminal, and its host made the run's folder.
  EXPECT_THAT(
      outcome.out, AllOf(
                       StartsWith("rank 0 of 4: train /"),
                       testing::EndsWith("/config.toml --made\n")));
  EXPECT_THAT(read("runs/first/config.toml"), HasSubstr("dp = 4\n"));
  EXPECT_THAT(
      read("runs/first/log/rank-2.log"),
      AllOf(StartsWith("rank 2 of 4: train /"), HasSubstr(" --made")));
  for (const auto& [arguments, part] :
       std::vector<std::pair<std::string, std::string>>{
           {"--nnodes 2", "--nnodes 2: needs --master-addr"},
           {"--nnodes 2 --node-rank 2 --master-addr a",
            "--node-rank 2: must be a whole number from 0 to 1"},
           {"--layout dp=3 --nnodes 2 --master-addr a",
            "--nnodes 2: layout dp=3 has 3 ranks"},
           {"-n 2 --ranks threads --nnodes 2 --master-addr a",
            "--ranks threads: threads are on one host"},
           {"-n 2 --set 'train.run=runs/{time}' --nnodes 2 --master-addr a",
            "hosts would name the run differently"},
           {"--nnodes 3:2 --master-addr a",
            "--nnodes MAX 2: must be a whole number from 3 to"},
           {"--nnodes 0:2 --master-addr a",
            "--nnodes MIN 0: must be a whole number from 1 to"},
           {"--join a:29500", "--join a:29500: give --nnodes too"},
           {"--nnodes 1:2 --join a --master-addr b",
            "--join a: is in place of --master-addr b"},
           {"--nnodes 1:2 --join a:0",
            "--join PORT 0: must be a whole number from 1 to 65535"}}) {
    expect_error("train first.toml " + arguments, part);
  }
}

TEST_F(CommandLine, VerifyAndBenchStartRanksOfSeveralHosts) {
  for (const std::string command :
       {"verify first.toml", "bench collectives --backend gloo"}) {
    const std::string hosts =
        " -n 2 --nnodes 2 --master-addr 127.0.0.1 --master-port " +
        std::to_string(testing_support::free_port());
    const auto outcome = shell(
        "bin/echelon " + command + hosts + " --node-rank 1 & bin/echelon " +
        command + hosts + " --node-rank 0; first=$?; wait $! && exit $first");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    EXPECT_THAT(outcome.out, StartsWith("rank 0 of 4: " + command.substr(0, 5)))
        << outcome.out;
  }
  for (const auto& [arguments, part] :
       std::vector<std::pair<std::string, std::string>>{
           {"verify first.toml --layout dp=3 --nnodes 2 --master-addr a",
            "--nnodes 2: layout dp=3 has 3 ranks"},
           {"verify first.toml --nnodes 2", "--nnodes 2: needs --master-addr"},
           {"verify first.toml --resume --layout dp=2 --then tp=2 --nnodes 2 "
            "--master-addr a",
            "--resume saves to a folder of this host alone"},
           {"bench collectives --ranks threads --nnodes 2 --master-addr a",
            "--ranks threads: threads are on one host"},
           {"verify first.toml --nnodes 1:2 --master-addr a",
            "--nnodes 1:2: the hosts of this command do not change"}}) {
    expect_error(arguments, part);
  }
}

TEST_F(CommandLine, MoreRanksThanCoresIsAWarning) {
  const auto outcome =
      run("train first.toml -n 64 --set train.batch=64 --ranks threads");
  if (std::thread::hardware_concurrency() >= 64) GTEST_SKIP();
  EXPECT_THAT(outcome.err, HasSubstr("warning: 64 ranks share "));
}

TEST_F(CommandLine, TrainReplacesARunOnlyWhenAsked) {
  ASSERT_EQ(run("train first.toml").exit_code, 0);
  write("runs/first/metrics.jsonl", "{}\n");
  const auto refused = run("train first.toml --set train.seed=2");
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(
      refused.err,
      "first.toml:4:7: [train] run = \"runs/first\": exists and has no "
      "checkpoints to resume from; --overwrite replaces it, or name another "
      "folder\n");
  EXPECT_TRUE(fs::exists(path("runs/first/metrics.jsonl")));
  EXPECT_EQ(run("train first.toml --overwrite").exit_code, 0);
  EXPECT_FALSE(fs::exists(path("runs/first/metrics.jsonl")));
  // Training with the run's own configuration keeps the run.
  write("runs/first/log/rank-0.log", "what happened\n");
  EXPECT_EQ(run("train runs/first/config.toml").exit_code, 0);
  EXPECT_TRUE(fs::exists(path("runs/first/log/rank-0.log")));
  write("runs/first/checkpoints/last.safetensors", "weights");
  EXPECT_EQ(run("train runs/first/config.toml").exit_code, 2);
}

TEST_F(CommandLine, CheckStartsNothing) {
  const auto out = printed(run("train first.toml -n 2 --check"));
  EXPECT_THAT(out, StartsWith("first.toml: fine\n"));
  EXPECT_THAT(out, HasSubstr("1797 digits"));
  EXPECT_FALSE(fs::exists(path("runs")));
}

TEST_F(CommandLine, WarnsOfASettingWithoutEffect) {
  const auto outcome = run("train first.toml --set optimizer.momentum=0.9");
  EXPECT_EQ(outcome.exit_code, 0);
  EXPECT_THAT(
      outcome.err,
      StartsWith("warning: --set optimizer.momentum=0.9: [optimizer] "
                 "momentum = 0.9: has no effect with optimizer "
                 "\"adamw\"\n"));
}

TEST_F(CommandLine, ReturnsTheExitCodeOfARank) {
  write("exit_code", "4");
  EXPECT_EQ(run("train first.toml -n 2").exit_code, 4);
}

TEST_F(CommandLine, SaysThatEchelonTrainIsMissing) {
  fs::remove(path("bin/echelon-train"));
  for (const std::string command :
       {"train first.toml", "verify first.toml", "bench collectives"}) {
    const auto outcome = run(command);
    EXPECT_EQ(outcome.exit_code, 2) << command;
    EXPECT_THAT(
        outcome.err, HasSubstr("bin/echelon-train: No such file or directory; "
                               "echelon needs it"))
        << command;
  }
  EXPECT_FALSE(fs::exists(path("runs")));
}

TEST_F(CommandLine, FindsEchelonTrainThroughALink) {
  fs::create_symlink(path("bin/echelon"), path("linked"));
  EXPECT_EQ(shell("./linked train first.toml").exit_code, 0);
}

TEST_F(CommandLine, VerifyPassesAResolvedConfiguration) {
  const auto out =
      printed(run("verify first.toml -n 2 --steps 3 --tolerance 1e-9 --json "
                  "--plant-error"));
  EXPECT_THAT(
      out, AllOf(
               HasSubstr("rank 0 of 2: verify "),
               HasSubstr("config.toml --steps 3 --tolerance 1e-9 "
                         "--json --plant-error\n"),
               HasSubstr("name = \"simple_cnn\"")));
  const size_t begin = out.find("config: ") + 8;
  const std::string config = out.substr(begin, out.find('\n', begin) - begin);
  EXPECT_FALSE(fs::exists(config)) << config;
  EXPECT_FALSE(fs::exists(path("runs")));
  EXPECT_EQ(run("verify first.toml --tolerance no").exit_code, 2);
  EXPECT_EQ(run("verify first.toml --steps 0").exit_code, 2);
}

TEST_F(CommandLine, VerifyPrintsOnlyItsVerdict) {
  write(
      "bin/echelon-train",
      "#!/bin/sh\n[ \"$RANK\" = 0 ] || exit 0\necho DIFFERENT; exit 1\n");
  const auto differ = run("verify first.toml -n 3");
  EXPECT_EQ(differ.exit_code, 1);
  EXPECT_EQ(differ.out, "DIFFERENT\n");
  EXPECT_EQ(differ.err, "");
  // Another code, another rank or a reported error is a failure.
  write("bin/echelon-train", "#!/bin/sh\nexit 3\n");
  expect_error("verify first.toml -n 1", "exit code 3");
  write("bin/echelon-train", "#!/bin/sh\nexit $RANK\n");
  expect_error("verify first.toml -n 2", "rank 1");
  write(
      "bin/echelon-train",
      "#!/bin/sh\n"
      "echo '{\"message\": \"no data\", \"type\": \"DataError\",'"
      " '\"exit_code\": 1, \"time_ns\": 1, \"rank\": 0,'"
      " '\"consequence\": false}' >$ECHELON_ERROR_FILE\nexit 1\n");
  expect_error("verify first.toml -n 1", "DataError: no data");
}

TEST_F(CommandLine, ExportsOneFile) {
  EXPECT_EQ(
      run("export runs/first out.safetensors").err,
      "runs/first: there is no such folder\n");
  write("runs/first/config.toml", "");
  expect_error("export runs/first out.safetensors", "has no checkpoint: ");
  const auto last = path("runs/first/checkpoints/last.safetensors");
  fs::create_directories(path("runs/first/checkpoints"));
  const float numbers[2] = {1, 3.0e38f};
  const int64_t count = 7;
  safetensors::write(
      last,
      {{"fc.weight", "F32", {2}, std::as_bytes(std::span(numbers))},
       {"steps", "I64", {}, std::as_bytes(std::span(&count, 1))}},
      {{"format", "pt"},
       {safetensors::checksum_key("fc.weight"), checksum(numbers, 8)},
       {safetensors::checksum_key("steps"), checksum(&count, 8)}});
  const auto exported = run("export runs/first out.safetensors");
  EXPECT_EQ(
      exported.out,
      "wrote out.safetensors: 2 tensors, from "
      "runs/first/checkpoints/last.safetensors\n")
      << exported.err;
  EXPECT_EQ(read("out.safetensors"), read_file(last));
  EXPECT_EQ(
      run("export runs/first half.safetensors --dtype bfloat16").exit_code, 0);
  const safetensors::File half(path("half.safetensors"));
  EXPECT_EQ(half.at("fc.weight").dtype, "BF16");
  EXPECT_EQ(half.at("steps").dtype, "I64");
  // A file is replaced only when asked.
  EXPECT_EQ(
      run("export runs/first half.safetensors").err,
      "half.safetensors: exists already; name a new file, or give "
      "--overwrite\n");
  EXPECT_EQ(
      safetensors::File(path("half.safetensors")).at("fc.weight").dtype,
      "BF16");
  EXPECT_EQ(run("export runs/first half.safetensors --overwrite").exit_code, 0);
  EXPECT_EQ(
      safetensors::File(path("half.safetensors")).at("fc.weight").dtype, "F32");
  const auto refused = run("export runs/first x.safetensors --dtype float16");
  EXPECT_EQ(refused.exit_code, 3);
  EXPECT_THAT(
      refused.err,
      HasSubstr("tensor \"fc.weight\": 3e+38 at [1] is beyond what F16"));
  EXPECT_FALSE(fs::exists(path("x.safetensors")));
  expect_error(
      "export runs/first x.safetensors --dtype bf16",
      "--dtype bf16: must be float32, bfloat16");
  expect_error("export runs/first nowhere/out.safetensors", "make it first");
  expect_error("export runs/first runs", "is a folder");
}

// A tiny GPT-2 as transformers saves it, of zeros.
void write_hugging_face(const TempFolder& folder) {
  folder.write(
      "theirs/config.json",
      R"({"architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_embd": 4,)"
      R"( "n_head": 2, "n_positions": 190, "vocab_size": 11})");
  folder.write("theirs/tokenizer.json", "{}");
  const ModelOptions options =
      hugging_face::read_config(folder.path("theirs/config.json"));
  const std::vector<std::byte> zeros(5000);
  std::vector<safetensors::TensorBytes> tensors;
  for (const auto& info : list_parameters(options, {190}, 11)) {
    tensors.push_back(
        {info.name, "F32", info.shape,
         std::span(zeros).first(static_cast<size_t>(4 * info.num_elements()))});
  }
  safetensors::write(folder.path("theirs/model.safetensors"), tensors);
}

TEST_F(CommandLine, ImportsAndExportsHuggingFaceFolders) {
  write_hugging_face(folder_);
  const auto imported = printed(run("import theirs ours"));
  EXPECT_THAT(
      imported, HasSubstr("wrote ours/config.toml: a gpt of 1,056 parameters"));
  EXPECT_THAT(
      read("ours/config.toml"),
      HasAll(
          "[model]\nname = \"gpt\"\n",
          "\nlayers = 1\nhidden_size = 4\nheads = 2\n", "\ndropout = 0.1\n",
          "[data]\nname = \"text\"\nsequence = 190\ntokenizer = "));
  // It trains: its samples are as long as the model allows.
  write("tokens.bin", std::string(400, '\0'));
  EXPECT_THAT(
      run("train ours/config.toml --check --set data.path=tokens.bin --set "
          "data.tokenizer= --set data.vocab_size=11 --set train.steps=1 "
          "--set train.batch=1")
          .err,
      "");
  EXPECT_EQ(run("config show ours/config.toml").exit_code, 0);
  EXPECT_EQ(
      run("import theirs ours").err,
      "ours: exists already; name a new folder\n");

  const auto exported = printed(run("export ours back --format huggingface"));
  EXPECT_EQ(
      exported,
      "wrote back: config.json, model.safetensors; 1,056 parameters in "
      "float32, "
      "from ours/checkpoints/last.safetensors\n");
  EXPECT_EQ(run("import back again").exit_code, 0);
  EXPECT_TRUE(fs::exists(path("again/tokenizer.json")));
  EXPECT_EQ(
      read("again/checkpoints/last.safetensors"),
      read("ours/checkpoints/last.safetensors"));
  EXPECT_THAT(
      run("export ours shards --format huggingface --max-shard-bytes 0.3kB")
          .out,
      HasSubstr("shards of weights"));
  EXPECT_EQ(run("import shards more").exit_code, 0);
  EXPECT_EQ(
      run("export ours half --format huggingface --dtype bfloat16").exit_code,
      0);
  EXPECT_EQ(json::parse(read("half/config.json"))["torch_dtype"], "bfloat16");
  EXPECT_EQ(run("import half from_half").exit_code, 0);

  expect_error("export ours back --format huggingface", "back: exists already");
  expect_error(
      "export ours x --format pt", "must be safetensors, huggingface or peft");
  write("cnn/config.toml", "");
  fs::create_directories(path("cnn/checkpoints"));
  safetensors::write(path("cnn/checkpoints/last.safetensors"), {});
  expect_error(
      "export cnn x --format huggingface",
      "[model] name=\"simple_cnn\": transformers can load");
  for (const auto& file : fs::directory_iterator(path("shards"))) {
    if (file.path().filename().string().starts_with("model-00002-of-")) {
      fs::remove(file.path());
    }
  }
  const auto missing = run("import shards other");
  EXPECT_EQ(missing.exit_code, 3);
  EXPECT_THAT(
      missing.err, HasSubstr("is missing, but model.safetensors.index"));
  EXPECT_FALSE(fs::exists(path("other")));
  EXPECT_THAT(names_in(folder_.path()), Not(Contains(HasSubstr(".part-"))));
}

void write_compared_run(const std::string& folder, const char* layout) {
  timeline::Timeline timeline{.title = "digits", .rank_names = {"rank 0"}};
  timeline.spans = {
      {.track = "compute",
       .name = "forward",
       .kind = timeline::SpanKind::forward,
       .end_ns = 1000,
       .step = 1}};
  timeline::write_chrome_trace(folder + "/timeline.json", timeline);
  timeline::MetricsWriter metrics(folder + "/metrics.jsonl");
  metrics.append(timeline::StepMetrics{.step = 1, .loss = 0.5});
  metrics.append(timeline::EvaluationMetrics{.step = 1, .accuracy = 0.975});
  write_file_atomically(
      folder + "/config.toml",
      std::string("[model]\nname = \"simple_cnn\"\n[train]\nrun = \"") +
          folder + "\"\nsteps = 1\n[layout]\n" + layout + "\n");
  write_file_atomically(folder + "/report.html", "<html>");
}

TEST_F(CommandLine, CompareNamesRunsAndWhatDiffers) {
  write_compared_run(path("runs/first"), "fsdp = 2");
  write_compared_run(path("runs/second"), "dp = 2");
  EXPECT_EQ(
      printed(run("compare runs/first runs/second/ -o page.html --title "
                  "'A <b>'")),
      "report: page.html\n");
  EXPECT_THAT(
      read("page.html"),
      HasAll(
          "A &lt;b&gt;", ">first</a>", ">second</a>",
          "Sharded data parallel, fsdp=2", "Data parallel, dp=2",
          "layout.fsdp</th><td>2</td><td>1</td>", "<td>97.5 %</td>",
          "are equal in the one step", "href=\"runs/second/report.html\""));
  EXPECT_THAT(read("page.html"), Not(HasSubstr("train.run")));
  // Runs of one name are told apart by their paths.
  write_compared_run(path("other/first"), "dp = 2");
  printed(run("compare runs/first other/first -o page.html"));
  EXPECT_THAT(read("page.html"), HasAll(">runs/first</a>", ">other/first</a>"));
  // Links still hold when the folder of page and runs moves.
  printed(run("compare " + path("runs/first") + " -o " + path("page.html")));
  EXPECT_THAT(
      read("page.html"),
      AllOf(
          HasSubstr(" href=\"runs/first/report.html\""),
          Not(HasSubstr(" href=\"/")), Not(HasSubstr(folder_.path()))));
  expect_error("compare runs/first -o nowhere/page.html", "make it first");
  EXPECT_THAT(run("compare runs/none").err, HasSubstr("there is no such run"));
}

TEST_F(CommandLine, CompareShowsProofsAndPlans) {
  write_compared_run(path("run"), "dp = 2");
  write(
      "proof.json",
      R"({"passed":true,"layout":"fsdp=2","steps":3,"compared":1234,"worst":[)"
      R"({"step":1,"rank":0,"what":"loss","relative":2e-16},)"
      R"({"step":1,"rank":1,"what":"parameter w","relative":3e-15}]})");
  write(
      "plan.json",
      R"({"model":"llama3-8b","cluster":"h100-sxm:8","plans":[{"strategy":)"
      R"({"text":"fsdp=8 · ZeRO 2"},"step_seconds":6.5,)"
      R"("model_flops_utilisation":0.49,"memory":{"peak_bytes":1073741824}}]})");
  printed(
      run("compare -o page.html --verified proof.json --planned "
          "plan.json run"));
  EXPECT_THAT(
      read("page.html"),
      HasAll(
          "fsdp=2</th><td>equal</td><td>3</td><td>1,234</td><td>3.0e-15",
          "llama3-8b</th><td>h100-sxm:8</td>", "fsdp=8 · ZeRO 2</td>",
          "<td>6.5 s</td><td>49 %</td><td>1 GiB</td>"));
  write("plan.json", R"({"plans":[]})");
  expect_error(
      "compare run --planned plan.json", "not what `echelon plan --json`");
  expect_error(
      "compare run --verified page.html", "not what `echelon verify --json`");
}

TEST_F(CommandLine, CompareShowsWhatARankHeldAndSent) {
  write_compared_run(path("run"), "dp = 2");
  auto timeline = timeline::read_chrome_trace(path("run/timeline.json"));
  using enum timeline::MemoryKind;
  timeline::MemorySample low{.time_ns = 1}, high{.time_ns = 2};
  low.memory[parameters] = 1000;
  high.memory[parameters] = 1000, high.memory[activations] = 500;
  high.memory[working] = 12;
  timeline.memory = {{.rank = 0, .samples = {low, high}}};
  for (const int64_t step : {1, 2}) {
    timeline.spans.push_back(
        {.track = "comm",
         .name = "all_reduce",
         .kind = timeline::SpanKind::communication,
         .begin_ns = 2000 * step,
         .end_ns = 2000 * step + 100,
         .step = step,
         .bytes = 300 * step});
  }
  timeline::write_chrome_trace(path("run/timeline.json"), timeline);
  printed(run("compare run -o page.html"));
  EXPECT_THAT(
      read("page.html"),
      HasSubstr("run</th><td>1.48 KiB</td><td>1,000 B</td><td>\u2013</td>"
                "<td>\u2013</td><td>500 B</td><td>12 B</td><td>450 B</td>"));
}

TEST_F(CommandLine, CompareShowsWhatAKilledRunLeft) {
  write_compared_run(path("killed"), "dp = 2");
  fs::remove(path("killed/timeline.json"));
  write("killed/metrics.jsonl", read("killed/metrics.jsonl") + "{\"step\":2,");
  printed(run("compare killed -o page.html"));
  EXPECT_THAT(
      read("page.html"), HasAll(
                             "<td>0.5</td>", "there is no timeline.json",
                             "the last line of metrics.jsonl is truncated"));
  write("killed/metrics.jsonl", "{\"step\":1,");
  const auto nothing = run("compare killed");
  EXPECT_EQ(nothing.exit_code, 3);
  EXPECT_THAT(nothing.err, HasSubstr("has no step"));
}

TEST_F(CommandLine, BenchPassesItsArguments) {
  EXPECT_EQ(
      run("bench collectives -n 2 --backend local --bytes 64 --json").out,
      "rank 0 of 2: bench collectives --backend local --bytes 64 "
      "--json\n");
  EXPECT_EQ(
      run("bench collectives --backend locl").err,
      "--backend locl: must be one of local, gloo, nccl; did you mean "
      "\"local\"?\n");
  EXPECT_EQ(run("bench collectives --bytes 64,x").exit_code, 2);
  EXPECT_EQ(run("bench collectives -n 0").exit_code, 2);
}

TEST_F(CommandLine, BenchSavesThisMachine) {
  const std::string file = path("here.toml");
  EXPECT_EQ(
      run("bench --save " + file + " -n 3 --json").out,
      "rank 0 of 3: bench machine --save " + file + " --json\n");
  // Without a file name it is saved where predictions of runs look for it.
  const std::string home = path("settings");
  ::setenv("XDG_CONFIG_HOME", home.c_str(), 1);
  EXPECT_THAT(
      run("bench --save -n 3").out,
      HasAll(
          "bench machine --save " + home + "/echelon/clusters/", "-3.toml\n"));
  EXPECT_TRUE(std::filesystem::is_directory(home + "/echelon/clusters"));
  write("file", "x");
  ::setenv("XDG_CONFIG_HOME", path("file").c_str(), 1);
  expect_error("bench --save", "--save: cannot make ");
  ::unsetenv("XDG_CONFIG_HOME");
  EXPECT_EQ(run("bench -n 2").exit_code, 2);
  EXPECT_EQ(run("bench --save " + file + " -n 0").exit_code, 2);
  for (const std::string place : {"nowhere/here.toml", "."}) {
    const auto outcome = run("bench --save " + place);
    EXPECT_EQ(outcome.exit_code, 2);
    EXPECT_THAT(outcome.err, HasSubstr("a file in a folder that exists"));
  }
}

TEST_F(CommandLine, RunStartsAProgramWithItsOwnFlags) {
  const auto text = printed(
      run("run -n 2 --no-prefix -- sh -c 'echo $RANK $0 $1' --help -n"));
  EXPECT_THAT(text, HasAll("0 --help -n\n", "1 --help -n\n"));
  EXPECT_EQ(
      run("run -n 2 echo --flag").out.size(),
      2 * std::string("[0] --flag\n").size());
  EXPECT_EQ(run("run -n 2 -- sh -c 'exit 7'").exit_code, 7);
}

TEST_F(CommandLine, RunChecksItsNumbers) {
  EXPECT_EQ(
      run("run -n 0 -- true").err,
      "-n 0: must be a whole number from 1 to 1024\n");
  EXPECT_EQ(
      run("run --nnodes 2 --node-rank 2 -- true").err,
      "--node-rank 2: must be a whole number from 0 to 1\n");
  expect_error("run --nnodes 2 -- true", "--master-addr");
  EXPECT_EQ(run("run -n 2 -- ./nowhere").exit_code, 2);
}

TEST_F(CommandLine, DoctorNamesEachFindingAndItsRemedy) {
  // The stand-in does not load LibTorch and sums nothing.
  const auto outcome = run("doctor --json");
  EXPECT_EQ(outcome.exit_code, 1);
  std::map<std::string, json> findings;
  for (const auto& finding : json::parse(outcome.out)) {
    findings[finding["topic"].get<std::string>()] = finding;
    EXPECT_EQ(
        finding["level"] == "ok", finding["remedy"].get<std::string>().empty())
        << finding;
  }
  for (const std::string topic :
       {"built with", "LibTorch", "processor", "memory", "GPUs", "links",
        "cluster", "/dev/shm", "memfd", "pidfd", "open files", "processes",
        "locked memory", "ports", "host name", "all_reduce"}) {
    EXPECT_EQ(findings.count(topic), 1u) << topic;
  }
  EXPECT_EQ(findings["LibTorch"]["level"], "error");
  EXPECT_EQ(findings["all_reduce"]["level"], "error");
  EXPECT_EQ(findings["pidfd"]["level"], "ok");
}

TEST_F(CommandLine, DoctorSeesALowLimit) {
  const auto outcome = shell("ulimit -n 256; bin/echelon doctor");
  EXPECT_THAT(
      outcome.out, HasAll(
                       "warning  open files     256",
                       "remedy: raise the limit: ulimit -n", "2 errors and "));
}

TEST_F(CommandLine, DoctorAsksTheDriverAndWritesTheCluster) {
  const std::string driver =
      "LD_LIBRARY_PATH=" + test_program("fake_nvml") + " ";
  const auto seen = shell(driver + "bin/echelon doctor");
  EXPECT_THAT(
      seen.out, HasAll(
                    "2 x NVIDIA H100 80GB HBM3 with 79.6 GiB, driver 560.35.03 "
                    "(CUDA 12.6)",
                    "NVLink 4 x18 to a switch 450 GB/s",
                    "local = 2 x h100-sxm of 79.6 GiB"));
  const auto cluster = shell(driver + "bin/echelon doctor --cluster");
  EXPECT_EQ(cluster.exit_code, 0);
  EXPECT_THAT(cluster.out, HasSubstr("[[nodes]]\ndevice = \"h100-sxm\""));
  EXPECT_THAT(
      shell(driver + "FAKE_NVML_ERROR=9 bin/echelon doctor").out,
      HasSubstr("does not start (NVML error 9)"));
  const auto unknown =
      shell(driver + "FAKE_NVML_NAME='NVIDIA T4' bin/echelon doctor --cluster");
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_THAT(unknown.err, HasSubstr("\"NVIDIA T4\" is not in the catalogue"));
  EXPECT_EQ(run("doctor --cluster --json").exit_code, 2);
}

TEST_F(CommandLine, DoctorReadsTheRowOfTheAllReduce) {
  write(
      "bin/echelon-train",
      "#!/bin/sh\n[ \"$RANK\" = 0 ] && echo '[{\"operation\": \"all_reduce\", "
      "\"bytes\": 1048576, \"microseconds\": 123.4}]'\nexit 0\n");
  for (const auto& finding : json::parse(run("doctor --json").out)) {
    if (finding["topic"] != "all_reduce") continue;
    EXPECT_EQ(finding["level"], "ok");
    EXPECT_EQ(finding["text"], "two ranks sum 1 MiB in 123 us (local)");
  }
}

}  // namespace echelon::cli_test
