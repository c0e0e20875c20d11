#include "echelon/launch/output.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace echelon::launch::output_test {

using std::chrono::milliseconds;
using testing::ElementsAre;

class LineSplitterTest : public testing::Test {
 protected:
  LineSplitter::Sink sink() {
    return [this](std::string_view line) { lines_.emplace_back(line); };
  }
  LineSplitter::TimePoint at(int ms) {
    return LineSplitter::TimePoint() + std::chrono::hours(1) + milliseconds(ms);
  }
  LineSplitter splitter_;
  std::vector<std::string> lines_;
};

TEST_F(LineSplitterTest, WholeLinesOnly) {
  splitter_.feed("one\ntw", at(0), sink());
  EXPECT_THAT(lines_, ElementsAre("one"));
  splitter_.feed("o\n\nthree", at(1), sink());
  EXPECT_THAT(lines_, ElementsAre("one", "two", ""));
  splitter_.finish(sink());
  EXPECT_THAT(lines_, ElementsAre("one", "two", "", "three"));
  splitter_.finish(sink());
  EXPECT_EQ(lines_.size(), 4u);
}

TEST_F(LineSplitterTest, ACarriageReturnRestartsTheLine) {
  splitter_.feed("10%\r20%\r", at(0), sink());
  splitter_.feed("30%\nnext\r\n", at(1), sink());
  EXPECT_THAT(lines_, ElementsAre("30%", "next"));
}

TEST_F(LineSplitterTest, APromptIsShownAfterHalfASecond) {
  splitter_.feed("name? ", at(0), sink());
  splitter_.feed_idle(at(400), sink());
  EXPECT_TRUE(lines_.empty());
  splitter_.feed_idle(at(500), sink());
  EXPECT_THAT(lines_, ElementsAre("name? "));
  EXPECT_FALSE(splitter_.waiting());
}

TEST_F(LineSplitterTest, ALongLineComesInPieces) {
  const std::string line(3 * LineSplitter::kMaxLine, 'x');
  splitter_.feed(line + "\nend\n", at(0), sink());
  std::string all;
  for (const auto& piece : lines_) {
    EXPECT_LE(piece.size(), LineSplitter::kMaxLine);
    all += piece;
  }
  EXPECT_EQ(all, line + "end");
  EXPECT_EQ(lines_.back(), "end");
}

TEST(Tail, KeepsTheLastBytes) {
  Tail tail;
  for (int i = 0; i < 100000; ++i) tail.add(std::to_string(i) + "\n");
  const std::string text = tail.text();
  EXPECT_EQ(text.size(), Tail::kBytes);
  EXPECT_EQ(text.substr(text.size() - 12), "99998\n99999\n");
  tail.add(std::string(1 << 20, 'y'));
  EXPECT_EQ(tail.text(), std::string(Tail::kBytes, 'y'));
}

TEST(SafeForTerminal, KeepsColoursAndDropsTheRest) {
  EXPECT_EQ(safe_for_terminal("a\tb"), "a\tb");
  EXPECT_EQ(
      safe_for_terminal("\x1b[31mred\x1b[0m"), "\x1b[31mred\x1b[0m\x1b[0m");
  EXPECT_EQ(safe_for_terminal("\x1b[2Jx\x1b]y\a\x7f"), "xy??");
  EXPECT_EQ(safe_for_terminal("end\x1b["), "end");
  EXPECT_EQ(safe_for_terminal("end\x1b"), "end");
  EXPECT_EQ(safe_for_terminal(std::string_view("\0z", 2)), "?z");
  EXPECT_EQ(
      safe_for_terminal("\u009b2Jx\x1b[1my\u009d"), "?2Jx\x1b[1my?\x1b[0m");
}

TEST(RankPrefix, AlignsNumbers) {
  EXPECT_EQ(rank_prefix(3, 4, false), "[3] ");
  EXPECT_EQ(rank_prefix(3, 16, false), "[ 3] ");
  EXPECT_EQ(rank_prefix(0, 2, true), "\x1b[36m[0]\x1b[0m ");
}

TEST(Screen, AReaderThatDoesNotReadBlocksNobody) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  Screen screen(ends[1], ends[1]);
  const std::string block(64 << 10, 'a');
  std::string sent;
  while (!screen.full()) {
    screen.write(1, block);
    sent += block;
    screen.pump();  // returns although nobody reads
  }
  EXPECT_EQ(screen.pending_file(), ends[1]);
  screen.drain(milliseconds(10));
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  std::string got;
  char bytes[4096];
  while (screen.pending_file() >= 0) {
    for (ssize_t size; (size = read(ends[0], bytes, sizeof bytes)) > 0;) {
      got.append(bytes, size);
    }
    screen.pump();
  }
  close(ends[1]);
  for (ssize_t size; (size = read(ends[0], bytes, sizeof bytes)) > 0;) {
    got.append(bytes, size);
  }
  close(ends[0]);
  EXPECT_EQ(got, sent);
}

// A rank's stderr comes in pieces, as the pipe gives them.
TEST(RankOutputTest, AReportIsNotShownWhereverReadsCutItsText) {
  const testing_support::TempFolder folder;
  const std::string text = "errors: 3\nerror: no such file\nerror: \n";
  const std::string report = folder.path() + "/report";
  const auto shown = [&](size_t cut, bool reported) {
    int ends[2];
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    Screen screen(ends[1], ends[1]);
    RankOutput output(Show::raw, "", false, report);
    const LineSplitter::TimePoint now{};
    for (const auto& part : {text.substr(0, cut), text.substr(cut)}) {
      if (reported) std::ofstream(report) << text;
      EXPECT_EQ(
          write(output.write_end(2), part.data(), part.size()),
          static_cast<ssize_t>(part.size()));
      output.read(2, now, screen);
    }
    output.finish(screen);
    screen.pump();
    close(ends[1]);
    std::string got(text.size() + 1, '\0');
    got.resize(std::max<ssize_t>(0, read(ends[0], got.data(), got.size())));
    close(ends[0]);
    std::filesystem::remove(report);
    return got;
  };
  for (size_t cut = 1; cut < text.size(); ++cut) {
    EXPECT_EQ(shown(cut, true), "errors: 3\n") << cut;
    EXPECT_EQ(shown(cut, false), text) << cut;
  }
}

TEST(RankOutputTest, WhatOnlyLooksLikeAReportIsShownAfterAWhile) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  Screen screen(ends[1], ends[1]);
  RankOutput output(Show::raw, "", false, "no such report");
  ASSERT_EQ(write(output.write_end(2), "err", 3), 3);
  LineSplitter::TimePoint now{};
  output.read(2, now, screen);
  EXPECT_TRUE(output.waiting());
  output.idle(now + milliseconds(100), screen);
  EXPECT_EQ(screen.pending_file(), -1);
  output.idle(now + milliseconds(600), screen);
  EXPECT_FALSE(output.waiting());
  screen.pump();
  char got[8];
  EXPECT_EQ(read(ends[0], got, sizeof got), 3);
  close(ends[0]);
  close(ends[1]);
}

TEST(Screen, AReaderThatIsGoneIsNoticed) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  close(ends[0]);
  signal(SIGPIPE, SIG_IGN);
  Screen screen(ends[1], ends[1]);
  screen.write(1, "x");
  screen.pump();
  EXPECT_TRUE(screen.broken(1));
  EXPECT_EQ(screen.pending_file(), -1);
  close(ends[1]);
}

}  // namespace echelon::launch::output_test
