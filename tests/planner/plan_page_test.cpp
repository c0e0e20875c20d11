#include "echelon/planner/plan_page.h"

#include <gtest/gtest.h>

#include "echelon/text/format.h"
#include "tests/planner/search_job.h"

namespace echelon::planner::plan_page_test {

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

TEST(PlanPage, ShowsMemoryStepChoicesAndGrowthWithoutTheNetwork) {
  auto request = plan_request("gpt2-xl", "a100-40gb:16", 64);
  request.model.name = "<b>gpt2</b>";
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
      count_of(html, "a device, MFU"),
      page.choices.size() + page.growth.size());
  for (const Axis axis : result.plans[0].strategy.layout.used_axes()) {
    const auto id = format("id=\"ranks-{}\"", short_name(axis));
    EXPECT_EQ(count_of(html, id), 1u) << id;
  }
  EXPECT_EQ(count_of(html, "<pre class=\"copy\">"), 1u);
  // The headline alone has the whole strategy in words.
  EXPECT_EQ(
      count_of(
          html.substr(0, html.find("Memory of a device</h2>")),
          "under\">" + cost::to_string(result.plans[0].strategy)),
      1u);
  for (const char* heading : {"Need", "Plan", "Which ranks share what"}) {
    EXPECT_EQ(count_of(html, format("<h2>{}</h2>", heading)), 1u) << heading;
  }
  EXPECT_EQ(count_of(html, "<b>gpt2"), 0u);
  EXPECT_EQ(count_of(html, "http://") + count_of(html, "https://"), 0u);
  EXPECT_EQ(count_of(html, "src="), 0u);
  // Each point tells its layout.
  for (const auto& choice : page.choices) {
    EXPECT_NE(html.find(to_string(choice.strategy.layout)), std::string::npos);
  }
}

// The text between two marks, after `from`.
std::string between(
    const std::string& text, const std::string& from, const std::string& to) {
  const size_t begin = text.find(from);
  if (begin == std::string::npos) return {};
  const size_t first = begin + from.size();
  return text.substr(first, text.find(to, first) - first);
}

// All layouts of one device take between 13 and 48 ms.
TEST(PlanPage, AnAxisOfTimeHasTwoTicksOrMore) {
  const auto request = plan_request("gpt2", "h100-sxm:1", 8);
  const std::string html = to_html(make_plan_page(request, plan(request)));
  const std::string choices = between(html, "id=\"choices\"", "</figure>");
  EXPECT_GE(count_of(choices, "class=\"tick\" x=\"-8\""), 2u);
}

// Ranks of a pipeline that are 32 nodes apart are all drawn; of 64 ranks that
// shard, those of 16 nodes.
TEST(PlanPage, DrawsTheNodesOfGroupsThatAreFarApart) {
  auto request = plan_request(
      "gpt3-175b", "a100-80gb:1024", 1536,
      {{"pp", "4"},
       {"tp", "4"},
       {"fsdp", "64"},
       {"order", "pp:dp:fsdp:cp:ep:tp"}});
  request.compare = false;
  const auto result = plan(request);
  ASSERT_FALSE(result.plans.empty());
  const std::string html = to_html(make_plan_page(request, result));
  const auto figure = [&](const std::string& axis) {
    return between(html, "id=\"ranks-" + axis + "\"", "</figure>");
  };
  const auto colored = [&](const std::string& axis) {
    return count_of(figure(axis), "<rect") -
           count_of(figure(axis), "<rect class=\"kw\"");
  };
  EXPECT_EQ(colored("tp"), 4u);
  EXPECT_EQ(colored("pp"), 4u);
  EXPECT_EQ(count_of(figure("pp"), "<svg"), 4u);
  EXPECT_NE(figure("pp").find("node 96: 768 to 775"), std::string::npos);
  EXPECT_EQ(colored("fsdp"), 32u);
  EXPECT_NE(
      figure("fsdp").find("in 32 nodes, of which 16 are drawn"),
      std::string::npos);
}

// The picture shows 16 of 64 ranks, but the figures are those of all ranks.
TEST(PlanPage, FiguresOfALongPipelineAreOfAllItsRanks) {
  auto request = plan_request(
      "gpt3-175b", "h100-sxm:512", 128,
      {{"pp", "64"}, {"tp", "8"}, {"schedule", "1f1b"}, {"microbatch", "1"}});
  request.compare = false;
  const auto result = plan(request);
  ASSERT_FALSE(result.plans.empty());
  const std::string html = to_html(make_plan_page(request, result));
  EXPECT_LT(html.size(), 500'000u);
  EXPECT_NE(html.find("the first 16 of its 64 ranks"), std::string::npos);
  EXPECT_EQ(html.find("rank 248"), std::string::npos);
  // (pp - 1) / (m + pp - 1) of the paper.
  const double ideal =
      std::stod(between(html, "emptying the pipeline leaves ", " %"));
  EXPECT_NEAR(ideal, 100.0 * 63 / (128 + 63), 2.0);
}

}  // namespace echelon::planner::plan_page_test
