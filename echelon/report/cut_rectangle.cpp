#include "echelon/report/cut_rectangle.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "echelon/text/units.h"

namespace echelon::detail {
namespace {

constexpr double kGroupText = 15;   // above a matrix with several ranges
constexpr double kCharWidth = 6.6;  // of 11 px text, at most

// A stretch of the side that is cut, and the ranks that have it.
struct Stretch {
  IndexRange range;
  std::vector<int64_t> ranks;
};

std::vector<Stretch> stretches_of(const Pieces& pieces, int64_t size) {
  std::set<int64_t> edges = {0, size};
  for (const auto& rank : pieces) {
    for (const auto& piece : rank) {
      edges.insert(piece.begin);
      edges.insert(piece.end);
    }
  }
  std::vector<Stretch> result;
  for (auto it = edges.begin(); std::next(it) != edges.end(); ++it) {
    Stretch stretch{{*it, *std::next(it)}, {}};
    for (size_t rank = 0; rank < pieces.size(); ++rank) {
      for (const auto& piece : pieces[rank]) {
        if (piece.begin <= *it && *it < piece.end) {
          stretch.ranks.push_back(static_cast<int64_t>(rank));
          break;
        }
      }
    }
    result.push_back(std::move(stretch));
  }
  return result;
}
bool fits(const std::string& text, double width, double height) {
  return kCharWidth * static_cast<double>(text.size()) + 6 <= width &&
         height >= 15;
}

void draw_text(
    Markup& page, const char* kind, double x, double y, const std::string& t) {
  page.leaf(
      "text",
      {{"class", kind}, {"x", coordinate(x, 1)}, {"y", coordinate(y, 1)}}, t);
}

void draw_box(
    Markup& page, const std::string& color, double x, double y, double width,
    double height, const std::string& title) {
  page.open(
      "rect", {{"class", color},
               {"x", coordinate(x)},
               {"y", coordinate(y)},
               {"width", coordinate(width)},
               {"height", coordinate(height)}});
  page.leaf("title", {}, title).close();
}

// Holders of one stretch share it out across the other side.
void draw_stretch(
    Markup& page, const Rectangle& r, const Stretch& stretch, double top) {
  const double length = r.vertical ? r.width : r.height;
  const double scale = length / static_cast<double>(r.size);
  const double begin = scale * static_cast<double>(stretch.range.begin);
  const double long_side = scale * static_cast<double>(stretch.range.size());
  const auto holders = static_cast<double>(stretch.ranks.size());
  const double short_side = (r.vertical ? r.height : r.width) / holders;
  for (size_t i = 0; i < stretch.ranks.size(); ++i) {
    const double across = short_side * static_cast<double>(i);
    const double x = r.vertical ? begin : across;
    const double y = top + (r.vertical ? across : begin);
    const double width = r.vertical ? long_side : short_side;
    const double height = r.vertical ? short_side : long_side;
    const std::string size = format_count(stretch.range.size());
    draw_box(
        page, rank_color(stretch.ranks[i]), x, y, width, height,
        ranks_text(stretch.ranks) + ": " + format_count(stretch.range.begin) +
            " to " + format_count(stretch.range.end - 1) + ", " + size);
    const std::string number = std::to_string(stretch.ranks[i]);
    const double cx = x + width / 2;
    const double cy = y + height / 2;
    if (fits(size, width, height - 16)) {
      draw_text(page, "n", cx, cy - 2, number);
      draw_text(page, "s", cx, cy + 11, size);
    } else if (fits(number, width, height)) {
      draw_text(page, "n", cx, cy + 4, number);
    }
  }
}

// Range i of all ranks together: queries, keys or values.
void draw_groups(Markup& page, const Rectangle& r) {
  for (size_t i = 0; i < r.groups.size(); ++i) {
    int64_t begin = r.size;
    int64_t end = 0;
    for (const auto& rank : r.pieces) {
      begin = std::min(begin, rank[i].begin);
      end = std::max(end, rank[i].end);
    }
    const double scale = r.width / static_cast<double>(r.size);
    const double width = scale * static_cast<double>(end - begin);
    const double middle = scale * static_cast<double>(begin + end) / 2;
    const std::string with_size = r.groups[i] + " " + format_count(end - begin);
    const bool whole = fits(with_size, width, 20);
    const std::string text = whole ? with_size : r.groups[i].substr(0, 1);
    draw_text(page, "g", middle, 11, text);
  }
}

}  // namespace

std::string rank_color(int64_t rank) {
  return "k" + std::to_string(rank % kNumRankColors);
}

std::string ranks_text(const std::vector<int64_t>& ranks) {
  const auto n = static_cast<int64_t>(ranks.size());
  std::string text = n == 1 ? "rank " : "ranks ";
  if (n > 2 && ranks.back() - ranks.front() == n - 1) {
    return text + std::to_string(ranks.front()) + "\u2013" +
           std::to_string(ranks.back());
  }
  for (int64_t i = 0; i < n; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

std::string size_text(int64_t rows, int64_t columns) {
  return format_count(rows) + " \u00d7 " + format_count(columns);
}

void draw_rectangle(Markup& page, const Rectangle& r) {
  const double top = r.groups.empty() ? 0 : kGroupText;
  const double height = r.height + top;
  page.open(
      "svg", {{"role", "img"},
              {"aria-labelledby", r.id + "-t " + r.id + "-d"},
              {"width", coordinate(r.width, 0)},
              {"height", coordinate(height, 0)},
              {"viewBox",
               "0 0 " + coordinate(r.width, 0) + " " + coordinate(height, 0)}});
  page.leaf("title", {{"id", r.id + "-t"}}, r.title);
  page.leaf("desc", {{"id", r.id + "-d"}}, r.description);
  if (r.pieces.empty()) {
    draw_box(page, "kw", 0, top, r.width, r.height, r.description);
  } else {
    draw_groups(page, r);
    for (const auto& stretch : stretches_of(r.pieces, r.size)) {
      draw_stretch(page, r, stretch, top);
    }
  }
  page.close();
}

}  // namespace echelon::detail
