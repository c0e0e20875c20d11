#include "echelon/simulator/shared_links.h"

#include <gtest/gtest.h>

namespace echelon::simulator::shared_links_test {

const std::vector<int32_t> kFirst = {0};
const std::vector<int32_t> kSecond = {1};
const std::vector<int32_t> kBoth = {0, 1};

TEST(SharedLinks, ALoneTransferTakesItsOwnTime) {
  SharedLinks links(2);
  links.start(1, 3, kBoth);
  EXPECT_DOUBLE_EQ(links.next_end(), 4);
  links.take_end();
  EXPECT_EQ(links.next_end(), std::numeric_limits<double>::infinity());
}

TEST(SharedLinks, TwoEqualOnesTakeTwiceAsLong) {
  SharedLinks links(1);
  const int32_t a = links.start(0, 5, kFirst);
  const int32_t b = links.start(0, 5, kFirst);
  EXPECT_DOUBLE_EQ(links.next_end(), 10);
  EXPECT_NE(links.take_end(), links.take_end());
  EXPECT_NE(a, b);
}

TEST(SharedLinks, WhatIsLeftGoesFasterWhenTheOtherEnds) {
  SharedLinks links(1);
  const int32_t longer = links.start(0, 10, kFirst);
  const int32_t shorter =
      links.start(4, 2, kFirst);  // 4 s of `longer` are done
  EXPECT_DOUBLE_EQ(links.next_end(), 8);
  EXPECT_EQ(links.take_end(), shorter);
  EXPECT_DOUBLE_EQ(links.next_end(), 12);  // both moved 12 s of work by then
  EXPECT_EQ(links.take_end(), longer);
}

TEST(SharedLinks, LinksApartDoNotMatter) {
  SharedLinks links(2);
  links.start(0, 5, kFirst);
  links.start(0, 7, kSecond);
  EXPECT_DOUBLE_EQ(links.next_end(), 5);
  links.take_end();
  EXPECT_DOUBLE_EQ(links.next_end(), 7);
}

TEST(SharedLinks, TheMostCrowdedLinkSetsThePace) {
  SharedLinks links(2);
  const int32_t wide = links.start(0, 4, kBoth);
  links.start(0, 1, kSecond);
  links.start(0, 1, kSecond);
  // Three on the second link: each at a third, until the short ones end at 3.
  EXPECT_DOUBLE_EQ(links.next_end(), 3);
  links.take_end();
  links.take_end();
  EXPECT_DOUBLE_EQ(links.next_end(), 6);
  EXPECT_EQ(links.take_end(), wide);
}

// A new transfer under an old number replaces the end that was expected.
TEST(SharedLinks, ANumberMayBeUsedAgain) {
  SharedLinks links(1);
  links.start(0, 5, kFirst);
  links.start(1, 1, kFirst);  // the first would have ended at 5
  EXPECT_DOUBLE_EQ(links.next_end(), 3);
  const int32_t number = links.take_end();
  EXPECT_EQ(links.start(3, 10, kFirst), number);
  EXPECT_DOUBLE_EQ(links.next_end(), 9);  // 3 s of the first, at half the pace
  EXPECT_NE(links.take_end(), number);
  EXPECT_DOUBLE_EQ(links.next_end(), 16);
  EXPECT_EQ(links.take_end(), number);
  EXPECT_EQ(links.next_end(), std::numeric_limits<double>::infinity());
}

TEST(SharedLinks, NothingToMoveEndsAtOnce) {
  SharedLinks links(1);
  links.start(2, 0, kFirst);
  EXPECT_DOUBLE_EQ(links.next_end(), 2);
  links.take_end();
}

}  // namespace echelon::simulator::shared_links_test
