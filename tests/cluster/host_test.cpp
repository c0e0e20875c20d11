// What this host lends a process.
#include "echelon/cluster/host.h"

#include <gtest/gtest.h>
#include <sched.h>

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

}  // namespace echelon::cluster::host_test
