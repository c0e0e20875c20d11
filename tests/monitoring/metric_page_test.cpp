#include "echelon/monitoring/metric_page.h"

#include <gmock/gmock.h>

#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "echelon/text/text_file.h"
#include "tests/support/places.h"

namespace echelon::metric_page_test {

using monitoring::metric_page;
using monitoring::metrics;
using monitoring::Observed;
using monitoring::RunFigures;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

/// All that can be seen, of a job of two ranks on GPUs.
Observed everything() {
  Observed seen{.run = "first", .host = "n0", .started = 1000};
  seen.up_seconds = 100;
  seen.now = 1100;
  seen.job.coordinates = true;
  seen.job.world_size = 2;
  seen.job.num_hosts = 1;
  seen.job.ranks = {
      {.number = 0, .pid = 10, .up = true},
      {.number = 1, .pid = 11, .progress = {.count = 8, .collectives = 5}}};
  seen.job.restarts[2] = 1;
  seen.job.recoveries = monitoring::Durations({0.5, 1});
  seen.job.recoveries.add(0.75);
  seen.job.checkpoint_seconds = 3;
  seen.job.peak_seconds = 0.75;
  seen.memory = {2e9, std::nullopt};
  RunFigures run;
  run.step = 30;
  run.loss = 0.25;
  run.grad_norm = 1.5;
  run.learning_rate = 1e-3;
  run.samples_per_second = 5120;
  run.tokens_per_second = 1e6;
  run.newest_seconds = 2;
  run.skipped_steps = 1;
  run.steps = 32;
  run.lost_steps = 2;
  run.step_seconds = monitoring::Durations({1, 10});
  run.step_seconds.add(2);
  run.phase_seconds = {0.5, 0.25, 0.75, 0.25, 0.125};
  run.kept_seconds = 80;
  run.checkpoint =
      std::chrono::system_clock::time_point(std::chrono::seconds(1058));
  run.checkpoint_seconds = 0.5;
  seen.figures = run;
  seen.saves = true;
  seen.gpus = {
      {.index = 2,
       .uuid = "GPU-a",
       .busy = 0.5,
       .memory_used = 4e9,
       .memory_total = 8e10,
       .celsius = 61,
       .watts = 412.5,
       .hertz = 1.98e9}};
  return seen;
}

std::set<std::string> names_in(const std::string& text) {
  static const std::regex kName("\\bechelon_[a-z0-9_]+");
  std::set<std::string> names;
  for (std::sregex_iterator it(text.begin(), text.end(), kName), end; it != end;
       ++it) {
    std::string name = it->str();
    if (name.ends_with("_")) continue;  // of "echelon_device_*"
    for (const char* suffix : {"_bucket", "_sum", "_count"}) {
      if (name.ends_with(suffix)) {
        name.resize(name.size() - std::string(suffix).size());
      }
    }
    names.insert(name);
  }
  return names;
}

std::set<std::string> known_names() {
  std::set<std::string> names;
  for (const auto& metric : metrics()) names.emplace(metric.name);
  return names;
}

TEST(MetricPage, HasEachMetricOnceWithItsHelpAndType) {
  const std::string page = metric_page(everything());
  EXPECT_EQ(names_in(page), known_names());
  for (const auto& metric : metrics()) {
    const std::string name(metric.name);
    const std::string head = "# HELP " + name + " " + std::string(metric.help) +
                             "\n# TYPE " + name + " " +
                             std::string(metric.type) + "\n" + name;
    const size_t at = page.find(head);
    EXPECT_NE(at, std::string::npos) << name;
    EXPECT_EQ(page.find(head, at + 1), std::string::npos) << name;
  }
}

TEST(MetricPage, LinesHaveTheFormOfTheFormat) {
  const std::regex line(
      "echelon_[a-z_]+\\{run=\"first\"(,[A-Za-z]+=\"[^\"]*\")*\\} "
      "-?[0-9.e+-]+");
  std::istringstream page(metric_page(everything()));
  std::set<std::string> series;
  for (std::string text; std::getline(page, text);) {
    if (text.starts_with("#")) continue;
    EXPECT_TRUE(std::regex_match(text, line)) << text;
    EXPECT_TRUE(series.insert(text.substr(0, text.find(' '))).second) << text;
  }
}

TEST(MetricPage, NamesSayTheUnitAndTheType) {
  for (const auto& [name, type, labels, help] : metrics()) {
    EXPECT_EQ(name.ends_with("_total"), type == "counter") << name;
    EXPECT_TRUE(help.ends_with(".")) << name;
    EXPECT_THAT(
        std::string(name),
        Not(testing::ContainsRegex("_(ms|kib|mib|percent)")));
  }
}

TEST(MetricPage, ValuesAreThoseThatWereSeen) {
  const std::string page = metric_page(everything());
  for (const char* line :
       {"echelon_rank_up{run=\"first\",rank=\"0\",host=\"n0\"} 1\n",
        "echelon_rank_up{run=\"first\",rank=\"1\",host=\"n0\"} 0\n",
        "echelon_rank_progress_total{run=\"first\",rank=\"1\",host=\"n0\"} 8\n",
        "echelon_restarts_total{run=\"first\",reason=\"rank_killed\"} 1\n",
        "echelon_restarts_total{run=\"first\",reason=\"rank_failed\"} 0\n",
        "echelon_recovery_seconds_bucket{run=\"first\",le=\"0.5\"} 0\n",
        "echelon_recovery_seconds_bucket{run=\"first\",le=\"1\"} 1\n",
        "echelon_recovery_seconds_bucket{run=\"first\",le=\"+Inf\"} 1\n",
        "echelon_recovery_seconds_sum{run=\"first\"} 0.75\n",
        "echelon_recovery_seconds_count{run=\"first\"} 1\n",
        "echelon_steps_total{run=\"first\"} 32\n",
        "echelon_step{run=\"first\"} 30\n",
        "echelon_checkpoint_age_seconds{run=\"first\"} 42\n",
        "echelon_effective_time_ratio{run=\"first\"} 0.8\n",
        "echelon_phase_seconds_total{run=\"first\",phase=\"data\"} 0.5\n",
        "echelon_phase_seconds_total{run=\"first\",phase=\"forward\"} 0.25\n",
        "echelon_phase_seconds_total{run=\"first\",phase=\"backward\"} 0.75\n",
        "echelon_phase_seconds_total{run=\"first\",phase=\"other\"} 0.125\n",
        "echelon_phase_seconds_total{run=\"first\",phase=\"communication\"} "
        "0.25\n",
        "echelon_phase_seconds_total{run=\"first\",phase=\"update\"} 0.125\n",
        "echelon_phase_seconds_total{run=\"first\",phase=\"checkpoint\"} 3\n",
        "echelon_mfu_ratio{run=\"first\"} 0.375\n",
        "echelon_phase_seconds_total{run=\"first\",phase=\"restart\"} 0.75\n",
        "echelon_rank_device{run=\"first\",rank=\"0\",Hostname=\"n0\","
        "gpu=\"2\"} 1\n",
        "echelon_device_utilization_ratio{run=\"first\",gpu=\"2\","
        "UUID=\"GPU-a\",Hostname=\"n0\"} 0.5\n"}) {
    EXPECT_THAT(page, HasSubstr(line));
  }
}

TEST(MetricPage, OtherHostsTellTheirRanksAlone) {
  Observed seen = everything();
  seen.job.coordinates = false;
  const auto names = names_in(metric_page(seen));
  EXPECT_TRUE(names.contains("echelon_rank_up"));
  EXPECT_TRUE(names.contains("echelon_device_power_watts"));
  EXPECT_FALSE(names.contains("echelon_steps_total"));
  EXPECT_FALSE(names.contains("echelon_restarts_total"));
}

TEST(MetricPage, WhatIsNotKnownIsLeftOut) {
  Observed seen = everything();
  seen.figures = RunFigures{};
  seen.job.checkpoint_seconds = 0;
  seen.saves = false;
  seen.gpus.clear();
  const std::string page = metric_page(seen);
  const auto names = names_in(page);
  for (const char* name :
       {"echelon_loss", "echelon_tokens_per_second", "echelon_step",
        "echelon_mfu_ratio", "echelon_checkpoint_age_seconds",
        "echelon_device_power_watts"}) {
    EXPECT_FALSE(names.contains(name)) << name;
  }
  EXPECT_THAT(page, HasSubstr("echelon_steps_total{run=\"first\"} 0\n"));
  EXPECT_THAT(page, HasSubstr("phase=\"other\"} 0\n"));
  EXPECT_THAT(page, Not(HasSubstr("phase=\"update\"")));
  seen.figures->newest_seconds = 1;
  seen.job.peak_seconds = 0;
  EXPECT_THAT(metric_page(seen), Not(HasSubstr("mfu")));
  // A run that saves and has not yet is as old as its launcher.
  seen.saves = true;
  EXPECT_THAT(
      metric_page(seen),
      HasSubstr("echelon_checkpoint_age_seconds{run=\"first\"} 100\n"));
}

TEST(MetricPage, NumbersThatAreNotFiniteAreTold) {
  Observed seen = everything();
  seen.figures->loss = std::numeric_limits<double>::quiet_NaN();
  seen.figures->grad_norm = -std::numeric_limits<double>::infinity();
  const std::string page = metric_page(seen);
  EXPECT_THAT(page, HasSubstr("echelon_loss{run=\"first\"} NaN\n"));
  EXPECT_THAT(page, HasSubstr("echelon_grad_norm{run=\"first\"} -Inf\n"));
}

TEST(MetricPage, AnyNameIsALabel) {
  Observed seen = everything();
  seen.run = "a\"b\\c\nd\xff";
  EXPECT_THAT(
      metric_page(seen),
      HasSubstr("echelon_step{run=\"a\\\"b\\\\c?d?\"} 30\n"));
}

// --- What others have of the metrics' names

TEST(Monitoring, ThePageOfTheManualListsTheMetrics) {
  const std::string text = read_text_file(source_path("doc/monitoring.md"));
  std::map<std::string, std::string> rows;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| `echelon_")) continue;
    const size_t end = line.find('`', 3);
    EXPECT_TRUE(rows.emplace(line.substr(3, end - 3), line).second) << line;
  }
  for (const auto& [name, type, labels, help] : metrics()) {
    const std::string row = "| `" + std::string(name) + "` | " +
                            std::string(type) + " | " + std::string(labels) +
                            (labels.empty() ? "| " : " | ") +
                            std::string(help) + " |";
    EXPECT_EQ(rows[std::string(name)], row);
  }
  EXPECT_EQ(rows.size(), metrics().size());
  EXPECT_THAT(known_names(), testing::IsSupersetOf(names_in(text)));
}

TEST(Monitoring, AlertsAreOnMetricsThatAreExported) {
  for (const char* name : {"alerts.yml", "alerts_test.yml"}) {
    const auto names =
        names_in(read_text_file(source_path("examples/monitoring/") + name));
    EXPECT_GE(names.size(), 6U) << name;
    EXPECT_THAT(known_names(), testing::IsSupersetOf(names)) << name;
  }
}

TEST(Monitoring, TheDashboardShowsMetricsThatAreExported) {
  const json board = json::parse(
      read_text_file(source_path("examples/monitoring/dashboard.json")));
  const std::regex plain_words("[A-Z][A-Za-z ,]+");
  std::set<std::string> titles;
  std::set<std::string> shown;
  for (const json& panel : board.at("panels")) {
    const std::string title = panel.at("title");
    EXPECT_TRUE(std::regex_match(title, plain_words)) << title;
    EXPECT_TRUE(titles.insert(title).second) << title;
    if (panel.at("type") == "row") continue;
    EXPECT_NE(panel.at("/fieldConfig/defaults/unit"_json_pointer), "") << title;
    ASSERT_FALSE(panel.at("targets").empty()) << title;
    for (const json& target : panel.at("targets")) {
      const auto names = names_in(target.at("expr"));
      EXPECT_FALSE(names.empty()) << title;
      shown.insert(names.begin(), names.end());
      EXPECT_THAT(known_names(), testing::IsSupersetOf(names)) << title;
      EXPECT_THAT(
          target.at("expr").get<std::string>(), HasSubstr("run=~\"$run\""));
    }
  }
  EXPECT_THAT(known_names(), testing::IsSupersetOf(names_in(board.dump())));
  // What is exported and shown nowhere is forgotten.
  auto forgotten = known_names();
  for (const auto& name : shown) forgotten.erase(name);
  EXPECT_THAT(forgotten, testing::ElementsAre("echelon_start_time_seconds"));
}

}  // namespace echelon::metric_page_test
