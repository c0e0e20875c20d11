// `echelon sample` as users run it: after a training of a few steps.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/process.h"
#include "tests/train/trained_command.h"

namespace echelon::sample_command_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;
using testing_support::Command;
using testing_support::TempFolder;

const std::string kText = source_path("examples/configs/text.toml");

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
    return Words{kEchelon, "train", kText, "-n", "2"} +
           set(
               {"train.run=" + run, "data.sources=[\"" + text() + "\"]",
                "data.sequence=32", "train.steps=40", "train.batch=8",
                "model.hidden_size=32", "model.layers=1",
                "optimizer.learning_rate=1e-2", "optimizer.warmup_steps=2"});
  }
  Words cache() const { return {"ECHELON_CACHE=" + folder_.path() + "/cache"}; }

  std::string sampled(const Words& words) {
    Command sample(Words{kEchelon, "sample"} + words, cache());
    EXPECT_EQ(sample.wait(), 0) << sample.err();
    return sample.out();
  }
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
  const Words words = {run, "--tokens", "30", "--prompt", "all work"};
  const std::string first = sampled(words);
  EXPECT_THAT(first, StartsWith("all work"));
  EXPECT_EQ(first.back(), '\n');
  // A prompt may look like a flag.
  EXPECT_THAT(
      sampled({run, "--tokens", "3", "--prompt=--seed"}), StartsWith("--seed"));
  EXPECT_EQ(sampled(words + Words{"--seed", "0"}), first);
  EXPECT_NE(sampled(words + Words{"--seed", "1"}), first);

  refused({run, "--prompt", ""}, 2, "--prompt is empty");
  refused({run, "--prompt", "a", "--top-p", "2"}, 2, "--top-p must be more");
}

// The text of several ranks is that of one device, and rank 0 alone prints it.
TEST_F(SampleCommand, RanksContinueAPromptTogether) {
  const std::string run = trained();
  const Words words = {
      run,
      "--tokens",
      "12",
      "--temperature",
      "0",
      "--prompt",
      "all work and no play all"};
  const std::string expected = sampled(words);
  EXPECT_EQ(sampled(words + Words{"--layout", "cp=2"}), expected);
  EXPECT_EQ(
      sampled(
          words + Words{"--layout", "cp=2,tp=2"} +
          set({"layout.context=ulysses", "train.ranks=threads"})),
      expected);
  EXPECT_EQ(sampled(words + set({"layout.cp=3"})), expected);
  // A prompt may look like a flag of the program that the ranks run.
  EXPECT_THAT(
      sampled(
          {run, "--layout", "cp=2", "--set", "train.ranks=threads", "--tokens",
           "1", "--prompt=--threads"}),
      StartsWith("--threads"));

  refused(
      words + Words{"--layout", "fsdp=2,cp=2"}, 2,
      "[layout] fsdp = 2: ranks of cp and tp continue a text together");
  refused(words + Words{"--layout", "cp=33"}, 2, "cp may be 32 at most");
  refused(words + Words{"--layout", "xp=2"}, 2, "xp");
  refused(
      words + set({"layout.contxt=ring"}), 2,
      "unknown key; did you mean \"context\"?");
}

// The weights are found by the checkpoint, by its run and by the last weights
// alone, and in another run that began with them and learns nothing.
TEST_F(SampleCommand, TakesWeightsOfARunOrACheckpoint) {
  const std::string run = trained();
  const auto said = [&](const std::string& place) {
    return sampled({place, "--tokens", "20", "--prompt", "all work"});
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
            set(
                {"model.weights=" + weights, "train.steps=1",
                 "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-30"}),
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

}  // namespace echelon::sample_command_test
