// The main of every test program: exits 77 (skipped, for CTest) when each of
// its tests was skipped, after printing why. Tests do not take a GPU that is
// there, unless ECHELON_TEST_GPU asks for it: they are written for CPUs. Their
// launchers have a token of the tests, so that the user's own is neither made
// nor read.
#include <gmock/gmock.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <set>
#include <string>

// The exit code of a run whose tests have passed or failed.
int exit_code_of(int result) {
  const auto& unit = *testing::UnitTest::GetInstance();
  if (result != 0 || unit.skipped_test_count() == 0) return result;
  std::set<std::string> reasons;
  for (int i = 0; i < unit.total_test_suite_count(); ++i) {
    const auto* suite = unit.GetTestSuite(i);
    for (int j = 0; j < suite->total_test_count(); ++j) {
      const auto* test = suite->GetTestInfo(j)->result();
      for (int k = 0; test->Skipped() && k < test->total_part_count(); ++k) {
        reasons.insert(test->GetTestPartResult(k).message());
      }
    }
  }
  for (const auto& reason : reasons) {
    std::cout << "skipped: " << reason << "\n";
  }
  return unit.skipped_test_count() == unit.test_to_run_count() ? 77 : result;
}

int main(int argc, char** argv) {
  if (std::getenv("ECHELON_TEST_GPU") == nullptr) {
    ::setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);
  }
  ::setenv("ECHELON_TOKEN", std::string(64, '7').c_str(), /*overwrite=*/1);
  // A shell ignores these for what it starts in the background, and programs
  // leave them so.
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGHUP, SIG_DFL);
  testing::InitGoogleMock(&argc, argv);
  const int exit_code = exit_code_of(RUN_ALL_TESTS());
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // LibTorch takes 0.1 s and more to remove its operators one by one.
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(exit_code);
#endif
  return exit_code;
}
