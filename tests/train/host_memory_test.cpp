#include "echelon/train/memory_watch.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace echelon {
namespace host_memory_test {

namespace fs = std::filesystem;

class HostMemory : public testing::Test {
 protected:
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  const fs::path root_ = fs::temp_directory_path() /
                         ("echelon_host_memory." + std::to_string(getpid()));
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

}  // namespace host_memory_test
}  // namespace echelon
