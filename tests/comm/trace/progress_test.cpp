#include "echelon/comm/trace/progress.h"

#include <gtest/gtest.h>

#include "echelon/comm/trace/record.h"

namespace echelon::progress_test {

TEST(Progress, IsSeenByTheLauncher) {
  ProgressBoard board(3);
  {
    ProgressMark mark(board.path(), 1);
    mark.advance();
    mark.advance();
    History history;
    history.begin({});
    history.count_into(mark.collectives());
    history.begin({});
    const auto ranks = board.read();
    EXPECT_EQ(ranks[1].count, 2u);
    EXPECT_EQ(ranks[1].collectives, 2u);
    EXPECT_EQ(ranks[1].phase, RankPhase::step);
    EXPECT_EQ(ranks[0].count + ranks[2].count, 0u);
    history.count_into(nullptr);
    history.begin({});
    EXPECT_EQ(board.read()[1].collectives, 2u);
    mark.add_checkpoint(0.5);
    mark.add_checkpoint(0.25);
    mark.add_checkpoint(-1);
    EXPECT_EQ(board.read()[1].checkpoint_ns, 750000000u);
    EXPECT_EQ(board.read()[0].checkpoint_ns, 0u);
    mark.pause();
    EXPECT_EQ(board.read()[1].phase, RankPhase::other);
    mark.advance(RankPhase::evaluation);
    EXPECT_EQ(board.read()[1].phase, RankPhase::evaluation);
  }
  EXPECT_EQ(board.read()[1].phase, RankPhase::other)
      << "its process goes on elsewhere";
  board.clear();
  EXPECT_EQ(board.read()[1].count, 0u);
  EXPECT_EQ(board.read()[1].checkpoint_ns, 0u);
}

TEST(Progress, NobodyNeedsToLook) {
  for (const char* path : {"", "/proc/1/fd/none"}) {
    ProgressMark mark(path, 0);
    mark.advance();
    mark.add_checkpoint(1);
    mark.pause();
    EXPECT_EQ(mark.collectives(), nullptr);
  }
}

}  // namespace echelon::progress_test
