#include "echelon/watch/web_page.h"

#include <gmock/gmock.h>

#include "tests/watch/written_run.h"

namespace echelon::watch::web_page_test {

using monitoring::PageRequest;
using testing::HasSubstr;
using testing::Not;

PageRequest
request_of(const std::string& host, const std::string& query = "token=abc") {
  PageRequest request;
  request.path = "/";
  request.query = query;
  request.headers["host"] = host;
  return request;
}

bool may(const PageRequest& request) {
  return !refusal_of(request, "abc").has_value();
}

TEST(WebGuard, AnswersThisHostWithTheToken) {
  for (const char* host :
       {"127.0.0.1:9465", "localhost:9465", "localhost", "[::1]:9465", "[::1]",
        "127.0.0.1:1"}) {
    EXPECT_TRUE(may(request_of(host))) << host;
  }
  PageRequest own = request_of("localhost:9465");
  own.headers["origin"] = "http://localhost:9465";
  EXPECT_TRUE(may(own));
}

TEST(WebGuard, RefusesOtherNamesOriginsAndTokens) {
  for (const char* host :
       {"", "evil.example", "evil.example:9465", "127.0.0.1.evil.example",
        "localhost.evil.example:9465", "10.0.0.1:9465", "localhost:x:9465"}) {
    EXPECT_FALSE(may(request_of(host))) << host;
  }
  for (const char* origin :
       {"http://evil.example", "null", "https://localhost:9465",
        "http://localhost:1"}) {
    PageRequest request = request_of("localhost:9465");
    request.headers["origin"] = origin;
    EXPECT_FALSE(may(request)) << origin;
  }
  for (const char* query :
       {"", "token=", "token=ab", "token=abcd", "token=abd", "x&token=abc"}) {
    EXPECT_FALSE(may(request_of("localhost:9465", query))) << query;
  }
  // What is refused learns nothing of the token.
  EXPECT_THAT(refusal_of(request_of("a"), "abc")->text, Not(HasSubstr("abc")));
}

TEST(WebPage, ShowsTheRunWithoutScripts) {
  using namespace written_run;
  TempFolder folder;
  write_run(folder);
  auto status = living();
  status.ranks[1].idle_seconds = 50;
  status.failure = "rank 1: <script>alert(1)</script>";
  write(folder, status);
  RunWatch watch(folder.path("run"), {.findings = false});
  const std::string page = to_page(watch.look());
  for (const char* part :
       {"<p class=\"outcome calm\">training</p>", "simple_cnn on digits",
        "of 100, 0:06 left", "no progress for 50 s", "1.5 GiB",
        "<title id=\"loss-t\">Loss</title>", "http-equiv=\"refresh\"",
        "connect-src 'self'", "&lt;script&gt;alert(1)"}) {
    EXPECT_THAT(page, HasSubstr(part));
  }
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  EXPECT_THAT(page, Not(HasSubstr(">GPU<")));
}

timeline::RankSpans
spans_of(int32_t rank, int64_t step, const std::string& action) {
  timeline::RankSpans spans{.rank = rank, .rank_name = "rank"};
  const auto add = [&](const std::string& name, timeline::SpanKind kind,
                       int64_t begin, int64_t end) {
    spans.spans.push_back(
        {.rank = rank,
         .track = "compute",
         .name = name,
         .kind = kind,
         .begin_ns = begin * 1'000'000,
         .end_ns = end * 1'000'000,
         .step = step});
  };
  add(action, timeline::SpanKind::forward, 10 * rank, 10 * rank + 10);
  add("wait for all_reduce", timeline::SpanKind::communication, 10 * rank + 10,
      40);
  return spans;
}

void write_last_step(
    const TempFolder& folder, int64_t step, const std::string& name) {
  for (int32_t rank = 0; rank < 2; ++rank) {
    const std::string action =
        name.empty() ? std::to_string(rank) + "F0" : name;
    folder.write(
        "run/" + timeline::last_step_file(rank),
        timeline::to_bytes(spans_of(rank, step, action)));
  }
}

TEST(WebPage, ShowsThePipelinesLastStep) {
  using namespace written_run;
  TempFolder folder;
  write_run(folder);
  write(folder, living());
  write_last_step(folder, 29, "");
  RunWatch watch(folder.path("run"), {.findings = false, .last_step = true});
  const std::string page = to_page(watch.look());
  for (const char* part :
       {"<h2>What each rank did</h2>", "Step 30, ", "Measured: step 30",
        "forward of microbatch 0, stage 1", "Ideal schedule",
        "<th scope=\"row\">rank 1"}) {
    EXPECT_THAT(page, HasSubstr(part));
  }
  // Files that come later are read once all ranks had time to write.
  for (const auto& entry :
       std::filesystem::directory_iterator(folder.path("run/last_step"))) {
    std::filesystem::last_write_time(
        entry, std::filesystem::file_time_type::clock::now() -
                   std::chrono::seconds(30));
  }
  watch.look();
  write_last_step(folder, 31, "");
  EXPECT_EQ(watch.look().last_step->step, 30);
  EXPECT_EQ(watch.look().last_step->step, 32);
  // What an earlier job with more ranks left does not count.
  folder.write(
      "run/" + timeline::last_step_file(2),
      timeline::to_bytes(spans_of(2, 90, "2F0")));
  RunWatch again(folder.path("run"), {.findings = false, .last_step = true});
  EXPECT_EQ(again.look().last_step->diagnosis.ranks.size(), 2u);
}

TEST(WebPage, ShowsSharesWithoutAPipeline) {
  using namespace written_run;
  TempFolder folder;
  write_run(folder);
  write(folder, living());
  write_last_step(folder, 29, "forward");
  RunWatch watch(folder.path("run"), {.findings = false, .last_step = true});
  const std::string page = to_page(watch.look());
  for (const char* part :
       {"<h2>What each rank did</h2>", "Step 30, ", "One step: 40 ms",
        "exposed", "rank 0", "30 ms"}) {
    EXPECT_THAT(page, HasSubstr(part));
  }
  EXPECT_THAT(page, Not(HasSubstr("microbatch")));
}

TEST(WebPage, SaysThatALastStepIsBroken) {
  using namespace written_run;
  TempFolder folder;
  write_run(folder);
  for (const std::string bytes :
       {"", "x", "\x93\x01\x02\x03", "\xdd\xff\xff\xff\xff"}) {
    folder.write("run/" + timeline::last_step_file(0), bytes);
    RunWatch watch(folder.path("run"), {.findings = false, .last_step = true});
    const RunView& view = watch.look();
    EXPECT_FALSE(view.last_step);
    EXPECT_THAT(view.note, HasSubstr("spans of rank 0"));
    EXPECT_THAT(to_page(view), HasSubstr("of 100"));
  }
}

TEST(WebPage, ShowsARunThatHasNotBegun) {
  TempFolder folder;
  RunWatch watch(folder.path("run"));
  EXPECT_THAT(to_page(watch.look()), HasSubstr("not begun: there is no such"));
}

}  // namespace echelon::watch::web_page_test
