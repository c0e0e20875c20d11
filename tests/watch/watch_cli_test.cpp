// `echelon watch` as people and scripts call it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>

#include "echelon/text/table.h"
#include "tests/monitoring/http.h"
#include "tests/support/places.h"
#include "tests/support/process.h"
#include "tests/watch/written_run.h"

namespace echelon::watch_cli_test {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing_support::Command;
using namespace written_run;

const std::string kWatch = program("echelon");

class WatchCommand : public testing::Test {
 protected:
  std::string run() const { return folder_.path("run"); }
  TempFolder folder_;
};

size_t widest(const std::string& text) {
  std::istringstream lines(text);
  size_t width = 0;
  for (std::string line; std::getline(lines, line);) {
    width = std::max(width, columns(line));
  }
  return width;
}

/// A command on a terminal of so many columns; what it writes is collected.
class OnTerminal {
 public:
  OnTerminal(
      const std::vector<std::string>& words, unsigned short width,
      const char* no_color = "") {
    controller_ = ::posix_openpt(O_RDWR | O_NOCTTY);
    EXPECT_EQ(::grantpt(controller_), 0);
    EXPECT_EQ(::unlockpt(controller_), 0);
    const std::string name = ::ptsname(controller_);
    winsize size{};
    size.ws_col = width;
    size.ws_row = 30;
    ::ioctl(controller_, TIOCSWINSZ, &size);
    ::fcntl(controller_, F_SETFL, O_NONBLOCK);
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::setsid();
    const int file = ::open(name.c_str(), O_RDWR);
    for (int fd = 0; fd <= 2; ++fd) ::dup2(file, fd);
    ::setenv("TERM", "xterm", 1);
    ::setenv("LC_ALL", "C.UTF-8", 1);
    ::setenv("NO_COLOR", no_color, 1);
    std::vector<char*> arguments;
    for (const auto& word : words) {
      arguments.push_back(const_cast<char*>(word.c_str()));
    }
    arguments.push_back(nullptr);
    ::execv(arguments[0], arguments.data());
    ::_exit(127);
  }
  ~OnTerminal() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(controller_);
  }
  bool until(const std::string& text) {
    return Command::until([&] {
      read();
      return output_.find(text) != std::string::npos;
    });
  }
  void type(const char* keys) { (void)!::write(controller_, keys, 1); }
  /// Its exit code.
  int wait() {
    int status = -1;
    const bool ended = Command::until([&] {
      read();
      return ::waitpid(pid_, &status, WNOHANG) == pid_;
    });
    read();
    if (!ended) return -1;
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  const std::string& output() const { return output_; }

 private:
  void read() {
    char bytes[4096];
    for (ssize_t got; (got = ::read(controller_, bytes, sizeof bytes)) > 0;) {
      output_.append(bytes, static_cast<size_t>(got));
    }
  }

  int controller_ = -1;
  pid_t pid_ = -1;
  std::string output_;
};

TEST_F(WatchCommand, PrintsOneState) {
  write_run(folder_);
  write(folder_, living());
  Command command({kWatch, "watch", run(), "--once"});
  ASSERT_EQ(command.wait(), 0) << command.err();
  EXPECT_THAT(
      command.out(),
      AllOf(
          HasSubstr("run  simple_cnn on digits, dp=2\ntraining\nstep 40/100"),
          HasSubstr("ETA 0:06"), HasSubstr("loss        0."),
          HasSubstr("speed       640 samples/s, 100 ms a step, 10 %"),
          HasSubstr("checkpoint  none yet"), HasSubstr("rank  state   memory"),
          HasSubstr("1     trains  1.5 GiB"), Not(HasSubstr("\033"))));
  EXPECT_LE(widest(command.out()), 80u);
}

TEST_F(WatchCommand, PrintsJson) {
  write_run(folder_);
  write(folder_, living());
  Command command({kWatch, "watch", run(), "--json"});
  ASSERT_EQ(command.wait(), 0) << command.err();
  const auto json = nlohmann::json::parse(command.out());
  EXPECT_EQ(json.at("state"), "training");
  EXPECT_EQ(json.at("step"), 40);
  EXPECT_EQ(json.at("ranks").size(), 2u);
  EXPECT_EQ(json.at("ranks").at(1).at("state"), "trains");
  EXPECT_NEAR(json.at("eta_seconds").get<double>(), 6, 1e-6);
}

TEST_F(WatchCommand, PrintsLinesUntilTheRunEnds) {
  write_run(folder_);
  write(folder_, living());
  Command command({kWatch, "watch", run()});
  ASSERT_TRUE(command.until_output("step 40/100"));
  append(folder_.path("run/metrics.jsonl"), steps(41, 100));
  auto status = living();
  status.exit_code = 0;
  write(folder_, status);
  ASSERT_EQ(command.wait(), 0) << command.err();
  EXPECT_THAT(
      command.out(),
      AllOf(
          HasSubstr("finished  step 100/100  loss "), Not(HasSubstr("\033"))));
}

TEST_F(WatchCommand, EndsByCtrlCAndLeavesTheTerminalAsItWas) {
  write_run(folder_);
  write(folder_, living());
  for (const unsigned short width : {40, 100}) {
    OnTerminal command({kWatch, "watch", run()}, width);
    ASSERT_TRUE(command.until("trains")) << command.output();
    command.type("\003");
    EXPECT_EQ(command.wait(), 0);
    const std::string& out = command.output();
    EXPECT_THAT(out, testing::StartsWith("\033[?1049h\033[?25l"));
    const size_t end = out.find("\033[?25h\033[?1049l");
    ASSERT_NE(end, std::string::npos) << out;
    // The last state stays, and nothing is wider than the window.
    EXPECT_THAT(out.substr(end), HasSubstr("step 40/100"));
    std::string text = out;
    for (size_t at = 0; (at = text.find("\033[", at)) != text.npos;) {
      const size_t last = text.find_first_of("mHhlKJ", at);
      const bool moves = text[last] != 'm' && text[last] != 'K';
      text.replace(at, last + 1 - at, moves ? "\n" : "");
    }
    std::erase(text, '\r');
    EXPECT_LE(widest(text), width) << text;
  }
}

TEST_F(WatchCommand, HasNoColoursWhereNobodyWantsThem) {
  write_run(folder_);
  auto status = living();
  status.exit_code = 3;
  write(folder_, status);
  OnTerminal with({kWatch, "watch", run(), "--once"}, 80);
  EXPECT_EQ(with.wait(), 0);
  EXPECT_THAT(with.output(), HasSubstr("\033[31;1mfailed"));
  OnTerminal without({kWatch, "watch", run(), "--once"}, 80, "1");
  EXPECT_EQ(without.wait(), 0);
  EXPECT_THAT(
      without.output(), AllOf(HasSubstr("failed"), Not(HasSubstr("\033"))));
}

TEST_F(WatchCommand, ShowsNoEscapesThatFilesHold) {
  const std::string name = "run\033[2Jx";
  folder_.write(name + "/metrics.jsonl", steps(1, 3));
  auto status = living();
  status.exit_code = 1;
  status.failure = "rank 0: \033]0;owned\007 \u009b31m";
  status.host = "h\033[31m";
  status.num_hosts = 2;
  status.ranks[0].phase = "\033[31m";
  folder_.write(name + "/status/rank-0.json", to_json(status));
  for (const auto& words :
       {std::vector<std::string>{kWatch, "watch", folder_.path(name)},
        {kWatch, "watch", folder_.path(name), "--once"},
        {kWatch, "watch", folder_.path(), "--once"}}) {
    Command command(words);
    ASSERT_EQ(command.wait(), 0) << command.err();
    EXPECT_THAT(command.out(), HasSubstr("failed"));
    EXPECT_THAT(
        command.out(), AllOf(
                           Not(HasSubstr("\033")), Not(HasSubstr("\007")),
                           Not(HasSubstr("\u009b"))));
  }
}

TEST_F(WatchCommand, ShowsManyRunsALineEach) {
  write_run(folder_);
  write(folder_, living());
  folder_.write("second/metrics.jsonl", steps(1, 7));
  auto status = living();
  status.exit_code = 1;
  folder_.write("second/status/rank-0.json", to_json(status));
  std::filesystem::last_write_time(
      folder_.path("second/metrics.jsonl"),
      std::filesystem::file_time_type::clock::now() - std::chrono::hours(2));
  std::filesystem::last_write_time(
      folder_.path("second/status"),
      std::filesystem::file_time_type::clock::now() - std::chrono::hours(2));
  Command command({kWatch, "watch", folder_.path(), "--once"});
  ASSERT_EQ(command.wait(), 0) << command.err();
  const std::string out = command.out();
  EXPECT_THAT(out, testing::StartsWith("run     state     step    loss"));
  EXPECT_LT(out.find("\nrun     training  40/100"), out.find("\nsecond  fail"));
  EXPECT_THAT(out, HasSubstr("2 h 00 min ago"));
  Command json({kWatch, "watch", folder_.path(), "--json"});
  ASSERT_EQ(json.wait(), 0);
  EXPECT_EQ(nlohmann::json::parse(json.out()).size(), 2u);
}

TEST_F(WatchCommand, WaitsForARunThatHasNotBegun) {
  Command command({kWatch, "watch", run()});
  ASSERT_TRUE(command.until_output("not begun  (there is no such folder yet)"));
  command.signal(SIGINT);
  EXPECT_EQ(command.wait(), 0);
}

TEST_F(WatchCommand, ErrorsSayWhatIsWrong) {
  Command none({kWatch, "watch", folder_.path("none/run")});
  EXPECT_EQ(none.wait(), 3);
  EXPECT_THAT(none.err(), HasSubstr("there is no such run, and no folder"));
  folder_.write("file", "");
  Command file({kWatch, "watch", folder_.path("file")});
  EXPECT_EQ(file.wait(), 3);
  EXPECT_THAT(file.err(), HasSubstr("is a file"));
}

TEST_F(WatchCommand, ServesAPageToWhoHasItsAddress) {
  write_run(folder_);
  write(folder_, living());
  const int port = testing_support::free_port();
  const std::vector<std::string> words = {
      kWatch, "watch", run(), "--web", std::to_string(port)};
  Command command(words);
  const std::string place = "http://127.0.0.1:" + std::to_string(port);
  ASSERT_TRUE(command.until_output(place + "/?token=")) << command.err();
  const std::string out = command.out();
  const size_t begin = out.find("/?token=");
  const std::string path = out.substr(begin, out.find('\n') - begin);
  const auto get = [&](const std::string& target, const std::string& host) {
    return testing_support::ask_page(
        port, "GET " + target + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n");
  };
  EXPECT_THAT(
      get(path, "127.0.0.1"),
      AllOf(
          testing::StartsWith("HTTP/1.1 200 OK"), HasSubstr("text/html"),
          HasSubstr("simple_cnn on digits")));
  EXPECT_THAT(
      get("/state.json" + path.substr(1), "localhost"),
      HasSubstr("\"state\":\"training\""));
  EXPECT_THAT(get("/", "127.0.0.1"), testing::StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(get(path, "evil.example"), testing::StartsWith("HTTP/1.1 401"));
  Command second(words);
  EXPECT_EQ(second.wait(), 2);
  EXPECT_THAT(second.err(), HasSubstr("the port is in use"));
  const int other = testing_support::free_port();
  Command open(
      {kWatch, "watch", run(), "--web", "0.0.0.0:" + std::to_string(other)});
  EXPECT_EQ(open.wait(), 2);
  EXPECT_THAT(open.err(), HasSubstr("for this host alone"));
  command.signal(SIGINT);
  EXPECT_EQ(command.wait(), 0);
}

TEST_F(WatchCommand, ReportsARunThatDied) {
  write_run(folder_);
  auto status = living();
  status.lost = true;
  write(folder_, status);
  Command command({kWatch, "report", run()});
  ASSERT_EQ(command.wait(), 0) << command.err();
  const std::string page = read_file(run() + "/report.html");
  EXPECT_THAT(
      page, AllOf(
                HasSubstr("died, step 40 of 100"),
                HasSubstr("simple_cnn on digits"), HasSubstr("Global batch")));
  // A timeline of an earlier process does not make the page the trainer's.
  folder_.write("run/timeline.json", "{\"traceEvents\":[]}");
  Command more({kWatch, "report", run()});
  EXPECT_EQ(more.wait(), 0) << more.err();
  folder_.write("run/report.html", "<footer>Written by Echelon</footer>");
  Command again({kWatch, "report", run()});
  EXPECT_EQ(again.wait(), 2);
  EXPECT_THAT(again.err(), HasSubstr("has written its own report"));
}

}  // namespace echelon::watch_cli_test
