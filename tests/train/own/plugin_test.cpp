// The command line with a library's model, data and loss.
#include "echelon/train/plugin.h"

#include <gmock/gmock.h>

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "echelon/timeline/metrics.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"
#include "tests/train/trained_command.h"

namespace echelon::plugin_test {

using testing::HasSubstr;
using testing::Not;
using testing_support::Command;
using testing_support::read_file;

const std::string kLibrary = test_program("own_plugin.so");
constexpr const char* kLoaded = "own_plugin was loaded";

class Plugin : public testing::Test {
 protected:
  std::string config(
      const std::string& library, const std::string& model = "own",
      const std::string& data = "own") const {
    return folder_.write(
        "own.toml", "[model]\nname = \"" + model + "\"\nlibrary = \"" +
                        library + "\"\ndtype = \"float64\"\n[data]\nname = \"" +
                        data + "\"\n[train]\nsteps = 6\nbatch = 12\nrun = \"" +
                        folder_.path("run") + "\"\n");
  }
  /// The library with other bytes at `offset` of its tag.
  std::string changed(size_t offset, uint32_t value) const {
    std::string bytes = read_file(kLibrary);
    const std::string mark(PluginTag().mark, sizeof(PluginTag::mark));
    const size_t at = bytes.find(mark);
    EXPECT_NE(at, std::string::npos);
    std::memcpy(bytes.data() + at + offset, &value, sizeof value);
    return folder_.write("changed.so", bytes);
  }

  TempFolder folder_;
};

TEST_F(Plugin, TrainsVerifiesPlansAndCounts) {
  const std::string own = config(kLibrary);
  for (const auto& words :
       {Words{"verify", own, "-n", "2", "--layout", "dp=2"},
        Words{"verify", own, "-n", "4", "--layout", "tp=2,pp=2"}}) {
    Command verify(Words{kEchelon} + words);
    EXPECT_EQ(verify.wait(), 0) << verify.err();
    EXPECT_THAT(verify.out(), HasSubstr("equal: 51 comparisons"));
  }
  Command train(Words{kEchelon, "train", own, "-n", "2"});
  EXPECT_EQ(train.wait(), 0) << train.err();
  EXPECT_THAT(train.out(), HasAll("mae", "held-out loss", "report: "));
  const auto metrics =
      timeline::read_metrics(folder_.path("run") + "/metrics.jsonl");
  EXPECT_EQ(metrics.steps.size(), 6U);
  EXPECT_EQ(metrics.evaluations.back().own.at(0).first, "mae");
  // The run goes on by its own configuration, which names the library.
  Command more(
      Words{
          kEchelon, "train", folder_.path("run") + "/config.toml", "-n", "2"} +
      set({"train.steps=8"}));
  EXPECT_EQ(more.wait(), 0) << more.err();
  EXPECT_THAT(more.out(), HasSubstr("resumes from step 6"));

  Command check(Words{kEchelon, "train", own, "--check", "-n", "2"});
  EXPECT_EQ(check.wait(), 0) << check.err();
  EXPECT_THAT(
      check.out(),
      HasAll("own, of " + kLibrary + ", 311 parameters", "6 steps"));
  Command plan(Words{kEchelon, "train", own, "--dry-run", "-n", "2"});
  EXPECT_EQ(plan.wait(), 0) << plan.err();
  EXPECT_THAT(plan.out(), HasSubstr("parameters"));
  Command count(Words{program("echelon-train"), "count", own});
  EXPECT_EQ(count.wait(), 0) << count.err();
  EXPECT_THAT(count.out(), HasAll("\"up\"", "\"loss\""));
}

// Memory is checked before the ranks start, as that of a model that is built
// in; where layers cannot be counted, training starts nevertheless.
TEST_F(Plugin, ItsParametersAreCountedBeforeTheStart) {
  const std::string own = config(kLibrary);
  Command small(
      Words{kEchelon, "train", own, "-n", "2"} +
      set({"memory.limit_bytes=\"4 KiB\""}));
  EXPECT_EQ(small.wait(), static_cast<int>(ExitCode::configuration));
  EXPECT_THAT(
      small.err(), HasAll("--set memory.limit_bytes", "rank 0 needs 13.1 KiB"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("run")));
  Command dry(Words{kEchelon, "train", own, "--dry-run", "-n", "2"});
  EXPECT_EQ(dry.wait(), 0) << dry.err();
  EXPECT_THAT(dry.out(), HasSubstr("restarts take 21.9 KiB"));
  Command broken(
      Words{kEchelon, "train", own, "--check", "-n", "2"},
      {"OWN_PLUGIN=throws"});
  EXPECT_EQ(broken.wait(), 0) << broken.err();
  EXPECT_THAT(
      broken.err(), HasAll("fits into memory is not known", "no weights here"));
}

TEST_F(Plugin, ABenchmarkOfItsStepKeepsNothing) {
  const std::string own = config(kLibrary);
  const Words bench = {kEchelon, "bench", "step", own, "-n", "2"};
  Command json(bench + Words{"--steps", "4", "--warmup", "2", "--json"});
  EXPECT_EQ(json.wait(), 0) << json.err();
  const auto figures = nlohmann::json::parse(json.out());
  EXPECT_EQ(figures.at("layout"), "dp=2");
  EXPECT_EQ(figures.at("parameters"), 311);
  EXPECT_EQ(figures.at("steps"), 4);
  const double step = figures.at("step_seconds");
  EXPECT_GT(step, 0);
  EXPECT_LE(figures.at("fastest_step_seconds"), step);
  EXPECT_GE(figures.at("slowest_step_seconds"), step);
  EXPECT_GT(figures.at("samples_per_second"), 0);
  EXPECT_LT(figures.at("forward_seconds"), figures.at("slowest_step_seconds"));
  EXPECT_GT(figures.at("peak_memory_bytes"), 1 << 20);
  Command text(bench + set({"train.batch=24"}));
  EXPECT_EQ(text.wait(), 0) << text.err();
  EXPECT_THAT(
      text.out(), HasAll(
                      "dp=2, 311 parameters, batch 24", "the median of 20",
                      "samples/s", "rank 0", "forward ", "memory "));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("run")));
  Command broken(bench + Words{"--steps", "0"});
  EXPECT_EQ(broken.wait(), static_cast<int>(ExitCode::configuration));
  EXPECT_THAT(broken.err(), HasSubstr("--steps 0"));
}

// No formula knows the layers of a library, so they are counted.
TEST_F(Plugin, IsSimulatedAndReplanned) {
  const std::string own = config(kLibrary);
  Command simulate(Words{
      kEchelon, "simulate", own, "--cluster", "h100-sxm:1x8", "--layout",
      "dp=2,tp=2", "--json"});
  EXPECT_EQ(simulate.wait(), 0) << simulate.err();
  EXPECT_THAT(simulate.out(), HasAll("\"step_seconds\"", "\"operators\""));
  Command plan(Words{
      kEchelon, "plan", own, "--elastic", "1:4", "--cluster", "h100-sxm:1x8",
      "--json"});
  EXPECT_EQ(plan.wait(), 0) << plan.err();
  const auto sizes = nlohmann::json::parse(plan.out()).at("sizes");
  ASSERT_EQ(sizes.size(), 4U);
  for (const auto& size : sizes) {
    EXPECT_GT(size.at("step_seconds").get<double>(), 0) << size;
    EXPECT_EQ(size.at("unknown"), "") << size;
  }
  // Layers that cannot be counted are no end of the plan.
  Command broken(
      Words{
          kEchelon, "plan", own, "--elastic", "1:2", "--cluster",
          "h100-sxm:1x8"},
      {"OWN_PLUGIN=throws"});
  EXPECT_EQ(broken.wait(), 0) << broken.err();
  EXPECT_THAT(broken.out(), HasSubstr("no weights here"));
}

// A library that was built with anything else is not loaded.
TEST_F(Plugin, OfAnotherVersionIsRefusedBeforeItRuns) {
  const struct {
    size_t offset;
    uint32_t value;
    std::string says;
  } cases[] = {
      {offsetof(PluginTag, echelon), 9, "Echelon 9.1.0, and this is Echelon"},
      {offsetof(PluginTag, torch) + 4, 99,
       "LibTorch 2.99.0, and this program with LibTorch 2."},
      {offsetof(PluginTag, abi), 1, "a compiler of ABI 1."},
      {offsetof(PluginTag, sizes), 1, "another build of Echelon"},
      {offsetof(PluginTag, form), 7, "and this is Echelon"}};
  for (const auto& one : cases) {
    const std::string library = changed(one.offset, one.value);
    Command train(Words{kEchelon, "verify", config(library), "-n", "1"});
    EXPECT_EQ(train.wait(), static_cast<int>(ExitCode::configuration));
    EXPECT_THAT(
        train.err(), HasAll(
                         "[model] library=\"" + library + "\" was built with",
                         one.says, "Nothing in it was run"));
    EXPECT_THAT(train.err(), Not(HasSubstr(kLoaded)));
  }
  // It does run where nothing was changed.
  const std::string library = changed(offsetof(PluginTag, echelon), 0);
  Command train(Words{kEchelon, "verify", config(library), "-n", "1"});
  EXPECT_EQ(train.wait(), 0);
  EXPECT_THAT(train.err(), HasSubstr(kLoaded));
}

TEST_F(Plugin, AFileThatIsNone) {
  const auto refusal = [&](const std::string& library) {
    return error_text<ConfigError>([&] { detail::read_plugin_tag(library); });
  };
  EXPECT_THAT(refusal("/nowhere.so"), HasSubstr("there is no such file"));
  EXPECT_THAT(refusal(folder_.path()), HasSubstr("there is no such file"));
  const std::string is_none = "is no library for Echelon";
  EXPECT_THAT(refusal(program("echelon")), HasSubstr(is_none));
  EXPECT_THAT(refusal(folder_.write("empty.so", "")), HasSubstr(is_none));
  const std::string bytes = read_file(kLibrary);
  for (const size_t length : {4U, 40U, 64U, 5000U}) {
    EXPECT_THAT(
        refusal(folder_.write("short.so", bytes.substr(0, length))),
        HasSubstr(is_none));
  }
  // A table of sections that is elsewhere, or names that are none.
  for (const size_t at : {40U, 44U, 58U, 60U, 62U}) {
    std::string broken = bytes;
    broken[at] = '\xff', broken[at + 1] = '\xff';
    EXPECT_THAT(
        refusal(folder_.write("broken.so", broken)), HasSubstr(is_none));
  }
  EXPECT_EQ(detail::read_plugin_tag(kLibrary), PluginTag());
}

TEST_F(Plugin, MistakesAroundIt) {
  const auto fails = [&](const std::string& path, const Words& more,
                         const std::vector<std::string>& environment = {}) {
    Command train(
        Words{kEchelon, "verify", path, "-n", "1"} + more, environment);
    EXPECT_NE(train.wait(), 0);
    return train.err();
  };
  EXPECT_THAT(
      fails(config(folder_.path("none.so")), {}),
      HasAll("library", "there is no such file; build it"));
  EXPECT_THAT(
      fails(config(kLibrary, "mlp", "own"), {}),
      HasAll("brings a model of its own; set [model] name = \"own\""));
  EXPECT_THAT(
      fails(config(kLibrary, "own", "digits"), {}, {"OWN_PLUGIN=all"}),
      HasAll("brings a data set of its own; set [data] name = \"own\""));
  EXPECT_THAT(
      fails(config(kLibrary), {}, {"OWN_PLUGIN=throws"}),
      HasAll("own_plugin.so\": no weights here"));
  EXPECT_THAT(fails(config(""), {}), HasAll("name the library"));
  EXPECT_THAT(
      fails(config("", "mlp"), {}),
      HasAll("name the library in [model] library"));
}

}  // namespace echelon::plugin_test
