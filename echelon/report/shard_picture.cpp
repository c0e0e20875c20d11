// The sharded side of a matrix is cut at every begin and end of a rank's range.
// Each stretch between two cuts is held by the same ranks all along: one, or
// several that hold copies, which then divide the rectangle across its other
// side. So every rank's colour covers what it holds, and copies are seen as
// such. Matrices of one region share a scale.
#include "echelon/report/shard_picture.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>

#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon::report::detail {

std::string rank_color(int64_t rank) {
  return format("k{}", rank % kNumRankColors);
}

namespace {

// --- A tensor as a rectangle, each rank's shard in its colour ----------------

using Pieces = std::vector<std::vector<IndexRange>>;  // by rank

// `width` and `height` are pixels; shards are to scale along the side that is
// sharded.
struct Rectangle {
  std::string id;  // unique in the page
  std::string title;
  std::string description;
  double width = 0;
  double height = 0;
  bool vertical = true;  // stripes side by side; else one above the other
  int64_t size = 0;      // along the sharded side
  Pieces pieces;         // none: replicated
  std::vector<std::string> groups;  // names of the ranges of each rank
};

// "rank 0", "ranks 0, 1", "ranks 0–3".
std::string ranks_text(const std::vector<int64_t>& ranks) {
  const auto n = static_cast<int64_t>(ranks.size());
  if (n > 2 && ranks.back() - ranks.front() == n - 1) {
    return format("ranks {}\u2013{}", ranks.front(), ranks.back());
  }
  return format("{} {}", n == 1 ? "rank" : "ranks", join(ranks, ", "));
}

// "768 × 2,304".
std::string size_text(int64_t rows, int64_t columns) {
  return format_count(rows) + " \u00d7 " + format_count(columns);
}

constexpr double kGroupText = 15;   // above a matrix with several ranges
constexpr double kCharWidth = 6.6;  // of 11 px text, at most

// A stretch of the sharded side, and the ranks that hold it.
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
      const bool holds = std::ranges::any_of(pieces[rank], [&](auto piece) {
        return piece.begin <= *it && *it < piece.end;
      });
      if (holds) stretch.ranks.push_back(static_cast<int64_t>(rank));
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
  page.add(
      "<text class='{}' x='{}' y='{}'>{}</text>", kind, coordinate(x, 1),
      coordinate(y, 1), t);
}

void draw_box(
    Markup& page, const std::string& color, double x, double y, double width,
    double height, const std::string& title) {
  page.add(
      "<rect class='{}' x='{}' y='{}' width='{}' "
      "height='{}'><title>{}</title></rect>",
      color, x, y, width, height, title);
}

// The ranks that hold a stretch divide it among them across the other side.
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
        format(
            "{}: {} to {}, {}", ranks_text(stretch.ranks),
            format_count(stretch.range.begin),
            format_count(stretch.range.end - 1), size));
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

// Names range i of all ranks together: queries, keys or values.
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
    const bool fits_whole = fits(with_size, width, 20);
    draw_text(
        page, "g", middle, 11,
        fits_whole ? with_size : r.groups[i].substr(0, 1));
  }
}

// Ranges that several ranks hold are divided among them across the other side.
// Each part says its rank and its size where it has room.
void draw_rectangle(Markup& page, const Rectangle& r) {
  const double top = r.groups.empty() ? 0 : kGroupText;
  const double height = r.height + top;
  const auto w = coordinate(r.width, 0), h = coordinate(height, 0);
  page.add(
      "<svg role='img' aria-labelledby='{}-t {}-d' width='{}' height='{}' "
      "viewBox='0 0 {} {}'>",
      r.id, r.id, w, h, w, h);
  page.add(
      "<title id='{}-t'>{}</title><desc id='{}-d'>{}</desc>", r.id, r.title,
      r.id, r.description);
  if (r.pieces.empty()) {
    draw_box(page, "kw", 0, top, r.width, r.height, r.description);
  } else {
    draw_groups(page, r);
    for (const auto& stretch : stretches_of(r.pieces, r.size)) {
      draw_stretch(page, r, stretch, top);
    }
  }
  page.add("</svg>");
}

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

// --- Collectives ------------------------------------------------------------

// A collective and what it transfers; without an operation nothing is sent.
struct Transfer {
  std::string operation;
  std::string what;
  RegionCosts::Cost cost;
};

const Transfer kNothing = {"", "nothing is sent", {}};

void draw_pass(Markup& page, const char* arrow, const Transfer& transfer) {
  page.add("<p>{}\u00a0", arrow);
  if (transfer.operation.empty()) {
    page.add("{}</p>", transfer.what);
    return;
  }
  page.add("<b>{}</b> {}", transfer.operation, transfer.what);
  if (transfer.cost.seconds > 0) {
    const auto bytes = std::llround(transfer.cost.bytes);
    page.add(
        "<span class='shard-cost'>{}", format_seconds(transfer.cost.seconds));
    if (bytes > 0) page.add(", {}", format_bytes(bytes));
    page.add("</span>");
  }
  page.add("</p>");
}

bool only_columns(const ShardedRegion* region) {
  return region != nullptr && region->rows.empty();
}

bool only_rows(const ShardedRegion* region) {
  return region != nullptr && region->columns.empty() &&
         region->rows.front().sharded_by == ShardedBy::rows;
}

// "each rank 768 × 1,152", or a line for each size.
std::vector<std::string> part_lines(const ShardedMatrix& m) {
  struct Size {
    int64_t size;
    std::vector<int64_t> ranks = {};
  };
  std::vector<Size> sizes;
  for (size_t rank = 0; rank < m.pieces.size(); ++rank) {
    const int64_t size = total(m.pieces[rank]);
    auto same = std::ranges::find(sizes, size, &Size::size);
    if (same == sizes.end()) same = sizes.insert(same, {size});
    same->ranks.push_back(static_cast<int64_t>(rank));
  }
  std::vector<std::string> lines;
  for (const auto& [size, ranks] : sizes) {
    const std::string part = m.sharded_by == ShardedBy::columns
                                 ? size_text(m.inputs, size)
                                 : size_text(size, m.outputs);
    lines.push_back(
        (sizes.size() == 1 ? "each rank" : ranks_text(ranks)) + ": " + part);
  }
  return lines;
}

bool on_several_ranks(const ShardedMatrix& m) {
  int64_t sum = 0;
  for (const auto& pieces : m.pieces) sum += total(pieces);
  return sum > m.sharded_size();
}

// A matrix with three ranges for each rank fuses queries, keys and values.
std::vector<std::string> group_names(const ShardedMatrix& m) {
  const bool fused = m.sharded_by == ShardedBy::columns &&
                     std::ranges::all_of(m.pieces, [](const auto& pieces) {
                       return pieces.size() == 3;
                     });
  if (!fused) return {};
  return {"Q", "K", "V"};
}

std::string sharded_text(const ShardedMatrix& m) {
  if (m.sharded_by == ShardedBy::vocabulary) return "by vocabulary";
  const bool columns = m.sharded_by == ShardedBy::columns;
  if (m.kernel.empty()) return columns ? "by columns" : "by rows";
  return columns ? "by output channels" : "by input channels";
}

// Pixels for each row or column of the matrices.
double scale_of(const ShardedRegion& region) {
  double most = 1;
  for (const auto* list : {&region.columns, &region.rows}) {
    for (const auto& m : *list) {
      most = std::max(
          {most, static_cast<double>(m.outputs),
           static_cast<double>(m.inputs) * kLongest / kHighest});
    }
  }
  return kLongest / most;
}

std::string subscripted(const char* letter, int64_t index) {
  constexpr const char* kDigits[] = {"\u2080", "\u2081", "\u2082", "\u2083",
                                     "\u2084", "\u2085", "\u2086", "\u2087",
                                     "\u2088", "\u2089"};
  std::string text = letter;
  for (const char c : std::to_string(index)) text += kDigits[c - '0'];
  return text;
}

// "A₁ A₂ A₃", "A₁ … A₈": of one letter, or of the products of two. Shards are
// numbered from 1, as matrices are.
std::string series_of(
    std::initializer_list<const char*> letters, int64_t ranks,
    const std::string& between) {
  std::vector<std::string> terms;
  for (int64_t i = 1; i <= ranks; ++i) {
    terms.push_back(join(letters, "", [&](const char* letter) {
      return subscripted(letter, i);
    }));
  }
  if (ranks > 3) terms = {terms.front(), "\u2026", terms.back()};
  return join(terms, between);
}

std::string formula(const ShardedRegion& region, int64_t ranks) {
  if (!region.rows.empty() &&
      region.rows.front().sharded_by == ShardedBy::vocabulary) {
    return format("Z = X E, E = [{}]", series_of({"E"}, ranks, "; "));
  }
  std::vector<std::string> parts;
  if (!region.columns.empty()) {
    parts.push_back(format("Y = X A, A = [{}]", series_of({"A"}, ranks, " ")));
  }
  if (!region.rows.empty()) {
    parts.push_back(format(
        "Z = {}, B = [{}]",
        series_of({parts.empty() ? "X" : "Y", "B"}, ranks, " + "),
        series_of({"B"}, ranks, "; ")));
  }
  return join(parts, ",\u2003");
}

std::string own_name(
    const ShardedMatrix& m, const ShardedRegion& region,
    const ShardedBlock& block) {
  if (m.name.empty()) {
    const auto& layer = block.layers.front();
    return layer.substr(layer.rfind('.') + 1);
  }
  const bool inside = !region.name.empty() && m.name != region.name;
  return inside ? m.name.substr(region.name.size() + 1) : m.name;
}

std::string features_text(int64_t count, const ShardedMatrix& m) {
  return format(
      "{} {}{}", format_count(count), m.kernel.empty() ? "feature" : "channel",
      count == 1 ? "" : "s");
}

class RegionDrawing {
 public:
  RegionDrawing(
      Markup& page, const ShardedRegion& region, const RegionContext& context)
      : page_(page),
        region_(region),
        context_(context),
        id_(context.id),
        costs_(context.costs),
        scale_(scale_of(region)) {}

  void draw() {
    const auto& layer = context_.block.layers.front();
    page_.add(
        "<div class='shard-region'><p class='shard-formula'><b>{}</b>"
        "<i>{}</i></p><div class='shard-flow'>",
        region_.name.empty() ? layer.substr(layer.rfind('.') + 1)
                             : region_.name,
        formula(region_, context_.model.ranks));
    if (!region_.columns.empty()) draw_columns();
    draw_rows();
    page_.add("<div class='shard-signed'>");
    if (!region_.rows.empty()) draw_sign("=");
    draw_leave();
    if (!region_.rows.empty()) {
      const ShardedMatrix& m = region_.rows.back();
      draw_state(id_ + "-z", "Z", features_text(m.outputs, m));
    }
    page_.add("</div></div></div>");
  }

 private:
  void draw_transfers(const Transfer& forward, const Transfer& backward) {
    const bool sends =
        !forward.operation.empty() || !backward.operation.empty();
    page_.add("<div class='{}'>", sends ? "shard-op sends" : "shard-op");
    draw_pass(page_, "forward \u2192", forward);
    draw_pass(page_, "backward \u2190", backward);
    page_.add("</div>");
  }

  void draw_enter() {
    if (context_.model.shards_tokens) {
      draw_transfers(
          {"all-gather", "of the tokens", costs_.enter_forward},
          {"all-gather, reduce-scatter",
           "of the tokens again, of X\u2019s gradient", costs_.enter_backward});
    } else if (context_.input_is_data) {
      draw_transfers(kNothing, {"", "nothing: X is data", {}});
    } else {
      draw_transfers(
          kNothing,
          {"all-reduce", "of X\u2019s gradient", costs_.enter_backward});
    }
  }

  void draw_leave() {
    if (only_columns(&region_) && only_rows(context_.after)) {
      draw_transfers({"", "nothing: Y stays sharded", {}}, kNothing);
    } else if (region_.rows.empty() && context_.is_last) {
      draw_transfers(
          {"all-gather", "of three numbers a token", costs_.leave_forward},
          kNothing);
    } else if (region_.rows.empty()) {
      draw_transfers(
          {"all-gather", "of Y", costs_.leave_forward},
          {"", "each rank takes its part", {}});
    } else if (context_.model.shards_tokens) {
      draw_transfers(
          {"reduce-scatter", "of the sums", costs_.leave_forward},
          {"all-gather", "of Z\u2019s gradient", costs_.leave_backward});
    } else {
      draw_transfers(
          {"all-reduce", "of the sums", costs_.leave_forward}, kNothing);
    }
  }

  void draw_sign(const char* sign) {
    if (*sign != '\0') page_.add("<span class='shard-times'>{}</span>", sign);
  }

  // `sign` stands before the item and stays with it where lines break.
  void draw_item(
      const char* sign, const Rectangle& rectangle, const std::string& name,
      const std::vector<std::string>& lines) {
    page_.add("<div class='shard-signed'>");
    draw_sign(sign);
    page_.add("<div class='shard-item'><p class='what'>{}</p>", name);
    draw_rectangle(page_, rectangle);
    for (const auto& line : lines) page_.add("<p>{}</p>", line);
    page_.add("</div></div>");
  }

  // X or Z: replicated, or sharded by tokens.
  void draw_state(
      const std::string& id, const std::string& name,
      const std::string& features, bool may_be_sharded = true) {
    const TensorShards& model = context_.model;
    const bool sharded = model.shards_tokens && may_be_sharded;
    Rectangle r{
        .id = id,
        .title = name,
        .description = name + (sharded ? ": each rank holds some of the tokens"
                                       : ": replicated, on every rank"),
        .width = kStateWidth,
        .height = kStateHeight,
        .vertical = false};
    if (sharded) {
      r.size = model.tokens > 0 ? model.tokens : model.ranks;
      for (int64_t rank = 0; rank < model.ranks; ++rank) {
        r.pieces.push_back({even_range(r.size, rank, model.ranks)});
      }
    }
    draw_item(
        "", r, name, {features, sharded ? "tokens sharded" : "on every rank"});
  }

  // Y: each rank has some of the features of all tokens.
  void draw_features(
      const char* sign, const std::string& id, const std::string& name,
      const Pieces& pieces, int64_t size, const std::string& line) {
    draw_item(
        sign,
        {.id = id,
         .title = name,
         .description = name + ": each rank has some of the features",
         .width = kStateWidth,
         .height = kStateHeight,
         .size = size,
         .pieces = pieces},
        name, {line, "features sharded"});
  }

  void draw_matrix(
      const char* sign, const ShardedMatrix& m, const std::string& letter,
      const std::string& id) {
    const auto length = [&](int64_t size, double most) {
      return std::clamp(scale_ * static_cast<double>(size), kLeast, most);
    };
    const std::string name = own_name(m, region_, context_.block);
    std::string size = size_text(m.inputs, m.outputs);
    for (const int64_t side : m.kernel) size += " \u00d7 " + format_count(side);
    auto lines = part_lines(m);
    lines.insert(lines.begin(), size);
    const Rectangle rectangle{
        .id = id,
        .title = format("{}, {}", name, sharded_text(m)),
        .description = join(lines, ", "),
        .width = length(m.outputs, kLongest),
        .height = length(m.inputs, kHighest),
        .vertical = m.sharded_by == ShardedBy::columns,
        .size = m.sharded_size(),
        .pieces = m.pieces,
        .groups = group_names(m)};
    lines.front() += ", " + sharded_text(m);
    if (on_several_ranks(m)) lines.emplace_back("some parts on several ranks");
    draw_item(sign, rectangle, format("{}\u2002{}", letter, name), lines);
  }

  void draw_columns() {
    const ShardedMatrix& first = region_.columns.front();
    draw_state(id_ + "-x", "X", features_text(first.inputs, first));
    draw_enter();
    for (size_t i = 0; i < region_.columns.size(); ++i) {
      draw_matrix(
          i == 0 ? "\u00d7" : "", region_.columns[i], "A",
          format("{}-a{}", id_, i));
    }
    if (region_.rows.empty()) {
      draw_features(
          "=", id_ + "-y", "Y", first.pieces, first.outputs,
          format_count(first.outputs) +
              (context_.is_last ? " tokens" : " features"));
    }
  }

  void draw_rows() {
    if (only_rows(&region_) && !only_columns(context_.before)) {
      const ShardedMatrix& first = region_.rows.front();
      draw_state(id_ + "-w", "X", features_text(first.inputs, first));
      draw_transfers(
          {"", "each rank takes its part", {}},
          {"all-gather", "of X\u2019s gradient", costs_.leave_backward});
    }
    const bool alone = region_.columns.empty();
    for (size_t i = 0; i < region_.rows.size(); ++i) {
      const ShardedMatrix& m = region_.rows[i];
      const std::string own = format("{}-b{}", id_, i);
      const bool lookup = m.sharded_by == ShardedBy::vocabulary;
      if (lookup) {
        draw_state(own + "-x", "X", "token numbers", false);
      } else {
        draw_features(
            alone ? "" : "=", own + "-y", alone ? "X" : "Y", m.pieces, m.inputs,
            features_text(m.inputs, m));
      }
      draw_matrix("\u00d7", m, lookup ? "E" : "B", own);
    }
  }

  Markup& page_;
  const ShardedRegion& region_;
  const RegionContext& context_;
  const std::string& id_;
  const RegionCosts& costs_;
  double scale_;
};

}  // namespace

void draw_region(
    Markup& page, const ShardedRegion& region, const RegionContext& context) {
  RegionDrawing(page, region, context).draw();
}

}  // namespace echelon::report::detail
