#include "echelon/comm/trace/record.h"

#include <gmock/gmock.h>

#include "echelon/comm/trace/status_board.h"

namespace echelon::record_test {

using testing::HasSubstr;
using testing::Not;

TEST(History, KeepsTheLast1024InOrder) {
  History history;
  for (uint64_t i = 0; i < 3000; ++i) {
    const uint64_t ticket = history.begin({.sequence = i});
    if (i % 2 == 0) history.end(ticket, i % 4 == 0);
  }
  const auto records = history.snapshot();
  ASSERT_EQ(records.size(), History::kCapacity);
  EXPECT_EQ(history.count(), 3000u);
  for (size_t i = 0; i < records.size(); ++i) {
    EXPECT_EQ(records[i].sequence, 3000 - 1024 + i);
    EXPECT_EQ(records[i].end_ns != 0, records[i].sequence % 2 == 0);
    EXPECT_EQ(records[i].failed, records[i].sequence % 4 == 0);
  }
}

TEST(History, ALateEndIsIgnored) {
  History history;
  const uint64_t first = history.begin({.sequence = 7});
  for (int i = 0; i < 2000; ++i) history.begin({});
  history.end(first);
  for (const auto& record : history.snapshot()) EXPECT_EQ(record.end_ns, 0);
}

TEST(History, NotifiesItsListenerOnce) {
  History history;
  std::vector<std::string> labels;
  history.on_end(
      [&](const CollectiveRecord& record) { labels.push_back(record.label); });
  const uint64_t ticket = history.begin({.label = "bucket 0"});
  history.end(ticket);
  history.end(ticket);
  history.on_end(nullptr);
  history.end(history.begin({.label = "unheard"}));
  EXPECT_THAT(labels, testing::ElementsAre("bucket 0"));
}

TEST(History, RecordsWhenAThreadBeganToWait) {
  History history;
  const uint64_t first = history.begin({});
  history.begin_wait(first);
  const int64_t since = history.snapshot()[0].wait_begin_ns;
  EXPECT_GE(since, history.snapshot()[0].begin_ns);
  history.begin_wait(first);
  EXPECT_EQ(history.snapshot()[0].wait_begin_ns, since);
  history.end(first);
  const uint64_t second = history.begin({});
  history.end(second);
  history.begin_wait(second);
  EXPECT_EQ(history.snapshot()[1].wait_begin_ns, 0);
}

TEST(Label, ScopesNest) {
  EXPECT_EQ(LabelScope::current(), "");
  {
    LabelScope outer("outer");
    {
      LabelScope inner("inner");
      EXPECT_EQ(LabelScope::current(), "inner");
    }
    EXPECT_EQ(LabelScope::current(), "outer");
  }
  EXPECT_EQ(LabelScope::current(), "");
}

TEST(HangReport, SaysWhatEachMissingRankDidLast) {
  const auto entry = [](uint64_t sequence, const char* operation,
                        const char* axis, const char* label) {
    return StatusEntry(
        {.sequence = sequence,
         .operation = operation,
         .axis = axis,
         .label = label});
  };
  const WaitingCall waiting{
      .call = entry(119, "all_reduce", "dp_replicate", "bucket 0"),
      .group = 3,
      .ranks = {0, 2, 4, 6},
      .rank = 0,
      .waited_seconds = 31.2};
  RankStatus behind;
  behind.num_finished = 118;
  behind.last_finished = entry(118, "all_gather", "dp_replicate", "layer3");
  behind.begun[3] = 119;
  RankStatus here = behind;
  here.begun[3] = 120;
  RankStatus elsewhere = behind;
  elsewhere.num_running = 1;
  elsewhere.last_begun = entry(5, "barrier", "tp", "");
  const std::string report =
      hang_report(waiting, {std::nullopt, behind, here, elsewhere});
  EXPECT_THAT(
      report,
      HasSubstr("rank 2 last finished all_gather \"layer3\" (#118) and has not "
                "called all_reduce \"bucket 0\" (#119) for 31 s\n"));
  EXPECT_THAT(report, HasSubstr("rank 6 last finished"));
  EXPECT_THAT(report, HasSubstr("it is in barrier (#5) on axis tp"));
  EXPECT_THAT(report, Not(HasSubstr("rank 4 last")));
  EXPECT_THAT(report, HasSubstr("arrived: rank 0, 4"));
  EXPECT_EQ(hang_report(waiting, {here, here, here, here}), "");
  EXPECT_THAT(
      hang_report(waiting, {here, std::nullopt, here, here}),
      HasSubstr("rank 2 has published no status yet and has not called"));
  EXPECT_THAT(
      hang_report(waiting, {here, RankStatus(), here, here}),
      HasSubstr("rank 2 has finished no collective yet"));
}

TEST(Status, SurvivesItsBytesAndLongNames) {
  RankStatus status;
  status.num_finished = 9;
  status.last_finished = StatusEntry(
      {.sequence = 1,
       .operation = std::string(100, 'o'),
       .axis = "tp",
       .label = std::string(99, 'l')});
  const auto back = status_from_bytes(to_bytes(status));
  ASSERT_TRUE(back.has_value());
  EXPECT_EQ(back->last_finished.describe(), status.last_finished.describe());
  EXPECT_FALSE(status_from_bytes("short").has_value());
}

}  // namespace echelon::record_test
