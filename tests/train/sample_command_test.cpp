// `echelon sample` as users run it: after a training of a few steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/places.h"
#include "tests/support/process.h"

namespace echelon {
namespace sample_command_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;
using testing_support::Command;
using testing_support::TempFolder;
using Words = std::vector<std::string>;

const std::string kEchelon = program("echelon");
const std::string kText = source_path("examples/configs/text.toml");
const std::string kDigits = source_path("examples/configs/digits.toml");

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class SampleCommand : public testing::Test {
 protected:
  /// The example, as small as it gets, on a text of its own.
  std::string trained() {
    const std::string run = folder_.path() + "/run";
    std::ofstream file(text());
    for (int i = 0; i < 400; ++i) file << "all work and no play ";
    file.close();
    Command train(train_words(run), cache());
    EXPECT_EQ(train.wait(), 0) << train.out() << train.err();
    return run;
  }
  std::string text() const { return folder_.path() + "/text.txt"; }
  Words train_words(const std::string& run) const {
    return {
        kEchelon,
        "train",
        kText,
        "-n",
        "2",
        "--set",
        "train.run=" + run,
        "--set",
        "data.sources=[\"" + text() + "\"]",
        "--set",
        "data.sequence=32",
        "--set",
        "train.steps=40",
        "--set",
        "train.batch=8",
        "--set",
        "model.hidden_size=32",
        "--set",
        "model.layers=1",
        "--set",
        "optimizer.learning_rate=1e-2",
        "--set",
        "optimizer.warmup_steps=2"};
  }
  Words cache() const { return {"ECHELON_CACHE=" + folder_.path() + "/cache"}; }

  void refused(const Words& words, int exit_code, const std::string& message) {
    Command sample(Words{kEchelon, "sample"} + words, cache());
    EXPECT_EQ(sample.wait(), exit_code) << message;
    EXPECT_THAT(sample.err(), HasSubstr(message));
    EXPECT_EQ(sample.out(), "");
  }

  TempFolder folder_;
};

TEST_F(SampleCommand, ContinuesAPrompt) {
  const std::string run = trained();
  const Words words = {kEchelon, "sample", run, "--tokens", "30", "--prompt"};
  Command first(words + Words{"all work"}, cache());
  EXPECT_EQ(first.wait(), 0) << first.err();
  EXPECT_THAT(first.out(), StartsWith("all work"));
  EXPECT_EQ(first.out().back(), '\n');
  // A prompt may look like a flag.
  Command flag(
      Words{kEchelon, "sample", run, "--tokens", "3", "--prompt=--seed"},
      cache());
  EXPECT_EQ(flag.wait(), 0) << flag.err();
  EXPECT_THAT(flag.out(), StartsWith("--seed"));
  Command same(words + Words{"all work", "--seed", "0"}, cache());
  EXPECT_EQ(same.wait(), 0);
  EXPECT_EQ(same.out(), first.out());
  Command other(words + Words{"all work", "--seed", "1"}, cache());
  EXPECT_EQ(other.wait(), 0);
  EXPECT_NE(other.out(), first.out());

  refused({run, "--prompt", ""}, 2, "--prompt is empty");
  refused({run, "--prompt", "a", "--top-p", "2"}, 2, "--top-p must be more");
}

// By the checkpoint, by its run, by the last weights alone, and after they were
// the first values of another run that learns nothing.
TEST_F(SampleCommand, TakesWeightsOfARunOrACheckpoint) {
  const std::string run = trained();
  const auto said = [&](const std::string& place) {
    Command sample(
        {kEchelon, "sample", place, "--tokens", "20", "--prompt", "all work"},
        cache());
    EXPECT_EQ(sample.wait(), 0) << sample.err();
    return sample.out();
  };
  const std::string checkpoint = run + "/checkpoints/step-00000040";
  ASSERT_TRUE(fs::exists(checkpoint));
  const auto text = said(run);
  EXPECT_EQ(said(checkpoint), text);
  for (const auto& [name, weights] :
       {std::pair("from-run", run), std::pair("from-checkpoint", checkpoint),
        std::pair("from-nothing", std::string())}) {
    const std::string next = folder_.path() + "/" + name;
    Command train(
        train_words(next) +
            Words{
                "--set", "model.weights=" + weights, "--set", "train.steps=1",
                "--set", "optimizer.warmup_steps=0", "--set",
                "optimizer.learning_rate=1e-30"},
        cache());
    ASSERT_EQ(train.wait(), 0) << train.err();
    if (weights.empty()) {
      EXPECT_NE(said(next), text);
    } else {
      EXPECT_EQ(said(next), text) << name;
    }
  }
  fs::remove_all(checkpoint);
  EXPECT_EQ(said(run), text);
  fs::remove(run + "/checkpoints/last.safetensors");
  refused({run, "--prompt", "a"}, 3, run + ": has no checkpoint");
}

TEST_F(SampleCommand, SaysWhatIsNoRunOfALanguageModel) {
  refused({folder_.path(), "--prompt", "a"}, 3, "has no checkpoint");
  fs::copy(kDigits, folder_.path() + "/config.toml");
  fs::create_directories(folder_.path() + "/checkpoints");
  std::ofstream(folder_.path() + "/checkpoints/last.safetensors") << "";
  refused(
      {folder_.path(), "--prompt", "a"}, 2,
      "its model is simple_cnn, not a language model");
}

}  // namespace sample_command_test
}  // namespace echelon
