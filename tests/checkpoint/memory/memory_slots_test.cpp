#include "echelon/checkpoint/memory/memory_slots.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>

#include "echelon/checkpoint/files/reader.h"
#include "echelon/error.h"
#include "tests/support/error_text.h"

namespace echelon {
namespace {

using testing::HasSubstr;

constexpr int64_t kRows = 6;

float value(int64_t step, int64_t i) {
  return static_cast<float>(100 * step + i);
}

CheckpointManifest manifest_of(int64_t step, int64_t ranks) {
  CheckpointManifest manifest;
  manifest.step = step;
  manifest.ranks = ranks;
  manifest.layout = "dp=" + std::to_string(ranks);
  return manifest;
}

// Each of `ranks` has as many rows of a column as the others.
void write(
    MemorySlot& slot, int64_t step, int64_t rank, int64_t ranks = 2,
    int generation = 0) {
  const int64_t rows = kRows / ranks;
  std::vector<float> values;
  for (int64_t i = rank * rows; i < (rank + 1) * rows; ++i) {
    values.push_back(value(step, i));
  }
  slot.write(
      {{.name = "weight",
        .dtype = "F32",
        .shape = {kRows},
        .box = {{rank * rows}, {rows}},
        .bytes = std::as_bytes(std::span(values))}},
      manifest_of(step, ranks), generation);
}

// Reads a checkpoint and compares it with what write() wrote.
void expect_whole(const CheckpointPlace& place) {
  CheckpointReader reader(place.path.string());
  const auto& manifest = reader.manifest();
  EXPECT_EQ(manifest.step, place.step);
  const SavedTensor* weight = manifest.find("weight");
  ASSERT_NE(weight, nullptr);
  std::vector<float> values(kRows);
  reader.read(
      *weight, whole_box({kRows}),
      std::as_writable_bytes(std::span(values)).data());
  for (int64_t i = 0; i < kRows; ++i) {
    EXPECT_EQ(values[static_cast<size_t>(i)], value(place.step, i));
  }
}

std::vector<int64_t> steps(const MemorySlots& slots) {
  std::vector<int64_t> found;
  for (const auto& place : checkpoints_in_memory(slots.path())) {
    found.push_back(place.step);
  }
  return found;
}

TEST(MemorySlots, HoldTheNewestStepsThatAllRanksHave) {
  MemorySlots slots(2);
  MemorySlot first(slots.path(), 0, -1);
  MemorySlot second(slots.path(), 1, -1);
  EXPECT_EQ(slots.collect(), std::nullopt);
  EXPECT_THAT(steps(slots), testing::IsEmpty());
  write(first, 7, 0);
  EXPECT_EQ(slots.collect(), std::nullopt);
  write(second, 7, 1);
  EXPECT_EQ(slots.collect(), 7);
  write(first, 8, 0);
  EXPECT_EQ(slots.collect(), 7);
  expect_whole(checkpoints_in_memory(slots.path())[0]);
  write(second, 8, 1);
  EXPECT_EQ(slots.collect(), 8);
  EXPECT_THAT(steps(slots), testing::ElementsAre(8, 7));
  for (const auto& place : checkpoints_in_memory(slots.path())) {
    expect_whole(place);
  }
}

TEST(MemorySlots, ARankThatResumesKeepsTheStepThatItResumedFrom) {
  for (const int64_t kept : {3, 4}) {
    MemorySlots slots(1);
    MemorySlot before(slots.path(), 0, -1);
    write(before, 3, 0, 1);
    write(before, 4, 0, 1);
    MemorySlot slot(slots.path(), 0, kept);
    write(slot, 5, 0, 1, 1);
    slots.collect();
    EXPECT_THAT(steps(slots), testing::ElementsAre(5, kept));
  }
}

TEST(MemorySlots, GenerationsAreNotMixed) {
  MemorySlots slots(2);
  MemorySlot first(slots.path(), 0, -1);
  MemorySlot second(slots.path(), 1, -1);
  write(first, 7, 0, 2, 0);
  write(second, 7, 1, 2, 1);
  EXPECT_EQ(slots.collect(), std::nullopt);
}

TEST(MemorySlots, FewerRanksMayGoOn) {
  MemorySlots slots(3);
  for (int rank = 0; rank < 3; ++rank) {
    MemorySlot slot(slots.path(), rank, -1);
    write(slot, 7, rank, 3);
  }
  EXPECT_EQ(slots.collect(), 7);
  for (int rank = 0; rank < 2; ++rank) {
    MemorySlot slot(slots.path(), rank, 7);
    write(slot, 8, rank, 2, 1);
  }
  EXPECT_EQ(slots.collect(), 8);
  EXPECT_THAT(steps(slots), testing::ElementsAre(8, 7));
  for (const auto& place : checkpoints_in_memory(slots.path())) {
    expect_whole(place);
  }
}

TEST(MemorySlots, AKillAtAnyMomentLeavesAWholeStep) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> delay(0, 3000);
  MemorySlots slots(1);
  int64_t last = 0;
  for (int kill = 0; kill < 20; ++kill) {
    const pid_t child = fork();
    if (child == 0) {
      MemorySlot slot(slots.path(), 0, last);
      for (int64_t step = last + 1;; ++step) write(slot, step, 0, 1, kill);
    }
    // Later ones more, so that a busy machine comes to write something too.
    usleep(static_cast<useconds_t>(delay(random) * (1 + kill)));
    ::kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    const auto found = slots.collect();
    ASSERT_GE(found.value_or(0), last);
    last = found.value_or(0);
    for (const auto& place : checkpoints_in_memory(slots.path())) {
      expect_whole(place);
    }
  }
  EXPECT_GT(last, 0);
}

TEST(MemorySlots, AFlippedBitIsFound) {
  MemorySlots slots(1);
  MemorySlot slot(slots.path(), 0, -1);
  write(slot, 7, 0, 1);
  ASSERT_EQ(slots.collect(), 7);
  const auto place = checkpoints_in_memory(slots.path())[0];
  const std::string file =
      (place.path.parent_path() /
       CheckpointReader(place.path.string()).manifest().files[0].name)
          .string();
  const int fd = open(file.c_str(), O_RDWR);
  ASSERT_GE(fd, 0);
  char byte = 0;
  const off_t end = lseek(fd, -1, SEEK_END);
  ASSERT_EQ(pread(fd, &byte, 1, end), 1);
  byte ^= 1;
  ASSERT_EQ(pwrite(fd, &byte, 1, end), 1);
  close(fd);
  EXPECT_THAT(
      error_text<CheckpointError>([&] { expect_whole(place); }),
      HasSubstr("it holds 1 part of a tensor, \"weight\""));
}

TEST(MemorySlots, CanBeDiscarded) {
  MemorySlots slots(1);
  MemorySlot slot(slots.path(), 0, -1);
  write(slot, 7, 0, 1);
  write(slot, 8, 0, 1);
  discard_checkpoints_in_memory(slots.path());
  EXPECT_EQ(slots.collect(), std::nullopt);
  EXPECT_THAT(steps(slots), testing::IsEmpty());
}

// Training that goes on finds them, and goes back to one.
TEST(MemorySlots, ARankCollectsAndDiscardsThoseOfLaterSteps) {
  MemorySlots slots(2);
  MemorySlot first(slots.path(), 0, -1);
  MemorySlot second(slots.path(), 1, -1);
  for (const int64_t step : {7, 8}) {
    write(first, step, 0);
    write(second, step, 1);
  }
  EXPECT_EQ(collect_checkpoints_in_memory(slots.path()), 8);
  EXPECT_THAT(steps(slots), testing::ElementsAre(8, 7));
  for (const auto& place : checkpoints_in_memory(slots.path())) {
    expect_whole(place);
  }
  discard_checkpoints_in_memory(slots.path(), 7);
  EXPECT_EQ(collect_checkpoints_in_memory(slots.path()), 7);
  EXPECT_EQ(slots.collect(), 7);
  EXPECT_THAT(steps(slots), testing::ElementsAre(7));
}

TEST(MemorySlots, SayWhatIsMissing) {
  EXPECT_THAT(
      error_text<DataError>([] { checkpoints_in_memory("/proc/1/fd/x"); }),
      HasSubstr("/proc/1/fd/x"));
  MemorySlots slots(1);
  EXPECT_THAT(
      error_text<CheckpointError>([&] { MemorySlot(slots.path(), 1, -1); }),
      HasSubstr("has no slots of rank 1"));
}

}  // namespace
}  // namespace echelon
