// What the shell sees of `echelon`: help, manual pages, completion, terminals.
#include <gmock/gmock.h>

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "tests/cli/typed.h"
#include "tests/support/error_text.h"

namespace echelon::help_cli_test {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

class Help : public testing::Test {
 protected:
  Help() {
    std::filesystem::create_directory(folder_.path("bin"));
    std::filesystem::create_symlink(
        program("echelon"), folder_.path("bin/echelon"));
  }

  Outcome shell(const std::string& command) {
    return echelon::shell(folder_, command);
  }
  Outcome run(const std::string& arguments) {
    return shell("bin/echelon " + arguments);
  }
  std::string read(const std::string& name) const {
    return read_file(folder_.path(name));
  }

  TempFolder folder_;
};

TEST_F(Help, PrintsColoursOnlyOnTerminals) {
  const std::string on_terminal =
      "TERM=xterm script -qec 'bin/echelon --help' "
      "/dev/null";
  EXPECT_THAT(shell(on_terminal).out, HasSubstr("\033["));
  EXPECT_THAT(shell("NO_COLOR=1 " + on_terminal).out, Not(HasSubstr("\033[")));
  EXPECT_THAT(run("--help").out, Not(HasSubstr("\033[")));
}

class BashCompletion : public Help {
 protected:
  std::vector<std::string> complete(const std::string& words, int current) {
    const auto outcome = shell(
        "bash -c 'source <(bin/echelon completion bash); COMP_WORDS=(" + words +
        "); COMP_CWORD=" + std::to_string(current) +
        "; _echelon; printf \"%s\\n\" \"${COMPREPLY[@]}\"'");
    EXPECT_EQ(outcome.err, "");
    return lines_of(outcome.out);
  }
};

TEST_F(BashCompletion, CompletesCommandsFlagsAndValues) {
  EXPECT_THAT(complete("echelon tr", 1), ElementsAre("train"));
  EXPECT_THAT(complete("echelon \"\"", 1), Contains("doctor"));
  EXPECT_THAT(complete("echelon config \"\"", 2), Contains("reference"));
  EXPECT_THAT(complete("echelon config show --j", 3), ElementsAre("--json"));
  EXPECT_THAT(complete("echelon train --over", 2), ElementsAre("--overwrite"));
  EXPECT_THAT(
      complete("echelon train --ranks \"\"", 3),
      ElementsAre("processes", "threads"));
  EXPECT_THAT(complete("echelon completion \"\"", 2), Contains("zsh"));
}

TEST_F(BashCompletion, LeavesFilesToTheShell) {
  EXPECT_THAT(complete("echelon train fir", 2), ElementsAre(""));
  EXPECT_THAT(complete("echelon run -n 2 -- ./pro", 5), ElementsAre(""));
}

TEST_F(BashCompletion, HidesTheFlagOfTests) {
  EXPECT_THAT(run("completion bash").out, Not(HasSubstr("plant")));
  EXPECT_THAT(run("verify --help").out, Not(HasSubstr("plant")));
}

TEST_F(BashCompletion, CompletesKeysOfSetAndTheirValues) {
  EXPECT_THAT(
      complete("echelon train a.toml --set train.st", 4),
      ElementsAre("train.steps="));
  EXPECT_GT(complete("echelon train a.toml --set \"\"", 4).size(), 120u);
  // The shell splits words at =.
  EXPECT_THAT(
      complete("echelon train a.toml --set train.ranks = \"\"", 6),
      ElementsAre("processes", "threads"));
  EXPECT_THAT(
      complete("echelon train a.toml --set train.ranks =", 5),
      ElementsAre("processes", "threads"));
  EXPECT_THAT(
      complete("echelon train a.toml --set memory.recompute = sel", 6),
      ElementsAre("selective"));
  // Or it does not, where COMP_WORDBREAKS lacks it.
  EXPECT_THAT(
      complete("echelon train a.toml --set data.flip=t", 4),
      ElementsAre("data.flip=true"));
  EXPECT_THAT(
      complete("echelon train a.toml --set data.path = ./fi", 6),
      ElementsAre(""));
  // What follows an assignment is completed as before.
  EXPECT_THAT(
      complete("echelon train a.toml --set data.flip = true --over", 7),
      ElementsAre("--overwrite"));
}

TEST_F(BashCompletion, KnowsModelsDevicesAndSchedules) {
  EXPECT_THAT(
      complete("echelon plan --model gpt3-1", 3), Contains("gpt3-175b"));
  EXPECT_THAT(
      complete("echelon simulate --cluster h100-s", 3),
      ElementsAre("h100-sxm:"));
  EXPECT_THAT(
      complete("echelon simulate --schedule zb-v", 3), ElementsAre("zb-v"));
  EXPECT_THAT(complete("echelon help tr", 2), ElementsAre("train"));
}

TEST_F(Help, PrintsCompletionsOfOtherShells) {
  EXPECT_THAT(
      run("completion zsh").out,
      AllOf(
          StartsWith("#compdef echelon\n"), HasSubstr(" train.steps= "),
          HasSubstr("train.ranks) answers=\"processes threads\"")));
  EXPECT_THAT(
      run("completion fish").out,
      HasAll(
          "complete -c echelon -n '__echelon_at \"\"' -f -a train -d ",
          " train.ranks=threads ", " train.steps= ",
          "-n '__echelon_at \" train\"' -l ranks -x -a 'processes threads'",
          "-n '__echelon_at \" config show\"' -l json -d"));
  EXPECT_THAT(
      run("completion tcsh").err, HasSubstr("must be bash, zsh or fish"));
}

TEST_F(Help, HelpNamesCommandsInGroups) {
  const auto lines = lines_of(run("--help").out);
  std::vector<std::string> headings;
  for (const auto& line : lines) {
    if (!line.empty() && std::isupper(line.front()) != 0 &&
        line.find(' ') == std::string::npos) {
      headings.push_back(line);
    }
  }
  EXPECT_THAT(
      headings, ElementsAre(
                    "Examples", "Train", "Share", "Inspect", "Plan", "Machine",
                    "Options"));
  EXPECT_EQ(run("help train").out, run("train --help").out);
  EXPECT_EQ(run("help config show").out, run("config show --help").out);
  EXPECT_EQ(run("help").out, run("--help").out);
  for (const std::string arguments : {"help trian", "trian --help"}) {
    const auto outcome = run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(
        outcome.err,
        "echelon: unknown command \"trian\"; did you mean \"train\"?\n");
  }
}

TEST_F(Help, WritesAManualPageForEachCommand) {
  EXPECT_THAT(printed(run("help --man man1")), HasSubstr("manual pages"));
  const auto train = read("man1/echelon-train.1");
  EXPECT_THAT(
      train, HasAll(
                 ".TH ECHELON\\-TRAIN 1 ", ".SH NAME\nechelon\\-train \\- ",
                 ".TP\n\\fB\\-n RANKS\\fR\n", ".SH EXIT STATUS",
                 "\\fBechelon\\fR(1)"));
  EXPECT_THAT(read("man1/echelon.1"), HasAll(".SH TRAIN\n", ".SH MACHINE\n"));
  EXPECT_TRUE(
      std::filesystem::exists(folder_.path("man1/echelon-config-show.1")));
  EXPECT_EQ(run("help --man /proc/none").exit_code, 2);
}

TEST_F(Help, ATerminalMayBeNarrowOrWithoutUtf8) {
  const auto on_terminal = [&](const std::string& settings,
                               const std::string& arguments) {
    return shell(
               settings + " script -qec 'stty cols 40; bin/echelon " +
               arguments + "' /dev/null")
        .out;
  };
  const auto utf8 = on_terminal("TERM=xterm LC_ALL=C.UTF-8", "train --help");
  EXPECT_THAT(utf8, HasSubstr("AXIS=DEGREE,…"));
  const auto ascii = on_terminal("TERM=xterm LC_ALL=C", "train --help");
  EXPECT_THAT(ascii, HasSubstr("AXIS=DEGREE,..."));
  EXPECT_TRUE(std::ranges::all_of(
      ascii, [](char c) { return static_cast<signed char>(c) >= 0; }));
  // Files are UTF-8 in every locale.
  EXPECT_THAT(
      shell("LC_ALL=C bin/echelon train --help").out,
      HasSubstr("AXIS=DEGREE,…"));
  const auto plain = on_terminal("NO_COLOR=1 LC_ALL=C", "train --help");
  EXPECT_THAT(plain, Not(HasSubstr("\033[")));
  const size_t options = plain.find("\nOptions");
  ASSERT_NE(options, std::string::npos);
  for (const auto& line : lines_of(plain.substr(options))) {
    EXPECT_LE(line.size(), 41u) << line;  // with the carriage return
  }
}

}  // namespace echelon::help_cli_test
