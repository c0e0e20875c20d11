#include "echelon/timeline/tensor_section.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>

#include "echelon/timeline/collectives.h"
#include "echelon/timeline/page.h"
#include "echelon/timeline/units.h"

namespace echelon {
namespace {

constexpr int kNumColors = 8;
// The longest side of a region's matrices in pixels, and the least of any.
constexpr double kLongest = 190;
constexpr double kHighest = 130;
constexpr double kLeast = 44;
constexpr double kStateWidth = 64;   // of X, Y and Z
constexpr double kStateHeight = 72;
constexpr double kGroupText = 15;    // above a matrix with several ranges
constexpr size_t kMaxStripes = 1200;  // of all pictures
constexpr size_t kMaxBlocks = 12;
constexpr size_t kMaxNames = 12;
constexpr double kCharWidth = 6.6;   // of 11 px text, at most

std::string color_of(int64_t rank) {
  return "k" + std::to_string(rank % kNumColors);
}

std::string count(int64_t value) {
  return format_count(static_cast<double>(value));
}

std::string size_text(int64_t a, int64_t b) {
  return count(a) + " \u00d7 " + count(b);
}

std::string joined(const std::vector<std::string>& names, const char* between) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kMaxNames; ++i) {
    text += (i == 0 ? "" : between) + names[i];
  }
  if (names.size() > kMaxNames) {
    text += between + std::to_string(names.size() - kMaxNames) + " more";
  }
  return text;
}

// "rank 0", "ranks 0, 1", "ranks 0–3".
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

int64_t total(const std::vector<IndexRange>& pieces) {
  int64_t sum = 0;
  for (const auto& piece : pieces) sum += piece.size();
  return sum;
}

// --- One rectangle with its parts -------------------------------------------

// A stretch of the side that is cut, and the ranks that have it.
struct Stretch {
  IndexRange range;
  std::vector<int64_t> ranks;
};

using Pieces = std::vector<std::vector<IndexRange>>;  // by rank

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

struct Rectangle {
  std::string id;
  std::string title;
  std::string description;
  double width = 0;
  double height = 0;
  bool vertical = true;  // stripes side by side; else one above the other
  int64_t size = 0;      // along the side that is cut
  Pieces pieces;         // none: whole, on every rank
  std::vector<std::string> groups;  // names of the ranges of each rank
};

bool fits(const std::string& text, double width, double height) {
  return kCharWidth * static_cast<double>(text.size()) + 6 <= width &&
         height >= 15;
}

void draw_text(
    Markup& page, const char* kind, double x, double y, const std::string& t) {
  page.leaf(
      "text",
      {{"class", kind}, {"x", coordinate(x, 1)}, {"y", coordinate(y, 1)}},
      t);
}

void draw_box(
    Markup& page,
    const std::string& color,
    double x,
    double y,
    double width,
    double height,
    const std::string& title) {
  page.open(
      "rect",
      {{"class", color},
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
    const std::string size = count(stretch.range.size());
    draw_box(
        page, color_of(stretch.ranks[i]), x, y, width, height,
        ranks_text(stretch.ranks) + ": " + count(stretch.range.begin) +
            " to " + count(stretch.range.end - 1) + ", " + size);
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
    const std::string with_size = r.groups[i] + " " + count(end - begin);
    const bool whole = fits(with_size, width, 20);
    const std::string text = whole ? with_size : r.groups[i].substr(0, 1);
    draw_text(page, "g", middle, 11, text);
  }
}

void draw_rectangle(Markup& page, const Rectangle& r) {
  const double top = r.groups.empty() ? 0 : kGroupText;
  const double height = r.height + top;
  page.open(
      "svg",
      {{"role", "img"},
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

// --- What a region is made of ------------------------------------------------

// Measured means of one layer and step.
struct Cost {
  double seconds = 0;
  double bytes = 0;
};

struct RegionCosts {
  Cost enter_forward;
  Cost enter_backward;
  Cost leave_forward;
  Cost leave_backward;
  bool any = false;
};

struct Drawing {
  const TensorCut& cut;
  const CutBlock& block;
  std::string id;  // of the block
  const CutRegion* before = nullptr;  // the last one of an earlier layer
  const CutRegion* after = nullptr;   // the first one of a later layer
  bool is_first = false;  // its input is data, which has no gradient
  bool is_last = false;   // its output goes into the loss
  std::vector<CollectiveCost> costs;  // of these layers, labels within a layer
};

// Whether the call of a label within a layer ("attn.c_attn input gradient")
// serves this region, and which of its ends.
enum class Place { elsewhere, enter, leave };

Place place_of(
    const CutRegion& region, const std::string& label, bool cuts_tokens) {
  const size_t space = label.find(' ');
  const std::string name = label.substr(0, space);
  const std::string what =
      space == std::string::npos ? "" : label.substr(space + 1);
  for (const auto& m : region.rows) {
    if (m.name == name) return Place::leave;
  }
  for (const auto& m : region.columns) {
    if (m.name == name) {
      const bool outputs = region.rows.empty() &&
                           (what == "loss" || (what == "gather" && !cuts_tokens));
      return outputs ? Place::leave : Place::enter;
    }
  }
  const bool part = name == region.name ||
                    (name.starts_with(region.name) && !region.name.empty() &&
                     name[region.name.size()] == '.');
  if (!part) return Place::elsewhere;
  const bool sums = what == "sum" || what == "scatter" || what == "loss";
  return sums || region.columns.empty() ? Place::leave : Place::enter;
}

RegionCosts costs_of(const Drawing& drawing, const CutRegion& region) {
  RegionCosts result;
  const auto layers = static_cast<double>(drawing.block.layers.size());
  for (const auto& cost : drawing.costs) {
    const Place place =
        place_of(region, cost.label, drawing.cut.cuts_tokens);
    if (place == Place::elsewhere) continue;
    const bool backward = cost.pass == "backward";
    Cost& to = place == Place::enter
                   ? (backward ? result.enter_backward : result.enter_forward)
                   : (backward ? result.leave_backward : result.leave_forward);
    to.seconds += cost.seconds / layers;
    to.bytes += cost.bytes / layers;
    result.any = true;
  }
  return result;
}

// A collective, and what it is for; an empty one sends nothing.
struct Transfer {
  std::string operation;
  std::string what;
  Cost cost;
};

void draw_pass(Markup& page, const char* arrow, const Transfer& transfer) {
  page.open("p").text(std::string(arrow) + "\u00a0");
  if (transfer.operation.empty()) {
    page.text(transfer.what).close();
    return;
  }
  page.leaf("b", {}, transfer.operation).text(" " + transfer.what);
  if (transfer.cost.seconds > 0) {
    const auto bytes = static_cast<int64_t>(transfer.cost.bytes + 0.5);
    page.open("span", {{"class", "cut-cost"}});
    page.text(format_seconds(transfer.cost.seconds));
    if (bytes > 0) page.text(", " + format_bytes(bytes));
    page.close();
  }
  page.close();
}

void draw_transfers(
    Markup& page, const Transfer& forward, const Transfer& backward) {
  const bool sends =
      !forward.operation.empty() || !backward.operation.empty();
  page.open("div", {{"class", sends ? "cut-op sends" : "cut-op"}});
  draw_pass(page, "forward \u2192", forward);
  draw_pass(page, "backward \u2190", backward);
  page.close();
}

// What stands before and after a region, in the order of computation.
struct Neighbours {
  bool begun_before = false;  // its input is cut already
  bool ends_after = false;    // its output stays cut
};

bool only_columns(const CutRegion* region) {
  return region != nullptr && region->rows.empty();
}

bool only_rows(const CutRegion* region) {
  return region != nullptr && region->columns.empty() &&
         region->rows.front().cut == MatrixCut::rows;
}

void draw_enter(
    Markup& page, const Drawing& drawing, const RegionCosts& costs) {
  if (drawing.cut.cuts_tokens) {
    draw_transfers(
        page,
        {"all-gather", "of the tokens", costs.enter_forward},
        {"reduce-scatter", "of X\u2019s gradient", costs.enter_backward});
  } else {
    const Transfer nothing = {"", "nothing: X is data", {}};
    draw_transfers(
        page,
        {"", "nothing is sent", {}},
        drawing.is_first
            ? nothing
            : Transfer{
                  "all-reduce", "of X\u2019s gradient", costs.enter_backward});
  }
}

void draw_leave(
    Markup& page,
    const Drawing& drawing,
    const CutRegion& region,
    const Neighbours& neighbours,
    const RegionCosts& costs) {
  if (neighbours.ends_after) {
    draw_transfers(
        page, {"", "nothing: Y stays cut", {}}, {"", "nothing is sent", {}});
  } else if (region.rows.empty() && drawing.is_last) {
    draw_transfers(
        page,
        {"all-reduce", "of the loss, some numbers a token", costs.leave_forward},
        {"", "nothing is sent", {}});
  } else if (region.rows.empty()) {
    draw_transfers(
        page,
        {"all-gather", "of Y", costs.leave_forward},
        {"", "each rank takes its part", {}});
  } else if (drawing.cut.cuts_tokens) {
    draw_transfers(
        page,
        {"reduce-scatter", "of the sums", costs.leave_forward},
        {"all-gather", "of Z\u2019s gradient", costs.leave_backward});
  } else {
    draw_transfers(
        page,
        {"all-reduce", "of the sums", costs.leave_forward},
        {"", "nothing is sent", {}});
  }
}

// --- X, A, Y, B, Z ------------------------------------------------------------

void draw_sign(Markup& page, const char* sign) {
  if (*sign == '\0') return;
  page.leaf("span", {{"class", "cut-times"}}, sign);
}

// `sign` stands before it, and stays with it where lines break.
void draw_item(
    Markup& page,
    const char* sign,
    const Rectangle& rectangle,
    const std::string& name,
    const std::vector<std::string>& lines) {
  page.open("div", {{"class", "cut-signed"}});
  draw_sign(page, sign);
  page.open("div", {{"class", "cut-item"}});
  page.leaf("p", {{"class", "what"}}, name);
  draw_rectangle(page, rectangle);
  for (const auto& line : lines) page.leaf("p", {}, line);
  page.close().close();
}

// Tokens and features of X or Z, which are whole or cut by tokens.
void draw_state(
    Markup& page,
    const Drawing& drawing,
    const std::string& id,
    const std::string& name,
    const std::string& features,
    bool may_be_cut = true) {
  const TensorCut& cut = drawing.cut;
  Rectangle r{
      .id = id, .title = name, .width = kStateWidth, .height = kStateHeight};
  r.vertical = false;
  std::vector<std::string> lines = {features};
  if (cut.cuts_tokens && may_be_cut) {
    r.size = std::max<int64_t>(cut.tokens, 0);
    const bool known = r.size > 0;
    if (!known) r.size = cut.ranks;
    for (int64_t rank = 0; rank < cut.ranks; ++rank) {
      r.pieces.push_back({even_range(r.size, rank, cut.ranks)});
    }
    lines.push_back("tokens cut");
    r.description = name + ": each rank holds some of the tokens";
  } else {
    lines.push_back("on every rank");
    r.description = name + ": whole, on every rank";
  }
  draw_item(page, "", r, name, lines);
}

// The features of Y that each rank has, all tokens.
void draw_features(
    Markup& page,
    const char* sign,
    const std::string& id,
    const std::string& name,
    const Pieces& pieces,
    int64_t size,
    const std::string& line) {
  Rectangle r{
      .id = id,
      .title = name,
      .description = name + ": each rank has some of the features",
      .width = kStateWidth,
      .height = kStateHeight,
      .size = size,
      .pieces = pieces};
  draw_item(page, sign, r, name, {line, "features cut"});
}

// "each rank 768 × 1,152", or a line for each size.
std::vector<std::string> part_lines(const CutMatrix& m) {
  std::vector<std::pair<int64_t, std::vector<int64_t>>> sizes;
  for (size_t rank = 0; rank < m.pieces.size(); ++rank) {
    const int64_t size = total(m.pieces[rank]);
    const auto same = std::find_if(
        sizes.begin(), sizes.end(), [&](auto& s) { return s.first == size; });
    auto& entry = same == sizes.end()
                      ? sizes.emplace_back(size, std::vector<int64_t>{})
                      : *same;
    entry.second.push_back(static_cast<int64_t>(rank));
  }
  std::vector<std::string> lines;
  for (const auto& [size, ranks] : sizes) {
    const std::string part = m.cut == MatrixCut::columns
                                 ? size_text(m.inputs, size)
                                 : size_text(size, m.outputs);
    lines.push_back(
        (sizes.size() == 1 ? "each rank" : ranks_text(ranks)) + ": " + part);
  }
  return lines;
}

bool on_several_ranks(const CutMatrix& m) {
  int64_t sum = 0;
  for (const auto& pieces : m.pieces) sum += total(pieces);
  return sum > m.cut_size();
}

// Three ranges a rank: a fused matrix of queries, keys and values.
std::vector<std::string> group_names(const CutMatrix& m) {
  const bool fused =
      m.cut == MatrixCut::columns &&
      std::all_of(m.pieces.begin(), m.pieces.end(), [](const auto& pieces) {
        return pieces.size() == 3;
      });
  return fused ? std::vector<std::string>{"Q", "K", "V"}
               : std::vector<std::string>{};
}

std::string cut_text(const CutMatrix& m) {
  switch (m.cut) {
    case MatrixCut::columns:
      return m.kernel.empty() ? "cut by columns" : "cut by output channels";
    case MatrixCut::rows:
      return m.kernel.empty() ? "cut by rows" : "cut by input channels";
    case MatrixCut::vocabulary:
      return "cut by words";
  }
  return "";
}

struct Scale {
  double pixels = 1;  // per row or column

  double length(int64_t size, double most) const {
    return std::clamp(pixels * static_cast<double>(size), kLeast, most);
  }
};

Scale scale_of(const CutRegion& region) {
  double most = 1;
  const auto look = [&](const CutMatrix& m) {
    most = std::max(most, static_cast<double>(m.outputs));
    most = std::max(most, static_cast<double>(m.inputs) * kLongest / kHighest);
  };
  std::for_each(region.columns.begin(), region.columns.end(), look);
  std::for_each(region.rows.begin(), region.rows.end(), look);
  return {kLongest / most};
}

void draw_matrix(
    Markup& page,
    const char* sign,
    const CutMatrix& m,
    const std::string& name,
    const std::string& letter,
    const std::string& id,
    const Scale& scale) {
  Rectangle r{.id = id, .title = name + ", " + cut_text(m)};
  r.vertical = m.cut == MatrixCut::columns;
  r.size = m.cut_size();
  r.pieces = m.pieces;
  r.width = scale.length(m.outputs, kLongest);
  r.height = scale.length(m.inputs, kHighest);
  r.groups = group_names(m);
  std::string size = size_text(m.inputs, m.outputs);
  for (const int64_t side : m.kernel) size += " \u00d7 " + count(side);
  auto lines = part_lines(m);
  r.description = size;
  for (const auto& line : lines) r.description += ", " + line;
  lines.insert(lines.begin(), size + ", " + cut_text(m));
  if (on_several_ranks(m)) lines.emplace_back("some parts on several ranks");
  draw_item(page, sign, r, letter + "\u2002" + name, lines);
}

std::string subscripted(const char* letter, int64_t index) {
  constexpr const char* kDigits[] = {
      "\u2080", "\u2081", "\u2082", "\u2083", "\u2084",
      "\u2085", "\u2086", "\u2087", "\u2088", "\u2089"};
  std::string text = letter;
  for (const char c : std::to_string(index)) text += kDigits[c - '0'];
  return text;
}

// "A₁ A₂ A₃", "A₁ … A₈"; parts are numbered from 1, as matrices are.
std::string
series(const char* letter, int64_t ranks, const std::string& between) {
  if (ranks > 3) {
    return subscripted(letter, 1) + between + "\u2026" + between +
           subscripted(letter, ranks);
  }
  std::string text;
  for (int64_t i = 1; i <= ranks; ++i) {
    text += (i == 1 ? "" : between) + subscripted(letter, i);
  }
  return text;
}

std::string products(const char* a, const char* b, int64_t ranks) {
  const auto product = [&](int64_t i) {
    return subscripted(a, i) + subscripted(b, i);
  };
  if (ranks > 3) return product(1) + " + \u2026 + " + product(ranks);
  std::string text;
  for (int64_t i = 1; i <= ranks; ++i) {
    text += (i == 1 ? "" : " + ") + product(i);
  }
  return text;
}

std::string formula(const CutRegion& region, int64_t ranks) {
  if (!region.rows.empty() &&
      region.rows.front().cut == MatrixCut::vocabulary) {
    return "Z = X E, E = [" + series("E", ranks, "; ") + "]";
  }
  std::string text;
  if (!region.columns.empty()) {
    text = "Y = X A, A = [" + series("A", ranks, " ") + "]";
  }
  if (!region.rows.empty()) {
    const char* input = text.empty() ? "X" : "Y";
    text += text.empty() ? "" : ",\u2003";
    text += "Z = " + products(input, "B", ranks) + ", B = [" +
            series("B", ranks, "; ") + "]";
  }
  return text;
}

std::string own_name(const CutMatrix& m, const CutRegion& region,
                     const CutBlock& block) {
  if (m.name.empty()) {
    const auto& layer = block.layers.front();
    return layer.substr(layer.rfind('.') + 1);
  }
  const bool inside = !region.name.empty() && m.name != region.name;
  return inside ? m.name.substr(region.name.size() + 1) : m.name;
}

std::string features_text(const CutMatrix& m) {
  return count(m.inputs) + (m.kernel.empty() ? " features" : " channels");
}

void draw_columns(
    Markup& page,
    const Drawing& drawing,
    const CutRegion& region,
    const RegionCosts& costs,
    const std::string& id) {
  const Scale scale = scale_of(region);
  draw_state(
      page, drawing, id + "-x", "X", features_text(region.columns.front()));
  draw_enter(page, drawing, costs);
  for (size_t i = 0; i < region.columns.size(); ++i) {
    const CutMatrix& m = region.columns[i];
    draw_matrix(
        page, i == 0 ? "\u00d7" : "", m, own_name(m, region, drawing.block), "A",
        id + "-a" + std::to_string(i), scale);
  }
  if (region.rows.empty()) {
    const CutMatrix& m = region.columns.front();
    draw_features(
        page, "=", id + "-y", "Y", m.pieces, m.outputs,
        count(m.outputs) + (drawing.is_last ? " words" : " features"));
  }
}

void draw_rows(
    Markup& page,
    const Drawing& drawing,
    const CutRegion& region,
    const Neighbours& neighbours,
    const RegionCosts& costs,
    const std::string& id) {
  const Scale scale = scale_of(region);
  if (only_rows(&region) && !neighbours.begun_before) {
    draw_state(
        page, drawing, id + "-w", "X", features_text(region.rows.front()));
    draw_transfers(
        page,
        {"", "each rank takes its part", {}},
        {"all-gather", "of X\u2019s gradient", costs.leave_backward});
  }
  for (size_t i = 0; i < region.rows.size(); ++i) {
    const CutMatrix& m = region.rows[i];
    const std::string own = id + "-b" + std::to_string(i);
    const bool words = m.cut == MatrixCut::vocabulary;
    if (words) {
      draw_state(page, drawing, own + "-x", "X", "numbers of words", false);
    } else {
      draw_features(
          page, region.columns.empty() ? "" : "=", own + "-y",
          region.columns.empty() ? "X" : "Y", m.pieces, m.inputs,
          features_text(m));
    }
    draw_matrix(
        page, "\u00d7", m, own_name(m, region, drawing.block), words ? "E" : "B", own,
        scale);
  }
}

void draw_region(
    Markup& page,
    const Drawing& drawing,
    const CutRegion& region,
    const Neighbours& neighbours,
    const std::string& id) {
  const RegionCosts costs = costs_of(drawing, region);
  page.open("div", {{"class", "cut-region"}});
  page.open("p", {{"class", "cut-formula"}});
  const auto& layer = drawing.block.layers.front();
  page.leaf(
      "b", {},
      region.name.empty() ? layer.substr(layer.rfind('.') + 1) : region.name);
  page.leaf("i", {}, formula(region, drawing.cut.ranks)).close();
  page.open("div", {{"class", "cut-flow"}});
  if (!region.columns.empty()) {
    draw_columns(page, drawing, region, costs, id);
  }
  draw_rows(page, drawing, region, neighbours, costs, id);
  page.open("div", {{"class", "cut-signed"}});
  if (!region.rows.empty()) draw_sign(page, "=");
  draw_leave(page, drawing, region, neighbours, costs);
  if (!region.rows.empty()) {
    const CutMatrix& m = region.rows.back();
    draw_state(
        page, drawing, id + "-z", "Z",
        count(m.outputs) + (m.kernel.empty() ? " features" : " channels"));
  }
  page.close().close().close();
}

// --- A layer, and the section --------------------------------------------------

// "transformer.h.0 to transformer.h.11" and "12 equal layers".
void draw_caption(Markup& page, const CutBlock& block, const std::string& id) {
  const auto n = block.layers.size();
  std::string title = block.layers.front();
  if (n == 2) title += ", " + block.layers.back();
  if (n > 2) title += " \u2026 " + block.layers.back();
  page.open("figcaption");
  page.leaf("h3", {{"id", id + "-title"}}, title);
  if (n > 1) {
    page.leaf(
        "span", {{"class", "now"}}, "\u00d7 " + std::to_string(n) +
                                        ", all cut alike");
  }
  page.close();
}

void draw_block(Markup& page, const Drawing& drawing) {
  const CutBlock& block = drawing.block;
  page.open("figure", {{"class", "cut-layer"}, {"id", drawing.id}});
  draw_caption(page, block, drawing.id);
  for (size_t i = 0; i < block.regions.size(); ++i) {
    const CutRegion& own = block.regions[i];
    const CutRegion* before = i > 0 ? &block.regions[i - 1] : drawing.before;
    const CutRegion* after =
        i + 1 < block.regions.size() ? &block.regions[i + 1] : drawing.after;
    draw_region(
        page, drawing, own,
        {.begun_before = only_columns(before) && only_rows(&own),
         .ends_after = only_columns(&own) && only_rows(after)},
        drawing.id + "-" + std::to_string(i));
  }
  if (!block.cut_vectors.empty()) {
    page.leaf(
        "p", {{"class", "cut-notes"}},
        "Cut with them: " + joined(block.cut_vectors, ", ") + ".");
  }
  if (!block.whole.empty()) {
    page.leaf(
        "p", {{"class", "cut-notes"}},
        "Whole on every rank: " + joined(block.whole, ", ") + ".");
  }
  page.close();
}

// The calls of these layers, with labels within a layer.
std::vector<CollectiveCost> costs_within(
    const std::vector<CollectiveCost>& all, const CutBlock& block) {
  std::vector<CollectiveCost> result;
  for (const auto& cost : all) {
    if (cost.axis != "tp") continue;
    for (const auto& layer : block.layers) {
      if (!cost.label.starts_with(layer)) continue;
      std::string rest = cost.label.substr(layer.size());
      if (!rest.empty() && rest[0] != '.' && rest[0] != ' ') continue;
      CollectiveCost own = cost;
      own.label = !rest.empty() && rest[0] == '.' ? rest.substr(1) : rest;
      result.push_back(std::move(own));
      break;
    }
  }
  return result;
}

// About how many rectangles the pictures of a block have.
size_t num_stripes(const CutBlock& block) {
  size_t count = 0;
  for (const auto& region : block.regions) {
    for (const auto* list : {&region.columns, &region.rows}) {
      for (const auto& m : *list) {
        for (const auto& pieces : m.pieces) count += pieces.size() + 1;
      }
    }
  }
  return count;
}

const CutRegion* first_region(const CutBlock& block) {
  return block.regions.empty() ? nullptr : &block.regions.front();
}

const CutRegion* last_region(const CutBlock& block) {
  return block.regions.empty() ? nullptr : &block.regions.back();
}

std::string share_text(const TensorCut& cut) {
  const auto held = held_shares(cut);
  const auto [least, most] = std::minmax_element(held.begin(), held.end());
  std::string text = format_percent(*least);
  if (format_percent(*most) != text) text += " to " + format_percent(*most);
  return text;
}

std::string lead_of(const TensorCut& cut) {
  const std::string ranks = std::to_string(cut.ranks);
  return "Each layer is computed by " + ranks +
         " ranks together; what has a rank\u2019s colour is on that rank. A "
         "rank holds " +
         share_text(cut) + " of the parameters. Between the layers " +
         (cut.cuts_tokens ? "each rank holds some of the tokens"
                          : "every rank holds all of the activations") +
         ".";
}

void draw_keys(Markup& page, const TensorCut& cut) {
  page.open("div", {{"class", "keys under"}});
  for (int64_t rank = 0; rank < cut.ranks && rank < kNumColors; ++rank) {
    draw_key(
        page, color_of(rank).c_str(), ("rank " + std::to_string(rank)).c_str());
  }
  draw_key(page, "kw", "on every rank");
  page.close();
}

}  // namespace

void draw_tensor_section(
    Markup& page,
    const TensorCut& cut,
    const Timeline& timeline,
    const Diagnosis& diagnosis) {
  if (cut.ranks < 2 || cut.layers.empty()) return;
  const auto blocks = cut_blocks(cut);
  const auto costs = collective_costs(timeline, diagnosis);
  page.open("section").leaf("h2", {}, "How the layers are cut");
  page.leaf("p", {{"class", "lead"}}, unbroken(lead_of(cut)));
  draw_keys(page, cut);
  std::vector<std::string> whole;
  size_t drawn = 0;
  size_t stripes = 0;
  size_t left_out = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const CutBlock& block = blocks[i];
    if (block.regions.empty()) {
      whole.insert(whole.end(), block.layers.begin(), block.layers.end());
      continue;
    }
    stripes += num_stripes(block);
    if (drawn > 0 && (drawn == kMaxBlocks || stripes > kMaxStripes)) {
      ++left_out;
      continue;
    }
    draw_block(
        page, {.cut = cut,
               .block = block,
               .id = "cut-" + std::to_string(drawn++),
               .before = i > 0 ? last_region(blocks[i - 1]) : nullptr,
               .after = i + 1 < blocks.size() ? first_region(blocks[i + 1])
                                              : nullptr,
               .is_first = i == 0,
               .is_last = block.layers.back() == cut.layers.back().name,
               .costs = costs_within(costs, block)});
  }
  if (!whole.empty()) {
    page.leaf(
        "p", {{"class", "note"}},
        "Layers that are whole on every rank: " + joined(whole, ", ") + ".");
  }
  if (left_out > 0) {
    page.leaf(
        "p", {{"class", "note"}},
        "Kinds of layers that are not drawn: " + std::to_string(left_out) +
            ".");
  }
  page.leaf(
      "p", {{"class", "note"}},
      "Parts are to scale along the side that is cut; the numbers in them are "
      "the rank and how many rows or columns it has. X, Y and Z have a row for "
      "each token. Times are means of one layer and step.");
  page.close();
}

}  // namespace echelon
