// A pool's page as a browser draws it.
#include <gmock/gmock.h>

#include <ctime>

#include "tests/pool/pool_server.h"
#include "tests/pool/sample_past.h"
#include "tests/support/python.h"

namespace echelon::pool::pool_page_browser_test {

constexpr const char* kDepartments = R"([project.research]
guaranteed = 4
[project.vision]
parent = "research"
guaranteed = 3
limit = 6
[project.speech]
parent = "research"
guaranteed = 1
[project.language]
guaranteed = 3
weight = 2
[project.guests]
limit = 2
)";

class PoolPageInBrowser : public PoolServer {
 protected:
  void SetUp() override {
    ECHELON_NEED_PYTHON();
    if (std::system("command -v chromium >/dev/null 2>&1") != 0) {
      GTEST_SKIP() << "needs Chromium: run `make extras` once";
    }
  }
};

// Three days of four projects, and what they do now.
TEST_F(PoolPageInBrowser, IsWholeAtAnyWidthAndWithoutScripts) {
  start(kDepartments, "8");
  daemon_->signal(SIGTERM);
  ASSERT_EQ(daemon_->wait(), 0);
  const double until = static_cast<double>(std::time(nullptr));
  const double since = until - 3 * 86400;
  State state = make_pool(8);
  state.projects = {
      {.name = "research", .guaranteed = 4},
      {.name = "vision", .parent = 0, .guaranteed = 3, .limit = 6},
      {.name = "speech", .parent = 0, .guaranteed = 1},
      {.name = "language", .guaranteed = 3, .weight = 2},
      {.name = "guests", .limit = 2}};
  write_past(path("pool"), simulate_past(state, since, until, 4), since);
  start(kDepartments, "8");
  submit({"--project", "language", "-n", "2..8", "--preemptible"}, "sleep 600");
  submit({"--project", "vision", "-n", "2"}, "sleep 600");
  submit({"--project", "vision", "-n", "3"}, "sleep 600");
  submit({"--project", "guests", "-n", "2", "--preemptible"}, "sleep 600");
  ASSERT_TRUE(reaches(2, "running"));
  ASSERT_TRUE(Command::until(
      [&] { return why(3).find("guarantee of vision") != std::string::npos; }));
  std::filesystem::create_directories(path("page"));
  const Finished wrote = finished({"page", path("page/report.html")});
  ASSERT_EQ(wrote.code, 0) << wrote.err;
  EXPECT_LT(text_of("page/report.html").size(), 500'000u);
  std::ofstream(path("page/expected.json")) << "{}";
  EXPECT_NO_THROW(run_python_script(
      "report/report_browser.py",
      {"quiet", path("page"), "layout", path("page")}));
}

}  // namespace echelon::pool::pool_page_browser_test
