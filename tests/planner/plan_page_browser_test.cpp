// A plan's page as a browser draws it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "echelon/planner/plan_page.h"
#include "echelon/planner/reasons.h"
#include "tests/planner/search_job.h"
#include "tests/support/python.h"
#include "tests/support/temp_folder.h"

namespace echelon::planner::plan_page_browser_test {

using Json = nlohmann::json;

class PlanPageInBrowser : public testing::Test {
 protected:
  void SetUp() override {
    ECHELON_NEED_PYTHON();
    if (std::system("command -v chromium >/dev/null 2>&1") != 0) {
      GTEST_SKIP() << "needs Chromium: run `make extras` once";
    }
  }

  void make(
      const std::string& model, const std::string& cluster, int64_t batch,
      std::vector<std::pair<std::string, std::string>> fixed = {}) {
    const auto request = plan_request(model, cluster, batch, std::move(fixed));
    page_ = make_plan_page(request, plan(request));
  }

  // One browser looks at the pages of all tests, since it takes seconds to
  // start. The folder of a page has the name of its test.
  static void TearDownTestSuite() {
    if (!looks_.empty()) {
      EXPECT_NO_THROW(
          run_python_script("planner/plan_page_browser.py", looks_));
    }
    looks_.clear();
    folder_.reset();
  }

  // What the page must show; `texts` besides.
  void look(const std::vector<std::string>& texts) {
    const auto& result = page_.result;
    const bool fits = !result.plans.empty();
    const Plan& shown = fits ? result.plans.front() : *result.closest;
    Json expected = {
        {"fits", fits},
        {"rows", fits ? shown.strategy.layout.pp : 0},
        {"texts", texts},
        {"figures", {"memory", "choices", "growth"}},
        {"bars", Json::array()}};
    const auto& memory = shown.step.memory;
    for (size_t rank = 0; rank < memory.ranks.size(); ++rank) {
      const double bytes = static_cast<double>(memory.ranks[rank].total()) +
                           memory.reserved_bytes;
      expected["bars"].push_back(
          {{"name", memory.ranks.size() > 1
                        ? "pipeline rank " + std::to_string(rank)
                        : to_string(shown.strategy.layout)},
           {"of_limit", bytes / usable_device_bytes(page_.request.cluster)}});
    }
    const auto told = [](const std::vector<Plan>& plans) {
      Json all = Json::array();
      for (const Plan& plan : plans)
        all.push_back(cost::to_string(plan.strategy));
      return all;
    };
    expected["choices"] = told(page_.choices);
    expected["growth"] = told(page_.growth);
    if (!folder_) folder_ = std::make_unique<TempFolder>();
    const std::string name =
        testing::UnitTest::GetInstance()->current_test_info()->name();
    folder_->write(name + "/report.html", to_html(page_));
    folder_->write(name + "/expected.json", expected.dump());
    looks_.push_back(folder_->path(name));
  }

  PlanPage page_;
  static inline std::unique_ptr<TempFolder> folder_;
  static inline std::vector<std::string> looks_;
};

TEST_F(PlanPageInBrowser, ShowsOnePipelineOfMany) {
  make("llama3-70b", "h100-sxm:64", 256, {{"pp", "4"}});
  ASSERT_FALSE(page_.result.plans.empty());
  look({"Drawn is one pipeline, that of rank 0; the other 15 pipelines do"});
}

TEST_F(PlanPageInBrowser, ShowsOneRankOfMany) {
  make("gpt2-xl", "a100-40gb:16", 64, {{"pp", "1"}});
  ASSERT_FALSE(page_.result.plans.empty());
  look({"Drawn is one rank, number 0; the other 15 ranks do the same"});
}

TEST_F(PlanPageInBrowser, ShowsWhatIsMissingWhenNothingFits) {
  make("gpt3-175b", "a100-80gb:8", 64);
  ASSERT_TRUE(page_.result.plans.empty());
  look({"Nothing fits", "The closest needs"});
}

}  // namespace echelon::planner::plan_page_browser_test
