#include "echelon/report/pipeline_picture.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <tuple>

#include "echelon/report/page.h"
#include "echelon/report/series.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

// Pixels of a plot at page widths of 400, 800 and 1200; a number is drawn from
// the first width on at which it fits.
constexpr double kPlotWidths[] = {292, 640, 950};
constexpr const char* kFits[] = {"n", "n m", "n l"};
constexpr int kNumShades = 4;
constexpr size_t kMaxTitles = 600;  // beyond, the script shows them
constexpr double kTolerance = 1e-6;

struct Sizes {
  int row = 28;
  int gap = 6;
  int strip = 5;  // transfers, below the blocks
};

Sizes sizes_for(size_t num_rows) {
  if (num_rows <= 8) return {};
  if (num_rows <= 16) return {19, 5, 4};
  if (num_rows <= 32) return {12, 4, 2};
  return {8, 2, 1};
}

bool is_transfer(const PipelineBlock& block) {
  return block.kind == BlockKind::transfer;
}

const char* kind_text(BlockKind kind) {
  switch (kind) {
    case BlockKind::forward:
      return "forward";
    case BlockKind::backward:
      return "backward";
    case BlockKind::backward_input:
      return "backward for inputs";
    case BlockKind::backward_weight:
      return "backward for weights";
    default:
      return "transfer";
  }
}

std::string time_text(double time, const std::string& unit) {
  if (unit.empty()) return format_seconds(time);
  return format_number(time) + " " + unit;
}

// A picture made ready to draw: cut to its limits, with times from 0.
struct Drawn {
  PipelinePicture picture;
  double makespan = 0;  // of all
  double bubble = 0;    // of all
  std::vector<double> busy;
  std::string cut;  // what was left out
};

void cut_rows(Drawn& drawn) {
  auto& [picture, makespan, bubble, busy, cut] = drawn;
  const size_t rows = picture.rows.size();
  if (rows <= kMaxPipelineRows) return;
  picture.rows.resize(kMaxPipelineRows);
  std::erase_if(picture.blocks, [](const PipelineBlock& block) {
    return block.row >= static_cast<int32_t>(kMaxPipelineRows);
  });
  cut = "the first " + std::to_string(kMaxPipelineRows) + " of " +
        format_count(static_cast<double>(rows)) + " rows";
}

// The first stretch of time with no more blocks than may be drawn.
double drawn_until(const PipelinePicture& picture, size_t max_blocks) {
  if (picture.blocks.size() <= max_blocks) {
    return std::numeric_limits<double>::infinity();
  }
  std::vector<double> begins;
  for (const auto& block : picture.blocks) begins.push_back(block.begin);
  std::nth_element(begins.begin(), begins.begin() + max_blocks, begins.end());
  return begins[max_blocks];
}

void cut_time(Drawn& drawn, double until) {
  std::erase_if(drawn.picture.blocks, [&](const PipelineBlock& block) {
    return block.begin >= until;
  });
  double end = 0;
  for (auto& block : drawn.picture.blocks) {
    block.end = std::min(block.end, until);
    end = std::max(end, block.end);
  }
  if (end < drawn.makespan * (1 - 1e-9)) {
    if (!drawn.cut.empty()) drawn.cut += ", ";
    drawn.cut += "the first " + unbroken(format_percent(end / drawn.makespan)) +
                 " of the time";
  }
}

Drawn drawn_of(const PipelinePicture& picture) {
  Drawn drawn{picture};
  auto& blocks = drawn.picture.blocks;
  const auto num_rows = static_cast<int32_t>(picture.rows.size());
  std::erase_if(blocks, [&](const PipelineBlock& block) {
    return block.row < 0 || block.row >= num_rows ||
           !std::isfinite(block.begin) || !std::isfinite(block.end) ||
           !(block.begin < block.end);
  });
  const double origin = first_begin(blocks);
  for (auto& block : blocks) {
    block.begin -= origin;
    block.end -= origin;
  }
  drawn.makespan = picture.makespan.value_or(makespan(blocks));
  drawn.bubble = picture.bubble.value_or(bubble_fraction(blocks, num_rows));
  drawn.busy = busy_times(blocks, num_rows);
  cut_rows(drawn);
  std::stable_sort(blocks.begin(), blocks.end(), [](auto& a, auto& b) {
    return std::pair(a.row, a.begin) < std::pair(b.row, b.begin);
  });
  return drawn;
}

std::string shortened(const std::string& name, size_t length) {
  if (name.size() <= length) return name;
  size_t end = length - 1;
  while (end > 0 && (static_cast<uint8_t>(name[end]) & 0xc0) == 0x80) --end;
  return name.substr(0, end) + "\u2026";
}

class Drawing {
 public:
  Drawing(Markup& page, const Drawn& drawn, double range, bool titled)
      : page_(page),
        drawn_(drawn),
        picture_(drawn.picture),
        sizes_(sizes_for(drawn.picture.rows.size())),
        range_(range),
        titled_(titled) {
    for (const auto& block : picture_.blocks) {
      num_chunks_ = std::max(num_chunks_, block.chunk + 1);
      has_transfers_ = has_transfers_ || is_transfer(block);
      if (!is_transfer(block)) end_ = std::max(end_, block.end);
    }
    if (!has_transfers_) sizes_.strip = 0;
    place_rows();
  }

  int height() const { return bottom_; }

  void draw() {
    draw_axis();
    size_t next = 0;
    for (size_t row = 0; row < picture_.rows.size(); ++row) {
      draw_heading(row);
      draw_row(row, next);
    }
    page_.empty(
        "line", {{"class", "cursor"},
                 {"x1", "0"},
                 {"x2", "0"},
                 {"y1", "-5"},
                 {"y2", std::to_string(bottom_)}});
  }

 private:
  bool begins_group(size_t row) const {
    const auto& rows = picture_.rows;
    return !picture_.groups.empty() &&
           (row == 0 || rows[row].group != rows[row - 1].group);
  }

  void place_rows() {
    for (size_t row = 0; row < picture_.rows.size(); ++row) {
      if (begins_group(row)) bottom_ += row == 0 ? 16 : 24;
      tops_.push_back(bottom_);
      bottom_ += sizes_.row + sizes_.strip + sizes_.gap;
    }
  }

  std::string percent(double time) const {
    return coordinate(100 * time / range_, 3) + "%";
  }

  void draw_axis() {
    for (const double tick : linear_ticks(0, range_, 8)) {
      const double share = tick / range_;
      page_.empty(
          "line", {{"class", "grid"},
                   {"x1", percent(tick)},
                   {"x2", percent(tick)},
                   {"y1", "-4"},
                   {"y2", std::to_string(bottom_)}});
      const auto index = std::llround(tick / linear_step());
      page_.leaf(
          "text",
          {{"class", index % 2 == 1 ? "tick minor" : "tick"},
           {"x", percent(tick)},
           {"y", std::to_string(bottom_ + 14)},
           {"text-anchor", share < 0.04   ? "start"
                           : share > 0.93 ? "end"
                                          : "middle"}},
          tick == 0               ? "0"
          : picture_.unit.empty() ? format_seconds(tick)
                                  : format_number(tick));
    }
  }

  double linear_step() const {
    const auto ticks = linear_ticks(0, range_, 8);
    return ticks.size() < 2 ? 1 : ticks[1] - ticks[0];
  }

  void draw_heading(size_t row) {
    if (!begins_group(row)) return;
    const auto group = static_cast<size_t>(picture_.rows[row].group);
    if (group >= picture_.groups.size()) return;
    page_.leaf(
        "text",
        {{"class", "heading"},
         {"x", "0"},
         {"y", std::to_string(tops_[row] - 5)}},
        shortened(picture_.groups[group], 40));
  }

  std::string idle_text(size_t row) const {
    const double whole = drawn_.makespan;
    const double idle =
        whole > 0 ? std::clamp(1 - drawn_.busy[row] / whole, 0.0, 1.0) : 0;
    return format_percent(idle) + " idle";
  }

  void draw_name(size_t row) {
    const auto& name = picture_.rows[row].name;
    const bool two_lines = sizes_.row >= 26;
    const int base = two_lines ? 11 : std::max(sizes_.row - 4, 8);
    if (sizes_.row < 12 && row % 2 == 1) return;  // too near to the one above
    page_.leaf(
        "text",
        {{"class", "name"},
         {"x", "-8"},
         {"y", std::to_string(base)},
         {"text-anchor", "end"}},
        shortened(name, 10));
    // Of all the time: a picture of the first part would show another share.
    if (!two_lines || !drawn_.cut.empty()) return;
    page_.leaf(
        "text",
        {{"class", "share"},
         {"x", "-8"},
         {"y", std::to_string(base + 14)},
         {"text-anchor", "end"}},
        idle_text(row));
  }

  void draw_row(size_t row, size_t& next) {
    const auto& info = picture_.rows[row];
    page_.open(
        "g",
        {{"class", "prow"},
         {"data-name", info.name},
         {"data-group", std::to_string(info.group)},
         {"transform", "translate(0 " + std::to_string(tops_[row]) + ")"}});
    draw_name(row);
    page_.empty(
        "rect", {{"class", "gap"},
                 {"width", percent(end_)},
                 {"height", std::to_string(sizes_.row)}});
    for (; next < picture_.blocks.size() &&
           static_cast<size_t>(picture_.blocks[next].row) == row;
         ++next) {
      draw_block(picture_.blocks[next]);
    }
    page_.close();
  }

  std::string class_of(const PipelineBlock& block) const {
    const int shade = num_chunks_ == 1
                          ? 0
                          : block.chunk * (kNumShades - 1) / (num_chunks_ - 1);
    std::string name(1, static_cast<char>(letter(block.kind) - 'A' + 'a'));
    return is_transfer(block) ? "pt" : "p" + name + std::to_string(shade);
  }

  std::string title_of(const PipelineBlock& block) const {
    std::string title = block.name;
    if (title.empty()) {
      title = kind_text(block.kind);
      if (block.microbatch >= 0) {
        title += " of microbatch " + std::to_string(block.microbatch);
      }
      if (block.stage >= 0) title += ", stage " + std::to_string(block.stage);
    }
    return title + ", " + time_text(block.end - block.begin, picture_.unit);
  }

  void draw_block(const PipelineBlock& block) {
    const bool transfer = is_transfer(block);
    if (transfer && sizes_.strip == 0) return;
    page_.open(
        "rect",
        {{"class", class_of(block)},
         {"x", percent(block.begin)},
         {"y", std::to_string(transfer ? sizes_.row + 1 : 0)},
         {"width", percent(block.end - block.begin)},
         {"height", std::to_string(transfer ? sizes_.strip : sizes_.row)},
         {"data-m", std::to_string(block.microbatch)},
         {"data-s", std::to_string(block.stage)}});
    if (titled_) page_.leaf("title", {}, title_of(block));
    page_.close();
    if (!transfer) draw_number(block);
  }

  void draw_number(const PipelineBlock& block) {
    const bool split = block.kind == BlockKind::backward_input ||
                       block.kind == BlockKind::backward_weight;
    std::string text;
    if (split || block.microbatch < 0) text = letter(block.kind);
    if (block.microbatch >= 0) text += std::to_string(block.microbatch);
    if (sizes_.row < 12) return;
    const double share = (block.end - block.begin) / range_;
    double needed = 4;
    for (const char c : text) needed += c <= '9' ? 6.8 : 11;
    for (size_t i = 0; i < std::size(kPlotWidths); ++i) {
      if (share * kPlotWidths[i] < needed) continue;
      const bool dark = block.kind == BlockKind::backward;
      page_.leaf(
          "text",
          {{"class", std::string(kFits[i]) + (dark ? " d" : "")},
           {"x", percent((block.begin + block.end) / 2)},
           {"y", std::to_string(sizes_.row / 2 + 4)},
           {"text-anchor", "middle"}},
          text);
      return;
    }
  }

  Markup& page_;
  const Drawn& drawn_;
  const PipelinePicture& picture_;
  Sizes sizes_;
  double range_;
  bool titled_;
  int num_chunks_ = 1;
  bool has_transfers_ = false;
  double end_ = 0;
  std::vector<int> tops_;
  int bottom_ = 0;
};

std::string description_of(const Drawn& drawn) {
  const auto& picture = drawn.picture;
  if (!picture.description.empty()) return picture.description;
  int32_t microbatches = 0;
  for (const auto& block : picture.blocks) {
    microbatches = std::max(microbatches, block.microbatch + 1);
  }
  std::string text = format_count(static_cast<double>(drawn.busy.size())) +
                     " rows of blocks in time";
  if (microbatches > 0) {
    text += ", one block for each pass of " + std::to_string(microbatches) +
            " microbatches";
  }
  return text + "; " + format_percent(drawn.bubble) + " of the time is idle.";
}

std::string steps_text(const Drawn& drawn, double range) {
  const auto steps = player_steps(drawn.picture.blocks);
  std::string text;
  for (const double moment : steps.moments) {
    if (!text.empty()) text += ' ';
    text += coordinate(100 * moment / range, 3);
  }
  return text;
}

void draw_picture(Markup& page, const Drawn& drawn, double range, bool titled) {
  const auto& picture = drawn.picture;
  page.open("figure", {{"class", "pipe"}, {"id", picture.id}});
  page.open("figcaption").leaf("h3", {}, picture.title);
  page.open("span", {{"class", "bubble"}})
      .text(picture.measure_name + " ")
      .leaf("b", {}, unbroken(format_percent(drawn.bubble)))
      .close();
  page.leaf(
      "span", {{"class", "now"}}, time_text(drawn.makespan, picture.unit));
  page.close();
  Drawing drawing(page, drawn, range, titled);
  page.open("div", {{"class", "plot"}});
  page.open(
      "svg", {{"width", "100%"},
              {"height", std::to_string(drawing.height() + 20)},
              {"role", "img"},
              {"aria-labelledby", picture.id + "-t " + picture.id + "-d"},
              {"data-steps", steps_text(drawn, range)},
              {"data-range", coordinate(range, 9)},
              {"data-unit", picture.unit}});
  page.leaf("title", {{"id", picture.id + "-t"}}, picture.title);
  page.leaf("desc", {{"id", picture.id + "-d"}}, description_of(drawn));
  drawing.draw();
  page.close().close();
  std::string note = picture.note;
  if (!drawn.cut.empty()) {
    if (!note.empty()) note += ' ';
    note += "Drawn: " + drawn.cut + "; the figures are of the whole.";
  }
  if (!note.empty()) page.leaf("p", {{"class", "note"}}, note);
  page.close();
}

// --- Legend and player -----------------------------------------------------

void draw_pattern(
    Markup& page, const std::string& id, const std::string& ground, bool dots) {
  page.open(
      "pattern", {{"id", id},
                  {"width", "6"},
                  {"height", "6"},
                  {"patternUnits", "userSpaceOnUse"},
                  {"patternTransform", dots ? "rotate(0)" : "rotate(45)"}});
  page.empty("rect", {{"class", ground}, {"width", "6"}, {"height", "6"}});
  if (dots) {
    page.empty(
        "circle", {{"class", "mark"}, {"cx", "3"}, {"cy", "3"}, {"r", "0.9"}});
  } else {
    page.empty("rect", {{"class", "mark"}, {"width", "1.3"}, {"height", "6"}});
  }
  page.close();
}

void draw_legend(Markup& page, const std::vector<Drawn>& all) {
  std::set<BlockKind> kinds;
  bool chunks = false;
  bool numbers = false;
  for (const auto& drawn : all) {
    for (const auto& block : drawn.picture.blocks) {
      kinds.insert(block.kind);
      chunks = chunks || block.chunk > 0;
      numbers = numbers || block.microbatch >= 0;
    }
  }
  page.open("p", {{"class", "keys"}});
  const std::tuple<BlockKind, const char*, const char*> keys[] = {
      {BlockKind::forward, "pf0", "forward"},
      {BlockKind::backward, "pb0", "backward"},
      {BlockKind::backward_input, "pi0", "backward for inputs"},
      {BlockKind::backward_weight, "pw0", "backward for weights"},
      {BlockKind::transfer, "pt", "transfer"}};
  for (const auto& [kind, color, text] : keys) {
    if (kinds.contains(kind)) draw_key(page, color, text);
  }
  draw_key(page, "gap", "idle");
  if (numbers) page.leaf("span", {{"class", "key"}}, "number: microbatch");
  if (chunks) {
    page.leaf("span", {{"class", "key"}}, "shade: stage of the row");
  }
  page.close();
}

void draw_player(
    Markup& page, const std::vector<Drawn>& all, size_t plays_first) {
  std::string ids;
  for (const auto& drawn : all) {
    ids += (ids.empty() ? "" : " ") + drawn.picture.id;
  }
  page.raw("<div class=\"player\" hidden ");
  page.raw("data-pictures=\"" + escape_markup(ids) + "\">");
  page.open("div", {{"class", "controls"}});
  const std::pair<const char*, const char*> buttons[] = {
      {"previous", "\u2039"}, {"play", "Play"}, {"next", "\u203a"}};
  for (const auto& [name, text] : buttons) {
    const std::string label = std::string(name) == "play"   ? "Play"
                              : std::string(name) == "next" ? "Next step"
                                                            : "Previous step";
    page.leaf(
        "button", {{"type", "button"}, {"class", name}, {"aria-label", label}},
        text);
  }
  page.raw(
      "<input type=\"range\" min=\"1\" max=\"1\" value=\"1\" "
      "aria-label=\"Step\">");
  page.open("output").close();
  if (all.size() > 1) {
    page.open("select", {{"aria-label", "What to play"}});
    for (size_t i = 0; i < all.size(); ++i) {
      const auto& picture = all[i].picture;
      page.raw("<option value=\"" + std::to_string(i) + "\"");
      page.raw(i == plays_first ? " selected>" : ">");
      page.text(
          picture.player_name.empty() ? picture.title : picture.player_name);
      page.raw("</option>");
    }
    page.close();
  }
  page.close();
  page.open(
      "div", {{"class", "scene"},
              {"tabindex", "0"},
              {"role", "region"},
              {"aria-label", "The devices at this step"}});
  page.close();
  page.raw("</div>");
}

}  // namespace

PlayerSteps player_steps(const std::vector<PipelineBlock>& blocks) {
  std::vector<std::pair<double, double>> work;
  double shortest = std::numeric_limits<double>::infinity();
  double end = 0;
  for (const auto& block : blocks) {
    if (is_transfer(block) || !(block.begin < block.end)) continue;
    work.emplace_back(block.begin, block.end);
    shortest = std::min(shortest, block.end - block.begin);
    end = std::max(end, block.end);
  }
  if (work.empty()) return {};
  std::sort(work.begin(), work.end());
  const auto fits = [&](double time) {
    const double slots = time / shortest;
    return std::abs(slots - std::round(slots)) < 1e-3;
  };
  const double origin = work.front().first;
  PlayerSteps steps;
  const auto slots = std::llround((end - origin) / shortest);
  steps.even =
      slots <= 4096 &&
      std::all_of(work.begin(), work.end(), [&](const auto& times) {
        return fits(times.first - origin) && fits(times.second - origin);
      });
  if (steps.even) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      steps.moments.push_back(
          origin + shortest * (static_cast<double>(slot) + 0.5));
    }
    return steps;
  }
  // Each step gathers the blocks that run side by side.
  double first_end = work.front().second;
  double last_begin = work.front().first;
  const auto finish = [&] {
    steps.moments.push_back(
        last_begin + 0.5 * std::min(first_end - last_begin, shortest));
  };
  for (const auto& [begin, block_end] : work) {
    if (begin >= first_end - kTolerance * (end - origin)) {
      finish();
      first_end = block_end;
    }
    first_end = std::min(first_end, block_end);
    last_begin = begin;
  }
  finish();
  return steps;
}

void draw_pipeline_patterns(Markup& page) {
  page.open(
      "svg", {{"class", "defs"},
              {"width", "0"},
              {"height", "0"},
              {"aria-hidden", "true"}});
  page.open("defs");
  for (int shade = 0; shade < kNumShades; ++shade) {
    const auto number = std::to_string(shade);
    draw_pattern(page, "stripes" + number, "gi" + number, false);
    draw_pattern(page, "dots" + number, "gw" + number, true);
  }
  draw_pattern(page, "gaps", "gg", false);
  page.close().close();
}

void draw_pipelines(
    Markup& page, const std::vector<PipelinePicture>& pictures,
    size_t plays_first, size_t max_blocks) {
  std::vector<Drawn> all;
  double until = std::numeric_limits<double>::infinity();
  for (const auto& picture : pictures) {
    Drawn drawn = drawn_of(picture);
    if (drawn.picture.blocks.empty()) continue;
    until = std::min(until, drawn_until(drawn.picture, max_blocks));
    all.push_back(std::move(drawn));
  }
  if (all.empty()) return;
  double range = 0;
  size_t count = 0;
  for (auto& drawn : all) {
    cut_time(drawn, until);
    count += drawn.picture.blocks.size();
    for (const auto& block : drawn.picture.blocks) {
      range = std::max(range, block.end);
    }
  }
  page.open("div", {{"class", "pipes"}});
  for (const auto& drawn : all) {
    draw_picture(page, drawn, range, count <= kMaxTitles);
  }
  draw_legend(page, all);
  draw_player(page, all, std::min(plays_first, all.size() - 1));
  page.close();
}

}  // namespace echelon
