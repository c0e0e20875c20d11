#include "echelon/launch/cause.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace echelon::launch::cause_test {

int exited(int code) {
  return code << 8;
}

RankEnd end_of(
    int rank, int status, int64_t time_ns,
    std::optional<ErrorReport> report = {}, bool told_to_end = false) {
  return {rank, status, time_ns, told_to_end, std::move(report), ""};
}

ErrorReport report_of(const std::string& text, bool consequence, int64_t time) {
  return {text, consequence ? "echelon::CommError" : "std::runtime_error",
          1,    time,
          0,    consequence};
}

TEST(FindCause, NoRankFailed) {
  EXPECT_FALSE(find_cause({end_of(0, 0, 5), end_of(1, 0, 6)}));
}

TEST(FindCause, EarliestFailure) {
  const auto cause = find_cause({end_of(0, exited(3), 20),
                                 end_of(1, exited(4), 10), end_of(2, 0, 5)})
                         .value();
  EXPECT_EQ(cause.rank, 1);
  EXPECT_EQ(cause.exit_code, 4);
}

TEST(FindCause, ALostPeerIsNotTheCause) {
  auto first = end_of(0, exited(1), 10, report_of("rank 1 is gone", true, 9));
  auto second = end_of(1, SIGKILL, 12);
  const auto cause = find_cause({first, second}).value();
  EXPECT_EQ(cause.rank, 1);
  EXPECT_EQ(cause.exit_code, 137);
  EXPECT_NE(cause.text.find("SIGKILL"), std::string::npos);
}

// The others' programs do not say that they lost a peer, and were seen first.
TEST(FindCause, AKilledRankComesBeforeThoseThatNoticed) {
  constexpr int64_t ms = 1'000'000;
  const auto killed = end_of(2, SIGKILL, 5400 * ms);
  const auto noticed = end_of(0, exited(1), 5000 * ms);
  EXPECT_EQ(find_cause({noticed, killed})->rank, 2);
  // Whoever failed long before was not waiting for it.
  const auto before = end_of(1, exited(3), 4000 * ms);
  EXPECT_EQ(find_cause({before, killed})->rank, 1);
  // The launcher's own signals are consequences.
  const auto ordered = end_of(2, SIGKILL, 5400 * ms, {}, true);
  EXPECT_EQ(find_cause({noticed, ordered})->rank, 0);
}

// The launcher killed the rank after it had written its report: the report's
// exit code counts.
TEST(FindCause, AKilledRankEndsWithTheCodeOfItsReport) {
  auto first =
      end_of(0, SIGKILL, 12, report_of("batch 7 does not fit", false, 9), true);
  first.report->exit_code = 2;
  const auto cause = find_cause({first, end_of(1, exited(1), 10)}).value();
  EXPECT_EQ(cause.rank, 0);
  EXPECT_EQ(cause.exit_code, 2);
  EXPECT_EQ(cause.ending, "exit code 2");
  // Without an order the signal counts: memory ran out while it exited, say.
  first.told_to_end = false;
  EXPECT_EQ(find_cause({first})->exit_code, 137);
}

TEST(FindCause, OnlyConsequencesShowTheEarliest) {
  auto first = end_of(0, exited(1), 12, report_of("later", true, 11));
  auto second = end_of(1, exited(1), 10, report_of("sooner", true, 9));
  const auto cause = find_cause({first, second}).value();
  EXPECT_EQ(cause.text, "sooner");
  EXPECT_TRUE(cause.consequence);
}

TEST(FindCause, AStoppedRankIsNotTheCause) {
  const auto stopped = end_of(0, SIGTERM, 5, {}, true);
  EXPECT_FALSE(find_cause({stopped}));
  auto failed = end_of(1, exited(2), 9);
  EXPECT_EQ(find_cause({stopped, failed})->rank, 1);
}

TEST(FindCause, AStoppedRankWithItsOwnErrorIsTheCause) {
  auto unwinding =
      end_of(0, exited(1), 30, report_of("disk full", false, 8), true);
  auto peer = end_of(1, exited(1), 10, report_of("rank 0 is gone", true, 9));
  const auto cause = find_cause({unwinding, peer});
  EXPECT_EQ(cause->rank, 0);
  EXPECT_EQ(cause->text, "std::runtime_error: disk full");
}

TEST(FindCause, EchelonsErrorsNeedNoTypeName) {
  const auto end = end_of(
      0, exited(2), 1,
      ErrorReport{"[layout] dp=3", "echelon::ConfigError", 2, 1, 0, false});
  EXPECT_EQ(find_cause({end})->text, "[layout] dp=3");
}

TEST(FindCause, ConnectionErrorsOfForeignProgramsAreConsequences) {
  auto first = end_of(0, exited(1), 1);
  first.stderr_tail =
      "Traceback (most recent call last):\n  File \"a.py\"\n"
      "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1\n";
  const auto cause = find_cause({first, end_of(1, SIGSEGV, 2)});
  EXPECT_EQ(cause->rank, 1);
  EXPECT_EQ(cause->exit_code, 139);
}

TEST(FindCause, ConnectionErrorsOfLibrariesAreConsequences) {
  const auto first = end_of(
      0, exited(1), 1,
      ErrorReport{
          "Read error [127.0.0.1]:1: Connection reset by peer",
          "gloo::IoException", 1, 1, 0, false});
  const auto card = end_of(
      1, exited(1), 2,
      ErrorReport{
          "CUDA error: an illegal memory access was encountered", "c10::Error",
          1, 2, 1, false});
  EXPECT_EQ(find_cause({first, card})->rank, 1);
}

TEST(FindCause, AMissingLibraryIsAConfigurationError) {
  auto end = end_of(0, exited(127), 1);
  end.stderr_tail =
      "./a: error while loading shared libraries: libx.so: cannot open shared "
      "object file: No such file or directory\n";
  const auto cause = find_cause({end});
  EXPECT_EQ(cause->exit_code, 2);
  EXPECT_NE(cause->text.find("libx.so"), std::string::npos);
  EXPECT_NE(cause->text.find("LD_LIBRARY_PATH"), std::string::npos);
}

TEST(FindCause, WithoutAnErrorTheExitCodeIsShown) {
  EXPECT_EQ(find_cause({end_of(0, exited(9), 1)})->text, "exit code 9");
}

TEST(FindCause, ARankThatWasToldToStopHasNotFailed) {
  for (const int code : {75, 130}) {
    EXPECT_FALSE(find_cause({end_of(0, exited(code), 5), end_of(1, 0, 6)}));
    const auto cause =
        find_cause({end_of(0, exited(code), 5), end_of(1, exited(1), 6)});
    EXPECT_EQ(cause.value().rank, 1);
  }
  EXPECT_EQ(
      find_cause({end_of(0, exited(75), 5, report_of("full", false, 4))})
          .value()
          .text,
      "std::runtime_error: full");
}

TEST(FindCause, LackOfMemoryIsToldWhereTheKernelSaysSo) {
  auto end = end_of(0, SIGKILL, 5);
  EXPECT_EQ(find_cause({end}).value().text, "killed by SIGKILL (Killed)");
  end.killed_because = "memory ran out";
  EXPECT_EQ(
      find_cause({end}).value().text,
      "killed by SIGKILL (Killed); memory ran out");
}

TEST(FindCause, SaysWhoseFailureItIs) {
  const auto kind_of = [](const RankEnd& end) {
    return find_cause({end}).value().kind;
  };
  EXPECT_EQ(kind_of(end_of(0, SIGKILL, 1)), FailureKind::outside);
  EXPECT_EQ(kind_of(end_of(0, SIGTERM, 1)), FailureKind::outside);
  EXPECT_EQ(
      kind_of(end_of(0, W_EXITCODE(128 + SIGKILL, 0), 1)),
      FailureKind::outside);
  EXPECT_EQ(kind_of(end_of(0, SIGSEGV, 1)), FailureKind::program);
  EXPECT_EQ(kind_of(end_of(0, W_EXITCODE(1, 0), 1)), FailureKind::program);
  auto end = end_of(0, SIGKILL, 1);
  end.killed_because = "memory ran out";
  EXPECT_EQ(kind_of(end), FailureKind::memory);
  // The launcher kills a rank that hangs.
  end = end_of(0, SIGKILL, 1);
  end.report = ErrorReport{.message = "rank 0 hangs"};
  EXPECT_EQ(kind_of(end), FailureKind::program);
  end.report->message = "step 3: rank 0: CUDA out of memory. Tried to allocate";
  EXPECT_EQ(kind_of(end), FailureKind::memory);
  end = end_of(0, SIGABRT, 1);
  end.stderr_tail =
      "terminate called after throwing an instance of 'std::bad_alloc'\n"
      "  what():  std::bad_alloc\n";
  EXPECT_EQ(kind_of(end), FailureKind::memory);
}

TEST(FindCause, ASignalIsNotExplainedByAnOldWarning) {
  auto end = end_of(0, SIGSEGV, 1);
  end.stderr_tail = "warning: slow disk\n";
  EXPECT_EQ(find_cause({end})->text, "killed by SIGSEGV (Segmentation fault)");
}

TEST(FindError, FindsTheErrorInStderr) {
  const std::string terminate =
      "terminate called after throwing an instance of ";
  const struct {
    std::string stderr_tail;
    std::string error;
  } cases[] = {
      {"step 1\n" + terminate +
           "'std::runtime_error'\n  what():  shape [2, 3] does not fit\n",
       "std::runtime_error: shape [2, 3] does not fit"},
      // Several lines of text, without the backtrace.
      {terminate +
           "'c10::Error'\n  what():  first\nsecond\nException raised from f at "
           "a.cpp:1 (most recent call first):\nframe #0: x\nAborted (core "
           "dumped)\n",
       "c10::Error: first\nsecond"},
      {terminate + "'int'\nAborted\n", "int"},
      {"Traceback (most recent call last):\n  File \"a\", line 1\n"
       "KeyError: 'x'\n\nDuring handling of the above exception, another "
       "exception occurred:\n\nTraceback (most recent call last):\n"
       "  File \"a\", line 3, in f\n    g()\nValueError: bad thing\n",
       "ValueError: bad thing"},
      {"==12==ERROR: AddressSanitizer: heap-use-after-free on 0x1\n"
       "    #0 0x2 in main\nSUMMARY: x\n",
       "==12==ERROR: AddressSanitizer: heap-use-after-free on 0x1"},
      {"just\nlines\n", ""},
      {"", ""}};
  for (const auto& test : cases) {
    EXPECT_EQ(find_error(test.stderr_tail), test.error);
  }
}

TEST(LastLines, SkipsNoiseAndEscapes) {
  EXPECT_EQ(
      last_lines(
          "one\n\n\x1b[31mtwo\x1b[0m\n10%\r20%\rthree\n\nAborted "
          "(core dumped)\n",
          3),
      "two\nthree");
}

TEST(LastLines, AShellsReportOfItsChildIsNoise) {
  EXPECT_EQ(
      last_lines("bad\n./w: line 3:  5029 Killed       \"$@\"\n", 3), "bad");
  EXPECT_EQ(
      last_lines("./w: line 3: no-such: command not found\n", 3),
      "./w: line 3: no-such: command not found");
}

TEST(LastLines, BoundsTheirLength) {
  EXPECT_LT(last_lines(std::string(10000, 'x'), 1).size(), 500u);
}

TEST(DescribeStatus, CodesAndSignals) {
  EXPECT_EQ(describe_status(exited(3)), "exit code 3");
  EXPECT_EQ(describe_status(SIGABRT), "SIGABRT (Aborted)");
  EXPECT_EQ(describe_status(SIGABRT | 0x80), "SIGABRT (Aborted), core dumped");
  EXPECT_EQ(
      describe_status(exited(139)), "exit code 139 (a shell's for SIGSEGV)");
  EXPECT_EQ(exit_code_of(SIGKILL), 137);
}

Outcome failed(int code, bool consequence) {
  Outcome outcome{code, 0, Cause{}};
  outcome.cause->consequence = consequence;
  return outcome;
}

TEST(Combine, TheFirstCauseThatIsNoConsequence) {
  EXPECT_EQ(
      combine({failed(1, true), failed(3, false), failed(4, false)}).exit_code,
      3);
  EXPECT_EQ(combine({failed(5, true), failed(6, true)}).exit_code, 5);
}

TEST(Combine, StoppedHostsWithoutACause) {
  EXPECT_EQ(
      combine({Outcome{0, 0, {}}, Outcome{130, SIGINT, {}}}).exit_code, 130);
  EXPECT_EQ(combine({Outcome{0, SIGINT, {}}, Outcome{0, 0, {}}}).exit_code, 0);
  EXPECT_EQ(combine({}).exit_code, 0);
}

}  // namespace echelon::launch::cause_test
