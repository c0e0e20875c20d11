// Positions are per cent of the time axis in an SVG of the page's width, so
// that the picture follows the window without a script; only heights are
// pixels. A number is drawn if the block has room for it at one of three page
// widths, and style sheets hide it below that width. drawn_of() prepares a
// picture: it drops what cannot be drawn, moves the first begin to 0 and takes
// the figures of the whole before it limits rows and time, so that the figures
// stay those of all blocks.
#include "echelon/report/pipeline_page.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon::report {
namespace {

using Json = nlohmann::ordered_json;

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

bool is_transfer(const timeline::PipelineBlock& block) {
  return block.kind == timeline::BlockKind::transfer;
}

// 'f', 'b', 'i', 'w', 't': in the classes of assets/pipeline.css and in the
// data of assets/pipeline.js.
char kind_letter(timeline::BlockKind kind) {
  return static_cast<char>(timeline::letter(kind) - 'A' + 'a');
}

const char* kind_text(timeline::BlockKind kind) {
  constexpr const char* kTexts[] = {
      "forward", "backward", "backward for inputs", "backward for weights",
      "transfer"};
  return kTexts[static_cast<size_t>(kind)];
}

std::string time_text(double time, const std::string& unit) {
  if (unit.empty()) return format_seconds(time);
  return format_number(time) + " " + unit;
}

// A picture made ready to draw: within the limits, with times from 0.
struct DrawnPicture {
  PipelinePicture picture;
  double makespan = 0;  // of all
  double bubble = 0;    // of all
  std::vector<double> busy;
  std::string limited;  // what is drawn of it; empty: all
};

void limit_rows(DrawnPicture& drawn) {
  auto& picture = drawn.picture;
  const size_t rows = picture.rows.size();
  if (rows <= kMaxPipelineRows) return;
  // Whole pipelines, unless the first one has more rows.
  size_t most = kMaxPipelineRows;
  while (most > 0 && picture.rows[most].group == picture.rows[most - 1].group) {
    --most;
  }
  if (most == 0) most = kMaxPipelineRows;
  picture.rows.resize(most);
  std::erase_if(picture.blocks, [&](const timeline::PipelineBlock& block) {
    return block.row >= static_cast<int32_t>(most);
  });
  drawn.limited = format("the first {} of {} rows", most, format_count(rows));
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

void limit_time(DrawnPicture& drawn, double until) {
  std::erase_if(
      drawn.picture.blocks, [&](const timeline::PipelineBlock& block) {
        return block.begin >= until;
      });
  double end = 0;
  for (auto& block : drawn.picture.blocks) {
    block.end = std::min(block.end, until);
    end = std::max(end, block.end);
  }
  if (end < drawn.makespan * (1 - 1e-9)) {
    if (!drawn.limited.empty()) drawn.limited += ", ";
    drawn.limited += "the first " +
                     unbroken(format_percent(end / drawn.makespan)) +
                     " of the time";
  }
}

DrawnPicture drawn_of(const PipelinePicture& picture) {
  DrawnPicture drawn{picture};
  auto& blocks = drawn.picture.blocks;
  const auto num_rows = static_cast<int32_t>(picture.rows.size());
  std::erase_if(blocks, [&](const timeline::PipelineBlock& block) {
    return block.row < 0 || block.row >= num_rows ||
           !std::isfinite(block.begin) || !std::isfinite(block.end) ||
           !(block.begin < block.end);
  });
  const double origin = timeline::first_begin(blocks);
  for (auto& block : blocks) {
    block.begin -= origin;
    block.end -= origin;
  }
  drawn.makespan = picture.makespan.value_or(timeline::makespan(blocks));
  drawn.bubble =
      picture.bubble.value_or(timeline::bubble_fraction(blocks, num_rows));
  drawn.busy = timeline::busy_times(blocks, num_rows);
  limit_rows(drawn);
  std::ranges::stable_sort(
      blocks, {}, [](const timeline::PipelineBlock& block) {
        return std::pair(block.row, block.begin);
      });
  return drawn;
}

std::string shortened(const std::string& name, size_t length) {
  if (name.size() <= length) return name;
  size_t end = length - 1;
  while (end > 0 && (static_cast<uint8_t>(name[end]) & 0xc0) == 0x80) --end;
  return name.substr(0, end) + "\u2026";
}

bool begins_group(const PipelinePicture& picture, size_t row) {
  const auto& rows = picture.rows;
  return static_cast<size_t>(rows[row].group) < picture.groups.size() &&
         (row == 0 || rows[row].group != rows[row - 1].group);
}

std::string heading_of(const PipelinePicture& picture, size_t row) {
  return shortened(
      picture.groups[static_cast<size_t>(picture.rows[row].group)], 40);
}

class PipelineDrawing {
 public:
  PipelineDrawing(
      Markup& page, const DrawnPicture& drawn, double range, bool titled)
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
    draw_time_axis(
        page_, range_, 8, bottom_, 14,
        picture_.unit.empty() ? format_seconds : format_number);
    size_t next = 0;
    for (size_t row = 0; row < picture_.rows.size(); ++row) {
      draw_heading(row);
      draw_row(row, next);
    }
    page_.add("<line class='cursor' x1='0' x2='0' y1='-5' y2='{}'/>", bottom_);
  }

 private:
  void place_rows() {
    for (size_t row = 0; row < picture_.rows.size(); ++row) {
      if (begins_group(picture_, row)) bottom_ += row == 0 ? 16 : 24;
      tops_.push_back(bottom_);
      bottom_ += sizes_.row + sizes_.strip + sizes_.gap;
    }
  }

  std::string percent(double time) const {
    return coordinate(100 * time / range_, 3) + "%";
  }

  void draw_heading(size_t row) {
    if (!begins_group(picture_, row)) return;
    page_.add(
        "<text class='heading' x='0' y='{}'>{}</text>", tops_[row] - 5,
        heading_of(picture_, row));
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
    page_.add(
        "<text class='name' x='-8' y='{}' text-anchor='end'>{}</text>", base,
        shortened(name, 10));
    // The share is of all the time; a first part alone would show another one.
    if (!two_lines || !drawn_.limited.empty()) return;
    page_.add(
        "<text class='share' x='-8' y='{}' text-anchor='end'>{}</text>",
        base + 14, idle_text(row));
  }

  void draw_row(size_t row, size_t& next) {
    page_.add("<g class='prow' transform='translate(0 {})'>", tops_[row]);
    draw_name(row);
    page_.add(
        "<rect class='gap' width='{}' height='{}'/>", percent(end_),
        sizes_.row);
    for (; next < picture_.blocks.size() &&
           static_cast<size_t>(picture_.blocks[next].row) == row;
         ++next) {
      draw_block(picture_.blocks[next]);
    }
    page_.add("</g>");
  }

  std::string class_of(const timeline::PipelineBlock& block) const {
    const int shade = num_chunks_ == 1
                          ? 0
                          : block.chunk * (kNumShades - 1) / (num_chunks_ - 1);
    return is_transfer(block) ? "pt"
                              : format("p{}{}", kind_letter(block.kind), shade);
  }

  std::string title_of(const timeline::PipelineBlock& block) const {
    std::string title = block.name;
    if (title.empty()) {
      title = kind_text(block.kind);
      if (block.microbatch >= 0) {
        title += format(" of microbatch {}", block.microbatch);
      }
      if (block.stage >= 0) title += format(", stage {}", block.stage);
    }
    return title + ", " + time_text(block.end - block.begin, picture_.unit);
  }

  void draw_block(const timeline::PipelineBlock& block) {
    const bool transfer = is_transfer(block);
    if (transfer && sizes_.strip == 0) return;
    page_.add(
        "<rect class='{}' x='{}' y='{}' width='{}' height='{}'>",
        class_of(block), percent(block.begin), transfer ? sizes_.row + 1 : 0,
        percent(block.end - block.begin), transfer ? sizes_.strip : sizes_.row);
    if (titled_) page_.add("<title>{}</title>", title_of(block));
    page_.add("</rect>");
    if (!transfer) draw_number(block);
  }

  void draw_number(const timeline::PipelineBlock& block) {
    const bool split = block.kind == timeline::BlockKind::backward_input ||
                       block.kind == timeline::BlockKind::backward_weight;
    std::string text;
    if (split || block.microbatch < 0) text = timeline::letter(block.kind);
    if (block.microbatch >= 0) text += std::to_string(block.microbatch);
    if (sizes_.row < 12) return;
    const double share = (block.end - block.begin) / range_;
    double needed = 4;
    for (const char c : text) needed += c <= '9' ? 6.8 : 11;
    for (size_t i = 0; i < std::size(kPlotWidths); ++i) {
      if (share * kPlotWidths[i] < needed) continue;
      const bool dark = block.kind == timeline::BlockKind::backward;
      page_.add(
          "<text class='{}' x='{}' y='{}' text-anchor='middle'>{}</text>",
          std::string(kFits[i]) + (dark ? " d" : ""),
          percent((block.begin + block.end) / 2), sizes_.row / 2 + 4, text);
      return;
    }
  }

  Markup& page_;
  const DrawnPicture& drawn_;
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

std::string description_of(const DrawnPicture& drawn) {
  const auto& picture = drawn.picture;
  int32_t microbatches = 0;
  for (const auto& block : picture.blocks) {
    microbatches = std::max(microbatches, block.microbatch + 1);
  }
  return format(
      "{} of blocks in time{}; {} of the time is idle.",
      counted(std::ssize(drawn.busy), "row"),
      microbatches == 0 ? ""
                        : format(
                              ", one block for each pass of {}",
                              counted(microbatches, "microbatch")),
      format_percent(drawn.bubble));
}

void draw_picture(
    Markup& page, const DrawnPicture& drawn, double range, bool titled) {
  const auto& picture = drawn.picture;
  page.add(
      "<figure class='pipe' id='{}'><figcaption><h3>{}</h3><span "
      "class='bubble'>{} <b>{}</b></span><span "
      "class='now'>{}</span></figcaption>",
      picture.id, picture.title, picture.measure_name,
      unbroken(format_percent(drawn.bubble)),
      time_text(drawn.makespan, picture.unit));
  PipelineDrawing drawing(page, drawn, range, titled);
  page.add("<div class='plot'>");
  open_svg(
      page, picture.id, drawing.height() + 20, picture.title,
      description_of(drawn));
  drawing.draw();
  page.add("</svg></div>");
  if (!drawn.limited.empty()) {
    page.add(
        "<p class='note'>Drawn: {}; the figures are of the whole.</p>",
        drawn.limited);
  }
  page.add("</figure>");
}

// --- Legend and player -----------------------------------------------------

void draw_legend(Markup& page, const std::vector<DrawnPicture>& all) {
  std::set<timeline::BlockKind> kinds;
  bool chunks = false;
  bool numbers = false;
  for (const auto& drawn : all) {
    for (const auto& block : drawn.picture.blocks) {
      kinds.insert(block.kind);
      chunks = chunks || block.chunk > 0;
      numbers = numbers || block.microbatch >= 0;
    }
  }
  page.add("<p class='keys'>");
  for (const timeline::BlockKind kind : kinds) {
    draw_key(
        page,
        kind == timeline::BlockKind::transfer
            ? "pt"
            : format("p{}0", kind_letter(kind)),
        kind_text(kind));
  }
  draw_key(page, "gap", "idle");
  if (numbers) page.add("<span class='key'>number: microbatch</span>");
  if (chunks) {
    page.add("<span class='key'>shade: stage of the row</span>");
  }
  page.add("</p>");
}

Json rows_json(const DrawnPicture& drawn, double range) {
  const auto percent = [&](double time) {
    return std::round(1e5 * time / range) / 1e3;
  };
  auto rows = Json::array();
  for (const auto& row : drawn.picture.rows) {
    rows.push_back(
        {{"name", row.name}, {"group", row.group}, {"blocks", Json::array()}});
  }
  for (const auto& block : drawn.picture.blocks) {
    rows[static_cast<size_t>(block.row)]["blocks"].push_back(
        {std::string(1, kind_letter(block.kind)), block.microbatch, block.stage,
         percent(block.begin), percent(block.end - block.begin)});
  }
  return rows;
}

// What assets/pipeline.js needs to know of the pictures. Times are per cent of
// the axis, which is `range` long; a block is its kind, its microbatch and its
// stage (-1: none), its begin and its length, in the order in which it is
// drawn.
Json player_json(
    const std::vector<DrawnPicture>& all, double range, size_t plays_first) {
  Json data = {{"first", plays_first}, {"range", range}};
  for (const auto& drawn : all) {
    const auto& picture = drawn.picture;
    Json one = {
        {"id", picture.id},
        {"name",
         picture.player_name.empty() ? picture.title : picture.player_name},
        {"unit", picture.unit},
        {"headings", Json::array()},
        {"steps", Json::array()},
        {"rows", rows_json(drawn, range)}};
    for (size_t row = 0; row < picture.rows.size(); ++row) {
      if (begins_group(picture, row)) {
        one["headings"].push_back(heading_of(picture, row));
      }
    }
    for (const double moment : player_steps(picture.blocks).moments) {
      one["steps"].push_back(std::round(1e5 * moment / range) / 1e3);
    }
    data["pictures"].push_back(std::move(one));
  }
  return data;
}

}  // namespace

PlayerSteps player_steps(const std::vector<timeline::PipelineBlock>& blocks) {
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
      slots <= 4096 && std::ranges::all_of(work, [&](auto times) {
        return fits(times.first - origin) && fits(times.second - origin);
      });
  if (steps.even) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      steps.moments.push_back(
          origin + shortest * (static_cast<double>(slot) + 0.5));
    }
    return steps;
  }
  // Each step stops at blocks that run side by side.
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

void draw_pipelines(
    Markup& page, const std::vector<PipelinePicture>& pictures,
    size_t plays_first, size_t max_blocks) {
  std::vector<DrawnPicture> all;
  double until = std::numeric_limits<double>::infinity();
  for (const auto& picture : pictures) {
    DrawnPicture drawn = drawn_of(picture);
    if (drawn.picture.blocks.empty()) continue;
    until = std::min(until, drawn_until(drawn.picture, max_blocks));
    all.push_back(std::move(drawn));
  }
  if (all.empty()) return;
  double range = 0;
  size_t count = 0;
  for (auto& drawn : all) {
    limit_time(drawn, until);
    count += drawn.picture.blocks.size();
    for (const auto& block : drawn.picture.blocks) {
      range = std::max(range, block.end);
    }
  }
  page.add("<div class='pipes'>");
  for (const auto& drawn : all) {
    draw_picture(page, drawn, range, count <= kMaxTitles);
  }
  draw_legend(page, all);
  page.add_json(player_json(all, range, std::min(plays_first, all.size() - 1))
                    .dump(-1, ' ', false, Json::error_handler_t::replace));
  page.add("</div>");
}

}  // namespace echelon::report
