// What this host lends a process.
#include "echelon/cluster/host.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>

#include "tests/support/process.h"

namespace echelon::cluster::host_test {

TEST(AvailableCores, AreThoseOfTheAffinityAtMost) {
  EXPECT_GE(available_cores(), 1);
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_LE(available_cores(), CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  for (size_t core = 0; CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(available_cores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST(HostMemory, HasLessFreeThanItHas) {
  const HostMemory memory = host_memory();
  EXPECT_GT(memory.free_bytes, 0);
  EXPECT_LE(memory.free_bytes, memory.total_bytes);
}

TEST(MemoryGroup, ReadsBothVersions) {
  using testing_support::TempFolder;
  const auto write = [](const TempFolder& root, const std::string& name,
                        const std::string& text) {
    const std::filesystem::path path = root.path() + "/" + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  };
  const TempFolder two;
  write(two, "proc/self/cgroup", "0::/a/job\n");
  write(
      two, "sys/fs/cgroup/a/job/memory.events",
      "low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\noom_group_kill 0\n");
  write(two, "sys/fs/cgroup/a/job/memory.max", "max\n");
  write(two, "sys/fs/cgroup/a/job/memory.peak", "5\n");
  write(two, "sys/fs/cgroup/a/memory.max", "4096\n");
  write(two, "sys/fs/cgroup/a/memory.peak", "4000\n");
  write(two, "sys/fs/cgroup/a/memory.current", "3000\n");
  write(two, "sys/fs/cgroup/a/memory.stat", "anon 9\ninactive_file 500\n");
  const auto second = memory_group(two.path());
  EXPECT_EQ(second.killed, 2);
  EXPECT_EQ(second.limit_bytes, 4096);
  EXPECT_EQ(second.peak_bytes, 4000);
  EXPECT_EQ(second.used_bytes, 2500);

  // The path is one that only the host sees.
  const TempFolder one;
  write(one, "proc/self/cgroup", "5:cpu:/\n4:memory:/docker/x\n0::/\n");
  write(
      one, "sys/fs/cgroup/memory/memory.oom_control",
      "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n");
  write(
      one, "sys/fs/cgroup/memory/memory.limit_in_bytes",
      "9223372036854771712\n");
  const auto first = memory_group(one.path());
  EXPECT_EQ(first.killed, 7);
  EXPECT_EQ(first.limit_bytes, 0);

  const TempFolder none;
  EXPECT_FALSE(memory_group(none.path()).killed);
  write(none, "proc/vmstat", "oom_kill 12\noom_kill_other 3\n");
  EXPECT_EQ(memory_group(none.path()).killed, 12);
}

}  // namespace echelon::cluster::host_test
