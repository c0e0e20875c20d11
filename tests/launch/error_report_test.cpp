// The reporter ends processes, so each case runs in a child.
#include "echelon/error_report.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <system_error>
#include <thread>

#include "echelon/error.h"
#include "tests/support/temp_folder.h"

namespace echelon::error_report_test {

class ErrorReportTest : public testing::Test {
 protected:
  /// The child's status; its stderr is in stderr_text().
  int run(const std::function<int()>& body) {
    const pid_t pid = fork();
    if (pid == 0) {
      const rlimit none{0, 0};
      setrlimit(RLIMIT_CORE, &none);
      setenv("ECHELON_ERROR_FILE", path_.c_str(), 1);
      setenv("RANK", "3", 1);
      (void)!std::freopen((path_ + ".err").c_str(), "w", stderr);
      [&]() noexcept {  // as main: nobody above catches
        _exit(body());
      }();
    }
    int status = 0;
    waitpid(pid, &status, 0);
    return status;
  }

  /// The same with the reporter installed.
  int run_reporting(const std::function<void()>& body) {
    return run([&] {
      install_error_reporter();
      body();
      return 0;
    });
  }

  std::string stderr_text() const { return read_file(path_ + ".err"); }

  TempFolder folder_;
  const std::string path_ = folder_.path("report");
};

TEST_F(ErrorReportTest, AnUncaughtExceptionLeavesItsText) {
  const int status =
      run_reporting([] { throw std::out_of_range("index 7 of 3"); });
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
  const auto report = read_error_report(path_);
  ASSERT_TRUE(report);
  EXPECT_EQ(report->message, "index 7 of 3");
  EXPECT_EQ(report->type, "std::out_of_range");
  EXPECT_EQ(report->rank, 3);
  EXPECT_GT(report->time_ns, 0);
  EXPECT_FALSE(report->consequence);
  EXPECT_EQ(stderr_text(), "error: index 7 of 3\n");
}

TEST_F(ErrorReportTest, EchelonsErrorsSetTheExitCode) {
  EXPECT_EQ(
      WEXITSTATUS(run_reporting([] { throw ConfigError("[layout] dp=3"); })),
      2);
  EXPECT_EQ(read_error_report(path_)->exit_code, 2);
}

TEST_F(ErrorReportTest, FromAThread) {
  EXPECT_EQ(
      WEXITSTATUS(run_reporting(
          [] { std::thread([] { throw NumericError("NaN"); }).join(); })),
      4);
  EXPECT_EQ(read_error_report(path_)->message, "NaN");
}

// The end of a communication group waits for its watchdog, which fails too.
TEST_F(ErrorReportTest, AThreadThatFailsLaterIsNotWaitedForForEver) {
  const int status = run_reporting([] {
    report_error(NumericError("NaN"));
    std::thread([] { throw std::runtime_error("lost"); }).join();
  });
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 4);
  EXPECT_EQ(read_error_report(path_)->message, "NaN");
}

TEST_F(ErrorReportTest, AThreadThatCannotBeStartedNamesTheLimits) {
  run_reporting([] {
    throw std::system_error(
        std::make_error_code(std::errc::resource_unavailable_try_again));
  });
  EXPECT_EQ(
      read_error_report(path_)->message,
      "Resource temporarily unavailable: no thread could be started; `ulimit "
      "-u` and the container's pids limit set how many threads and processes "
      "there may be");
}

TEST_F(ErrorReportTest, LibrariesErrorsSayWhere) {
  run_reporting([] {
    set_error_place("cuda:1 of node-3");
    throw std::runtime_error("CUDA error: unknown\nMore of it");
  });
  EXPECT_EQ(
      read_error_report(path_)->message,
      "CUDA error: unknown (cuda:1 of node-3)\nMore of it");
  run_reporting([] {
    set_error_place("cuda:1 of node-3");
    throw ConfigError("[layout] dp=3");
  });
  EXPECT_EQ(read_error_report(path_)->message, "[layout] dp=3");
}

TEST_F(ErrorReportTest, ErrorsOfDevicesAndOfCommunicationSayWhere) {
  run_reporting([] {
    set_error_place("cuda:1 of node-3");
    throw DeviceError("all_reduce failed: ECC");
  });
  EXPECT_EQ(
      read_error_report(path_)->message,
      "all_reduce failed: ECC (cuda:1 of node-3)");
  EXPECT_FALSE(read_error_report(path_)->consequence);
  run_reporting([] {
    set_error_place("cuda:1 of node-3");
    throw CommError("all_reduce failed\n  arrived: rank 1");
  });
  EXPECT_EQ(
      read_error_report(path_)->message,
      "all_reduce failed (cuda:1 of node-3)\n  arrived: rank 1");
}

TEST_F(ErrorReportTest, ALostPeerIsAConsequence) {
  run_reporting([] { throw CommError("rank 2 is gone"); });
  EXPECT_TRUE(read_error_report(path_)->consequence);
}

TEST_F(ErrorReportTest, ProgramsThatCatchInMain) {
  EXPECT_EQ(
      WEXITSTATUS(run([] {
        try {
          throw DataError("cut short");
        } catch (const std::exception& error) {
          return report_error(error);
        }
      })),
      3);
  EXPECT_EQ(read_error_report(path_)->message, "cut short");
  EXPECT_EQ(stderr_text(), "error: cut short\n");
}

TEST_F(ErrorReportTest, TheFirstErrorIsKept) {
  run([] {
    report_error(std::runtime_error("first"));
    return report_error(std::runtime_error("second"));
  });
  EXPECT_EQ(read_error_report(path_)->message, "first");
}

TEST_F(ErrorReportTest, NotAnException) {
  EXPECT_EQ(WEXITSTATUS(run_reporting([] { throw 7; })), 1);
  EXPECT_EQ(read_error_report(path_)->type, "int");
}

TEST_F(ErrorReportTest, SignalsAreLeftAlone) {
  const int status = run_reporting([] { raise(SIGSEGV); });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGSEGV);
  EXPECT_FALSE(read_error_report(path_));
}

TEST_F(ErrorReportTest, TerminateWithoutAnExceptionAborts) {
  const int status = run_reporting([] { std::terminate(); });
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGABRT);
  EXPECT_TRUE(read_error_report(path_));
}

TEST_F(ErrorReportTest, OtherFilesAreNotReports) {
  EXPECT_FALSE(read_error_report(path_));
  for (const char* text : {"", "{", "[]", "{\"message\": 3}", "null"}) {
    std::ofstream(path_) << text;
    EXPECT_FALSE(read_error_report(path_)) << text;
  }
}

TEST(WithoutBacktrace, RemovesLibTorchsBacktrace) {
  EXPECT_EQ(
      without_backtrace("bad shape\nException raised from f at a.cpp:1 "
                        "(most recent call first):\nframe #0"),
      "bad shape");
  EXPECT_EQ(without_backtrace("two\nlines\n"), "two\nlines");
}

}  // namespace echelon::error_report_test
