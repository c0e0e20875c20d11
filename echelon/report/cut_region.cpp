#include "echelon/report/cut_region.h"

#include <algorithm>
#include <utility>

#include "echelon/report/cut_rectangle.h"
#include "echelon/text/units.h"

namespace echelon::detail {
namespace {

// The longest side of a region's matrices in pixels, and the least of any.
constexpr double kLongest = 190;
constexpr double kHighest = 130;
constexpr double kLeast = 44;
constexpr double kStateWidth = 64;  // of X, Y and Z
constexpr double kStateHeight = 72;

int64_t total(const std::vector<IndexRange>& pieces) {
  int64_t sum = 0;
  for (const auto& piece : pieces) sum += piece.size();
  return sum;
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
      const bool outputs =
          region.rows.empty() &&
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

RegionCosts costs_of(const RegionContext& context, const CutRegion& region) {
  RegionCosts result;
  const auto layers = static_cast<double>(context.block.layers.size());
  for (const auto& cost : context.costs) {
    const Place place = place_of(region, cost.label, context.cut.cuts_tokens);
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
  const bool sends = !forward.operation.empty() || !backward.operation.empty();
  page.open("div", {{"class", sends ? "cut-op sends" : "cut-op"}});
  draw_pass(page, "forward \u2192", forward);
  draw_pass(page, "backward \u2190", backward);
  page.close();
}

bool only_columns(const CutRegion* region) {
  return region != nullptr && region->rows.empty();
}

bool only_rows(const CutRegion* region) {
  return region != nullptr && region->columns.empty() &&
         region->rows.front().cut == MatrixCut::rows;
}

void draw_enter(
    Markup& page, const RegionContext& context, const RegionCosts& costs) {
  if (context.cut.cuts_tokens) {
    draw_transfers(
        page, {"all-gather", "of the tokens", costs.enter_forward},
        {"all-gather, reduce-scatter",
         "of the tokens again, of X\u2019s gradient", costs.enter_backward});
  } else {
    const Transfer nothing = {"", "nothing: X is data", {}};
    draw_transfers(
        page, {"", "nothing is sent", {}},
        context.input_is_data
            ? nothing
            : Transfer{
                  "all-reduce", "of X\u2019s gradient", costs.enter_backward});
  }
}

void draw_leave(
    Markup& page, const RegionContext& context, const CutRegion& region,
    const RegionCosts& costs) {
  if (only_columns(&region) && only_rows(context.after)) {
    draw_transfers(
        page, {"", "nothing: Y stays cut", {}}, {"", "nothing is sent", {}});
  } else if (region.rows.empty() && context.is_last) {
    draw_transfers(
        page, {"all-gather", "of three numbers a token", costs.leave_forward},
        {"", "nothing is sent", {}});
  } else if (region.rows.empty()) {
    draw_transfers(
        page, {"all-gather", "of Y", costs.leave_forward},
        {"", "each rank takes its part", {}});
  } else if (context.cut.cuts_tokens) {
    draw_transfers(
        page, {"reduce-scatter", "of the sums", costs.leave_forward},
        {"all-gather", "of Z\u2019s gradient", costs.leave_backward});
  } else {
    draw_transfers(
        page, {"all-reduce", "of the sums", costs.leave_forward},
        {"", "nothing is sent", {}});
  }
}

// --- X, A, Y, B, Z
// ------------------------------------------------------------

void draw_sign(Markup& page, const char* sign) {
  if (*sign == '\0') return;
  page.leaf("span", {{"class", "cut-times"}}, sign);
}

// `sign` stands before it, and stays with it where lines break.
void draw_item(
    Markup& page, const char* sign, const Rectangle& rectangle,
    const std::string& name, const std::vector<std::string>& lines) {
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
    Markup& page, const RegionContext& context, const std::string& id,
    const std::string& name, const std::string& features,
    bool may_be_cut = true) {
  const TensorCut& cut = context.cut;
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
    Markup& page, const char* sign, const std::string& id,
    const std::string& name, const Pieces& pieces, int64_t size,
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
  const bool fused = m.cut == MatrixCut::columns &&
                     std::all_of(
                         m.pieces.begin(), m.pieces.end(),
                         [](const auto& pieces) { return pieces.size() == 3; });
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
    Markup& page, const char* sign, const CutMatrix& m, const std::string& name,
    const std::string& letter, const std::string& id, const Scale& scale) {
  Rectangle r{.id = id, .title = name + ", " + cut_text(m)};
  r.vertical = m.cut == MatrixCut::columns;
  r.size = m.cut_size();
  r.pieces = m.pieces;
  r.width = scale.length(m.outputs, kLongest);
  r.height = scale.length(m.inputs, kHighest);
  r.groups = group_names(m);
  std::string size = size_text(m.inputs, m.outputs);
  for (const int64_t side : m.kernel) size += " \u00d7 " + format_count(side);
  auto lines = part_lines(m);
  r.description = size;
  for (const auto& line : lines) r.description += ", " + line;
  lines.insert(lines.begin(), size + ", " + cut_text(m));
  if (on_several_ranks(m)) lines.emplace_back("some parts on several ranks");
  draw_item(page, sign, r, letter + "\u2002" + name, lines);
}

std::string subscripted(const char* letter, int64_t index) {
  constexpr const char* kDigits[] = {"\u2080", "\u2081", "\u2082", "\u2083",
                                     "\u2084", "\u2085", "\u2086", "\u2087",
                                     "\u2088", "\u2089"};
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

std::string
own_name(const CutMatrix& m, const CutRegion& region, const CutBlock& block) {
  if (m.name.empty()) {
    const auto& layer = block.layers.front();
    return layer.substr(layer.rfind('.') + 1);
  }
  const bool inside = !region.name.empty() && m.name != region.name;
  return inside ? m.name.substr(region.name.size() + 1) : m.name;
}

std::string features_text(const CutMatrix& m) {
  return format_count(m.inputs) +
         (m.kernel.empty() ? " features" : " channels");
}

void draw_columns(
    Markup& page, const RegionContext& context, const CutRegion& region,
    const RegionCosts& costs, const std::string& id) {
  const Scale scale = scale_of(region);
  draw_state(
      page, context, id + "-x", "X", features_text(region.columns.front()));
  draw_enter(page, context, costs);
  for (size_t i = 0; i < region.columns.size(); ++i) {
    const CutMatrix& m = region.columns[i];
    draw_matrix(
        page, i == 0 ? "\u00d7" : "", m, own_name(m, region, context.block),
        "A", id + "-a" + std::to_string(i), scale);
  }
  if (region.rows.empty()) {
    const CutMatrix& m = region.columns.front();
    draw_features(
        page, "=", id + "-y", "Y", m.pieces, m.outputs,
        format_count(m.outputs) + (context.is_last ? " words" : " features"));
  }
}

void draw_rows(
    Markup& page, const RegionContext& context, const CutRegion& region,
    const RegionCosts& costs, const std::string& id) {
  const Scale scale = scale_of(region);
  if (only_rows(&region) && !only_columns(context.before)) {
    draw_state(
        page, context, id + "-w", "X", features_text(region.rows.front()));
    draw_transfers(
        page, {"", "each rank takes its part", {}},
        {"all-gather", "of X\u2019s gradient", costs.leave_backward});
  }
  for (size_t i = 0; i < region.rows.size(); ++i) {
    const CutMatrix& m = region.rows[i];
    const std::string own = id + "-b" + std::to_string(i);
    const bool words = m.cut == MatrixCut::vocabulary;
    if (words) {
      draw_state(page, context, own + "-x", "X", "numbers of words", false);
    } else {
      draw_features(
          page, region.columns.empty() ? "" : "=", own + "-y",
          region.columns.empty() ? "X" : "Y", m.pieces, m.inputs,
          features_text(m));
    }
    draw_matrix(
        page, "\u00d7", m, own_name(m, region, context.block),
        words ? "E" : "B", own, scale);
  }
}

}  // namespace

void draw_region(
    Markup& page, const CutRegion& region, const RegionContext& context) {
  const std::string& id = context.id;
  const RegionCosts costs = costs_of(context, region);
  page.open("div", {{"class", "cut-region"}});
  page.open("p", {{"class", "cut-formula"}});
  const auto& layer = context.block.layers.front();
  page.leaf(
      "b", {},
      region.name.empty() ? layer.substr(layer.rfind('.') + 1) : region.name);
  page.leaf("i", {}, formula(region, context.cut.ranks)).close();
  page.open("div", {{"class", "cut-flow"}});
  if (!region.columns.empty()) {
    draw_columns(page, context, region, costs, id);
  }
  draw_rows(page, context, region, costs, id);
  page.open("div", {{"class", "cut-signed"}});
  if (!region.rows.empty()) draw_sign(page, "=");
  draw_leave(page, context, region, costs);
  if (!region.rows.empty()) {
    const CutMatrix& m = region.rows.back();
    draw_state(
        page, context, id + "-z", "Z",
        format_count(m.outputs) +
            (m.kernel.empty() ? " features" : " channels"));
  }
  page.close().close().close();
}

}  // namespace echelon::detail
