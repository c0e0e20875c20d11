#include "echelon/launch/health.h"

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "tests/checkpoint/small_disk.h"
#include "tests/support/temp_folder.h"

namespace echelon::launch::health_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

// The tests are about what is found, not about how long it takes.
constexpr std::chrono::seconds kLong{60};

std::vector<std::string>
texts(const HostNeeds& needs, const HealthBefore& before = {}) {
  std::vector<std::string> all;
  for (const auto& finding : look_at_host(needs, before, kLong)) {
    EXPECT_FALSE(finding.final) << finding.text;
    all.push_back(finding.text);
  }
  return all;
}

TEST(Health, AHealthyHostIsNotTalkedOf) {
  const TempFolder folder;
  EXPECT_THAT(
      texts(
          {.folder = folder.path("not/made/yet"),
           .memory_bytes = 1,
           .disk_bytes = 1,
           .gpus = false},
          HealthBefore::now()),
      IsEmpty());
  EXPECT_THAT(texts({.gpus = false}), IsEmpty());
}

TEST(Health, TellsWhatTheHostLacks) {
  const TempFolder folder;
  EXPECT_THAT(
      texts({.memory_bytes = 0x1p60, .gpus = false}),
      ElementsAre(HasSubstr("and the ranks need about ")));
  EXPECT_THAT(
      texts(
          {.folder = folder.path("made"), .disk_bytes = 0x1p60, .gpus = false}),
      ElementsAre(testing::AllOf(
          StartsWith("the disk of "), HasSubstr(" left, and a checkpoint "))));
  EXPECT_THAT(
      texts({.gpus = false}, {.cores = 100000}),
      ElementsAre(HasSubstr(" left of 100000 that the job began with")));
}

TEST(Health, TellsOfAFolderThatCannotBeWritten) {
  const TempFolder folder;
  constexpr int kCannotMount = 2;
  const int ended = in_child([&] {
    if (!mount_disk(folder.path(), "size=1m", MS_RDONLY)) return kCannotMount;
    const auto found = texts({.folder = folder.path("run"), .gpus = false});
    const std::string expected =
        folder.path() + " cannot be written: Read-only file system";
    return found == std::vector{expected} ? 0 : 1;
  });
  if (ended == kCannotMount)
    GTEST_SKIP() << "this system lets us mount nothing";
  EXPECT_EQ(ended, 0);
}

// A driver that does not answer.
TEST(Health, DoesNotWaitLongerThanAsked) {
  EXPECT_THAT(
      look_at_host({.memory_bytes = 0x1p60}, {}, std::chrono::milliseconds(0)),
      IsEmpty());
}

TEST(Health, FindsErrorsOfGpusInTheKernelsMessages) {
  const TempFolder folder;
  const auto path = folder.write(
      "kmsg",
      "6,1,1000,-;NVRM: Xid (PCI:0000:17:00): 13, an old one\n"
      "6,2,2000,-;usb 1-1: new device\n"
      "6,3,3000,-;NVRM: Xid (PCI:0000:17:00): 79, pid=9, GPU has fallen off "
      "the bus.\n SUBSYSTEM=pci\n");
  EXPECT_THAT(
      find_gpu_errors(2000, path),
      ElementsAre("the kernel says: NVRM: Xid (PCI:0000:17:00): 79, pid=9, GPU "
                  "has fallen off the bus."));
  EXPECT_THAT(find_gpu_errors(2000, folder.path("none")), IsEmpty());
}

}  // namespace echelon::launch::health_test
