// `echelon train --dry-run`, and its figures against what ranks hold.
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "echelon/text/text_file.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/memory_kind.h"
#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon::memory_plan::memory_plan_command_test {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;
using testing_support::Command;
using testing_support::TempFolder;
using Words = std::vector<std::string>;

const std::string kEchelon = program("echelon");
const std::string kRank = test_program("memory_plan_rank");

class DryRun : public testing::Test {
 protected:
  std::string write(
      const std::string& model, const std::string& data, int batch,
      const std::string& more) {
    const std::string path = folder_.path() + "/job.toml";
    std::ofstream(path) << "[model]\n"
                        << model << "[data]\n"
                        << data << "[train]\nsteps = 4\nbatch = " << batch
                        << "\nrun = \"" << folder_.path() << "/run\"\n"
                        << more;
    return path;
  }
  std::string text() const {
    return "name = \"text\"\nsources = [\"" +
           source_path("doc/configuration.md") + "\"]\nsequence = 128\n";
  }
  std::string config(
      const std::string& more,
      const std::string& size = "layers = 4\nhidden_size = 384\nheads = 6\n",
      const std::string& name = "gpt", int vocabulary = 4096, int batch = 16) {
    return write(
        "name = \"" + name + "\"\nvocab_size = " + std::to_string(vocabulary) +
            "\nmax_positions = 128\n" + size,
        text(), batch, more);
  }
  std::string
  digits(const std::string& name, int batch, const std::string& more) {
    return write(
        "name = \"" + name + "\"\n" +
            (name == "mlp" ? "hidden = [512, 512]\n" : ""),
        "name = \"digits\"\n", batch, more);
  }
  Words cache() const { return {"ECHELON_CACHE=" + folder_.path() + "/cache"}; }

  json dry_run(const std::string& path) {
    Command command({kEchelon, "train", path, "--dry-run", "--json"}, cache());
    EXPECT_EQ(command.wait(), 0) << command.err();
    return json::parse(command.out(), nullptr, false);
  }

  TempFolder folder_;
};

struct Case {
  std::string name;
  std::string layout;
  std::string settings;
  std::string model = "large gpt";
  int ranks = 2;
  /// Its tensors are much larger than what libraries allocate, so that the
  /// resident set is near as well.
  bool resident = true;
};

class MeasuredPeak : public DryRun, public testing::WithParamInterface<Case> {
 protected:
  std::string config_of(const Case& one) {
    const auto more = one.layout + one.settings;
    if (one.model == "mlp") return digits("mlp", 128, more);
    if (one.model == "resnet18") return digits("resnet18", 8, more);
    if (one.model == "large gpt") {
      return config(
          more, "layers = 5\nhidden_size = 512\nheads = 8\n", "gpt", 4096, 12);
    }
    if (one.model == "medium gpt") {
      return config(
          more, "layers = 4\nhidden_size = 384\nheads = 6\n", "gpt", 4096, 10);
    }
    // A CPU without instructions for bf16 is twenty times slower with it.
    if (one.model == "bf16 gpt" || one.model == "bf16 llama") {
      const std::string size = "layers = 4\nhidden_size = 128\nheads = 4\n";
      return one.model == "bf16 gpt"
                 ? config(more, size, "gpt", 512, 8)
                 : config(
                       more, size + "intermediate_size = 384\n", "llama", 512,
                       8);
    }
    if (one.model == "deepseek") {
      return config(
          more,
          "layers = 3\nhidden_size = 256\nheads = 4\n"
          "intermediate_size = 768\nquery_rank = 96\nkey_value_rank = 64\n"
          "nope_size = 48\nrope_size = 16\nvalue_size = 48\n"
          "dense_layers = 1\nexperts = 8\nexperts_per_token = 2\n"
          "expert_groups = 4\ngroups_per_token = 2\nexpert_size = 256\n"
          "shared_experts = 1\n",
          "deepseek-v3");
    }
    const std::string small = "layers = 4\nhidden_size = 256\nheads = 4\n";
    return one.model == "llama"
               ? config(more, small + "intermediate_size = 768\n", "llama")
               : config(more, small);
  }
};

// The plan is within a tenth of what the ranks hold at most, in all and of each
// kind.
TEST_P(MeasuredPeak, AgreesWithThePlan) {
  const std::string path = config_of(GetParam());
  const auto ranks_of_job = std::to_string(GetParam().ranks);
  // The check of the command line splits the text into tokens once.
  Command check({kEchelon, "train", path, "--check"}, cache());
  ASSERT_EQ(check.wait(), 0) << check.err();
  Command ranks(
      {kEchelon, "run", "-n", ranks_of_job, "--", kRank, path}, cache());
  ASSERT_EQ(ranks.wait(std::chrono::minutes(8)), 0) << ranks.err();
  int seen = 0;
  std::istringstream lines(ranks.out());
  for (std::string line; std::getline(lines, line);) {
    const auto brace = line.find('{');
    if (brace == std::string::npos) continue;
    const json rank = json::parse(line.substr(brace));
    ++seen;
    const double planned = rank["planned_peak"];
    const double measured = rank["measured_peak"];
    const double resident = rank["resident"];
    std::cout << line << "\n"
              << "meter / plan " << measured / planned << ", resident / plan "
              << resident / planned << "\n";
    EXPECT_NEAR(measured / planned, 1.0, 0.1);
    if (GetParam().resident) {
      EXPECT_NEAR(resident / planned, 1.0, 0.1);
    }
    for (const timeline::MemoryKind kind : timeline::kMemoryKinds) {
      const std::string name(timeline::to_string(kind));
      EXPECT_NEAR(
          rank["measured"][name].get<double>() / planned,
          rank["planned"][name].get<double>() / planned, 0.07)
          << name;
    }
  }
  EXPECT_EQ(seen, GetParam().ranks);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int stage : {0, 1, 2, 3}) {
    for (const std::string recompute : {"none", "all"}) {
      const std::string layout = stage == 0
                                     ? "[layout]\ndp = 2\n"
                                     : "[layout]\nfsdp = 2\n[shard]\nstage = " +
                                           std::to_string(stage) + "\n";
      all.push_back(
          {"stage" + std::to_string(stage) + "_" + recompute, layout,
           "[memory]\nrecompute = \"" + recompute + "\"\n",
           // Recomputing leaves few activations, which must outweigh the rest.
           recompute == "none" ? "medium gpt" : "large gpt"});
    }
  }
  return all;
}

std::vector<Case> more_cases() {
  const std::string plain = "[layout]\ndp = 2\n";
  const std::string cut = "[layout]\nfsdp = 2\n";
  const std::string bf16 = "[precision]\ncompute = \"bf16\"\n";
  const auto memory = [](const std::string& setting) {
    return "[memory]\n" + setting + "\n";
  };
  const std::string all = memory("recompute = \"all\"");
  const std::string selective = memory("recompute = \"selective\"");
  const std::string offload = memory("offload = \"optimizer\"");
  // Some blocks are recomputed in full, some in part, some not at all.
  const std::string budget =
      memory("recompute = \"budget\"\nactivation_bytes = 40000000");
  return {
      {"bf16_llama", cut, bf16, "bf16 llama", 2, false},
      {"bf16_llama_all", plain, bf16 + all, "bf16 llama", 2, false},
      {"float32_llama_all", cut, all, "llama", 2, false},
      {"bf16_gpt_all", cut, bf16 + all, "bf16 gpt", 2, false},
      {"bf16_gpt_selective", cut, bf16 + selective, "bf16 gpt", 2, false},
      {"bf16_mlp", plain, bf16, "mlp", 2, false},
      {"bf16_resnet18", plain, bf16, "resnet18", 2, false},
      {"pp", "[layout]\npp = 2\n", "", "gpt", 2, false},
      {"pp_bf16", "[layout]\npp = 2\n", bf16, "bf16 gpt", 2, false},
      {"tp", "[layout]\ntp = 2\n", "", "gpt"},
      {"hybrid", "[layout]\ndp = 2\nfsdp = 2\n", "", "gpt", 4},
      {"deepseek_tp", "[layout]\ntp = 2\nsequence_parallel = true\n", "",
       "deepseek", 2, false},
      {"deepseek_ep", "[layout]\nep = 2\n", "", "deepseek", 2, false},
      {"budget", cut, budget, "gpt", 2, false},
      {"offload", cut, offload, "gpt"}};
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, MeasuredPeak, testing::ValuesIn(more_cases()),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Stages, MeasuredPeak, testing::ValuesIn(cases()),
    [](const auto& info) { return info.param.name; });

TEST_F(DryRun, PrintsPeaksAndCollectivesAndStartsNothing) {
  const std::string path = config("[layout]\ndp = 2\npp = 2\n");
  Command command({kEchelon, "train", path, "--dry-run"}, cache());
  EXPECT_EQ(command.wait(), 0) << command.err();
  const std::string out = command.out();
  for (const char* said :
       {"Peak of each rank, by kind", "activations", "all_reduce", "send",
        "\nCopies of the state for restarts take "}) {
    EXPECT_THAT(out, HasSubstr(said));
  }
  EXPECT_THAT(out, Not(HasSubstr("\x1b[")));
  EXPECT_FALSE(std::ifstream(folder_.path() + "/run").good());
  const json plan = dry_run(path);
  ASSERT_TRUE(plan.is_object());
  std::vector<int> ranks;
  for (const auto& group : plan["ranks"]) {
    for (const int rank : group["ranks"]) ranks.push_back(rank);
    EXPECT_GT(group["peak_bytes"].get<int64_t>(), 0);
  }
  EXPECT_THAT(ranks, testing::UnorderedElementsAre(0, 1, 2, 3));
  // Each parameter's gradient is reduced once, by the rank that has it.
  int64_t reduced = 0;
  for (const auto& group : plan["ranks"]) {
    for (const auto& call : group["collectives"]) {
      if (call["operation"] == "all_reduce") {
        reduced += call["bytes"].get<int64_t>();
      }
    }
  }
  EXPECT_GE(reduced, 4 * plan["parameters"].get<int64_t>());
}

// A dry run of 70 B parameters, 280 GB, allocates none of them.
TEST_F(DryRun, OfAModelThatNoMachineHolds) {
  const std::string path = write(
      "name = \"llama\"\nlayers = 80\nhidden_size = 8192\nheads = 64\n"
      "kv_heads = 8\nintermediate_size = 28672\nvocab_size = 128256\n"
      "max_positions = 4096\n",
      text(), 32, "[layout]\ntp = 8\npp = 8\n");
  const json plan = dry_run(path);
  ASSERT_TRUE(plan.is_object());
  EXPECT_GT(plan["parameters"].get<double>(), 70e9);
  double bytes = 0;
  for (const auto& group : plan["ranks"]) {
    bytes += group["bytes"]["parameters"].get<double>() *
             static_cast<double>(group["ranks"].size());
  }
  EXPECT_NEAR(bytes / (4 * plan["parameters"].get<double>()), 1.0, 0.01);
}

TEST_F(DryRun, SaysWhatDoesNotFitAndWhatWouldHelp) {
  const std::string path =
      config("[layout]\ndp = 2\n[memory]\nlimit_bytes = 200000000\n");
  Command command({kEchelon, "train", path, "--dry-run"}, cache());
  EXPECT_EQ(command.wait(), 0) << command.err();
  for (const char* said :
       {"Does not fit: rank 0 needs ", "more than the limit of 191 MiB",
        "memory.recompute = \"all\" saves ", ", which fits"}) {
    EXPECT_THAT(command.out(), HasSubstr(said));
  }
  const json plan = dry_run(path);
  EXPECT_FALSE(plan["fits"].get<bool>());
  ASSERT_GT(plan["advice"].size(), 2u);
  EXPECT_GE(
      plan["advice"][0]["saves_bytes"].get<int64_t>(),
      plan["advice"][1]["saves_bytes"].get<int64_t>());
}

TEST_F(DryRun, ARunRecordsMemoryBesideItsPlan) {
  const std::string path = config(
      "[layout]\ndp = 2\n", "layers = 4\nhidden_size = 256\nheads = 4\n", "gpt",
      1024, 8);
  Command command({kEchelon, "train", path}, cache());
  ASSERT_EQ(command.wait(), 0) << command.err();
  const std::string run = folder_.path() + "/run";
  const timeline::Timeline timeline =
      timeline::read_chrome_trace(run + "/timeline.json");
  ASSERT_EQ(timeline.memory.size(), 2u);
  for (const auto& rank : timeline.memory) {
    int64_t most = 0;
    for (const auto& sample : rank.samples) {
      most = std::max(most, sample.memory.total());
    }
    ASSERT_GT(rank.planned_bytes, 0);
    EXPECT_NEAR(
        static_cast<double>(most) / static_cast<double>(rank.planned_bytes),
        1.0, 0.1);
  }
  const std::string page = read_text_file(run + "/report.html");
  EXPECT_THAT(page, HasSubstr("Memory over a step, by kind"));
  EXPECT_LT(page.size(), 500'000u);
}

// "auto", the default, and tf32 on devices that are not here.
TEST_F(DryRun, ComputesInBf16OnAGpuUnlessItIsToldOtherwise) {
  for (const auto& [table, plan, step] :
       std::vector<std::tuple<std::string, std::string, std::string>>{
           {"", "computes in bf16", "of the bf16 peak"},
           {"compute = \"same\"", "adamw", "of the fp32 peak"},
           {"compute = \"tf32\"", "computes in tf32", "of the tf32 peak"}}) {
    SCOPED_TRACE(table);
    const std::string path = config("[precision]\n" + table + "\n");
    Command text({kEchelon, "train", path, "--dry-run", "--on", "h100-sxm:1"});
    EXPECT_EQ(text.wait(), 0) << text.err();
    EXPECT_THAT(text.out(), HasSubstr(plan));
    EXPECT_THAT(text.out(), HasSubstr(step));
    if (plan == "adamw") {
      EXPECT_THAT(text.out(), Not(HasSubstr("computes in")));
    }
  }
}

TEST_F(DryRun, ARankThatRunsOutOfMemorySaysWhatWouldHelp) {
  const std::string path =
      config("[layout]\ndp = 2\n[memory]\nlimit_bytes = 200000000\n");
  // `echelon train` refuses the plan; `echelon run` does not know it.
  Command command(
      {kEchelon, "run", "-n", "2", "--", program("echelon-train"), "train",
       path},
      cache());
  EXPECT_EQ(command.wait(), 1);
  for (const char* said :
       {"step 1: rank ", "out of memory: ", " are activations",
        "says a peak of 231 MiB in the ", "the limit is 191 MiB",
        "memory.recompute = \"all\" saves "}) {
    EXPECT_THAT(command.err(), HasSubstr(said));
  }
}

TEST_F(DryRun, PrintsAStepOnDevicesThatAreNotHere) {
  const std::string path =
      config("[layout]\nfsdp = 2\ntp = 2\n[precision]\ncompute = \"bf16\"\n");
  Command text({kEchelon, "train", path, "--dry-run", "--on", "h100-sxm:8"});
  EXPECT_EQ(text.wait(), 0) << text.err();
  for (const char* said :
       {"Fits the limit of 78.8 GiB.", "gpt on h100-sxm:8, 4 of 8 devices",
        "of the bf16 peak", "what bounds the operators", "launches",
        "steps are CUDA graphs", "operators that take longest",
        "all_reduce bwd", "beside the formulas", "'echelon plan' reckons"}) {
    EXPECT_THAT(text.out(), HasSubstr(said));
  }
  std::istringstream lines(
      text.out().substr(text.out().find("what bounds the operators")));
  for (std::string line; std::getline(lines, line);) {
    const auto columns = std::ranges::count_if(line, [](char c) {
      return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
    });
    EXPECT_LE(columns, 80) << line;
  }
  Command kernels(
      {kEchelon, "train", path, "--dry-run", "--on", "h100-sxm:8", "--set",
       "train.cuda_graphs=off"});
  EXPECT_EQ(kernels.wait(), 0) << kernels.err();
  EXPECT_THAT(kernels.out(), HasSubstr("waiting for the host"));
  EXPECT_THAT(kernels.out(), HasSubstr("the host launches them in"));
  // The plan alone tells the memory.
  EXPECT_THAT(text.out(), Not(HasSubstr("of the fullest device's")));
  Command command(
      {kEchelon, "train", path, "--dry-run", "--on", "h100-sxm:8", "--json"});
  ASSERT_EQ(command.wait(), 0) << command.err();
  const json told = json::parse(command.out());
  EXPECT_TRUE(told["fits"].get<bool>());
  const json& step = told["step"];
  EXPECT_FALSE(step.contains("memory_bytes"));
  double sum = 0;
  for (const auto& one : step["counted"]["operators"]) {
    sum += one["seconds"].get<double>();
  }
  // Beside these, computing is slower while fsdp's collectives run.
  const double within = sum + step["counted"]["host_waits"].get<double>();
  const double parts = step["parts"]["matrix"].get<double>() +
                       step["parts"]["memory"].get<double>() +
                       step["parts"]["exposed"]["tp"].get<double>();
  EXPECT_GE(parts, within);
  EXPECT_LT(parts, 1.1 * within);
  EXPECT_GT(step["counted"]["kernels"].get<double>(), 4 * 36);
  EXPECT_FALSE(std::ifstream(folder_.path() + "/run").good());
}

// Steps that others measured with a program much like this one: a gpt of equal
// size, PyTorch's FSDP, eager kernels (benchmarks/published/step_times.csv).
TEST_F(DryRun, CountedStepsAreNearThoseThatOthersMeasured) {
  struct Row {
    int layers, hidden, heads, sequence, batch, microbatch;
    double seconds;
  };
  std::string words;
  for (int i = 0; words.size() < 1'200'000; ++i) {
    words += std::to_string(i) + " ";
  }
  const std::string corpus = folder_.path() + "/corpus.txt";
  std::ofstream(corpus) << words;
  for (const Row& row :
       {Row{24, 2048, 16, 2048, 112, 14, 0.6308},
        Row{24, 2048, 16, 4096, 224, 7, 2.9762},
        Row{40, 5120, 40, 2048, 16, 2, 0.8548}}) {
    const auto number = [](int value) { return std::to_string(value); };
    const std::string path = write(
        "name = \"gpt\"\nvocab_size = 50368\nlayers = " + number(row.layers) +
            "\nhidden_size = " + number(row.hidden) +
            "\nheads = " + number(row.heads) +
            "\nmax_positions = " + number(row.sequence) + "\n",
        "name = \"text\"\ntokenizer = \"bytes\"\nholdout = 0.0\nsources = [\"" +
            corpus + "\"]\nsequence = " + number(row.sequence) + "\n",
        row.batch,
        "accumulate = " + number(row.batch / 8 / row.microbatch) +
            "\n[layout]\nfsdp = 8\n[precision]\ncompute = \"bf16\"\n");
    Command command(
        {kEchelon, "simulate", path, "--cluster", "h100-sxm:8", "--stack",
         "fsdp", "--count", "--json"},
        cache());
    ASSERT_EQ(command.wait(), 0) << command.err();
    EXPECT_NEAR(
        json::parse(command.out())["step_seconds"].get<double>() / row.seconds,
        1, 0.15)
        << row.hidden << ", " << row.sequence;
  }
}

TEST_F(DryRun, DevicesThatNobodyKnowsAreRefused) {
  const std::string path = config("[layout]\nfsdp = 8\n");
  for (const auto& [words, said] : std::vector<std::pair<Words, std::string>>{
           {{"--dry-run", "--on", "h100-smx:8"}, "did you mean \"h100-sxm\""},
           {{"--dry-run", "--on", "h100-sxm:4"}, "4 devices"},
           {{"--on", "h100-sxm:8"}, "give --dry-run too"}}) {
    Words command = {kEchelon, "train", path};
    command.insert(command.end(), words.begin(), words.end());
    Command refused(command);
    EXPECT_EQ(refused.wait(), 2);
    EXPECT_THAT(refused.err(), HasSubstr(said));
  }
}

TEST_F(DryRun, JsonWithoutADryRunIsRefused) {
  Command command({kEchelon, "train", config(""), "--json"}, cache());
  EXPECT_EQ(command.wait(), 2);
  EXPECT_THAT(command.err(), HasSubstr("--json prints what --dry-run finds"));
}

}  // namespace echelon::memory_plan::memory_plan_command_test
