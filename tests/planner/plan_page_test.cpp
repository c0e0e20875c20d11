#include "echelon/planner/plan_page.h"

#include <gtest/gtest.h>

#include "echelon/cluster/catalogue.h"
#include "echelon/cost/model_catalogue.h"

namespace echelon {
namespace {

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

TEST(PlanPage, ShowsMemoryStepChoicesAndGrowthWithoutTheNetwork) {
  PlanRequest request;
  request.model = find_model("gpt2-xl");
  request.model.name = "<b>gpt2</b>";
  request.cluster = find_cluster("a100-40gb:16");
  request.global_batch = 64;
  request.fixed = {{"pp", "2"}};
  const auto result = plan(request);
  ASSERT_FALSE(result.plans.empty());
  const PlanPage page = make_plan_page(request, result);
  const std::string html = to_html(page);
  EXPECT_LT(html.size(), 500'000u);
  for (const char* id : {"memory", "parts", "choices", "growth"}) {
    EXPECT_EQ(count_of(html, "id=\"" + std::string(id) + "\""), 1u) << id;
  }
  EXPECT_EQ(
      count_of(html, "a device, utilisation"),
      page.choices.size() + page.growth.size());
  EXPECT_EQ(count_of(html, "<b>gpt2"), 0u);
  EXPECT_EQ(count_of(html, "http://") + count_of(html, "https://"), 0u);
  EXPECT_EQ(count_of(html, "src="), 0u);
  // Each point tells its layout.
  for (const auto& choice : page.choices) {
    EXPECT_NE(html.find(to_string(choice.strategy.layout)), std::string::npos);
  }
}

}  // namespace
}  // namespace echelon
