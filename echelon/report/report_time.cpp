#include "echelon/report/report_time.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "echelon/report/bar_cell.h"
#include "echelon/report/lanes.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

struct PickedStep {
  int64_t step = 0;
  std::string title;
};

// The median step, and the slowest when it is another matter.
std::vector<PickedStep> picked_steps(const Diagnosis& d) {
  std::map<int64_t, double> longest;
  for (const auto& b : d.steps) {
    longest[b.step] = std::max(longest[b.step], b.step_seconds);
  }
  if (longest.empty()) return {};
  std::vector<std::pair<double, int64_t>> sorted;
  for (const auto& [step, seconds] : longest) sorted.push_back({seconds, step});
  std::sort(sorted.begin(), sorted.end());
  const auto [typical_seconds, typical] = sorted[(sorted.size() - 1) / 2];
  std::vector<PickedStep> picked = {
      {typical, "Step " + std::to_string(typical) +
                    ", a typical one: " + format_seconds(typical_seconds)}};
  // The first recorded step warms caches up; its length says little.
  const int64_t first = longest.begin()->first;
  std::erase_if(
      sorted, [&](const auto& entry) { return entry.second == first; });
  if (!sorted.empty() && sorted.back().first > 1.4 * typical_seconds) {
    picked.push_back(
        {sorted.back().second,
         "Step " + std::to_string(sorted.back().second) +
             ", the slowest: " + format_seconds(sorted.back().first)});
  }
  return picked;
}

std::string describe(const std::vector<StepActivity>& ranks) {
  std::string text = "Timeline of " + std::to_string(ranks.size()) +
                     (ranks.size() == 1 ? " rank." : " ranks.");
  for (size_t i = 0; i < ranks.size() && i < 8; ++i) {
    const auto seconds = [](const Intervals& times) {
      return format_seconds(1e-9 * static_cast<double>(total_length(times)));
    };
    text += " Rank " + std::to_string(ranks[i].rank) + " computes for " +
            seconds(ranks[i].compute) + " and communicates for " +
            seconds(ranks[i].communication) + ", " + seconds(ranks[i].exposed) +
            " of it exposed.";
  }
  return text;
}

void draw_pictures(
    Markup& page, const Timeline& timeline,
    const std::vector<PickedStep>& steps, const std::string& prefix) {
  const auto activities = step_activities(timeline);
  std::vector<LanesPicture> pictures;
  std::vector<StepActivity> all;
  for (const auto& picked : steps) {
    LanesPicture picture{
        .id = prefix + "step-" + std::to_string(picked.step),
        .title = picked.title};
    for (const auto& activity : activities) {
      if (activity.step == picked.step) picture.ranks.push_back(activity);
    }
    all.insert(all.end(), picture.ranks.begin(), picture.ranks.end());
    picture.description = describe(picture.ranks);
    pictures.push_back(std::move(picture));
  }
  for (auto& picture : pictures) {
    picture.max_bars /= pictures.size();
    draw_lanes(page, picture);
    if (&picture == &pictures.front()) draw_lanes_legend(page, all);
  }
}

void draw_row(
    Markup& page, const std::string& name, const StepBreakdown& b,
    double longest, bool all) {
  page.open("tr", {{"class", all ? "all" : "one"}});
  page.leaf("th", {{"scope", "row"}}, name);
  for (const double seconds :
       {b.step_seconds, b.compute_seconds, b.overlapped_seconds,
        b.exposed_seconds, b.data_seconds, b.idle_seconds}) {
    page.leaf("td", {}, seconds < 0.5e-9 ? "\u2013" : format_seconds(seconds));
  }
  draw_bar_cell(
      page,
      {{"bw", b.compute_seconds},
       {"ex", b.exposed_seconds},
       {"da", b.data_seconds},
       {"idle", b.idle_seconds}},
      longest);
  page.close();
}

void draw_table(
    Markup& page, const Diagnosis& d, const std::vector<StepBreakdown>& ranks) {
  double longest = 0;
  for (const auto& b : d.ranks) longest = std::max(longest, b.step_seconds);
  page.open(
      "div", {{"class", "scroll"},
              {"tabindex", "0"},
              {"role", "region"},
              {"aria-label", "Time of each rank"}});
  page.open("table").leaf(
      "caption", {{"class", "hidden"}}, "Mean time per step of each rank");
  page.open("thead").open("tr");
  for (const char* head :
       {"Mean per step", "Step", "Compute", "Overlapped", "Exposed",
        "Data wait", "Idle"}) {
    page.leaf("th", {{"scope", "col"}}, head);
  }
  page.leaf("th", {{"scope", "col"}}, "Compute, exposed, data, idle");
  page.close().close().open("tbody");
  if (d.ranks.size() > 1) draw_row(page, "all ranks", d.mean, longest, true);
  for (const auto& b : ranks) {
    std::string name = "rank " + std::to_string(b.rank);
    if (b.rank == d.slowest_rank && d.slowest_excess > 0.02)
      name += ", slowest";
    draw_row(page, name, b, longest, false);
  }
  page.close().close().close();
}

// The ranks with the most work first, then the one with the least.
std::vector<StepBreakdown> extremes(const Diagnosis& d) {
  auto ranks = d.ranks;
  std::stable_sort(ranks.begin(), ranks.end(), [](auto& a, auto& b) {
    return a.compute_seconds + a.data_seconds >
           b.compute_seconds + b.data_seconds;
  });
  ranks.erase(ranks.begin() + 7, ranks.end() - 1);
  return ranks;
}

void draw_tables(Markup& page, const Diagnosis& d) {
  if (d.ranks.size() <= 16) {
    draw_table(page, d, d.ranks);
    return;
  }
  draw_table(page, d, extremes(d));
  page.leaf(
      "p", {{"class", "note"}},
      "The seven ranks with the most work, and the one with the least.");
  page.open("details").leaf(
      "summary", {}, "All " + std::to_string(d.ranks.size()) + " ranks");
  draw_table(page, d, d.ranks);
  page.close();
}

std::string table_note(const Diagnosis& d, bool simulated) {
  std::string note =
      "Overlapped: communication while something computes, which costs no "
      "time. Exposed: communication while nothing computes; it includes "
      "waiting for slower ranks inside of a collective. " +
      std::string(simulated ? "Simulated: " : "Recorded: ") +
      std::to_string(d.num_steps) + (d.num_steps == 1 ? " step" : " steps");
  if (d.num_outliers > 0) {
    note += "; left out of the means, as over three times the median: " +
            std::to_string(d.num_outliers);
  }
  return note + ".";
}

}  // namespace

void draw_time_section(
    Markup& page, const Timeline& timeline, const Diagnosis& d) {
  if (d.steps.empty()) return;
  page.open("section").leaf("h2", {}, "Where the time went");
  page.leaf("p", {{"class", "lead"}}, unbroken(d.sentence));
  draw_lanes_pattern(page);
  draw_pictures(page, timeline, picked_steps(d), "");
  draw_tables(page, d);
  page.leaf("p", {{"class", "note"}}, table_note(d, timeline.simulated));
  page.close();
}

void draw_typical_step(
    Markup& page, const Timeline& timeline, const Diagnosis& d,
    const std::string& prefix) {
  auto steps = picked_steps(d);
  if (steps.empty()) return;
  steps.resize(1);
  draw_pictures(page, timeline, steps, prefix);
}

}  // namespace echelon
