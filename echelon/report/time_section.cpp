#include "echelon/report/sections.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "echelon/report/lanes.h"
#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon::report {
namespace {

// The page says so where the picture is longer than the longest rank's step by
// more than this share.
constexpr double kOutOfPhase = 0.05;

constexpr size_t kMaxBars = 1200;

// --- Which steps, and the table ---------------------------------------------

struct PickedStep {
  int64_t step = 0;
  std::string title;
};

using StepLength = std::pair<double, int64_t>;  // of its longest rank, and it
using Windows = std::map<int64_t, timeline::Interval>;

double seconds_of(const timeline::Interval& time) {
  return 1e-9 * static_cast<double>(time.end - time.begin);
}

// By how much the picture of the step is longer, as a share of the step.
double phase_of(const StepLength& one, const Windows& windows) {
  return seconds_of(windows.at(one.second)) / one.first - 1;
}

// The step nearest to the median one whose picture is as long as the step,
// among those of about the median length and the middle half of all. Where
// there is none, the one of them whose ranks were the least out of phase.
StepLength
typical_of(const std::vector<StepLength>& sorted, const Windows& windows) {
  const size_t middle = (sorted.size() - 1) / 2;
  const double median = sorted[middle].first;
  // Less is better: whether the picture is too long, by how much, or else how
  // far the length is from the median, and the place among all.
  using Rank = std::tuple<bool, double, size_t>;
  std::optional<std::pair<Rank, StepLength>> best;
  for (size_t i = 0; i < sorted.size(); ++i) {
    const StepLength& one = sorted[i];
    const double off = std::abs(one.first - median);
    const size_t places = i < middle ? middle - i : i - middle;
    if (places > sorted.size() / 4 && off > 0.05 * median) continue;
    const double phase = phase_of(one, windows);
    const bool too_long = phase > kOutOfPhase;
    const Rank rank = {too_long, too_long ? phase : off, places};
    if (!best || rank < best->first) best = {rank, one};
  }
  return best->second;
}

// A picture of ranks out of phase is longer than the step of any rank.
std::string length_text(const StepLength& one, const Windows& windows) {
  if (phase_of(one, windows) <= kOutOfPhase) return format_seconds(one.first);
  return format(
      "{} over all ranks, which are out of phase; {} a rank",
      format_seconds(seconds_of(windows.at(one.second))),
      format_seconds(one.first));
}

// The median step, and the slowest one when it is much longer.
std::vector<PickedStep>
picked_steps(const timeline::Diagnosis& d, const Windows& windows) {
  std::map<int64_t, double> longest;
  for (const auto& b : d.steps) {
    longest[b.step] = std::max(longest[b.step], b.step_seconds);
  }
  if (longest.empty()) return {};
  std::vector<std::pair<double, int64_t>> sorted;
  for (const auto& [step, seconds] : longest) sorted.push_back({seconds, step});
  std::sort(sorted.begin(), sorted.end());
  const StepLength typical = typical_of(sorted, windows);
  std::vector<PickedStep> picked = {
      {typical.second,
       (longest.size() == 1
            ? std::string("One step: ")
            : format(
                  "Step {}, a typical one: ", format_count(typical.second))) +
           length_text(typical, windows)}};
  // The first recorded step warms caches up; its length says little.
  const int64_t first = longest.begin()->first;
  std::erase_if(
      sorted, [&](const auto& entry) { return entry.second == first; });
  if (!sorted.empty() && sorted.back().first > 1.4 * typical.first) {
    const StepLength& slowest = sorted.back();
    picked.push_back(
        {slowest.second,
         format("Step {}, the slowest: ", format_count(slowest.second)) +
             length_text(slowest, windows)});
  }
  return picked;
}

void draw_steps(
    Markup& page, const std::vector<timeline::StepActivity>& activities,
    const std::vector<PickedStep>& steps, const std::vector<int32_t>& classes,
    const std::string& prefix) {
  std::vector<std::vector<Lane>> pictures;
  std::vector<Lane> all;
  for (const auto& picked : steps) {
    std::vector<timeline::StepActivity> ranks;
    std::ranges::copy_if(
        activities, std::back_inserter(ranks),
        [&](const auto& activity) { return activity.step == picked.step; });
    const auto& lanes = pictures.emplace_back(lanes_of(ranks, classes));
    all.insert(all.end(), lanes.begin(), lanes.end());
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    draw_lanes(
        page, format("{}step-{}", prefix, steps[i].step), steps[i].title,
        pictures[i], kMaxBars / steps.size());
    if (i == 0) draw_lanes_legend(page, all);
  }
}

// Ranks with equal means, as those of a simulation.
struct RankGroup {
  timeline::StepBreakdown mean;
  std::vector<int32_t> ranks;
};

std::vector<RankGroup>
groups_of(const timeline::Diagnosis& d, const std::vector<int32_t>& classes) {
  std::vector<RankGroup> groups;
  const auto values = [](const timeline::StepBreakdown& b) {
    return std::array{b.step_seconds,       b.compute_seconds,
                      b.overlapped_seconds, b.exposed_seconds,
                      b.data_seconds,       b.idle_seconds};
  };
  for (const auto& b : d.ranks) {
    const auto found = std::ranges::find_if(groups, [&](const RankGroup& one) {
      return values(one.mean) == values(b);
    });
    RankGroup& group =
        found == groups.end() ? groups.emplace_back(RankGroup{b, {}}) : *found;
    add_ranks(group.ranks, b.rank, classes);
  }
  return groups;
}

void draw_rank_row(
    Markup& page, const std::string& name, const timeline::StepBreakdown& b,
    double longest, bool all) {
  page.add("<tr class='{}'><th scope='row'>{}</th>", all ? "all" : "one", name);
  for (const double seconds :
       {b.step_seconds, b.compute_seconds, b.overlapped_seconds,
        b.exposed_seconds, b.data_seconds, b.idle_seconds}) {
    page.add(
        "<td>{}</td>", seconds < 0.5e-9 ? "\u2013" : format_seconds(seconds));
  }
  draw_bar_cell(
      page,
      {{"bw", b.compute_seconds},
       {"ex", b.exposed_seconds},
       {"da", b.data_seconds},
       {"idle", b.idle_seconds}},
      longest);
  page.add("</tr>");
}

void draw_rank_table(
    Markup& page, const timeline::Diagnosis& d,
    const std::vector<RankGroup>& groups) {
  double longest = 0;
  for (const auto& b : d.ranks) longest = std::max(longest, b.step_seconds);
  open_table(
      page, "Mean time per step of each rank",
      {d.num_steps == 1 ? "Rank" : "Mean per step", "Step", "Compute",
       "Overlapped", "Exposed", "Data wait", "Idle",
       "Compute, exposed, data, idle"});
  if (groups.size() > 1) {
    draw_rank_row(page, "all ranks", d.mean, longest, true);
  }
  for (const auto& [mean, ranks] : groups) {
    const bool most =
        ranks.front() == d.slowest_rank && d.slowest_excess > 0.02;
    draw_rank_row(
        page, ranks_text(ranks) + (most ? ", most work" : ""), mean, longest,
        false);
  }
  close_table(page);
}

// The ranks with the most work first, then the one with the least.
std::vector<RankGroup> extremes(std::vector<RankGroup> groups) {
  std::ranges::stable_sort(groups, std::greater(), [](const RankGroup& group) {
    return group.mean.compute_seconds + group.mean.data_seconds;
  });
  groups.erase(groups.begin() + 7, groups.end() - 1);
  return groups;
}

void draw_tables(
    Markup& page, const timeline::Diagnosis& d,
    const std::vector<int32_t>& classes) {
  const auto groups = groups_of(d, classes);
  if (groups.size() <= 16) {
    draw_rank_table(page, d, groups);
    return;
  }
  draw_rank_table(page, d, extremes(groups));
  page.add(
      "<p class='note'>The seven ranks with the most work, and the one with "
      "the least.</p><details><summary>All {} ranks</summary>",
      format_count(d.ranks.size()));
  draw_rank_table(page, d, groups);
  page.add("</details>");
}

std::string
table_note(const timeline::Diagnosis& d, const timeline::Timeline& timeline) {
  std::string note = format(
      "Overlapped: communication while something computes, which costs no "
      "time. Exposed: communication while nothing computes; it includes "
      "waiting for slower ranks inside of a collective. {}: {}",
      timeline.simulated ? "Simulated" : "Recorded",
      counted(d.num_steps, "step"));
  if (d.num_outliers > 0) {
    note += format(
        "; left out of the means, as over three times the median: {}",
        d.num_outliers);
  }
  note += ".";
  const auto groups = groups_of(d, timeline.rank_classes);
  size_t shown = 0;
  for (const auto& [_, ranks] : groups) shown += ranks.size();
  if (shown < timeline.rank_classes.size()) {
    note += format(
        " Shown are {} of {} ranks.", format_count(shown),
        format_count(timeline.rank_classes.size()));
  }
  for (const auto& [_, ranks] : groups) {
    if (ranks_text(ranks).find('+') == std::string::npos) continue;
    note += format(
        " {}: rank {} and {}, which {} the same.", ranks_text(ranks),
        ranks.front(), counted(std::ssize(ranks) - 1, "other rank"),
        ranks.size() == 2 ? "does" : "do");
    break;
  }
  return note;
}

}  // namespace

void draw_time_section(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& d) {
  if (d.steps.empty()) return;
  page.add(
      "<section id='time'><h2>Where the time went</h2><p class='lead'>{}</p>",
      unbroken(d.sentence));
  const auto activities = timeline::step_activities(timeline);
  draw_steps(
      page, activities, picked_steps(d, timeline::step_windows(activities)),
      timeline.rank_classes, "");
  draw_rank_times(page, timeline, d);
  page.add("</section>");
}

void draw_rank_times(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& d) {
  draw_tables(page, d, timeline.rank_classes);
  page.add("<p class='note'>{}</p>", table_note(d, timeline));
}

void draw_typical_step(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& d, const std::string& prefix) {
  const auto activities = timeline::step_activities(timeline);
  auto steps = picked_steps(d, timeline::step_windows(activities));
  if (steps.empty()) return;
  steps.resize(1);
  draw_steps(page, activities, steps, timeline.rank_classes, prefix);
}

}  // namespace echelon::report
