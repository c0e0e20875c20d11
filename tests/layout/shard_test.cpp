// Which rank holds which part of a tensor.
#include "echelon/layout/shard.h"

#include <gmock/gmock.h>

#include <algorithm>

namespace echelon::shard_test {

using ::testing::ElementsAre;

TEST(Shard, EvenRangesCoverWithSizesThatDifferByOneAtMost) {
  for (const int64_t total : {0, 1, 2, 5, 12, 13}) {
    for (const int64_t parts : {1, 2, 3, 4, 7}) {
      int64_t next = 0;
      int64_t largest = 0;
      int64_t smallest = total;
      for (int64_t part = 0; part < parts; ++part) {
        const IndexRange range = even_range(total, part, parts);
        EXPECT_EQ(range.begin, next);
        next = range.end;
        largest = std::max(largest, range.size());
        smallest = std::min(smallest, range.size());
      }
      EXPECT_EQ(next, total);
      EXPECT_LE(largest - smallest, 1);
    }
  }
}

TEST(Shard, LocalShapeSumsThePieces) {
  const Shard fused{
      .shape = {8, 30}, .dim = 1, .pieces = {{0, 5}, {10, 15}, {20, 22}}};
  EXPECT_THAT(fused.local_shape(), ElementsAre(8, 12));
  EXPECT_THAT(even_shard({7, 3}, 0, 1, 2).local_shape(), ElementsAre(3, 3));
  EXPECT_THAT(even_shard({1, 3}, 0, 1, 2).local_shape(), ElementsAre(0, 3));
}

TEST(Shard, TheFirstRankOwnsWhatAllHold) {
  EXPECT_THAT(replicated({4}, 0).owned, ElementsAre(IndexRange{0, 4}));
  EXPECT_TRUE(replicated({4}, 1).owned.empty());
  EXPECT_THAT(replicated({}, 1).local_shape(), ElementsAre());
}

}  // namespace echelon::shard_test
