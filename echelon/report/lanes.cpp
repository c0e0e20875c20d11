#include "echelon/report/lanes.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "echelon/report/page.h"
#include "echelon/report/series.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

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
  Interval time;
  std::string title;  // shown while pointed at
  int joined = 1;     // spans in it
};

const char* color_of(SpanKind kind) {
  switch (kind) {
    case SpanKind::forward:
      return "fw";
    case SpanKind::backward:
      return "bw";
    case SpanKind::optimizer:
      return "op";
    default:
      return "ot";
  }
}

Rows rows_for(const std::vector<StepActivity>& ranks) {
  Rows rows;
  if (ranks.size() > 16) {
    rows = {8, 6, 1, 4};
  } else if (ranks.size() > 8) {
    rows = {12, 8, 1, 8};
  }
  rows.has_communication = std::any_of(
      ranks.begin(), ranks.end(),
      [](const StepActivity& a) { return !a.communication.empty(); });
  return rows;
}

std::string length_text(const Interval& time) {
  return format_seconds(1e-9 * static_cast<double>(time.end - time.begin));
}

std::string bar_title(const Span& span, const Interval& time) {
  std::string title = span.name + ", " + length_text(time);
  if (span.bytes > 0) title += ", " + format_bytes(span.bytes);
  return title;
}

void add_intervals(
    std::vector<Bar>& bars, int row, const char* color, const char* name,
    const Intervals& times) {
  for (const auto& time : times) {
    bars.push_back(
        {row, color, time, std::string(name) + ", " + length_text(time)});
  }
}

std::vector<Bar> bars_of(const std::vector<StepActivity>& ranks) {
  std::vector<Bar> bars;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto& rank = ranks[i];
    const int row = 2 * static_cast<int>(i);
    for (const auto& piece : rank.pieces) {
      const SpanKind kind = piece.span->kind;
      if (kind == SpanKind::communication || kind == SpanKind::data) continue;
      bars.push_back(
          {row, color_of(kind), piece.time,
           bar_title(*piece.span, piece.time)});
    }
    add_intervals(bars, row, "da", "waiting for data", rank.data);
    add_intervals(
        bars, row + 1, "ov", "overlapped communication", rank.overlapped);
    add_intervals(bars, row + 1, "ex", "exposed communication", rank.exposed);
  }
  std::stable_sort(bars.begin(), bars.end(), [](const Bar& a, const Bar& b) {
    return std::pair(a.row, a.time.begin) < std::pair(b.row, b.time.begin);
  });
  return bars;
}

// The collectives themselves: outlines over the marks, each with its name.
std::vector<Bar> collectives_of(const std::vector<StepActivity>& ranks) {
  std::vector<Bar> bars;
  for (size_t i = 0; i < ranks.size(); ++i) {
    std::set<const Span*> seen;
    for (const auto& piece : ranks[i].pieces) {
      const Span& span = *piece.span;
      if (span.kind != SpanKind::communication) continue;
      if (!seen.insert(&span).second) continue;
      const Interval time = {span.begin_ns, span.end_ns};
      bars.push_back(
          {2 * static_cast<int>(i) + 1, "co", time, bar_title(span, time)});
    }
  }
  return bars;
}

// Joins neighbours of one colour that are at most `gap` apart.
std::vector<Bar> joined(const std::vector<Bar>& bars, int64_t gap) {
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
      into.joined += bar.joined;
      continue;
    }
    last[key] = last_of_row[bar.row] = result.size();
    result.push_back(bar);
  }
  return result;
}

std::vector<Bar> at_most(std::vector<Bar> bars, size_t count, int64_t range) {
  for (int64_t gap = range / 4000; bars.size() > count && gap < range;
       gap = 2 * gap + 1) {
    bars = joined(bars, gap);
    // Alternating colours do not join; the narrowest give way to the others.
    if (bars.size() > count) {
      std::erase_if(bars, [&](const Bar& bar) {
        return bar.time.end - bar.time.begin < gap;
      });
    }
  }
  return bars;
}

class Drawing {
 public:
  Drawing(Markup& page, const LanesPicture& picture)
      : page_(page), picture_(picture), rows_(rows_for(picture.ranks)) {
    range_ = picture.ranks.front().window;
    for (const auto& rank : picture.ranks) {
      range_.begin = std::min(range_.begin, rank.window.begin);
      range_.end = std::max(range_.end, rank.window.end);
    }
    range_.end = std::max(range_.end, range_.begin + 1);
  }

  int height() const {
    return static_cast<int>(picture_.ranks.size()) * rows_.rank();
  }

  void draw() {
    draw_axis();
    const int64_t length = range_.end - range_.begin;
    auto bars = at_most(bars_of(picture_.ranks), picture_.max_bars, length);
    auto collectives =
        at_most(collectives_of(picture_.ranks), picture_.max_bars / 2, length);
    for (size_t i = 0; i < picture_.ranks.size(); ++i) {
      draw_rank(static_cast<int>(i), bars, collectives);
    }
  }

 private:
  std::string percent(int64_t time) const {
    const double share = static_cast<double>(time - range_.begin) /
                         static_cast<double>(range_.end - range_.begin);
    return coordinate(100 * std::clamp(share, 0.0, 1.0), 3) + "%";
  }

  void draw_axis() {
    const double seconds =
        1e-9 * static_cast<double>(range_.end - range_.begin);
    const auto bottom = std::to_string(height());
    const auto ticks = linear_ticks(0, seconds, 6);
    for (size_t i = 0; i < ticks.size(); ++i) {
      const double share = ticks[i] / seconds;
      const auto x = coordinate(100 * share, 3) + "%";
      page_.empty(
          "line", {{"class", "grid"},
                   {"x1", x},
                   {"x2", x},
                   {"y1", "-4"},
                   {"y2", bottom}});
      page_.leaf(
          "text",
          {{"class", i % 2 == 1 ? "tick minor" : "tick"},
           {"x", x},
           {"y", std::to_string(height() + 16)},
           {"text-anchor", share < 0.04   ? "start"
                           : share > 0.96 ? "end"
                                          : "middle"}},
          ticks[i] == 0 ? "0" : format_seconds(ticks[i]));
    }
  }

  void draw_rank(
      int index, const std::vector<Bar>& bars,
      const std::vector<Bar>& collectives) {
    const auto& rank = picture_.ranks[index];
    const int y = index * rows_.rank();
    page_.open(
        "g", {{"class", "rank"}, {"data-rank", std::to_string(rank.rank)}});
    const int label_y = y + std::max(rows_.compute - 4, 8);
    page_.leaf(
        "text",
        {{"class", "name"},
         {"x", "-8"},
         {"y", std::to_string(label_y)},
         {"text-anchor", "end"}},
        "rank " + std::to_string(rank.rank));
    draw_share(rank, y);
    draw_bar({2 * index, "idle", rank.window, "idle"}, false);
    if (rows_.has_communication) {
      draw_bar({2 * index + 1, "idle", rank.window, "idle"}, false);
    }
    for (const auto& bar : bars) {
      if (bar.row / 2 == index) draw_bar(bar, true);
    }
    for (const auto& bar : collectives) {
      if (bar.row / 2 != index) continue;
      if (rows_.communication >= 8) draw_cut(bar);
      draw_bar(bar, true);
    }
    page_.close();
  }

  void draw_share(const StepActivity& rank, int y) {
    if (!rows_.has_communication || rows_.communication < 11) return;
    const double share =
        static_cast<double>(total_length(rank.exposed)) /
        static_cast<double>(rank.window.end - rank.window.begin);
    page_.leaf(
        "text",
        {{"class", "share minor"},
         {"x", "-8"},
         {"y", std::to_string(y + rows_.rank() - rows_.gap)},
         {"text-anchor", "end"}},
        format_percent(share) + " exposed");
  }

  // Where a collective follows another without a pause.
  void draw_cut(const Bar& bar) {
    const int y = bar.row / 2 * rows_.rank() + rows_.compute + rows_.between;
    const auto x = percent(bar.time.begin);
    page_.empty(
        "line", {{"class", "cut"},
                 {"x1", x},
                 {"x2", x},
                 {"y1", std::to_string(y)},
                 {"y2", std::to_string(y + rows_.communication)}});
  }

  void draw_bar(const Bar& bar, bool titled) {
    const bool lower = bar.row % 2 == 1;
    const int y = bar.row / 2 * rows_.rank() +
                  (lower ? rows_.compute + rows_.between : 0);
    const double length = static_cast<double>(range_.end - range_.begin);
    const auto width = coordinate(
        100 * static_cast<double>(bar.time.end - bar.time.begin) / length, 3);
    const Markup::Attributes attributes = {
        {"class", bar.color},
        {"x", percent(bar.time.begin)},
        {"y", std::to_string(y)},
        {"width", width + "%"},
        {"height",
         std::to_string(lower ? rows_.communication : rows_.compute)}};
    if (!titled) {
      page_.empty("rect", attributes);
      return;
    }
    page_.open("rect", attributes);
    page_.leaf(
        "title", {},
        bar.joined == 1
            ? bar.title
            : std::to_string(bar.joined) + " spans, " + length_text(bar.time));
    page_.close();
  }

  Markup& page_;
  const LanesPicture& picture_;
  Rows rows_;
  Interval range_;
};

}  // namespace

void draw_lanes(Markup& page, const LanesPicture& picture) {
  if (picture.ranks.empty()) return;
  Drawing drawing(page, picture);
  page.open("figure", {{"class", "lanes"}, {"id", picture.id}});
  page.open("figcaption").leaf("h3", {}, picture.title).close();
  page.open("div", {{"class", "plot"}});
  page.open(
      "svg", {{"width", "100%"},
              {"height", std::to_string(drawing.height() + 22)},
              {"role", "img"},
              {"aria-labelledby", picture.id + "-t " + picture.id + "-d"}});
  page.leaf("title", {{"id", picture.id + "-t"}}, picture.title);
  page.leaf("desc", {{"id", picture.id + "-d"}}, picture.description);
  drawing.draw();
  page.close().close().close();
}

void draw_lanes_pattern(Markup& page) {
  page.open(
      "svg", {{"class", "defs"},
              {"width", "0"},
              {"height", "0"},
              {"aria-hidden", "true"}});
  page.open("defs").open(
      "pattern", {{"id", "hatch"},
                  {"width", "5"},
                  {"height", "5"},
                  {"patternUnits", "userSpaceOnUse"},
                  {"patternTransform", "rotate(45)"}});
  page.empty(
      "rect", {{"class", "hatch-ground"}, {"width", "5"}, {"height", "5"}});
  page.empty(
      "rect", {{"class", "hatch-line"}, {"width", "1.6"}, {"height", "5"}});
  page.close().close().close();
}

void draw_lanes_legend(Markup& page, const std::vector<StepActivity>& ranks) {
  std::set<std::string> used;
  for (const auto& bar : bars_of(ranks)) used.insert(bar.color);
  page.open("p", {{"class", "keys"}});
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
  page.close();
}

}  // namespace echelon
