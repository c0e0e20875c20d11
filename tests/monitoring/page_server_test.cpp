#include "echelon/monitoring/page_server.h"

#include <gmock/gmock.h>
#include <poll.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "echelon/monitoring/metric_text.h"
#include "tests/monitoring/http.h"
#include "tests/support/process.h"

namespace echelon::page_server_test {

using monitoring::PageServer;
using monitoring::read_request;
using testing::HasSubstr;
using testing::StartsWith;
using testing_support::ask_page;
using testing_support::Command;
using testing_support::connect_to;
using testing_support::kGetMetrics;
using testing_support::receive_all;
using testing_support::send_text;

std::optional<int> status(const std::string& request) {
  const auto read = read_request(request);
  if (!read) return std::nullopt;
  return read->status == 200 && read->path != "/metrics" ? 404 : read->status;
}

TEST(PageRequest, OneFormIsAnswered) {
  EXPECT_EQ(status(kGetMetrics), 200);
  EXPECT_EQ(status("GET /metrics HTTP/1.0\r\n\r\n"), 200);
  EXPECT_EQ(
      status(
          "GET /metrics?format=text HTTP/1.1\r\nHost: a:9464\r\n"
          "Accept: text/plain;version=0.0.4\r\nUser-Agent: Prometheus/2.42\r\n"
          "X-Prometheus-Scrape-Timeout-Seconds: 10\r\nEmpty:\r\n\r\n"),
      200);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), 404);
  EXPECT_EQ(status("GET /metrics/ HTTP/1.1\r\nHost: a\r\n\r\n"), 404);
  EXPECT_EQ(status("GET http://a/metrics HTTP/1.1\r\nHost: a\r\n\r\n"), 404);
}

TEST(PageRequest, OthersAreRefused) {
  const std::string host = "Host: a\r\n\r\n";
  const std::vector<std::pair<std::string, int>> requests = {
      {"POST /metrics HTTP/1.1\r\n" + host, 405},
      {"HEAD /metrics HTTP/1.1\r\n" + host, 405},
      {"get /metrics HTTP/1.1\r\n" + host, 405},
      {"GET /metrics HTTP/2.0\r\n" + host, 505},
      {"GET /metrics\r\n" + host, 400},
      {"GET  /metrics HTTP/1.1\r\n" + host, 400},
      {"GET /metrics  HTTP/1.1\r\n" + host, 400},
      {"GET /metrics HTTP/1.1 \r\n" + host, 400},
      {" GET /metrics HTTP/1.1\r\n" + host, 400},
      {"GET /met\trics HTTP/1.1\r\n" + host, 400},
      {"GET /m\xc3\xa9trics HTTP/1.1\r\n" + host, 400},
      {std::string("GET /metrics\0 HTTP/1.1\r\n", 24) + host, 400},
      {"\r\nGET /metrics HTTP/1.1\r\n" + host, 400},
      {"GET /metrics HTTP/1.1\r\n\r\n", 400},  // no Host
      {"GET /metrics HTTP/1.1\r\nHost: a\r\n" + host, 400},
      {"GET /metrics HTTP/1.1\r\nHost : a\r\n\r\n", 400},
      {"GET /metrics HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400},  // a folded line
      {"GET /metrics HTTP/1.1\r\nno colon\r\n" + host, 400},
      {"GET /metrics HTTP/1.1\r\nA: b\nHost: a\r\n\r\n", 400},
      {"GET /metrics HTTP/1.1\r\nA: b\rc\r\n" + host, 400},
      {"GET /metrics HTTP/1.1\r\nContent-Length: 5\r\n" + host, 413},
      {"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + host, 501}};
  for (const auto& [request, expected] : requests) {
    EXPECT_EQ(status(request), expected) << request;
  }
}

TEST(PageRequest, EndsWithinItsMostBytes) {
  const std::string whole = kGetMetrics;
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_EQ(status(whole.substr(0, size)), std::nullopt) << size;
  }
  const std::string start = "GET /metrics HTTP/1.1\r\nHost: a\r\nA: ";
  EXPECT_EQ(
      status(start + std::string(4095 - start.size(), 'a')), std::nullopt);
  EXPECT_EQ(status(start + std::string(4096 - start.size(), 'a')), 431);
}

// Whatever is changed in a request, it is answered or refused, and what was not
// the one form before is never taken for it.
TEST(PageRequest, AnyBytesHaveAStatus) {
  std::mt19937 random(1);
  const std::string good = kGetMetrics;
  for (int i = 0; i < 20000; ++i) {
    std::string request = good;
    const size_t at = random() % (good.find("\r\n"));
    const char byte = static_cast<char>(random());
    if (byte == request[at]) continue;
    request[at] = byte;
    if (request.find("HTTP/1.0") != std::string::npos) continue;
    const auto found = status(request);
    EXPECT_NE(found, 200) << i << ": " << request;
  }
}

TEST(PageRequest, IsTakenApart) {
  const auto read = read_request(
      "GET /metrics?token=a&b HTTP/1.1\r\nHost: h\r\nCookie:  x=1; y=2 \r\n"
      "COOKIE: z=3\r\n\r\n");
  ASSERT_TRUE(read);
  EXPECT_EQ(read->path, "/metrics");
  EXPECT_EQ(read->query, "token=a&b");
  EXPECT_EQ(read->headers.at("cookie"), "x=1; y=2");
}

class Served : public testing::Test {
 protected:
  void SetUp() override {
    FileDescriptor listener(
        ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* raw = reinterpret_cast<sockaddr*>(&address);
    ASSERT_EQ(bind(listener.fd(), raw, size), 0);
    ASSERT_EQ(listen(listener.fd(), 64), 0);
    ASSERT_EQ(getsockname(listener.fd(), raw, &size), 0);
    port_ = ntohs(address.sin_port);
    const auto make = [this] {
      ++made_;
      return page_;
    };
    const auto guard = [this](const monitoring::PageRequest& request)
        -> std::optional<monitoring::PageRefusal> {
      if (!guarded_ || request.query == "key") return std::nullopt;
      return monitoring::PageRefusal{.headers = "WWW-Authenticate: Bearer\r\n"};
    };
    const auto other = [] { return std::string("<p>other</p>"); };
    server_.emplace(
        std::move(listener),
        std::vector<monitoring::ServedPage>{
            {"/metrics", monitoring::kMetricsType, make},
            {"/", "text/html", other}},
        guard);
    thread_ = std::thread([this] {
      while (!ends_) {
        server_->serve(std::chrono::milliseconds(20));
        open_ = server_->num_connections();
        most_ = std::max<size_t>(most_, open_);
      }
    });
  }
  void TearDown() override {
    ends_ = true;
    thread_.join();
  }

  int port_ = 0;
  std::string page_ = "echelon_steps_total 3\n";
  std::atomic<bool> guarded_ = false;
  std::atomic<int> made_ = 0;
  std::atomic<size_t> open_ = 0;  // connections
  std::atomic<size_t> most_ = 0;
  std::atomic<bool> ends_ = false;
  std::optional<PageServer> server_;
  std::thread thread_;
};

TEST_F(Served, GivesThePageAndCloses) {
  const std::string answer = ask_page(port_);
  EXPECT_THAT(answer, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(
      answer,
      HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
  EXPECT_THAT(answer, HasSubstr("Content-Length: 22\r\n"));
  EXPECT_THAT(answer, testing::EndsWith("\r\n\r\n" + page_));
}

TEST_F(Served, SaysWhyThereIsNoPage) {
  const std::vector<std::pair<std::string, std::string>> answers = {
      {"", "400 Bad Request"},
      {"GET /other HTTP/1.1\r\nHost: a", "404 Not Found"},
      {"POST /metrics HTTP/1.1\r\nHost: a", "405 Method Not Allowed"},
      {"GET /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 5",
       "413 Content Too Large"},
      {"GET /metrics HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked",
       "501 Not Implemented"},
      {"GET /metrics HTTP/2.0\r\nHost: a", "505 HTTP Version Not Supported"}};
  for (const auto& [request, reason] : answers) {
    const std::string answer = ask_page(port_, request + "\r\n\r\n");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 " + reason + "\r\n"));
    EXPECT_THAT(
        answer, testing::EndsWith(
                    "\r\n\r\n" + reason +
                    "; the page is at /metrics and /, for GET\n"));
    EXPECT_EQ(
        answer.find("\r\nAllow: GET\r\n") != std::string::npos,
        reason.starts_with("405"));
  }
  EXPECT_EQ(made_, 0);
}

TEST_F(Served, EachPathHasItsPage) {
  const std::string answer = ask_page(port_, "GET / HTTP/1.0\r\n\r\n");
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/html\r\n"));
  EXPECT_THAT(answer, testing::EndsWith("\r\n\r\n<p>other</p>"));
  EXPECT_EQ(made_, 0);
}

TEST_F(Served, WhomTheGuardRefusesHasNoPage) {
  guarded_ = true;
  for (const char* path : {"/metrics", "/", "/other", "/metrics?k"}) {
    const std::string answer =
        ask_page(port_, "GET " + std::string(path) + " HTTP/1.0\r\n\r\n");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 401 Unauthorized\r\n")) << path;
    EXPECT_THAT(answer, HasSubstr("\r\nWWW-Authenticate: Bearer\r\n"));
  }
  EXPECT_EQ(made_, 0);
  EXPECT_THAT(
      ask_page(port_, "GET /metrics?key HTTP/1.0\r\n\r\n"),
      StartsWith("HTTP/1.1 200 OK"));
}

TEST_F(Served, ALargePageComesWhole) {
  page_ = std::string(5 << 20, 'a');
  const std::string answer = ask_page(port_);
  EXPECT_EQ(answer.size() - answer.find("\r\n\r\n") - 4, page_.size());
}

// A page is what a request costs most; it is kept for a moment.
TEST_F(Served, ThePageIsMadeAFewTimesASecond) {
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < 50; ++i) ask_page(port_);
  const auto passed = std::chrono::steady_clock::now() - began;
  EXPECT_LE(made_, passed / PageServer::kPageAge + 1);
}

TEST_F(Served, WhoSendsNothingDoesNotKeepOthersOut) {
  std::vector<FileDescriptor> idle;
  for (size_t i = 0; i < PageServer::kMostConnections + 20; ++i) {
    idle.push_back(connect_to(port_));
    if (i % 2 == 0) send_text(idle.back(), "GET /metr");
  }
  EXPECT_THAT(ask_page(port_), StartsWith("HTTP/1.1 200"));
  EXPECT_LE(most_, PageServer::kMostConnections);
  // The last of them waits until its time is over.
  EXPECT_EQ(receive_all(idle.back()), "");
}

TEST_F(Served, WhoReadsNothingDoesNotKeepOthersOut) {
  page_ = std::string(8 << 20, 'a');  // more than sockets hold
  std::vector<FileDescriptor> idle;
  for (int i = 0; i < 8; ++i) {
    idle.push_back(connect_to(port_));
    send_text(idle.back(), kGetMetrics);
  }
  EXPECT_THAT(ask_page(port_), StartsWith("HTTP/1.1 200"));
  // Their time ends too.
  EXPECT_TRUE(Command::until([&] { return open_ == 0; }));
}

TEST_F(Served, LongRequestsAreCutOff) {
  const FileDescriptor socket = connect_to(port_);
  send_text(socket, "GET /metrics HTTP/1.1\r\nA: " + std::string(8000, 'a'));
  EXPECT_THAT(receive_all(socket), StartsWith("HTTP/1.1 431 "));
}

// Beyond so many connections a second the others wait: they all get the page.
TEST_F(Served, AFloodWaits) {
  int answered = 0;
  const auto began = std::chrono::steady_clock::now();
  constexpr int kAsked = 2 * PageServer::kMostInASecond + 10;
  for (int i = 0; i < kAsked; ++i) {
    answered += ask_page(port_).starts_with("HTTP/1.1 200") ? 1 : 0;
  }
  EXPECT_EQ(answered, kAsked);
  const auto passed = std::chrono::floor<std::chrono::seconds>(
      std::chrono::steady_clock::now() - began);
  EXPECT_LE(kAsked, PageServer::kMostInASecond * (passed.count() + 1));
}

}  // namespace echelon::page_server_test
