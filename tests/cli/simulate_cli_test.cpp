// The command `echelon simulate`.
#include <gmock/gmock.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/cli/typed.h"
#include "tests/support/error_text.h"
#include "tests/support/places.h"

namespace echelon::simulate_cli_test {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

const std::string kSmall =
    "--model gpt2 --cluster h100-sxm:1x8 --layout dp=2,tp=2,pp=2 --batch 16 ";

// Columns of a terminal: bytes that begin a character.
size_t width_of(const std::string& line) {
  return static_cast<size_t>(std::count_if(
      line.begin(), line.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

void expect_to_fit_a_terminal(const std::string& text) {
  for (const std::string& line : lines_of(text)) {
    EXPECT_LE(width_of(line), 80u) << line;
  }
}

class SimulateCommand : public testing::Test {
 protected:
  Outcome run(const std::string& arguments) {
    return typed(folder_, "simulate " + arguments);
  }

  // Expects a short error with these parts and no result.
  template <typename... Parts>
  void refuses(const std::string& arguments, const Parts&... says) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_THAT(outcome.err, HasAll(says...)) << arguments;
    EXPECT_LE(lines_of(outcome.err).size(), 5u) << outcome.err;
  }

  TempFolder folder_;
};

TEST_F(SimulateCommand, PrintsTimeMemoryAndPartsOfTheStep) {
  const Outcome outcome = run(kSmall);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(
      outcome.out,
      AllOf(
          StartsWith("gpt2 on h100-sxm:1x8, 8 of 8 devices\n"
                     "dp=2,pp=2,tp=2 · 8 microbatches of 1 · 1f1b\n"),
          HasSubstr("tokens/s"), HasSubstr("of the bf16 peak"),
          HasSubstr("of the fullest device's"), HasSubstr("waiting for tp"),
          HasSubstr("pipeline bubble"), HasSubstr("optimizer"),
          HasSubstr("simulated 2 of 8 ranks"),
          Not(HasSubstr("with failures"))));
  expect_to_fit_a_terminal(outcome.out);
}

TEST_F(SimulateCommand, ItsHelpFitsATerminal) {
  const auto out = printed(run("--help"));
  expect_to_fit_a_terminal(out);
}

TEST_F(SimulateCommand, PrintsJsonWithPartsThatAddUp) {
  const auto out =
      printed(run(kSmall + "--steps 5 --jitter 0.05 --hours 24 --json"));
  const json printed = json::parse(out);
  EXPECT_EQ(printed["model"], "gpt2");
  EXPECT_EQ(printed["layout"], "dp=2,pp=2,tp=2");
  EXPECT_EQ(printed["steps"].size(), 5u);
  EXPECT_EQ(printed["fits"], true);
  EXPECT_EQ(printed["simulated_ranks"], 8);  // with jitter each is by itself
  double sum = 0;
  for (const auto& [name, part] : printed["parts"].items()) {
    if (name != "exposed") sum += part.get<double>();
  }
  for (const auto& part : printed["parts"]["exposed"])
    sum += part.get<double>();
  EXPECT_NEAR(sum, printed["step_seconds"].get<double>(), 1e-9);
  const json& weeks = printed["effective_time"];
  EXPECT_NEAR(
      weeks["share"].get<double>() + weeks["saving"].get<double>() +
          weeks["lost"].get<double>() + weeks["recovering"].get<double>(),
      1, 1e-9);
}

TEST_F(SimulateCommand, ResultsDependOnTheSeedOnly) {
  const auto steps = [&](const std::string& more) {
    const std::string text =
        run(kSmall + more + " --jitter 0.1 --steps 3 --stragglers 2 --json")
            .out;
    return json::parse(text)["steps"];
  };
  EXPECT_EQ(steps("--seed 1"), steps("--seed 1"));
  EXPECT_NE(steps("--seed 1"), steps("--seed 2"));
}

TEST_F(SimulateCommand, WritesTheFilesOfARun) {
  const auto out = printed(run(kSmall + "--steps 3 --run simulated"));
  EXPECT_THAT(out, HasSubstr("report: simulated/report.html\n"));
  const std::string folder = folder_.path("simulated/");
  const auto metrics = lines_of(read_file(folder + "metrics.jsonl"));
  ASSERT_EQ(metrics.size(), 3u);
  for (const std::string& line : metrics) {
    const json step = json::parse(line);
    EXPECT_EQ(step["simulated"], true);
    EXPECT_GT(step["tokens_per_second"].get<double>(), 0);
    EXPECT_FALSE(step.contains("loss"));
  }
  const json timeline = json::parse(read_file(folder + "timeline.json"));
  EXPECT_GT(timeline["traceEvents"].size(), 100u);
  const std::string page = read_file(folder + "report.html");
  EXPECT_LT(page.size(), 500'000u);
  EXPECT_THAT(page, AllOf(HasSubstr("nothing was trained"), HasSubstr("gpt2")));
  EXPECT_THAT(page, Not(HasSubstr("http://")));

  // An existing folder is not overwritten.
  refuses(kSmall + "--run simulated", "simulated");
  EXPECT_EQ(lines_of(read_file(folder + "metrics.jsonl")).size(), 3u);
}

// The folder describes the simulation completely: explain predicts the same
// from it, and reads the same from its timeline.
TEST_F(SimulateCommand, WritesARunThatExplainReads) {
  folder_.write("layers.json", R"({"model": "mlp", "seq_len": 0, "layers": [
    {"name": "fc", "forward_flops": 1e9, "backward_flops": 2e9, "parameters": 1e4,
     "kept_elements": 100, "moved_elements": 1e5, "output_elements": 10, "rows": 1,
     "inner": 100, "columns": 100, "counted_samples": 4,
     "forward": [{"name": "mm", "product": "product", "count": 1, "m": 400, "n": 4000,
                  "k": 4000}],
     "backward": [{"name": "add", "bytes": 1e7}]}]})");
  const std::string digits =
      source_path("examples/configs/digits.toml --cluster h100-sxm:1x8 ");
  int run_number = 0;
  for (const std::string& arguments :
       {kSmall, kSmall + "--schedule gpipe --recompute all",
        kSmall + "--sequence-parallel --precision fp32 --seq-len 512",
        std::string(
            "--model llama3.1-8b --cluster h100-sxm:2x8 --layout fsdp=16 "
            "--batch 64 --microbatch 2 --zero 2"),
        std::string(
            "--model resnet50 --cluster h100-sxm:1x8 --layout dp=4,pp=2 "
            "--batch 64 --microbatch 4"),
        digits + "--layout dp=4 --batch 64 --microbatch 4 --precision bf16",
        digits + "--layout pp=2",
        digits + "--layout dp=2 --layers layers.json"}) {
    const std::string folder = "run" + std::to_string(++run_number);
    const Outcome simulated =
        run(arguments + " --steps 2 --json --run " + folder);
    ASSERT_EQ(simulated.exit_code, 0) << arguments << simulated.err;
    const double seconds = json::parse(simulated.out)["step_seconds"];
    const Outcome explained = typed(folder_, "explain " + folder + " --json");
    ASSERT_EQ(explained.exit_code, 0) << arguments << explained.err;
    const json told = json::parse(explained.out);
    EXPECT_EQ(told["notes"], json::array()) << arguments;
    EXPECT_EQ(told["predicted_seconds"], seconds) << arguments;
    EXPECT_NEAR(told["step_seconds"].get<double>(), seconds, 1e-3 * seconds);
    EXPECT_EQ(told["simulated"], true);
    EXPECT_EQ(
        told["layers"], arguments.ends_with(".json") ? "counted" : "formulas");
  }
  EXPECT_THAT(
      typed(folder_, "explain run1").out,
      AllOf(HasSubstr("Simulated: "), Not(HasSubstr("Predicted on "))));
  EXPECT_EQ(typed(folder_, "compare run1 run2").exit_code, 0);
}

TEST_F(SimulateCommand, PageShowsEqualRanksOnceAndWhatTheTerminalPrints) {
  const auto text = printed(
      run("--model llama3-8b --cluster h100-sxm:4x8 --layout fsdp=8,tp=4 "
          "--batch 256 --run sim"));
  const auto page = read_file(folder_.path("sim/report.html"));
  const auto count = [&](const std::string& part) {
    size_t found = 0;
    for (size_t at = 0; (at = page.find(part, at)) != page.npos; ++at) ++found;
    return found;
  };
  EXPECT_EQ(count("class=\"rank\""), 1u);
  EXPECT_EQ(count(">ranks 0\u201331</text>"), 1u);
  EXPECT_EQ(count(">ranks 0\u201331</th>"), 1u);
  EXPECT_EQ(count("all ranks</th>"), 0u);
  EXPECT_GT(count("class=\"ex\""), 10u);  // exposed calls are drawn
  EXPECT_THAT(page, HasAll("One step: ", ">1 step<", ">Memory</dt>"));
  EXPECT_THAT(page, HasAll("would hold the run back", ">MFU</dt>"));
  const size_t mfu = text.find("MFU       ") + 10;
  EXPECT_THAT(
      page, HasSubstr(
                ">MFU</dt><dd class=\"value\">" +
                text.substr(mfu, text.find(" of the", mfu) - mfu) + "<"));
  // The timeline has 16 of them; a page that has only the files knows the rest.
  printed(typed(folder_, "compare sim -o compare.html"));
  EXPECT_THAT(
      read_file(folder_.path("compare.html")),
      HasSubstr(">ranks 0\u201331</text>"));
}

TEST_F(SimulateCommand, PageShowsOneOfEqualPipelines) {
  printed(
      run("--model llama3-8b --cluster h100-sxm:4x8 --layout fsdp=8,pp=2,tp=2 "
          "--batch 256 --run sim"));
  const auto page = read_file(folder_.path("sim/report.html"));
  EXPECT_THAT(
      page, HasAll(
                ">Simulated: step 0, one of 16 equal pipelines<",
                "rank 0 + 15: rank 0 and 15 other ranks, which do the same."));
  EXPECT_THAT(page, Not(HasSubstr(">pipeline 1<")));
  // Transfers are those between stages: calls of tp and fsdp are not.
  EXPECT_THAT(page, Not(HasSubstr("all-reduce</title>")));
}

TEST_F(SimulateCommand, NamesTheNearestSettingThatFits) {
  const std::string job =
      "--model llama3.1-70b --cluster h100-sxm:32x8 --batch 512 ";
  const auto text = printed(run(job + "--layout dp=8,tp=8,pp=4"));
  EXPECT_THAT(
      text,
      HasAll(
          ": does not fit", "\nIt fits with --sequence-parallel: 56.6 GiB, "));
  expect_to_fit_a_terminal(text);
  const auto told =
      json::parse(printed(run(job + "--layout dp=8,tp=8,pp=4 --json")));
  EXPECT_EQ(told["fits_with"], "--sequence-parallel");
  EXPECT_FALSE(
      json::parse(printed(run(job + "--layout fsdp=8,pp=4,tp=8 --json")))
          .contains("fits_with"));
  // Two changes, where one does not do.
  const auto fits = [&](const std::string& flags) {
    return json::parse(printed(
        run("--model llama3-8b --cluster a100-40gb:1x8 --batch 64 " + flags)));
  };
  const auto small = fits("--layout dp=8 --microbatch 8 --json");
  ASSERT_FALSE(small["fits"]);
  const auto flags = small["fits_with"].get<std::string>();
  EXPECT_THAT(flags, HasSubstr("--layout fsdp=8 "));
  const std::string rest =
      flags.find("--microbatch") == flags.npos ? " --microbatch 8" : "";
  EXPECT_TRUE(fits(flags + rest + " --json")["fits"]) << flags;
  EXPECT_THAT(
      printed(run("--model llama3.1-405b --cluster l4:1 --batch 1")),
      HasSubstr("Neither smaller microbatches"));
}

TEST_F(SimulateCommand, SaysWhichSettingsItsConfigurationLacks) {
  const auto other = printed(
      run("--model gpt-oss-20b --cluster h100-sxm:2x8 --layout dp=2,tp=8 "
          "--batch 16 "
          "--run experts"));
  EXPECT_THAT(
      other,
      HasSubstr(
          "note: there is no config.toml: echelon train has no gpt-oss-20b"));
  EXPECT_EQ(typed(folder_, "explain experts").exit_code, 0);
  const Outcome stack = run(kSmall + "--stack megatron-core --run stack");
  EXPECT_THAT(
      stack.out,
      HasSubstr("note: config.toml does not say --stack megatron-core"));
}

TEST_F(SimulateCommand, PrintsTheShareOfUsefulTime) {
  const auto weeks = [&](const std::string& more) {
    const auto text =
        printed(run(kSmall + "--hours 20000 " + more + " --json"));
    return json::parse(text)["effective_time"];
  };
  EXPECT_EQ(weeks("")["failures"], 0);
  const json failing = weeks("--mean-hours-between-failures 50");
  EXPECT_NEAR(failing["failures"].get<double>(), 400, 80);
  EXPECT_NEAR(
      failing["share"].get<double>(), failing["expected_share"].get<double>(),
      0.01);
  // Rare checkpoints lose more work.
  const json seldom = weeks(
      "--mean-hours-between-failures 50 --checkpoint-interval-seconds 20000");
  EXPECT_GT(seldom["lost"].get<double>(), 2 * failing["lost"].get<double>());
  EXPECT_LT(seldom["share"].get<double>(), failing["share"].get<double>());
  const json slow =
      weeks("--mean-hours-between-failures 50 --recovery-seconds 9000");
  EXPECT_GT(slow["recovering"].get<double>(), 0.03);

  const Outcome text =
      run(kSmall + "--hours 720 --mean-hours-between-failures 50");
  EXPECT_THAT(
      text.out,
      HasAll("720 hours of it, with failures", "by formula", "repeated"));
  expect_to_fit_a_terminal(text.out + run(kSmall).out);
  refuses(kSmall + "--checkpoint-interval-seconds 5", "add --hours");
}

TEST_F(SimulateCommand, TakesAConfigurationOfTrain) {
  const std::string configuration =
      source_path("examples/configs/digits.toml ");
  const auto text =
      printed(run(configuration + "--cluster h100-sxm:1x8 --layout dp=4"));
  EXPECT_THAT(
      text, AllOf(
                StartsWith("simple_cnn on h100-sxm:1x8, 4 of 8 devices\n"
                           "dp=4 · 1 microbatch of 16\n"),
                HasAll("samples/s", "bf16 peak", "waiting for dp  ")));
  // What "auto" is not, on the same GPUs.
  const std::string digits =
      testing_support::read_file(source_path("examples/configs/digits.toml"));
  folder_.write("same.toml", digits + "\n[precision]\ncompute = \"same\"\n");
  EXPECT_THAT(
      printed(run("same.toml --cluster h100-sxm:1x8 --layout dp=4")),
      HasSubstr("fp32 peak"));
  refuses(configuration, "--cluster is missing");
  refuses(
      configuration + "--cluster h100-sxm:1x8 --model gpt2", "leave one out");
  folder_.write("broken.toml", "[model]\nname = \"simple_cn\"\n");
  refuses("broken.toml --cluster h100-sxm:1x8", "broken.toml");
}

TEST_F(SimulateCommand, RefusesMissingAndWrongValues) {
  refuses("", "--model is missing");
  refuses("--model gpt2", "--cluster is missing");
  refuses("--model gpt2 --cluster h100-sxm:1x8", "--batch is missing");
  refuses(
      "--model gtp2 --cluster h100-sxm:1x8 --batch 8", "gtp2",
      "did you mean \"gpt2\"");
  refuses(
      "--model gpt2 --cluster h100-smx:1x8 --batch 8", "h100-smx",
      "did you mean \"h100-sxm\"");
  refuses(
      "--model gpt2 --cluster h100-sxm:1x8 --layout dp=16 --batch 16",
      "16 ranks", "8 devices");
  refuses(
      "--model gpt2 --cluster h100-sxm:1x8 --layout pp=15 --batch 16", "15");
  refuses(kSmall + "--schedule 1f2b", "did you mean \"1f1b\"");
  refuses(kSmall + "--stack meg", "unknown stack");
  refuses(kSmall + "--recompute al", "\"all\"");
  refuses(kSmall + "--precision fp17", "fp17");
  refuses(kSmall + "--zero 2", "add fsdp=");
}

TEST_F(SimulateCommand, RefusesWrongNumbers) {
  for (const std::string wrong :
       {"--batch 0", "--batch -3", "--batch 1e3", "--steps 0", "--steps 1.5",
        "--jitter 1", "--jitter nan", "--jitter -0.1", "--stragglers 9",
        "--straggler-factor 0", "--straggler-factor x", "--hours 0",
        "--hours inf", "--microbatch 3", "--seq-len 0",
        "--batch 99999999999999999999"}) {
    const bool batch = wrong.starts_with("--batch");
    refuses(
        (batch ? kSmall.substr(0, kSmall.find("--batch")) : kSmall) + wrong,
        "");
  }
}

TEST_F(SimulateCommand, RefusesBrokenClusterFiles) {
  const auto with = [&](const std::string& text) {
    folder_.write("c.toml", text);
    return std::string("--model gpt2 --cluster c.toml --layout dp=8 --batch 8");
  };
  refuses(with("nodes = ["), "c.toml");
  refuses(with(""), "c.toml");
  refuses(with("[[nodes]]\ndevice = \"h101\"\ncount = 1\n"), "c.toml");
  refuses(
      "--model gpt2 --cluster nowhere.toml --layout dp=8 --batch 8",
      "nowhere.toml");
}

}  // namespace echelon::simulate_cli_test
