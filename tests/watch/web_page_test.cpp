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

TEST(WebPage, ShowsARunThatHasNotBegun) {
  TempFolder folder;
  RunWatch watch(folder.path("run"));
  EXPECT_THAT(to_page(watch.look()), HasSubstr("not begun: there is no such"));
}

}  // namespace echelon::watch::web_page_test
