// Failures while training is saved, and requests meanwhile.
#include "echelon/train/saving/saver.h"

#include <gmock/gmock.h>

#include <csignal>
#include <filesystem>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/profiling/memory_meter.h"
#include "tests/support/error_text.h"
#include "tests/train/small_run.h"

namespace echelon::saver_test {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::IsEmpty;

CheckpointManifest at_step(int64_t step) {
  return {.step = step};
}

class SaverTest : public testing::Test {
 protected:
  void on(const Job& job, const std::function<void(SmallRun&, Saver&)>& body) {
    on_ranks(job, [&](SmallRun& run) {
      Saver saver(
          job, run.source, run.world, run.groups, folder_.path("run"), nullptr);
      body(run, saver);
    });
  }
  fs::path checkpoints() const { return folder_.path("run") + "/checkpoints"; }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> all;
    for (const auto& place : list_checkpoints(checkpoints())) {
      all.push_back(place.step);
      EXPECT_THAT(verify_checkpoint(place.path.string()), IsEmpty());
    }
    return all;
  }

  mutable TempFolder folder_;
};

// A folder that is in the way of a checkpoint's last rename.
void block(const fs::path& checkpoints, int64_t step) {
  fs::create_directories(checkpoint_path(checkpoints, step) / "in the way");
}

TEST_F(SaverTest, ARequestDuringAnotherIsNotLost) {
  install_save_signal();
  on(small_mlp(), [&](SmallRun& run, Saver& saver) {
    EXPECT_EQ(saver.news().request, 0);
    // The sums of the step are on their way.
    std::raise(SIGUSR1);
    saver.after_step(run.state, at_step(1), {.request = 1});
    saver.wait();
    const SaverNews news = saver.news();
    EXPECT_EQ(news.request, 1);
    saver.after_step(run.state, at_step(2), news);
    saver.wait();
    EXPECT_EQ(saver.news().request, 0);
    // Two requests at once are one.
    std::raise(SIGUSR1);
    std::raise(SIGUSR1);
    EXPECT_EQ(saver.news().request, 1);
    saver.after_step(run.state, at_step(3), {.request = 1});
    saver.wait();
    EXPECT_EQ(saver.news().request, 0);
  });
  EXPECT_EQ(steps(), (std::vector<int64_t>{3, 2}));
}

TEST_F(SaverTest, ARankWithoutMemoryForItsCopyFailsOnlyTheCheckpoint) {
  Job job = small_mlp();
  job.model.hidden = {512, 512};
  job.layout = {.dp_replicate = 2};
  testing::internal::CaptureStderr();
  on(job, [&](SmallRun& run, Saver& saver) {
    profiling::MemoryMeter meter;
    {
      const auto counting = meter.count();
      if (run.world.rank() == 1) meter.limit(64 << 10);
      saver.after_step(run.state, at_step(1), {.request = 1});
    }
    // The others do not wait for it, and the next checkpoint is complete.
    saver.before_update();
    run.train(0, 1);
    saver.after_step(run.state, at_step(2), {.request = 1});
    saver.wait();
  });
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasAll(
          "the checkpoint of step 1 failed: rank 1: [checkpoint] a "
          "copy of this rank's state takes ",
          "(1 of 3)"));
  EXPECT_EQ(steps(), (std::vector<int64_t>{2}));
}

TEST_F(SaverTest, TheLastCheckpointIsTriedAfterAFailure) {
  Job job = small_mlp();
  job.checkpoint.attempts = 1;
  job.layout = {.dp_replicate = 2};
  testing::internal::CaptureStderr();
  on(job, [&](SmallRun& run, Saver& saver) {
    saver.after_step(run.state, at_step(1), {.request = 1});
    run.world.group().barrier();
    if (run.world.rank() == 0) block(checkpoints(), 1);
    run.world.group().barrier();
    saver.before_update();
    run.train(0, 1);
    saver.save_and_wait(run.state, at_step(2));
    EXPECT_EQ(saver.last(), checkpoint_path(checkpoints(), 2));
  });
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasAll(
          "warning: the checkpoint of step 1 failed: rank 0: ",
          "; a last one is tried now"));
  EXPECT_EQ(steps(), (std::vector<int64_t>{2}));
}

TEST_F(SaverTest, AFailedLastCheckpointIsAnError) {
  const Job job = small_mlp();
  on(job, [&](SmallRun& run, Saver& saver) {
    block(checkpoints(), 1);
    EXPECT_THAT(
        error_text<CheckpointError>(
            [&] { saver.save_and_wait(run.state, at_step(1)); }),
        HasSubstr("the checkpoint of step 1 failed: "));
    fs::remove_all(checkpoint_path(checkpoints(), 1));
    saver.save_and_wait(run.state, at_step(1));
    saver.save_and_wait(run.state, at_step(1));  // is there
  });
  EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
}

TEST_F(SaverTest, TheRestoredCheckpointIsNotSavedAgain) {
  const Job job = small_mlp();
  on(job, [&](SmallRun& run, Saver& saver) {
    saver.save_and_wait(run.state, at_step(4));
  });
  const auto path = checkpoint_path(checkpoints(), 4);
  const auto time = fs::last_write_time(path / "manifest.json");
  on(job, [&](SmallRun& run, Saver& saver) {
    saver.resumed_from(4, path);
    saver.save_and_wait(run.state, at_step(4));
    EXPECT_EQ(saver.last(), path);
    EXPECT_EQ(saver.count(), 0);
  });
  EXPECT_EQ(fs::last_write_time(path / "manifest.json"), time);
}

TEST_F(SaverTest, OneSignalIsOneCheckpointOfAllRanks) {
  install_save_signal();
  Job job = small_mlp();
  job.layout = {.dp_replicate = 3};
  on(job, [&](SmallRun& run, Saver& saver) {
    run.world.group().barrier();
    if (run.world.rank() == 2) std::raise(SIGUSR1);
    run.world.group().barrier();
    for (int64_t step = 1; step < 4; ++step) {
      auto request = torch::tensor({saver.news().request}, torch::kFloat64);
      run.world.group().all_reduce(request);
      saver.after_step(
          run.state, at_step(step), {.request = request[0].item<double>()});
      saver.wait();
    }
    EXPECT_EQ(saver.count(), 1);
  });
  EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
}

}  // namespace echelon::saver_test
