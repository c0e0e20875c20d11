#include "echelon/pool/metrics.h"

#include <gmock/gmock.h>

#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "echelon/text/text_file.h"
#include "tests/support/places.h"

namespace echelon::pool::metrics_test {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsSupersetOf;

PoolFigures some_figures() {
  PoolFigures figures{.devices = 8, .idle = 2, .drained = 1};
  ProjectFigures vision{
      .name = "vision",
      .guaranteed = 3,
      .in_use = 5,
      .fair_share = 4,
      .waiting = 1,
      .running = 2,
      .longest_wait = 12.5};
  vision.counts.waits.add(70);
  vision.counts.device_seconds = 3600;
  vision.counts.shrunk = 4;
  vision.counts.ended[static_cast<size_t>(JobState::failed)] = 2;
  figures.projects = {vision, {.name = "research", .is_parent = true}};
  return figures;
}

std::set<std::string> names_in(const std::string& text) {
  static const std::regex kName("\\bechelon_pool_[a-z_]+[a-z]");
  static const std::regex kEnd("_(bucket|sum|count)$");
  std::set<std::string> names;
  for (std::sregex_iterator it(text.begin(), text.end(), kName), end; it != end;
       ++it) {
    names.insert(std::regex_replace(it->str(), kEnd, ""));
  }
  return names;
}

std::set<std::string> known_names() {
  std::set<std::string> names;
  for (const auto& metric : pool_metrics()) names.emplace(metric.name);
  return names;
}

TEST(PoolMetrics, TheTextHasEachWithItsHelp) {
  const std::string text = metric_page(some_figures());
  EXPECT_EQ(names_in(text), known_names());
  for (const auto& [name, type, labels, help] : pool_metrics()) {
    EXPECT_EQ(name.ends_with("_total"), type == "counter") << name;
    EXPECT_THAT(
        text, HasSubstr(
                  "# HELP " + std::string(name) + " " + std::string(help) +
                  "\n# TYPE " + std::string(name) + " " + std::string(type) +
                  "\n" + std::string(name)));
  }
  std::istringstream lines(text);
  std::set<std::string> series;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("#")) continue;
    EXPECT_TRUE(series.insert(line.substr(0, line.find(' '))).second) << line;
  }
}

TEST(PoolMetrics, ValuesAreThoseOfThePool) {
  const std::string text = metric_page(some_figures());
  for (const char* line :
       {"echelon_pool_capacity_devices{kind=\"all\"} 8\n",
        "echelon_pool_capacity_devices{kind=\"idle\"} 2\n",
        "echelon_pool_capacity_devices{kind=\"drained\"} 1\n",
        "echelon_pool_devices{project=\"vision\",kind=\"guaranteed\"} 3\n",
        "echelon_pool_devices{project=\"vision\",kind=\"in_use\"} 5\n",
        "echelon_pool_devices{project=\"vision\",kind=\"over_quota\"} 2\n",
        "echelon_pool_devices{project=\"vision\",kind=\"fair_share\"} 4\n",
        "echelon_pool_devices{project=\"research\",kind=\"over_quota\"} 0\n",
        "echelon_pool_jobs{project=\"vision\",state=\"running\"} 2\n",
        "echelon_pool_longest_wait_seconds{project=\"vision\"} 12.5\n",
        "echelon_pool_wait_seconds_bucket{project=\"vision\",le=\"60\"} 0\n",
        "echelon_pool_wait_seconds_bucket{project=\"vision\",le=\"300\"} 1\n",
        "echelon_pool_wait_seconds_sum{project=\"vision\"} 70\n",
        "echelon_pool_device_seconds_total{project=\"vision\"} 3600\n",
        "echelon_pool_ended_jobs_total{project=\"vision\",state=\"failed\"} "
        "2\n",
        "echelon_pool_taken_back_total{project=\"vision\",how=\"shrunk\"} "
        "4\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_THAT(
      text, testing::Not(HasSubstr("echelon_pool_jobs{project=\"research\"")));
}

// --- What others have of the metrics' names

TEST(PoolMetrics, ThePageOfTheManualListsThem) {
  const std::string text = read_text_file(source_path("doc/pool.md"));
  for (const auto& [name, type, labels, help] : pool_metrics()) {
    EXPECT_THAT(
        text,
        HasSubstr(
            "| `" + std::string(name) + "` | " + std::string(type) + " | " +
            std::string(labels) + " | " + std::string(help) + " |\n"));
  }
  EXPECT_THAT(known_names(), IsSupersetOf(names_in(text)));
}

TEST(PoolMetrics, AlertsAndDashboardShowWhatIsExported) {
  std::set<std::string> shown;
  for (const char* name :
       {"pool_alerts.yml", "pool_alerts_test.yml", "pool_dashboard.json"}) {
    const auto names =
        names_in(read_text_file(source_path("examples/monitoring/") + name));
    EXPECT_THAT(known_names(), IsSupersetOf(names)) << name;
    EXPECT_GE(names.size(), 3u) << name;
  }
  const json board = json::parse(
      read_text_file(source_path("examples/monitoring/pool_dashboard.json")));
  for (const json& panel : board.at("panels")) {
    for (const json& target : panel.at("targets")) {
      const auto names = names_in(target.at("expr"));
      EXPECT_FALSE(names.empty()) << panel.at("title");
      shown.insert(names.begin(), names.end());
    }
  }
  EXPECT_EQ(shown, known_names());
}

}  // namespace echelon::pool::metrics_test
