#include "echelon/checkpoint/format/new_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "tests/support/temp_folder.h"

namespace echelon::leftovers_test {

using testing::UnorderedElementsAre;

/// The number of a process that has just ended.
std::string dead_process() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ::waitpid(child, nullptr, 0);
  return std::to_string(child);
}

TEST(Leftovers, OfDeadProcessesAreRemoved) {
  const TempFolder folder;
  const std::string dead = dead_process(), alive = std::to_string(::getpid());
  folder.write("out.part-" + dead, "");
  folder.write("out.part-" + dead + "-0", "");
  folder.write("out.part-" + dead + "-12/a/file", "");
  folder.write("out.part-" + alive + "-0", "");
  folder.write("out", "");
  for (const char* other :
       {"out.part-", "out.part-x", "out.part-1x", "out.part-0", "out.part--1",
        "out.part-99999999999999999999", "another.part-"}) {
    folder.write(other, "");
  }
  for (const char* behind : {"-", "-x", "-0-0", ".safetensors"}) {
    folder.write("out.part-" + dead + behind, "");
  }
  folder.write("another.part-" + dead, "");
  remove_leftovers(folder.path("out.part-"));
  EXPECT_THAT(
      names_in(folder.path()),
      UnorderedElementsAre(
          "out", "out.part-" + alive + "-0", "out.part-", "out.part-x",
          "out.part-1x", "out.part-0", "out.part--1",
          "out.part-99999999999999999999", "another.part-",
          "out.part-" + dead + "-", "out.part-" + dead + "-x",
          "out.part-" + dead + "-0-0", "out.part-" + dead + ".safetensors",
          "another.part-" + dead));
}

// Left by a process that is not visible here.
TEST(Leftovers, StayWhileClaimed) {
  const TempFolder folder;
  const std::string dead = dead_process();
  const auto part = folder.write("out.part-" + dead + "-0", "");
  const auto parts = folder.make_folder("out.part-" + dead);
  const int file = ::open(part.c_str(), O_WRONLY | O_CLOEXEC);
  const int inner = ::open(parts.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  claim_part(file);
  claim_part(inner);
  remove_leftovers(folder.path("out.part-"));
  EXPECT_EQ(names_in(folder.path()).size(), 2);
  ::close(file);
  ::close(inner);
  remove_leftovers(folder.path("out.part-"));
  EXPECT_EQ(names_in(folder.path()).size(), 0);
}

TEST(Leftovers, ALinkIsNotFollowed) {
  const TempFolder folder;
  const std::string dead = dead_process();
  folder.write("precious/file", "");
  std::filesystem::create_directory_symlink(
      folder.path("precious"), folder.path("out.part-" + dead));
  remove_leftovers(folder.path("out.part-"));
  EXPECT_TRUE(std::filesystem::exists(folder.path("precious/file")));
}

TEST(Leftovers, NoFolderIsNoError) {
  remove_leftovers("/nowhere/out.part-");
  remove_leftovers("out.part-");
}

}  // namespace echelon::leftovers_test
