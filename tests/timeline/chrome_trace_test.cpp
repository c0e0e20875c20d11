#include "echelon/timeline/chrome_trace.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "echelon/error.h"
#include "tests/report/sample_run.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::timeline {

static auto fields(const Span& s) {
  return std::tie(
      s.rank, s.begin_ns, s.end_ns, s.track, s.name, s.kind, s.step, s.bytes,
      s.axis);
}

bool operator==(const Span& a, const Span& b) {
  return fields(a) == fields(b);
}

void PrintTo(const Span& s, std::ostream* out) {
  *out << "rank " << s.rank << " " << s.track << "/" << s.name << " ["
       << s.begin_ns << ", " << s.end_ns << ") step " << s.step;
}

namespace chrome_trace_test {

using testing::HasSubstr;
using Json = nlohmann::json;

std::vector<Span> sorted(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return fields(a) < fields(b);
  });
  return spans;
}

Timeline small() {
  return {
      .title = "run \"one\"",
      .rank_names = {"rank 0 (cpu)", "rank 1 (cuda:3)"},
      .spans = {
          {0, "compute", "forward", SpanKind::forward, 1, 1'234'567, 3, 0},
          {1, "comm", "all_reduce \"bucket 0\"", SpanKind::communication, 1'001,
           9'000'000'000'123, 4, 1 << 20, "dp_replicate"},
          {1, "loader", "batch", SpanKind::data, -1'500, -3, -1, 0}}};
}

TEST(ChromeTrace, IsReadBackAsItWas) {
  auto timeline = small();
  timeline.rank_classes = {0, 1, 1, 0};
  const auto back = parse_chrome_trace(to_chrome_trace(timeline), "test");
  EXPECT_EQ(back.title, timeline.title);
  EXPECT_EQ(back.rank_classes, timeline.rank_classes);
  EXPECT_EQ(back.rank_names, timeline.rank_names);
  EXPECT_EQ(sorted(back.spans), sorted(timeline.spans));
}

TEST(ChromeTrace, AWholeRunIsReadBackFromAFile) {
  TempFolder folder;
  const auto timeline = report::sample::run({.ranks = 5, .layers = 3}).timeline;
  write_chrome_trace(folder.path("timeline.json"), timeline);
  const auto back = read_chrome_trace(folder.path("timeline.json"));
  EXPECT_EQ(sorted(back.spans), sorted(timeline.spans));
}

TEST(ChromeTrace, SaysRanksAsProcessesAndTracksAsThreads) {
  const auto json = Json::parse(to_chrome_trace(small()));
  EXPECT_EQ(json["displayTimeUnit"], "ms");
  int names = 0;
  for (const auto& event : json["traceEvents"]) {
    if (event["name"] == "process_name") {
      ++names;
      EXPECT_EQ(
          event["args"]["name"],
          event["pid"] == 0 ? "rank 0 (cpu)" : "rank 1 (cuda:3)");
    }
    if (event["name"] == "forward") {
      EXPECT_EQ(event["ph"], "X");
      EXPECT_EQ(event["pid"], 0);
      EXPECT_EQ(event["cat"], "forward");
      EXPECT_EQ(event["ts"], 0.001);
      EXPECT_EQ(event["dur"], 1234.566);
      EXPECT_EQ(event["args"], (Json{{"step", 3}}));
    }
    if (event["cat"] == "communication") {
      EXPECT_EQ(
          event["args"],
          (Json{{"step", 4}, {"bytes", 1 << 20}, {"axis", "dp_replicate"}}));
    }
  }
  EXPECT_EQ(names, 2);
}

// The events of a thread must nest or stand apart, whatever the spans were.
TEST(ChromeTrace, EventsOfAThreadNestOrStandApart) {
  std::mt19937 random(1);
  Timeline timeline{.rank_names = {"rank 0"}};
  for (int i = 0; i < 300; ++i) {
    const int64_t begin = random() % 5000;
    timeline.spans.push_back(
        {0, "comm", "s" + std::to_string(i), SpanKind::communication, begin,
         begin + static_cast<int64_t>(random() % 400), 0, 0});
  }
  const auto text = to_chrome_trace(timeline);
  std::map<int, std::vector<std::pair<double, double>>> threads;
  const auto json = Json::parse(text);
  for (const auto& event : json["traceEvents"]) {
    if (event["ph"] != "X") continue;
    const double begin = event["ts"];
    threads[event["tid"]].emplace_back(begin, begin + double(event["dur"]));
  }
  EXPECT_GT(threads.size(), 1u);
  for (const auto& [tid, events] : threads) {
    for (const auto& [a0, a1] : events) {
      for (const auto& [b0, b1] : events) {
        const bool crossing =
            a0 < b0 - 1e-6 && b0 < a1 - 1e-6 && a1 < b1 - 1e-6;
        EXPECT_FALSE(crossing) << tid << ": " << a0 << " " << b0;
      }
    }
  }
  const auto back = parse_chrome_trace(text, "test");
  EXPECT_EQ(sorted(back.spans), sorted(timeline.spans));
}

TEST(ChromeTrace, TextsOfAnyBytesGiveValidJson) {
  auto timeline = small();
  timeline.spans[0].name = "a\"\\\n\x01\xff\xe2\x82\xac</script>";
  const auto json = Json::parse(to_chrome_trace(timeline));
  EXPECT_THAT(json.dump(), HasSubstr("\\u0001\xef\xbf\xbd\xe2\x82\xac"));
}

TEST(ChromeTrace, WhatIsNoTraceIsAnErrorWithItsPlace) {
  const std::string good = to_chrome_trace(small());
  std::vector<std::string> bad = {
      "",
      "{}",
      "[]",
      "null",
      "{\"traceEvents\":[{}]}",
      good.substr(0, good.size() / 2)};
  for (const auto& [from, to] :
       {std::pair{"\"forward\",\"pid\"", "\"sleeping\",\"pid\""},
        std::pair{"\"thread_name\"", "\"thread_nome\""},
        std::pair{"\"ts\":0.001", "\"ts\":1e300"},
        std::pair{"\"traceEvents\":[", "\"traceEvents\":[7,"},
        std::pair{"\"otherData\"", "\"elseData\""},
        std::pair{"\"pid\":1,\"tid\":0", "\"pid\":-1,\"tid\":0"}}) {
    std::string text = good;
    const auto at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    bad.push_back(text.replace(at, std::string(from).size(), to));
  }
  for (const auto& text : bad) {
    EXPECT_THAT(
        error_text<DataError>([&] { parse_chrome_trace(text, "run/t.json"); }),
        HasSubstr("run/t.json is no trace that Echelon wrote"))
        << text.substr(0, 200);
  }
}

TEST(ChromeTrace, AFileThatCannotBeWrittenIsNamedAndTheOldOneKept) {
  TempFolder folder;
  const auto path = folder.make_folder("timeline.json");
  folder.write("timeline.json/inside", "x");
  EXPECT_THAT(
      error_text([&] { write_chrome_trace(path, small()); }),
      HasSubstr("cannot write " + path));
  EXPECT_EQ(read_file(folder.path("timeline.json/inside")), "x");
}

TEST(MergeSpans, AlignsClocksAndStartsAtZero) {
  const auto span = [](int64_t begin, int64_t end) {
    return Span{
        .rank = 9, .track = "compute", .begin_ns = begin, .end_ns = end};
  };
  const auto timeline = merge_spans(
      {{2, "rank 2 (far)", 1'000'000, {span(500, 700)}},
       {0, "rank 0 (near)", 0, {span(1'000'600, 1'000'900)}}},
      "run");
  EXPECT_EQ(timeline.title, "run");
  EXPECT_EQ(
      timeline.rank_names,
      (std::vector<std::string>{"rank 0 (near)", "rank 1", "rank 2 (far)"}));
  ASSERT_EQ(timeline.spans.size(), 2u);
  EXPECT_EQ(timeline.spans[0].rank, 2);
  EXPECT_EQ(timeline.spans[0].begin_ns, 0);
  EXPECT_EQ(timeline.spans[0].end_ns, 200);
  EXPECT_EQ(timeline.spans[1].rank, 0);
  EXPECT_EQ(timeline.spans[1].begin_ns, 100);
}

TEST(MergeSpans, AddsTheWaitsOfBackward) {
  const auto timeline = merge_spans(
      {{0,
        "",
        0,
        {{0, "compute", "backward", SpanKind::backward, 0, 100, 1, 0},
         {0, "comm", "all_reduce", SpanKind::communication, 60, 90, 1, 8}}}},
      "");
  ASSERT_EQ(timeline.spans.size(), 3u);
  EXPECT_EQ(timeline.spans[1].rank, 0);
  EXPECT_EQ(timeline.spans[1].begin_ns, 60);
  EXPECT_EQ(timeline.spans[2].begin_ns, 60);
}

TEST(MergeSpans, ARankTwiceIsAnError) {
  EXPECT_THAT(
      error_text<DataError>([] {
        merge_spans({{1, "", 0, {}}, {1, "", 0, {}}}, "");
      }),
      HasSubstr("there are two files of rank 1"));
  EXPECT_TRUE(merge_spans({}, "none").rank_names.empty());
}

TEST(ChromeTrace, MemoryIsACounterOfEachRank) {
  Timeline timeline = small();
  MemorySample first{.time_ns = 1500};
  first.memory[MemoryKind::unsharded] = 7;
  MemorySample second{.time_ns = 2'000'001};
  second.memory[MemoryKind::activations] = int64_t{5} << 40;
  timeline.memory = {
      {.rank = 1,
       .samples = {first, second},
       .planned_bytes = 99,
       .limit_bytes = 100}};
  const auto json = Json::parse(to_chrome_trace(timeline));
  int counters = 0;
  for (const auto& event : json.at("traceEvents")) {
    counters += event.at("ph") == "C" ? 1 : 0;
  }
  EXPECT_EQ(counters, 2);
  const Timeline back = parse_chrome_trace(to_chrome_trace(timeline), "memory");
  ASSERT_EQ(back.memory.size(), 1u);
  EXPECT_EQ(back.memory[0].rank, 1);
  EXPECT_EQ(back.memory[0].planned_bytes, 99);
  EXPECT_EQ(back.memory[0].limit_bytes, 100);
  ASSERT_EQ(back.memory[0].samples.size(), 2u);
  EXPECT_EQ(back.memory[0].samples[0].time_ns, 1500);
  EXPECT_EQ(back.memory[0].samples[0].memory.bytes, first.memory.bytes);
  EXPECT_EQ(back.memory[0].samples[1].time_ns, 2'000'001);
  EXPECT_EQ(back.memory[0].samples[1].memory.bytes, second.memory.bytes);
  EXPECT_EQ(sorted(back.spans), sorted(timeline.spans));
}

TEST(ChromeTrace, MemoryOfEarlierVersionsIsRead) {
  Timeline timeline = small();
  MemorySample sample{.time_ns = 1500};
  sample.memory[MemoryKind::unsharded] = 7;
  timeline.memory = {{.rank = 1, .samples = {sample}}};
  std::string text = to_chrome_trace(timeline);
  const std::string now = "\"unsharded\"";
  text.replace(text.find(now), now.size(), "\"gathered\"");
  const Timeline back = parse_chrome_trace(text, "memory");
  ASSERT_EQ(back.memory.size(), 1u);
  EXPECT_EQ(back.memory[0].samples.at(0).memory.bytes, sample.memory.bytes);
}

TEST(MergeSpans, MemoryHasTheClockOfTheSpans) {
  const Span span{
      .name = "forward",
      .kind = SpanKind::forward,
      .begin_ns = 1000,
      .end_ns = 2000};
  std::vector<RankSpans> ranks(2);
  for (int32_t rank = 0; rank < 2; ++rank) {
    ranks[rank].rank = rank;
    ranks[rank].spans = {span};
  }
  ranks[1].clock_offset_ns = 500;
  ranks[1].memory.samples = {{.time_ns = 900}, {.time_ns = 1600}};
  const Timeline merged = merge_spans(std::move(ranks), "two");
  ASSERT_EQ(merged.memory.size(), 1u);
  EXPECT_EQ(merged.memory[0].rank, 1);
  EXPECT_EQ(merged.memory[0].samples[0].time_ns, 400);
  EXPECT_EQ(merged.memory[0].samples[1].time_ns, 1100);
}

}  // namespace chrome_trace_test
}  // namespace echelon::timeline
