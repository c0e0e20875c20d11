#include "echelon/text/format.h"

#include <gtest/gtest.h>

#include <vector>

#include "echelon/error.h"
#include "echelon/text/check.h"

namespace echelon::format_test {

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

TEST(Check, SaysWhatDoesNotHoldAndWhere) {
  const int ranks = 3;
  EXPECT_NO_THROW(ECHELON_CHECK(ranks == 3, "{} ranks", ranks));
  try {
    ECHELON_CHECK(ranks % 2 == 0, "{} ranks", ranks);
    FAIL() << "the check passed";
  } catch (const InternalError& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::failure);
    EXPECT_EQ(
        std::string(error.what()),
        format(
            "a bug of Echelon, please report it: 3 ranks (format_test.cpp:{}: "
            "ranks % 2 == 0 does not hold)",
            __LINE__ - 9));
  }
}

TEST(Join, PutsSeparatorsBetweenElements) {
  EXPECT_EQ(join(std::vector<std::string>{"a", "", "c"}, ", "), "a, , c");
  EXPECT_EQ(join(std::vector{2, 3, 4}, "x"), "2x3x4");
  EXPECT_EQ(join(std::vector<int>{}, ", "), "");
}

TEST(Join, PrintsWhatTheProjectionGives) {
  const std::vector<std::string> names = {"tp", "pp"};
  EXPECT_EQ(join(names, ", ", in_quotes), "\"tp\", \"pp\"");
  EXPECT_EQ(join(names, "+", &std::string::size), "2+2");
}

}  // namespace echelon::format_test
