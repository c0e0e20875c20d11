#include "echelon/report/sections.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/text/units.h"

// A step is drawn with two lanes for each rank: computation and data wait, and
// below it communication, hatched where computation hides it and solid where it
// is exposed. The bars are the intervals of step_activities (overlap.h).
namespace echelon::report {
namespace {

// More bars are merged where the gaps between them are the smallest.
constexpr size_t kMaxBars = 1200;

// --- One step of all ranks --------------------------------------------------

// Heights in pixels.
struct Rows {
  int compute = 18;
  int communication = 11;
  int between = 2;
  int gap = 13;
  bool has_communication = true;

  int rank() const {
    return compute + (has_communication ? between + communication : 0) + gap;
  }
};

struct Bar {
  int row = 0;        // 2 * index of the rank, + 1 for communication
  std::string color;  // class
  timeline::Interval time;
  std::string title;  // shown while pointed at
  int num_spans = 1;
};

const char* color_of(timeline::SpanKind kind) {
  return kind == timeline::SpanKind::forward     ? "fw"
         : kind == timeline::SpanKind::backward  ? "bw"
         : kind == timeline::SpanKind::optimizer ? "op"
                                                 : "ot";
}

Rows rows_for(const std::vector<timeline::StepActivity>& ranks) {
  Rows rows;
  if (ranks.size() > 16) {
    rows = {8, 6, 1, 4};
  } else if (ranks.size() > 8) {
    rows = {12, 8, 1, 8};
  }
  rows.has_communication = std::ranges::any_of(
      ranks,
      [](const timeline::StepActivity& a) { return !a.communication.empty(); });
  return rows;
}

std::string length_text(const timeline::Interval& time) {
  return format_seconds(1e-9 * static_cast<double>(time.end - time.begin));
}

std::string
bar_title(const timeline::Span& span, const timeline::Interval& time) {
  std::string title = span.name + ", " + length_text(time);
  if (span.bytes > 0) title += ", " + format_bytes(span.bytes);
  return title;
}

void add_intervals(
    std::vector<Bar>& bars, int row, const char* color, const char* name,
    const timeline::Intervals& times) {
  for (const auto& time : times) {
    bars.push_back(
        {row, color, time, std::string(name) + ", " + length_text(time)});
  }
}

std::vector<Bar> bars_of(const std::vector<timeline::StepActivity>& ranks) {
  std::vector<Bar> bars;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto& rank = ranks[i];
    const int row = 2 * static_cast<int>(i);
    for (const auto& piece : rank.pieces) {
      const timeline::SpanKind kind = piece.span->kind;
      if (kind == timeline::SpanKind::communication ||
          kind == timeline::SpanKind::data)
        continue;
      bars.push_back(
          {row, color_of(kind), piece.time,
           bar_title(*piece.span, piece.time)});
    }
    add_intervals(bars, row, "da", "waiting for data", rank.data);
    add_intervals(
        bars, row + 1, "ov", "overlapped communication", rank.overlapped);
    add_intervals(bars, row + 1, "ex", "exposed communication", rank.exposed);
  }
  std::ranges::stable_sort(bars, {}, [](const Bar& bar) {
    return std::pair(bar.row, bar.time.begin);
  });
  return bars;
}

// The collectives themselves: outlines over the bars, each with its name.
std::vector<Bar>
collectives_of(const std::vector<timeline::StepActivity>& ranks) {
  std::vector<Bar> bars;
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::set<const timeline::Span*> seen;
    for (const auto& piece : ranks[i].pieces) {
      const timeline::Span& span = *piece.span;
      if (span.kind != timeline::SpanKind::communication) continue;
      if (!seen.insert(&span).second) continue;
      const timeline::Interval time = {span.begin_ns, span.end_ns};
      bars.push_back(
          {2 * static_cast<int>(i) + 1, "co", time, bar_title(span, time)});
    }
  }
  return bars;
}

// Neighbours of one colour that are at most `gap` apart become one bar.
std::vector<Bar> merged(const std::vector<Bar>& bars, int64_t gap) {
  std::vector<Bar> result;
  std::map<std::pair<int, std::string>, size_t> last;
  std::map<int, size_t> last_of_row;
  for (const auto& bar : bars) {
    const auto key = std::pair(bar.row, bar.color);
    const auto found = last.find(key);
    if (found != last.end() && last_of_row[bar.row] == found->second &&
        bar.time.begin - result[found->second].time.end <= gap) {
      Bar& into = result[found->second];
      into.time.end = std::max(into.time.end, bar.time.end);
      into.num_spans += bar.num_spans;
      continue;
    }
    last[key] = last_of_row[bar.row] = result.size();
    result.push_back(bar);
  }
  return result;
}

// Widens the gap that merged() closes until few enough bars are left.
std::vector<Bar> at_most(std::vector<Bar> bars, size_t count, int64_t range) {
  for (int64_t gap = range / 4000; bars.size() > count && gap < range;
       gap = 2 * gap + 1) {
    bars = merged(bars, gap);
    // Alternating colours do not merge: the narrowest bars are left out.
    if (bars.size() > count) {
      std::erase_if(bars, [&](const Bar& bar) {
        return bar.time.end - bar.time.begin < gap;
      });
    }
  }
  return bars;
}

class LanesDrawing {
 public:
  LanesDrawing(
      Markup& page, const std::vector<timeline::StepActivity>& ranks,
      size_t max_bars)
      : page_(page),
        ranks_(ranks),
        max_bars_(max_bars),
        rows_(rows_for(ranks)),
        range_(ranks.front().window) {
    for (const auto& rank : ranks) {
      range_.begin = std::min(range_.begin, rank.window.begin);
      range_.end = std::max(range_.end, rank.window.end);
    }
    range_.end = std::max(range_.end, range_.begin + 1);
  }

  int height() const { return static_cast<int>(ranks_.size()) * rows_.rank(); }

  void draw() {
    draw_axis();
    const int64_t length = range_.end - range_.begin;
    auto bars = at_most(bars_of(ranks_), max_bars_, length);
    auto collectives = at_most(collectives_of(ranks_), max_bars_ / 2, length);
    for (size_t i = 0; i < ranks_.size(); ++i) {
      draw_rank(static_cast<int>(i), bars, collectives);
    }
  }

 private:
  double share(int64_t time) const {
    const double share = static_cast<double>(time - range_.begin) /
                         static_cast<double>(range_.end - range_.begin);
    return std::clamp(share, 0.0, 1.0);
  }
  static std::string percent(double share) {
    return coordinate(100 * share, 3) + "%";
  }

  void draw_axis() {
    const double seconds =
        1e-9 * static_cast<double>(range_.end - range_.begin);
    draw_time_axis(page_, seconds, 6, height(), 16, format_seconds);
  }

  void draw_rank(
      int index, const std::vector<Bar>& bars,
      const std::vector<Bar>& collectives) {
    const auto& rank = ranks_[index];
    const int y = index * rows_.rank();
    page_.add(
        "<g class='rank' data-rank='{}'><text class='name' x='-8' y='{}' "
        "text-anchor='end'>rank {}</text>",
        rank.rank, y + std::max(rows_.compute - 4, 8), rank.rank);
    draw_exposed(rank, y);
    draw_bar({2 * index, "idle", rank.window, ""});
    if (rows_.has_communication) {
      draw_bar({2 * index + 1, "idle", rank.window, ""});
    }
    for (const auto& bar : bars) {
      if (bar.row / 2 == index) draw_bar(bar);
    }
    for (const auto& bar : collectives) {
      if (bar.row / 2 != index) continue;
      if (rows_.communication >= 8) draw_seam(bar);
      draw_bar(bar);
    }
    page_.add("</g>");
  }

  void draw_exposed(const timeline::StepActivity& rank, int y) {
    if (!rows_.has_communication || rows_.communication < 11) return;
    const double share =
        static_cast<double>(timeline::total_length(rank.exposed)) /
        static_cast<double>(rank.window.end - rank.window.begin);
    page_.add(
        "<text class='share minor' x='-8' y='{}' text-anchor='end'>{} "
        "exposed</text>",
        y + rows_.rank() - rows_.gap, format_percent(share));
  }

  // Separates collectives that follow each other without a pause.
  void draw_seam(const Bar& bar) {
    const int y = bar.row / 2 * rows_.rank() + rows_.compute + rows_.between;
    const auto x = percent(share(bar.time.begin));
    page_.add(
        "<line class='seam' x1='{}' x2='{}' y1='{}' y2='{}'/>", x, x, y,
        y + rows_.communication);
  }

  void draw_bar(const Bar& bar) {
    const bool lower = bar.row % 2 == 1;
    const int y = bar.row / 2 * rows_.rank() +
                  (lower ? rows_.compute + rows_.between : 0);
    page_.add(
        "<rect class='{}' x='{}' y='{}' width='{}' height='{}'>", bar.color,
        percent(share(bar.time.begin)), y,
        percent(
            static_cast<double>(bar.time.end - bar.time.begin) /
            static_cast<double>(range_.end - range_.begin)),
        lower ? rows_.communication : rows_.compute);
    if (bar.num_spans > 1) {
      page_.add(
          "<title>{} spans, {}</title>", bar.num_spans, length_text(bar.time));
    } else if (!bar.title.empty()) {
      page_.add("<title>{}</title>", bar.title);
    }
    page_.add("</rect>");
  }

  Markup& page_;
  const std::vector<timeline::StepActivity>& ranks_;
  size_t max_bars_;
  Rows rows_;
  timeline::Interval range_;
};

// --- Which steps, and the table ---------------------------------------------

struct PickedStep {
  int64_t step = 0;
  std::string title;
};

// The median step, and the slowest one when it is much longer.
std::vector<PickedStep> picked_steps(const timeline::Diagnosis& d) {
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
      {typical, format(
                    "Step {}, a typical one: {}", typical,
                    format_seconds(typical_seconds))}};
  // The first recorded step warms caches up; its length says little.
  const int64_t first = longest.begin()->first;
  std::erase_if(
      sorted, [&](const auto& entry) { return entry.second == first; });
  if (!sorted.empty() && sorted.back().first > 1.4 * typical_seconds) {
    const auto& [seconds, slowest] = sorted.back();
    picked.push_back(
        {slowest,
         format("Step {}, the slowest: {}", slowest, format_seconds(seconds))});
  }
  return picked;
}

std::string describe(const std::vector<timeline::StepActivity>& ranks) {
  std::string text = format(
      "Timeline of {} {}.", ranks.size(), ranks.size() == 1 ? "rank" : "ranks");
  const auto seconds = [](const timeline::Intervals& times) {
    return format_seconds(
        1e-9 * static_cast<double>(timeline::total_length(times)));
  };
  for (size_t i = 0; i < ranks.size() && i < 8; ++i) {
    text += format(
        " Rank {} computes for {} and communicates for {}, {} of it exposed.",
        ranks[i].rank, seconds(ranks[i].compute),
        seconds(ranks[i].communication), seconds(ranks[i].exposed));
  }
  return text;
}

void draw_lanes(
    Markup& page, const std::string& id, const std::string& title,
    const std::vector<timeline::StepActivity>& ranks, size_t max_bars) {
  if (ranks.empty()) return;
  LanesDrawing drawing(page, ranks, max_bars);
  page.add(
      "<figure class='lanes' id='{}'><figcaption><h3>{}</h3></figcaption><div "
      "class='plot'>",
      id, title);
  open_svg(page, id, drawing.height() + 22, title, describe(ranks));
  drawing.draw();
  page.add("</svg></div></figure>");
}

void draw_lanes_legend(
    Markup& page, const std::vector<timeline::StepActivity>& ranks) {
  std::set<std::string> used;
  for (const auto& bar : bars_of(ranks)) used.insert(bar.color);
  page.add("<p class='keys'>");
  const std::pair<const char*, const char*> keys[] = {
      {"fw", "forward"},
      {"bw", "backward"},
      {"op", "optimizer"},
      {"ov", "communication, overlapped"},
      {"ex", "communication, exposed"},
      {"da", "waiting for data"},
      {"ot", "other"}};
  for (const auto& [color, text] : keys) {
    if (used.contains(color)) draw_key(page, color, text);
  }
  draw_key(page, "idle", "idle");
  page.add("</p>");
}

void draw_steps(
    Markup& page, const timeline::Timeline& timeline,
    const std::vector<PickedStep>& steps, const std::string& prefix) {
  const auto activities = timeline::step_activities(timeline);
  std::vector<std::vector<timeline::StepActivity>> pictures;
  std::vector<timeline::StepActivity> all;
  for (const auto& picked : steps) {
    auto& ranks = pictures.emplace_back();
    std::ranges::copy_if(
        activities, std::back_inserter(ranks),
        [&](const auto& activity) { return activity.step == picked.step; });
    all.insert(all.end(), ranks.begin(), ranks.end());
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    draw_lanes(
        page, format("{}step-{}", prefix, steps[i].step), steps[i].title,
        pictures[i], kMaxBars / steps.size());
    if (i == 0) draw_lanes_legend(page, all);
  }
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
    const std::vector<timeline::StepBreakdown>& ranks) {
  double longest = 0;
  for (const auto& b : d.ranks) longest = std::max(longest, b.step_seconds);
  open_table(
      page, "Mean time per step of each rank",
      {"Mean per step", "Step", "Compute", "Overlapped", "Exposed", "Data wait",
       "Idle", "Compute, exposed, data, idle"});
  if (d.ranks.size() > 1)
    draw_rank_row(page, "all ranks", d.mean, longest, true);
  for (const auto& b : ranks) {
    const bool slowest = b.rank == d.slowest_rank && d.slowest_excess > 0.02;
    draw_rank_row(
        page, format("rank {}{}", b.rank, slowest ? ", slowest" : ""), b,
        longest, false);
  }
  close_table(page);
}

// The ranks with the most work first, then the one with the least.
std::vector<timeline::StepBreakdown> extremes(const timeline::Diagnosis& d) {
  auto ranks = d.ranks;
  std::ranges::stable_sort(ranks, std::greater(), [](const auto& rank) {
    return rank.compute_seconds + rank.data_seconds;
  });
  ranks.erase(ranks.begin() + 7, ranks.end() - 1);
  return ranks;
}

void draw_tables(Markup& page, const timeline::Diagnosis& d) {
  if (d.ranks.size() <= 16) {
    draw_rank_table(page, d, d.ranks);
    return;
  }
  draw_rank_table(page, d, extremes(d));
  page.add(
      "<p class='note'>The seven ranks with the most work, and the one with "
      "the least.</p><details><summary>All {} ranks</summary>",
      d.ranks.size());
  draw_rank_table(page, d, d.ranks);
  page.add("</details>");
}

std::string table_note(const timeline::Diagnosis& d, bool simulated) {
  std::string note = format(
      "Overlapped: communication while something computes, which costs no "
      "time. Exposed: communication while nothing computes; it includes "
      "waiting for slower ranks inside of a collective. {}: {} {}",
      simulated ? "Simulated" : "Recorded", d.num_steps,
      d.num_steps == 1 ? "step" : "steps");
  if (d.num_outliers > 0) {
    note += format(
        "; left out of the means, as over three times the median: {}",
        d.num_outliers);
  }
  return note + ".";
}

}  // namespace

void draw_time_section(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& d) {
  if (d.steps.empty()) return;
  page.add(
      "<section><h2>Where the time went</h2><p class='lead'>{}</p>",
      unbroken(d.sentence));
  draw_steps(page, timeline, picked_steps(d), "");
  draw_tables(page, d);
  page.add(
      "<p class='note'>{}</p></section>", table_note(d, timeline.simulated));
}

void draw_typical_step(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& d, const std::string& prefix) {
  auto steps = picked_steps(d);
  if (steps.empty()) return;
  steps.resize(1);
  draw_steps(page, timeline, steps, prefix);
}

}  // namespace echelon::report
