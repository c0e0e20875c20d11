#include "echelon/bench/bench_collectives.h"

#include <gmock/gmock.h>

#include <map>
#include <string>

namespace echelon::bench::bench_collectives_test {

using testing::HasSubstr;

BenchRow row_of(const std::string& operation) {
  return {
      .backend = "local",
      .operation = operation,
      .ranks = 4,
      .bytes = 64 << 20,
      .min_microseconds = 900,
      .median_microseconds = 1000,
      .calls = 10};
}

// The factors of nccl-tests' doc/PERFORMANCE.md.
TEST(BenchCollectives, HaveTheBandwidthsOfNcclTests) {
  const std::map<std::string, double> factors = {
      {"all_reduce", 1.5},  {"all_gather", 0.75}, {"reduce_scatter", 0.75},
      {"all_to_all", 0.75}, {"broadcast", 1},     {"send_recv", 1}};
  for (const auto& [operation, factor] : factors) {
    const Bandwidth bandwidth = bandwidth_of(row_of(operation));
    EXPECT_NEAR(bandwidth.algorithm, 67.108864, 1e-9) << operation;
    EXPECT_NEAR(bandwidth.bus, factor * 67.108864, 1e-9) << operation;
  }
}

TEST(BenchCollectives, ShowSizesAndBandwidths) {
  const std::string text = to_text({row_of("all_reduce")});
  EXPECT_THAT(text, HasSubstr("algbw GB/s  busbw GB/s\n"));
  EXPECT_THAT(text, HasSubstr("   64 MiB      1000.0       900.0"));
  EXPECT_THAT(text, HasSubstr("     67.109     100.663\n"));
  EXPECT_THAT(
      to_json({row_of("all_reduce")}),
      HasSubstr("\"busbw_gb_per_second\":100.6"));
}

}  // namespace echelon::bench::bench_collectives_test
