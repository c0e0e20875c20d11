#include "echelon/train/memory_watch.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/temp_folder.h"

namespace echelon::host_memory_test {

class HostMemory : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    folder_.write(path, text);
  }

  TempFolder folder_;
  const std::filesystem::path root_ = folder_.path();
};

TEST_F(HostMemory, IsWhatTheKernelSaysIsAvailable) {
  EXPECT_EQ(available_host_bytes(root_), std::nullopt);
  write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable:   1000 kB\n");
  EXPECT_EQ(available_host_bytes(root_), 1000 * 1024);
  write("sys/fs/cgroup/memory.max", "max\n");
  write("sys/fs/cgroup/memory.current", "5\n");
  EXPECT_EQ(available_host_bytes(root_), 1000 * 1024);
}

TEST_F(HostMemory, IsWhatTheControlGroupLeaves) {
  write("proc/meminfo", "MemAvailable: 1000 kB\n");
  write("sys/fs/cgroup/memory.max", "9000\n");
  write("sys/fs/cgroup/memory.current", "5000\n");
  EXPECT_EQ(available_host_bytes(root_), 4000);
  write("sys/fs/cgroup/memory.stat", "anon 1\ninactive_file 3000\n");
  EXPECT_EQ(available_host_bytes(root_), 7000);
  write("sys/fs/cgroup/memory.current", "99000\n");
  EXPECT_EQ(available_host_bytes(root_), 0);
  write("sys/fs/cgroup/memory.max", "99000000\n");
  EXPECT_EQ(available_host_bytes(root_), 1000 * 1024);
}

TEST_F(HostMemory, IsKnownOnThisHost) {
  const auto available = available_host_bytes();
  ASSERT_TRUE(available);
  EXPECT_GT(*available, 1 << 20);
}

}  // namespace echelon::host_memory_test
