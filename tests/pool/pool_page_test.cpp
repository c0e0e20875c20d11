// What a pool shows: its history, its page and metrics over HTTP, and its
// commands over TCP.
#include <gmock/gmock.h>
#include <unistd.h>

#include "tests/monitoring/http.h"
#include "tests/pool/pool_server.h"
#include "tests/pool/sample_past.h"
#include "tests/support/error_text.h"

namespace echelon::pool::pool_page_test {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;
using testing_support::ask_page;

class PoolPage : public PoolServer {
 protected:
  PoolPage() { variables_ = {"XDG_CONFIG_HOME=" + path("config"), "TZ=UTC"}; }

  void stop() {
    daemon_->signal(SIGTERM);
    EXPECT_EQ(daemon_->wait(), 0);
    daemon_.reset();
  }
  std::string page_token() const {
    std::string text = text_of("pool/page-token");
    text.pop_back();
    return text;
  }
  // The command on another host, say.
  Finished remote(Words words, const std::string& config = "config") const {
    words.insert(words.begin(), {program("echelon"), "pool"});
    words.insert(
        std::ranges::find(words, "--"),
        {"--at", "127.0.0.1:" + std::to_string(commands_)});
    words.insert(words.begin(), "XDG_CONFIG_HOME=" + path(config));
    Command run(unmarked(std::move(words)));
    const int code = run.wait();
    return {code, run.out(), run.err()};
  }
  static std::string get(const std::string& target, const std::string& header) {
    return "GET " + target + " HTTP/1.1\r\nHost: a\r\n" + header + "\r\n";
  }

  int page_ = testing_support::free_port();
  int commands_ = testing_support::free_port();
};

// Two hours of two projects, counted by hand.
TEST_F(PoolPage, TheHistoryIsThatOfTheFile) {
  start();
  stop();
  const double until = static_cast<double>(std::time(nullptr)) - 3600;
  const auto hour = [&](double number) { return until + 3600 * number; };
  write_past(
      path("pool"),
      {{.job = 1,
        .project = "language",
        .devices = 4,
        .names = {"0", "1", "2", "3"},
        .began = hour(-2),
        .ended = hour(-1)},
       {.job = 1,
        .project = "language",
        .devices = 3,
        .names = {"0", "1", "2"},
        .began = hour(-1),
        .ended = hour(0)},
       {.job = 2,
        .project = "vision",
        .devices = 1,
        .names = {"3"},
        .began = hour(-1),
        .ended = hour(-0.5)}},
      hour(-2));
  start();
  const Json history = ask({"history"});
  const auto& projects = history["projects"];
  EXPECT_EQ(projects[0]["project"], "language");
  EXPECT_NEAR(projects[0]["device_hours"].get<double>(), 7, 1e-9);
  EXPECT_NEAR(projects[0]["borrowed_hours"].get<double>(), 1, 1e-9);
  EXPECT_NEAR(projects[1]["device_hours"].get<double>(), 0.5, 1e-9);
  EXPECT_EQ(projects[1]["borrowed_hours"], 0);
  EXPECT_NEAR(history["used_hours"].get<double>(), 7.5, 1e-9);
  // 4 slots for the 2 hours and the time since then.
  const double all =
      4 * (history["until"].get<double>() - history["since"].get<double>()) /
      3600;
  EXPECT_NEAR(history["idle_hours"].get<double>(), all - 7.5, 1e-6);
  EXPECT_GE(all, 12);
  const std::string table = finished({"history"}).out;
  EXPECT_THAT(table, HasSubstr("language  7.00"));
  EXPECT_THAT(table, HasSubstr("vision    0.50"));
  // The last half of an hour in which anybody had anything.
  const Json half = ask({"history", "--since", "90m"});
  EXPECT_NEAR(half["projects"][0]["device_hours"].get<double>(), 1.5, 0.02);

  submit({"--project", "vision", "-n", "1"}, "sleep 600");
  submit({"--project", "vision", "-n", "1"}, "sleep 600 # <b>&</b>");
  ASSERT_TRUE(reaches(1, "running"));
  ASSERT_TRUE(Command::until(
      [&] { return why(2).find("guarantee of vision") != std::string::npos; }));
  const Finished wrote = finished({"page", path("page.html")});
  EXPECT_EQ(wrote.code, 0) << wrote.err;
  const std::string page = text_of("page.html");
  for (const char* text :
       {"Who has what", "Who waits, and why",
        "it needs 1 of the guarantee of vision", "Device by device",
        "job 1 of language", ">7.0</td>", ">0.5</td>", "sleep 600"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
  EXPECT_THAT(page, Not(HasSubstr("<script")));
  EXPECT_THAT(page, Not(HasSubstr("<b>&</b>")));
}

TEST_F(PoolPage, AWeekOfThousandsOfJobsIsASmallPage) {
  start();
  stop();
  constexpr double kWeek = 7 * 86400;
  const double until = static_cast<double>(std::time(nullptr));
  // Each slot has another project's job every five minutes.
  std::vector<Allocation> past;
  for (int i = 0; i < 2000; ++i) {
    for (int slot = 0; slot < 4; ++slot) {
      const double began = until - kWeek + 300 * i;
      past.push_back(
          {.job = 4 * i + slot,
           .project = (i + slot) % 2 == 0 ? "language" : "vision",
           .devices = 1,
           .names = {std::to_string(slot)},
           .began = began,
           .ended = began + 290});
    }
  }
  write_past(path("pool"), past, until - kWeek);
  start();
  const Finished wrote = finished({"page", path("page.html")});
  EXPECT_EQ(wrote.code, 0) << wrote.err;
  const std::string page = text_of("page.html");
  EXPECT_LT(page.size(), 500'000u);
  EXPECT_GT(testing_support::count(page, "<title>"), 100);
}

TEST_F(PoolPage, APageNeedsItsToken) {
  options_ = {"--page", std::to_string(page_)};
  start();
  EXPECT_THAT(
      daemon_->out(), HasSubstr("http://127.0.0.1:" + std::to_string(page_)));
  const std::string token = page_token();
  EXPECT_THAT(daemon_->out(), Not(HasSubstr(token)));
  const std::string bearer = "Authorization: Bearer " + token + "\r\n";
  for (const char* target : {"/", "/metrics", "/other"}) {
    const std::string answer = ask_page(page_, get(target, ""));
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 401 Unauthorized\r\n"));
    EXPECT_THAT(
        answer, HasAll(
                    "WWW-Authenticate: Bearer\r\n", "token is needed",
                    "`echelon pool page` prints the address"));
  }
  for (const std::string& wrong :
       {"Authorization: Bearer " + token.substr(1) + "\r\n",
        "Authorization: Basic " + token + "\r\n",
        std::string("Cookie: echelon_pool=x\r\n"),
        "Cookie: other=" + token + "\r\n"}) {
    EXPECT_THAT(ask_page(page_, get("/", wrong)), StartsWith("HTTP/1.1 401 "))
        << wrong;
  }
  EXPECT_THAT(
      ask_page(page_, get("/?token=" + token + "0", "")),
      HasSubstr("this is not the pool\u2019s token"));
  // The user's own token is another one, and opens no page.
  std::string own = text_of("config/echelon/token");
  own.pop_back();
  EXPECT_NE(own, token);
  EXPECT_THAT(
      ask_page(page_, get("/", "Authorization: Bearer " + own + "\r\n")),
      StartsWith("HTTP/1.1 401 "));

  EXPECT_THAT(
      ask_page(page_, get("/other", bearer)), StartsWith("HTTP/1.1 404 "));
  const std::string page = ask_page(page_, get("/", bearer));
  EXPECT_THAT(
      page, HasAll(
                "HTTP/1.1 200 OK\r\nContent-Type: text/html", "<!DOCTYPE html>",
                "Who has what"));
  EXPECT_THAT(
      ask_page(page_, get("/metrics", bearer)),
      HasSubstr(
          "\nechelon_pool_devices{project=\"vision\",kind=\"guaranteed\"} "
          "1\n"));
  // A browser is given the token once, and has a cookie from then on.
  const std::string url = finished({"page"}).out;
  ASSERT_THAT(url, testing::EndsWith("/?token=" + token + "\n"));
  const std::string first = ask_page(page_, get("/?token=" + token, ""));
  EXPECT_THAT(
      first, HasAll(
                 "HTTP/1.1 303 See Other\r\n", "Location: /\r\n",
                 "HttpOnly; SameSite=Strict"));
  const std::string cookie = "Cookie: a=b; echelon_pool=" + token + "\r\n";
  EXPECT_THAT(ask_page(page_, get("/", cookie)), StartsWith("HTTP/1.1 200 OK"));

  // The next daemon has the same page and the same token.
  replace_daemon();
  EXPECT_EQ(page_token(), token);
  EXPECT_THAT(ask_page(page_, get("/", cookie)), StartsWith("HTTP/1.1 200 OK"));
}

TEST_F(PoolPage, MetricsCountWhatJobsDid) {
  options_ = {"--page", std::to_string(page_)};
  start();
  const std::string ask =
      get("/metrics", "Authorization: Bearer " + page_token() + "\r\n");
  const auto shows = [&](const std::string& line) {
    return Command::until([&] {
      return ask_page(page_, ask).find("\n" + line + "\n") != std::string::npos;
    });
  };
  const int64_t done = submit({"--project", "language"}, "true");
  ASSERT_TRUE(reaches(done, "done"));
  const int64_t borrower = submit(
      {"--project", "language", "-n", "4", "--preemptible"},
      "trap 'exit 75' TERM; touch " + path("runs") +
          "; while true; do sleep 0.05; done");
  ASSERT_TRUE(appears("runs"));
  EXPECT_TRUE(shows(
      "echelon_pool_devices{project=\"language\",kind=\"over_quota\"} 1"));
  EXPECT_TRUE(shows("echelon_pool_capacity_devices{kind=\"idle\"} 0"));
  submit({"--project", "vision"}, "sleep 600");
  EXPECT_TRUE(shows(
      "echelon_pool_taken_back_total{project=\"language\",how=\"stopped\"} 1"));
  ASSERT_TRUE(reaches(borrower, "waiting"));
  EXPECT_TRUE(
      shows("echelon_pool_jobs{project=\"language\",state=\"waiting\"} 1"));
  EXPECT_TRUE(shows(
      "echelon_pool_ended_jobs_total{project=\"language\",state=\"done\"} 1"));
  EXPECT_TRUE(shows("echelon_pool_wait_seconds_count{project=\"language\"} 2"));
  EXPECT_TRUE(shows("echelon_pool_wait_seconds_count{project=\"vision\"} 1"));
}

TEST_F(PoolPage, WhatCannotBeServedIsSaid) {
  const auto refused = [&](Words options, const std::string& rule) {
    options_ = std::move(options);
    Command run(daemon());
    EXPECT_EQ(run.wait(), 2);
    EXPECT_THAT(run.err(), HasSubstr(rule));
  };
  start();
  refused({"--page", "9465x"}, "another daemon");
  stop();
  refused({"--page", "9465x"}, "--page 9465x: it is HOST:PORT");
  refused(
      {"--page", std::to_string(page_), "--token-file", path("none")},
      "--token-file: there is no token file " + path("none"));
  std::ofstream(path("open")) << std::string(64, 'a');
  ::chmod(path("open").c_str(), 0644);
  refused(
      {"--commands", std::to_string(commands_), "--token-file", path("open")},
      "has mode 644");
  FileDescriptor taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(page_));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(
      ::bind(taken.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address),
      0);
  ASSERT_EQ(::listen(taken.fd(), 1), 0);
  refused({"--page", std::to_string(page_)}, "the port is in use");
  refused({"--commands", std::to_string(page_)}, "the port is in use");
  taken.close();
  options_.clear();
  start();
  EXPECT_THAT(
      finished({"page"}).err, HasSubstr("the pool shows no page; `echelon pool "
                                        "start --page 9465` does"));
}

TEST_F(PoolPage, CommandsOverTcpNeedTheToken) {
  options_ = {"--commands", std::to_string(commands_)};
  start();
  const int64_t id = submit({"--project", "language", "-n", "2"}, "sleep 600");
  ASSERT_TRUE(reaches(id, "running"));
  EXPECT_THAT(remote({"list"}).out, HasAll("language", "running", "sleep 600"));
  EXPECT_THAT(remote({"why", "1"}).out, HasSubstr("it runs on 2 devices"));
  EXPECT_EQ(remote({"why", "7"}).code, 2);
  EXPECT_THAT(remote({"why", "7"}).err, HasSubstr("there is no such job"));
  const Finished submitted =
      remote({"submit", "--project", "vision", "--", "true"});
  if (::geteuid() == 0) {
    EXPECT_EQ(submitted.code, 2);
    EXPECT_THAT(
        submitted.err, HasSubstr("a token does not say who that is; submit on "
                                 "the pool's host"));
  } else {
    EXPECT_EQ(submitted.out, "job 2\n");
  }
  // Another token, none, and somebody who has neither and speaks HTTP.
  const Finished other = remote({"list"}, "other");
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(
      other.err, HasAll(
                     "the pool has another token than the file",
                     "other/echelon/token", "--token-file"));
  const Finished none = remote({"list", "--token-file", path("none")});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, HasSubstr("--token-file: there is no token file"));
  EXPECT_EQ(ask_page(commands_, get("/", "")), "");
  EXPECT_THAT(remote({"cancel", "1"}).out, HasSubstr("job 1: ending"));
  ASSERT_TRUE(reaches(id, "cancelled"));
  stop();
  // The process that took commands ends with its daemon.
  EXPECT_TRUE(Command::until([&] {
    const Finished gone = remote({"list"});
    return gone.code == 2 &&
           gone.err.find(
               "Connection refused; `echelon pool "
               "start --commands HOST:PORT`") != std::string::npos;
  }));
}

}  // namespace echelon::pool::pool_page_test
