#include "echelon/text/format.h"

#include <gtest/gtest.h>

namespace echelon {
namespace format_test {

TEST(Format, TakesEveryKindOfArgument) {
  const std::string name = "dp";
  EXPECT_EQ(
      format("{}={} of {}, {} {} {}", name, 2, size_t{8}, 'c', true, "end"),
      "dp=2 of 8, c true end");
}

TEST(Format, FollowsSpecifications) {
  EXPECT_EQ(format("{:.1f} {:>4} {:x}", 2.55, 7, 255), "2.5    7 ff");
  EXPECT_EQ(format("{{{}}}", 1), "{1}");
}

TEST(Format, PrintsRealNumbersInTheFewestDigits) {
  EXPECT_EQ(format("{} {} {}", 0.1, 3.0, 1e-5), "0.1 3 1e-05");
}

}  // namespace format_test
}  // namespace echelon
