#include "echelon/checkpoint/files/folder.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <limits>

#include "echelon/checkpoint/files/reader.h"
#include "tests/checkpoint/files/small_save.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::folder_test {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

std::vector<int64_t> steps(const std::vector<CheckpointPlace>& places) {
  std::vector<int64_t> found;
  for (const auto& place : places) found.push_back(place.step);
  return found;
}

class Folder : public testing::Test {
 protected:
  // Makes a folder that looks like a checkpoint to code that does not read it.
  void pretend(const std::string& name) {
    temp_.write("run/checkpoints/" + name + "/manifest.json", "{}");
  }
  void write(const std::string& name, const std::string& text) {
    temp_.write("run/checkpoints/" + name, text);
  }
  std::string content(const std::string& name) {
    return read_file((folder_ / name).string());
  }
  std::vector<std::string> entries() { return names_in(folder_); }
  /// What refuses to make a checkpoint of step 200 from the ranks' files.
  std::string refused_commit(int64_t ranks = 2) {
    return error_text<CheckpointError>(
        [&] { commit_checkpoint(folder_, small_manifest(200), ranks); });
  }
  std::string refused_begin(int64_t step, int64_t needed_bytes = 0) {
    return error_text<CheckpointError>(
        [&] { begin_checkpoint(folder_, step, needed_bytes); });
  }

  TempFolder temp_;
  fs::path folder_ = temp_.path("run/checkpoints");
};

TEST_F(Folder, ListsCompleteCheckpointsNewestFirst) {
  for (const char* name :
       {"step-00000001", "step-00000100", "step-123456789",
        ".step-00000200.partial", ".step-00000050.removed",
        "damaged-step-00000150", "step-300", "step-0000000400",
        "step-00000500x", "step--0000001", "step-99999999999999999999"}) {
    pretend(name);
  }
  write("step-00000600/rank-00000.safetensors", "");
  write("step-00000700", "");
  write("last.safetensors", "");
  const auto found = list_checkpoints(folder_);
  EXPECT_THAT(steps(found), ElementsAre(123456789, 100, 1));
  EXPECT_EQ(found.back().path, folder_ / "step-00000001");
}

TEST_F(Folder, HasNoCheckpointsWhenItIsMissing) {
  EXPECT_THAT(list_checkpoints(folder_), IsEmpty());
  EXPECT_FALSE(latest_checkpoint(folder_));
  EXPECT_THAT(
      error_text<CheckpointError>(
          [&] { list_checkpoints(temp_.write("file", "")); }),
      HasAll("/file: listing the folder", "directory"));
}

TEST_F(Folder, TheLatestIsTheNamedOne) {
  pretend("step-00000100");
  pretend("step-00000200");
  EXPECT_EQ(latest_checkpoint(folder_)->step, 200);
  write("LATEST", "step-00000100\n");
  EXPECT_EQ(latest_checkpoint(folder_)->step, 100);
  EXPECT_EQ(latest_checkpoint(folder_)->path, folder_ / "step-00000100");
  for (const std::string broken :
       {"step-00000300\n", "step-00000100", "", "step-00000100\nx\n", "\n",
        "../step-00000100\n", "step-100\n"}) {
    write("LATEST", broken);
    EXPECT_EQ(latest_checkpoint(folder_)->step, 200) << broken;
  }
  write("LATEST", std::string(100, 'x'));
  EXPECT_EQ(latest_checkpoint(folder_)->step, 200);
}

TEST_F(Folder, FollowsTheNameThatACrashLeft) {
  pretend("step-00000100");
  pretend("step-00000150");
  write("LATEST", "step-00000100\n");
  write(".LATEST.new", "step-00000200\n");
  EXPECT_EQ(latest_checkpoint(folder_)->step, 100);
  pretend("step-00000200");
  EXPECT_EQ(latest_checkpoint(folder_)->step, 200);
  begin_checkpoint(folder_, 300, 0);
  EXPECT_EQ(content("LATEST"), "step-00000200\n");
  EXPECT_FALSE(fs::exists(folder_ / ".LATEST.new"));
}

TEST_F(Folder, FindsWhereAPathLeads) {
  save_small(folder_, 100);
  save_small(folder_, 200);
  save_small(folder_, 300);
  write("LATEST", "step-00000200\n");
  for (const std::string path :
       {"run", "run/", "run/checkpoints", "run/checkpoints/"}) {
    const auto found = find_checkpoints(temp_.path(path));
    EXPECT_THAT(steps(found), ElementsAre(200, 300, 100)) << path;
    EXPECT_EQ(found.front().path, folder_ / "step-00000200");
  }
  for (const std::string path : {"step-00000100", "step-00000100/"}) {
    const auto found = find_checkpoints(folder_ / path);
    EXPECT_THAT(steps(found), ElementsAre(100));
    EXPECT_EQ(found.front().path, folder_ / "step-00000100");
  }
  fs::copy(
      folder_ / "step-00000100", temp_.path("good"),
      fs::copy_options::recursive);
  EXPECT_THAT(steps(find_checkpoints(temp_.path("good"))), ElementsAre(100));
}

TEST_F(Folder, SaysWhatIsThereInsteadOfACheckpoint) {
  const auto error = [](const fs::path& path) {
    return error_text<CheckpointError>([&] { find_checkpoints(path); });
  };
  EXPECT_THAT(error(temp_.path("no")), HasSubstr("/no: there is no such"));
  EXPECT_THAT(
      error(temp_.write("a.safetensors", "")),
      HasSubstr("/a.safetensors: is a file; a checkpoint is a folder"));
  EXPECT_THAT(
      error(temp_.make_folder("run")),
      HasSubstr("/run: has no checkpoint: neither manifest.json nor"));
  // Other programs' checkpoints, with the commands that convert them.
  temp_.write("dcp/.metadata", "");
  EXPECT_THAT(
      error(temp_.path("dcp")),
      HasAll(
          "/dcp: has no checkpoint",
          "is a folder of torch.distributed.checkpoint (DCP)",
          "dcp_to_torch '" + temp_.path("dcp") + "'"));
  temp_.write("megatron/latest_checkpointed_iteration.txt", "100");
  EXPECT_THAT(
      error(temp_.path("megatron")),
      HasAll("is a checkpoint of Megatron-LM", "`echelon import`"));
  EXPECT_THAT(
      error(temp_.write("a.pt", "")),
      HasAll(
          "/a.pt: is a file", "is a pickle of torch.save", "[model] weights"));
  pretend(".step-00000200.partial");
  EXPECT_THAT(
      error(temp_.path("run")),
      HasSubstr("run/checkpoints: has no whole checkpoint, only one that was"));
  EXPECT_THAT(
      error(folder_ / ".step-00000200.partial"),
      HasSubstr("is what a crash or a running save has left"));
}

TEST_F(Folder, OneProcessWrites) {
  {
    const CheckpointLock lock(folder_);
    const std::string text =
        error_text<CheckpointError>([&] { CheckpointLock second(folder_); });
    EXPECT_THAT(
        text, StartsWith(
                  folder_.string() + ": process " + std::to_string(::getpid()) +
                  " on host "));
    EXPECT_THAT(text, HasAll(" since 2", "[train] run"));
  }
  const CheckpointLock again(folder_);
}

TEST_F(Folder, TheLockOfADeadProcessIsFree) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const CheckpointLock lock(folder_);
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    while (true) ::pause();
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THAT(
      error_text<CheckpointError>([&] { CheckpointLock lock(folder_); }),
      HasSubstr("process " + std::to_string(child) + " on host"));
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const CheckpointLock lock(folder_);
  EXPECT_THAT(
      content("LOCK"), StartsWith("process " + std::to_string(::getpid())));
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(Folder, SaysWhyItCannotBeLocked) {
  const auto file = temp_.write("file", "");
  EXPECT_THAT(
      error_text<CheckpointError>(
          [&] { CheckpointLock lock(fs::path(file) / "checkpoints"); }),
      HasAll(
          "/file/checkpoints: making the folder failed: ", "Not a directory"));
}

TEST_F(Folder, BeginRemovesWhatCrashesLeft) {
  pretend("step-00000100");
  pretend(".step-00000200.partial");
  pretend(".step-00000150.partial");
  write(".step-00000050.removed/deep/file", "x");
  pretend("damaged-step-00000070");
  write(".LATEST.new", "step-00000200\n");
  write("LATEST", "step-00000100\n");
  write("last.safetensors", "");
  const auto partial = begin_checkpoint(folder_, 300, 1000);
  EXPECT_EQ(partial, folder_ / ".step-00000300.partial");
  EXPECT_EQ(partial, partial_checkpoint(folder_, 300));
  EXPECT_TRUE(fs::is_empty(partial));
  EXPECT_THAT(
      entries(),
      ElementsAre(
          ".step-00000300.partial", "LATEST", "damaged-step-00000070",
          "last.safetensors", "step-00000100"));
  EXPECT_EQ(latest_checkpoint(folder_)->step, 100);
}

TEST_F(Folder, BeginRefusesAStepThatIsThere) {
  pretend("step-00000100");
  EXPECT_THAT(
      refused_begin(100),
      HasAll("step-00000100: is there already", "never overwritten"));
  EXPECT_THAT(entries(), ElementsAre("step-00000100"));
  // An incomplete folder, made by hand, is not overwritten either.
  write("step-00000200/rank-00000.safetensors", "");
  EXPECT_THAT(refused_begin(200), HasSubstr("is there already"));
}

TEST_F(Folder, ListsWhatHasNoManifest) {
  pretend("step-00000050");
  write("step-00000100/rank-00000.safetensors", "");
  write("step-00000200/rank-00000.safetensors", "");
  const auto found = list_incomplete(folder_);
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].step, 200);
  EXPECT_EQ(found[1].path, folder_ / "step-00000100");
}

TEST_F(Folder, APipeInPlaceOfLatestNamesNothing) {
  pretend("step-00000100");
  ASSERT_EQ(::mkfifo((folder_ / "LATEST").c_str(), 0600), 0);
  EXPECT_EQ(latest_checkpoint(folder_)->step, 100);
}

TEST_F(Folder, BeginRefusesWhatDoesNotFitOnTheDisk) {
  const int64_t needed = std::numeric_limits<int64_t>::max() / 2;
  EXPECT_THAT(
      refused_begin(100, needed),
      HasAll(
          "a checkpoint needs " + std::to_string(needed) + " bytes, but",
          " are free there"));
  EXPECT_THAT(entries(), IsEmpty());
}

TEST_F(Folder, AFolderInPlaceOfLatestIsSetAside) {
  fs::create_directories(folder_ / "LATEST");
  write("LATEST/notes", "mine");
  save_small(folder_, 100);
  EXPECT_EQ(content("LATEST"), "step-00000100\n");
  EXPECT_EQ(content("damaged-LATEST/notes"), "mine");
}

TEST_F(Folder, CommitMakesACheckpoint) {
  save_small(folder_, 100);
  const auto path = save_small(folder_, 200, {{"loss", 0.5}});
  EXPECT_EQ(path, folder_ / "step-00000200");
  EXPECT_EQ(content("LATEST"), "step-00000200\n");
  EXPECT_THAT(
      entries(), ElementsAre("LATEST", "step-00000100", "step-00000200"));
  EXPECT_THAT(
      names_in(path),
      ElementsAre(
          "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"));
  CheckpointReader reader(path.string());
  EXPECT_EQ(reader.manifest().step, 200);
  EXPECT_EQ(reader.manifest().ranks, 2);
  EXPECT_EQ(reader.manifest().metrics.at("loss"), 0.5);
  const auto* tensor = reader.manifest().find("fc.weight");
  ASSERT_NE(tensor, nullptr);
  std::vector<float> values(12);
  reader.read(
      *tensor, whole_box({4, 3}), reinterpret_cast<std::byte*>(values.data()));
  for (int64_t i = 0; i < 12; ++i) {
    EXPECT_EQ(values[static_cast<size_t>(i)], small_value(200, i));
  }
  EXPECT_THAT(verify_checkpoint(path.string()), IsEmpty());
}

TEST_F(Folder, CommitWantsEveryRanksPart) {
  save_small(folder_, 100);
  auto partial = begin_checkpoint(folder_, 200, 0);
  write_small_rank(partial, 200, 0);
  EXPECT_THAT(
      refused_commit(),
      HasSubstr("rank-00001.part.json: rank 1 of 2 has not written its part"));
  EXPECT_THAT(entries(), ElementsAre("LATEST", "step-00000100"));
  // One rank alone leaves holes.
  partial = begin_checkpoint(folder_, 200, 0);
  write_small_rank(partial, 200, 0);
  EXPECT_THAT(refused_commit(1), HasSubstr("fc.weight"));
  EXPECT_THAT(entries(), ElementsAre("LATEST", "step-00000100"));
  EXPECT_EQ(content("LATEST"), "step-00000100\n");
}

TEST_F(Folder, CommitRefusesFilesThatAreNotWhatRanksWrote) {
  auto partial = begin_checkpoint(folder_, 200, 0);
  write_small_rank(partial, 200, 0);
  write_small_rank(partial, 200, 1);
  fs::resize_file(partial / "rank-00001.safetensors", 10);
  EXPECT_THAT(
      refused_commit(),
      HasSubstr("rank-00001.safetensors: has 10 bytes, but rank 1 wrote "));

  partial = begin_checkpoint(folder_, 200, 0);
  write_small_rank(partial, 200, 0);
  fs::copy_file(
      partial / "rank-00000.part.json", partial / "rank-00001.part.json");
  EXPECT_THAT(
      refused_commit(),
      HasSubstr("is about rank-00000.safetensors, not about rank-00001"));
  EXPECT_THAT(entries(), IsEmpty());
}

TEST_F(Folder, CommitOverwritesNothing) {
  const auto partial = begin_checkpoint(folder_, 200, 0);
  write_small_rank(partial, 200, 0);
  write_small_rank(partial, 200, 1);
  pretend("step-00000200");
  EXPECT_THAT(refused_commit(), HasSubstr("is there already"));
  EXPECT_THAT(entries(), ElementsAre("step-00000200"));
  EXPECT_EQ(content("step-00000200/manifest.json"), "{}");
}

TEST_F(Folder, AbandonLeavesOthersAlone) {
  pretend("step-00000100");
  pretend(".step-00000200.partial");
  write(".LATEST.new", "step-00000100\n");
  abandon_checkpoint(folder_, 100);
  abandon_checkpoint(folder_, 150);
  EXPECT_EQ(entries().size(), 3u);
  write(".LATEST.new", "step-00000200\n");
  abandon_checkpoint(folder_, 200);
  EXPECT_THAT(entries(), ElementsAre("step-00000100"));
  abandon_checkpoint(temp_.path("nowhere"), 200);
}

TEST_F(Folder, AtLeastTwoStay) {
  for (int64_t step : {100, 200, 300, 400, 500}) save_small(folder_, step);
  EXPECT_THAT(
      steps(keep_checkpoints(folder_, {.newest = 4})), ElementsAre(100));
  EXPECT_THAT(
      steps(keep_checkpoints(folder_, {.newest = 0})), ElementsAre(300, 200));
  EXPECT_THAT(steps(list_checkpoints(folder_)), ElementsAre(500, 400));
  EXPECT_THAT(keep_checkpoints(folder_, {}), IsEmpty());
  EXPECT_THAT(
      entries(), ElementsAre("LATEST", "step-00000400", "step-00000500"));
}

TEST_F(Folder, TheLatestStays) {
  for (int64_t step : {100, 200, 300, 400}) save_small(folder_, step);
  write("LATEST", "step-00000100\n");
  keep_checkpoints(folder_, {});
  EXPECT_THAT(steps(list_checkpoints(folder_)), ElementsAre(400, 300, 100));
}

TEST_F(Folder, TheBestStays) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> loss = {0.5, 0.2, 0.2, nan, 0.7, 0.9, 0.8};
  for (size_t i = 0; i < loss.size(); ++i) {
    save_small(folder_, 100 * static_cast<int64_t>(i + 1), {{"loss", loss[i]}});
  }
  save_small(folder_, 800);
  const auto kept = [&](const KeepRule& rule) {
    const TempFolder copy;
    fs::copy(folder_, copy.path(), fs::copy_options::recursive);
    keep_checkpoints(copy.path(), rule);
    return steps(list_checkpoints(copy.path()));
  };
  EXPECT_THAT(kept({.best = "loss"}), ElementsAre(800, 700, 300));
  EXPECT_THAT(
      kept({.best = "loss", .best_is_largest = true}),
      ElementsAre(800, 700, 600));
  EXPECT_THAT(kept({.best = "eval_loss"}), ElementsAre(800, 700));
  // A checkpoint that cannot be read may be the best.
  write("step-00000100/manifest.json", "{}");
  EXPECT_THAT(kept({.best = "loss"}), ElementsAre(800, 700, 300, 100));
  EXPECT_THAT(kept({}), ElementsAre(800, 700));
}

TEST_F(Folder, ADamagedCheckpointIsSetAside) {
  save_small(folder_, 100);
  save_small(folder_, 200);
  const auto aside = set_aside(*latest_checkpoint(folder_));
  EXPECT_EQ(aside, folder_ / "damaged-step-00000200");
  EXPECT_EQ(latest_checkpoint(folder_)->step, 100);
  save_small(folder_, 200);
  EXPECT_EQ(
      set_aside(*latest_checkpoint(folder_)),
      folder_ / "damaged-step-00000200-2");
  EXPECT_TRUE(fs::exists(aside / "manifest.json"));
  EXPECT_THAT(steps(find_checkpoints(folder_)), ElementsAre(100));
}

}  // namespace echelon::folder_test
