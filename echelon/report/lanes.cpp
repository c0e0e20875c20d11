// A lane has two rows: computation and data wait, and below it communication,
// hatched where computation hides it and solid where it is exposed. The bars
// are the intervals of step_activities (overlap.h). When there are too many,
// bars of one colour that are closer than a quarter of a pixel are merged
// first. If that is not enough, cells replace the bars, each with the shares of
// its colours as heights, and the cells are doubled in width until they are few
// enough.
#include "echelon/report/lanes.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon::report {
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
  timeline::Interval time;
  std::string title;  // shown while pointed at
  int num_spans = 1;
  double low = 0;  // of the row's height, from below
  double high = 1;
};

struct Meaning {
  const char* color;
  const char* text;
};
constexpr Meaning kMeanings[] = {
    {"fw", "forward"},
    {"bw", "backward"},
    {"op", "optimizer"},
    {"ov", "communication, overlapped"},
    {"ex", "communication, exposed"},
    {"da", "waiting for data"},
    {"ot", "other"}};

std::string meaning_of(const std::string& color) {
  const auto* found = std::ranges::find(
      kMeanings, color,
      [](const Meaning& one) { return std::string(one.color); });
  return found == std::end(kMeanings) ? color : found->text;
}

const char* color_of(timeline::SpanKind kind) {
  return kind == timeline::SpanKind::forward     ? "fw"
         : kind == timeline::SpanKind::backward  ? "bw"
         : kind == timeline::SpanKind::optimizer ? "op"
                                                 : "ot";
}

Rows rows_for(const std::vector<Lane>& lanes) {
  Rows rows;
  if (lanes.size() > 16) {
    rows = {8, 6, 1, 4};
  } else if (lanes.size() > 8) {
    rows = {12, 8, 1, 8};
  }
  rows.has_communication = std::ranges::any_of(lanes, [](const Lane& lane) {
    return !lane.activity.communication.empty();
  });
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

std::vector<Bar> bars_of(const std::vector<Lane>& lanes) {
  std::vector<Bar> bars;
  for (size_t i = 0; i < lanes.size(); ++i) {
    const auto& rank = lanes[i].activity;
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
std::vector<Bar> collectives_of(const std::vector<Lane>& lanes) {
  std::vector<Bar> bars;
  for (size_t i = 0; i < lanes.size(); ++i) {
    std::set<const timeline::Span*> seen;
    for (const auto& piece : lanes[i].activity.pieces) {
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
  std::map<int, size_t> last_of_row;
  for (const auto& bar : bars) {
    const auto found = last_of_row.find(bar.row);
    if (found != last_of_row.end()) {
      Bar& last = result[found->second];
      if (last.color == bar.color && bar.time.begin - last.time.end <= gap) {
        last.time.end = std::max(last.time.end, bar.time.end);
        last.num_spans += bar.num_spans;
        last.title.clear();
        continue;
      }
    }
    last_of_row[bar.row] = result.size();
    result.push_back(bar);
  }
  return result;
}

// What a stretch of a row is spent on.
struct Cell {
  timeline::Interval time;
  std::map<std::string, double> spent;  // nanoseconds, by color
  std::map<std::string, int> spans;

  double share(const std::string& color) const {
    const auto found = spent.find(color);
    return found == spent.end()
               ? 0
               : found->second / static_cast<double>(time.end - time.begin);
  }
};

bool are_alike(const Cell& a, const Cell& b) {
  const auto differ = [&](const auto& part) {
    return std::abs(a.share(part.first) - b.share(part.first)) > 0.08;
  };
  return std::ranges::none_of(a.spent, differ) &&
         std::ranges::none_of(b.spent, differ);
}

// Cells of `width`, each with the time that the bars of one row take of it.
std::vector<Cell> cells_of(
    const std::vector<Bar>& bars, const timeline::Interval& range,
    int64_t width) {
  const auto count =
      static_cast<size_t>((range.end - range.begin + width - 1) / width);
  std::vector<Cell> cells(count);
  for (size_t i = 0; i < count; ++i) {
    const int64_t begin = range.begin + static_cast<int64_t>(i) * width;
    cells[i].time = {begin, std::min(begin + width, range.end)};
  }
  for (const Bar& bar : bars) {
    auto i = static_cast<size_t>((bar.time.begin - range.begin) / width);
    for (; i < count && cells[i].time.begin < bar.time.end; ++i) {
      const int64_t begin = std::max(bar.time.begin, cells[i].time.begin);
      const int64_t end = std::min(bar.time.end, cells[i].time.end);
      if (end <= begin) continue;
      cells[i].spent[bar.color] += static_cast<double>(end - begin);
      cells[i].spans[bar.color] += bar.num_spans;
    }
  }
  return cells;
}

// The colours of a cell one above the other, each as high as its share.
void add_stacked(std::vector<Bar>& bars, int row, const Cell& cell) {
  double low = 0;
  for (const auto& [color, spent] : cell.spent) {
    Bar bar{
        .row = row,
        .color = color,
        .time = cell.time,
        .num_spans = cell.spans.at(color)};
    bar.low = low;
    bar.high = std::min(1.0, low + cell.share(color));
    bar.title = format(
        "{}: {} of {}", meaning_of(color), format_percent(bar.high - bar.low),
        length_text(cell.time));
    low = bar.high;
    bars.push_back(std::move(bar));
  }
}

// Rows whose bars are too narrow to draw: cells of `width`, those that are
// alike put together, each with the shares of its colours as heights. So the
// area of a colour is the time that it took.
std::vector<Bar> stacked(
    const std::vector<Bar>& bars, const timeline::Interval& range,
    int64_t width) {
  std::map<int, std::vector<Bar>> rows;
  for (const Bar& bar : bars) rows[bar.row].push_back(bar);
  std::vector<Bar> result;
  for (const auto& [row, of_row] : rows) {
    std::vector<Cell> together;
    for (Cell& cell : cells_of(of_row, range, width)) {
      if (together.empty() || !are_alike(together.back(), cell)) {
        together.push_back(std::move(cell));
        continue;
      }
      Cell& last = together.back();
      last.time.end = cell.time.end;
      for (const auto& [color, spent] : cell.spent) last.spent[color] += spent;
      for (const auto& [color, n] : cell.spans) last.spans[color] += n;
    }
    for (const Cell& cell : together) add_stacked(result, row, cell);
  }
  return result;
}

// A thousandth of the range is about a pixel.
std::vector<Bar>
at_most(std::vector<Bar> bars, size_t count, const timeline::Interval& range) {
  const int64_t length = range.end - range.begin;
  if (bars.size() <= count) return bars;
  auto few = merged(bars, length / 4000);
  for (int64_t width = length / 500 + 1; few.size() > count && width < length;
       width *= 2) {
    // Each try starts from the bars: cells that were joined already would blur
    // the shares.
    few = stacked(bars, range, width);
  }
  return few;
}

// Outlines may cover pauses: they are seen only while pointed at.
std::vector<Bar>
outlines(std::vector<Bar> bars, size_t count, const timeline::Interval& range) {
  const int64_t length = range.end - range.begin;
  for (int64_t gap = length / 4000; bars.size() > count && gap < length;
       gap = 2 * gap + 1) {
    bars = merged(bars, gap);
  }
  return bars;
}

class LanesDrawing {
 public:
  LanesDrawing(Markup& page, const std::vector<Lane>& lanes, size_t max_bars)
      : page_(page),
        lanes_(lanes),
        max_bars_(max_bars),
        rows_(rows_for(lanes)),
        range_(lanes.front().activity.window) {
    for (const auto& lane : lanes) {
      const auto& window = lane.activity.window;
      range_.begin = std::min(range_.begin, window.begin);
      range_.end = std::max(range_.end, window.end);
    }
    range_.end = std::max(range_.end, range_.begin + 1);
  }

  int height() const { return static_cast<int>(lanes_.size()) * rows_.rank(); }

  void draw() {
    draw_axis();
    auto bars = at_most(bars_of(lanes_), max_bars_, range_);
    auto collectives = outlines(collectives_of(lanes_), max_bars_ / 2, range_);
    for (size_t i = 0; i < lanes_.size(); ++i) {
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
    const auto& rank = lanes_[index].activity;
    const int y = index * rows_.rank();
    page_.add(
        "<g class='rank' data-rank='{}'><text class='name' x='-8' y='{}' "
        "text-anchor='end'>{}</text>",
        rank.rank, y + std::max(rows_.compute - 4, 8), lanes_[index].name);
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
      if (rows_.communication >= 8 && bar.num_spans == 1) draw_seam(bar);
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
    const int top = bar.row / 2 * rows_.rank() +
                    (lower ? rows_.compute + rows_.between : 0);
    const int height = lower ? rows_.communication : rows_.compute;
    page_.add(
        "<rect class='{}' x='{}' y='{}' width='{}' height='{}'>", bar.color,
        percent(share(bar.time.begin)),
        coordinate(top + height * (1 - bar.high)),
        percent(
            static_cast<double>(bar.time.end - bar.time.begin) /
            static_cast<double>(range_.end - range_.begin)),
        coordinate(height * (bar.high - bar.low)));
    if (bar.num_spans > 1 && bar.title.empty()) {
      page_.add(
          "<title>{} spans, {}</title>", format_count(bar.num_spans),
          length_text(bar.time));
    } else if (!bar.title.empty()) {
      page_.add("<title>{}</title>", bar.title);
    }
    page_.add("</rect>");
  }

  Markup& page_;
  const std::vector<Lane>& lanes_;
  size_t max_bars_;
  Rows rows_;
  timeline::Interval range_;
};

std::string describe(const std::vector<Lane>& lanes) {
  std::string text = format(
      "Timeline with {} {}.", lanes.size(),
      lanes.size() == 1 ? "lane" : "lanes");
  const auto seconds = [](const timeline::Intervals& times) {
    return format_seconds(
        1e-9 * static_cast<double>(timeline::total_length(times)));
  };
  for (size_t i = 0; i < lanes.size() && i < 8; ++i) {
    const auto& activity = lanes[i].activity;
    text += format(
        " {}: computation {}, communication {}, {} of it exposed.",
        lanes[i].name, seconds(activity.compute),
        seconds(activity.communication), seconds(activity.exposed));
  }
  return text;
}

bool are_equal(
    const timeline::StepActivity& a, const timeline::StepActivity& b) {
  const auto same = [](const timeline::Piece& x, const timeline::Piece& y) {
    return x.time == y.time && x.span->kind == y.span->kind &&
           x.span->name == y.span->name;
  };
  return a.window == b.window && a.exposed == b.exposed &&
         a.overlapped == b.overlapped && a.data == b.data &&
         std::ranges::equal(a.pieces, b.pieces, same);
}

}  // namespace

void add_ranks(
    std::vector<int32_t>& ranks, int32_t rank,
    const std::vector<int32_t>& classes) {
  const auto at = static_cast<size_t>(rank);
  for (size_t other = 0; other < classes.size(); ++other) {
    if (at < classes.size() && classes[other] == classes[at]) {
      ranks.push_back(static_cast<int32_t>(other));
    }
  }
  ranks.push_back(rank);
  std::ranges::sort(ranks);
  const auto [first, last] = std::ranges::unique(ranks);
  ranks.erase(first, last);
}

std::string ranks_text(const std::vector<int32_t>& ranks) {
  if (ranks.size() == 1) return format("rank {}", ranks.front());
  const auto others = static_cast<int32_t>(ranks.size()) - 1;
  if (ranks.back() - ranks.front() == others) {
    return format("ranks {}\u2013{}", ranks.front(), ranks.back());
  }
  return format("rank {} + {}", ranks.front(), format_count(others));
}

std::vector<Lane> lanes_of(
    const std::vector<timeline::StepActivity>& ranks,
    const std::vector<int32_t>& classes) {
  std::vector<Lane> lanes;
  for (const auto& activity : ranks) {
    const auto found = std::ranges::find_if(lanes, [&](const Lane& lane) {
      return are_equal(lane.activity, activity);
    });
    Lane& lane = found == lanes.end()
                     ? lanes.emplace_back(Lane{{}, {}, activity})
                     : *found;
    add_ranks(lane.ranks, activity.rank, classes);
  }
  for (Lane& lane : lanes) lane.name = ranks_text(lane.ranks);
  return lanes;
}

void draw_lanes(
    Markup& page, const std::string& id, const std::string& title,
    const std::vector<Lane>& lanes, size_t max_bars) {
  if (lanes.empty()) return;
  LanesDrawing drawing(page, lanes, max_bars);
  page.add(
      "<figure class='lanes' id='{}'><figcaption><h3>{}</h3></figcaption><div "
      "class='plot'>",
      id, title);
  open_svg(page, id, drawing.height() + 22, title, describe(lanes));
  drawing.draw();
  page.add("</svg></div></figure>");
}

void draw_lanes_legend(Markup& page, const std::vector<Lane>& lanes) {
  std::set<std::string> used;
  for (const auto& bar : bars_of(lanes)) used.insert(bar.color);
  page.add("<p class='keys'>");
  for (const auto& [color, text] : kMeanings) {
    if (used.contains(color)) draw_key(page, color, text);
  }
  draw_key(page, "idle", "idle");
  page.add("</p>");
}

}  // namespace echelon::report
