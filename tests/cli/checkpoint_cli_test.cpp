// `echelon checkpoint` on small checkpoints.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "echelon/checkpoint/files/reader.h"
#include "tests/checkpoint/files/small_save.h"
#include "tests/cli/typed.h"

namespace echelon::checkpoint_cli_test {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

class CheckpointCommand : public testing::Test {
 protected:
  CheckpointCommand() {
    save(100, {{"loss", 1.5}});
    save(200, {{"loss", 0.25}, {"eval_loss", 0.5}});
  }

  void save(int64_t step, const std::map<std::string, double>& metrics) {
    const auto partial = begin_checkpoint(folder_, step, 0);
    write_small_rank(partial, step, 0);
    write_small_rank(partial, step, 1);
    auto manifest = small_manifest(step, metrics);
    manifest.epoch = 2;
    manifest.consumed = 640;
    manifest.seed = 7;
    manifest.data = "digits\nshuffled\nwhole\n1617 samples\n180 held out\n";
    manifest.config = "[optimizer]\nlearning_rate = " + std::to_string(step) +
                      "\nname = \"adamw\"\n";
    manifest.config_hash =
        checksum(manifest.config.data(), manifest.config.size());
    if (step == 200) manifest.loss_scale = SavedLossScale{1024, 5, 1};
    commit_checkpoint(folder_, manifest, 2);
  }
  Outcome run(const std::string& arguments) {
    return typed(temp_, "checkpoint " + arguments);
  }
  void damage(int64_t step, const std::string& file, size_t from_end) {
    const auto path = (checkpoint_path(folder_, step) / file).string();
    auto bytes = read_file(path);
    bytes[bytes.size() - 1 - from_end] ^= 16;
    std::ofstream(path, std::ios::binary) << bytes;
  }

  TempFolder temp_;
  fs::path folder_ = temp_.path("run/checkpoints");
};

TEST_F(CheckpointCommand, Lists) {
  const auto out = printed(run("list run"));
  EXPECT_THAT(out, StartsWith("run/checkpoints\n\n"));
  EXPECT_THAT(
      out, ContainsRegex("step +saved +layout +ranks +size +eval_loss +loss\n"
                         "200 +20.* dp=1,tp=2 +2 +.* B +0.5 +0.25 +latest\n"
                         "100 +20.* dp=1,tp=2 +2 +.* B +1.5\n$"));
}

TEST_F(CheckpointCommand, ListsUnfinishedCheckpointsApart) {
  begin_checkpoint(folder_, 300, 0);
  set_aside({folder_ / "step-00000200", 200});
  const auto out = printed(run("list run/checkpoints"));
  EXPECT_THAT(out, Not(HasSubstr("\n200 ")));
  EXPECT_THAT(
      out, AllOf(
               HasSubstr("unfinished: .step-00000300.partial"),
               HasSubstr("set aside: damaged-step-00000200\n")));
}

TEST_F(CheckpointCommand, ListsAsJson) {
  begin_checkpoint(folder_, 300, 0);
  const auto list = json::parse(run("list run --json").out);
  EXPECT_EQ(list["folder"], "run/checkpoints");
  ASSERT_EQ(list["checkpoints"].size(), 2u);
  const auto& first = list["checkpoints"][0];
  EXPECT_EQ(first["step"], 200);
  EXPECT_EQ(first["latest"], true);
  EXPECT_EQ(first["path"], "run/checkpoints/step-00000200");
  EXPECT_EQ(first["metrics"]["eval_loss"], 0.5);
  EXPECT_EQ(first["files"], 2);
  EXPECT_EQ(list["checkpoints"][1]["latest"], false);
  EXPECT_EQ(list["others"], json({".step-00000300.partial"}));
}

TEST_F(CheckpointCommand, ListsAManifestThatCannotBeRead) {
  damage(100, "manifest.json", 30);
  const auto outcome = run("list run");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.out, ContainsRegex("\n100 .* damaged\n"));
  EXPECT_THAT(
      outcome.out,
      HasSubstr("damaged: run/checkpoints/step-00000100/manifest.json"));
  const auto list = json::parse(run("list run --json").out);
  EXPECT_TRUE(list["checkpoints"][1].contains("damage"));
}

TEST_F(CheckpointCommand, ShowsTheLatest) {
  const auto text = printed(run("show run"));
  EXPECT_THAT(text, StartsWith("run/checkpoints/step-00000200, saved 20"));
  for (const char* line :
       {"\n  step           200 of 1000\n",
        "\n  metrics        eval_loss 0.5, loss 0.25\n",
        "\n  position       epoch 2, 640 samples of it consumed, seed 7\n",
        "\n  data           digits, 1617 samples, 180 held out\n",
        "\n  layout         dp=1,tp=2, 2 ranks\n",
        "\n  loss scale     1024, 5 good steps, 1 overflow\n",
        "\n  parameters     2 tensors, 17 elements of F32, 68 B\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  const auto hash = CheckpointReader((folder_ / "step-00000200").string())
                        .manifest()
                        .content_hash;
  EXPECT_THAT(text, HasSubstr("\n  contents       " + hash + "\n"));
  EXPECT_THAT(text, Not(HasSubstr("fc.weight")));
}

TEST_F(CheckpointCommand, ShowsTensorsAndConfiguration) {
  const auto text =
      printed(run("show run/checkpoints/step-00000100 --tensors"));
  EXPECT_THAT(text, HasSubstr("step           100 of 1000"));
  EXPECT_THAT(
      text,
      ContainsRegex("fc.weight +parameter +F32 +.4, 3. +.* B +2 +[0-9a-f]+\n"));
  EXPECT_EQ(
      run("show run --config").out,
      "[optimizer]\nlearning_rate = 200\nname = \"adamw\"\n");
  const auto shown = json::parse(run("show run --json").out);
  EXPECT_EQ(shown["step"], 200);
  EXPECT_EQ(shown["tensors"].size(), 2u);
  EXPECT_EQ(shown["files"][1]["name"], "rank-00001.safetensors");
  EXPECT_EQ(shown["loss_scale"]["scale"], 1024);
}

TEST_F(CheckpointCommand, VerifiesARun) {
  const auto whole = run("verify run");
  EXPECT_EQ(whole.exit_code, 0);
  EXPECT_THAT(
      whole.out,
      ContainsRegex("^run/checkpoints/step-00000200: whole: 2 files, .*\n"
                    "run/checkpoints/step-00000100: whole: 2 files, .*\n$"));
  damage(100, "rank-00001.safetensors", 0);
  const auto outcome = run("verify run");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.out, HasSubstr("step-00000200: whole"));
  EXPECT_THAT(
      outcome.out,
      ContainsRegex(
          "step-00000100: damaged: 1 place\n  .*rank-00001.safetensors.*\n$"));
  EXPECT_EQ(run("verify run/checkpoints/step-00000200").exit_code, 0);
  const auto rows = json::parse(run("verify run --json").out);
  EXPECT_EQ(rows[0]["whole"], true);
  EXPECT_EQ(rows[1]["whole"], false);
  EXPECT_EQ(rows[1]["damages"][0]["tensor"], "fc.weight");
}

TEST_F(CheckpointCommand, VerifiesManifestsAndMissingFiles) {
  damage(100, "manifest.json", 30);
  fs::remove(folder_ / "step-00000200" / "rank-00000.safetensors");
  const auto outcome = run("verify run");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(
      outcome.out,
      ContainsRegex("step-00000200: damaged: .*\n  .*rank-00000.safetensors"));
  EXPECT_THAT(
      outcome.out,
      ContainsRegex("step-00000100: damaged: 1 place\n  .*manifest.json"));
}

TEST_F(CheckpointCommand, VerifiesAFolderWithoutManifest) {
  fs::remove(folder_ / "step-00000100" / "manifest.json");
  const auto outcome = run("verify run");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(
      outcome.out,
      ContainsRegex("step-00000200: whole: .*\n.*step-00000100: damaged: "
                    "1 place\n  .*manifest.json"));
  EXPECT_EQ(run("verify run/checkpoints/step-00000200").exit_code, 0);
  EXPECT_EQ(
      json::parse(run("list run --json").out)["incomplete"],
      json::array({"step-00000100"}));
  const auto list = run("list run");
  EXPECT_EQ(list.exit_code, 3);
  EXPECT_THAT(
      list.out, HasSubstr("damaged: run/checkpoints/step-00000100 has no "
                          "manifest.json\n"));
}

TEST_F(CheckpointCommand, ComparesTheTwoNewest) {
  const auto text = printed(run("diff run"));
  EXPECT_THAT(
      text,
      StartsWith(
          "A  run/checkpoints/step-00000100  step 100, dp=1,tp=2, 2 ranks\n"
          "B  run/checkpoints/step-00000200  step 200, dp=1,tp=2, 2 ranks\n"
          "\noptimizer.learning_rate  100  ->  200\n\n"));
  // 12 elements, each 100 larger: sqrt(12) * 100.
  EXPECT_THAT(
      text,
      ContainsRegex("fc.weight +.4, 3. F32 +347.6 +346.4 +0.9966 +100\n"));
  EXPECT_THAT(text, HasSubstr("\n2 of 2 parameters changed, most of all fc."));
  const auto both = json::parse(
      run("diff run/checkpoints/step-00000200 run/checkpoints/step-00000100 "
          "--json")
          .out);
  EXPECT_EQ(both["a"], "run/checkpoints/step-00000200");
  EXPECT_EQ(both["same_contents"], false);
  EXPECT_EQ(both["settings"][0]["key"], "optimizer.learning_rate");
  EXPECT_EQ(both["tensors"][0]["change_norm"].get<double>() > 0, true);
}

TEST_F(CheckpointCommand, ComparesOneWithItself) {
  const auto out = printed(run("diff run run"));
  EXPECT_THAT(out, HasSubstr("\nthe same contents: "));
  fs::remove_all(folder_ / "step-00000100");
  EXPECT_EQ(run("diff run").exit_code, 2);
  EXPECT_THAT(run("diff run").err, HasSubstr("run: has one checkpoint; name"));
}

TEST_F(CheckpointCommand, SaysThatAFolderIsMissing) {
  for (const std::string command : {"list", "show", "verify", "diff"}) {
    const auto outcome = run(command + " nowhere");
    EXPECT_EQ(outcome.exit_code, 3) << command;
    EXPECT_THAT(outcome.out, IsEmpty());
    EXPECT_EQ(outcome.err, "nowhere: there is no such folder\n");
    EXPECT_EQ(run(command).exit_code, 2);
  }
}

TEST_F(CheckpointCommand, ReplacesControlCharacters) {
  const auto partial = begin_checkpoint(folder_, 300, 0);
  const float value = 1;
  write_rank_file(
      partial.string(), rank_file_name(0),
      {{.name = "red\033[31m",
        .dtype = "F32",
        .shape = {1},
        .box = {{0}, {1}},
        .bytes = std::as_bytes(std::span(&value, 1))}});
  CheckpointManifest manifest;
  manifest.step = 300;
  commit_checkpoint(folder_, manifest, 1);
  for (const std::string command : {"show run --tensors", "diff run"}) {
    const auto outcome = run(command);
    EXPECT_THAT(outcome.out, HasSubstr("red?[31m")) << outcome.err;
    EXPECT_THAT(outcome.out, Not(HasSubstr("\033")));
  }
}

}  // namespace echelon::checkpoint_cli_test
