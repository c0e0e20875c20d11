#include "echelon/cli/schedule_print.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>

#include "echelon/report/pipeline_page.h"
#include "echelon/schedule/memory.h"
#include "echelon/schedule/timing.h"
#include "echelon/text/table.h"

namespace echelon::cli {
namespace {

using Stages = std::vector<std::vector<int32_t>>;  // by rank

constexpr const char* kCosts = "F = I = W = 1 and B = 2";

Stages stages_by_rank(const Schedule& schedule) {
  Stages stages(schedule.ranks.size());
  for (int32_t stage = 0; stage < schedule.num_stages(); ++stage) {
    const int32_t rank = schedule.rank_of_stage[static_cast<size_t>(stage)];
    stages[static_cast<size_t>(rank)].push_back(stage);
  }
  return stages;
}

std::string count(size_t number, const std::string& what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
}

std::string percent(double part) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f %%", 100 * part);
  return text;
}

// Without a fraction where there is none, as nearly always.
std::string time_text(double time) {
  if (time < 1e15 && time == std::floor(time)) {
    return std::to_string(static_cast<int64_t>(time));
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%.10g", time);
  return text;
}

std::string sizes(const Schedule& schedule, const Stages& stages) {
  size_t fewest = stages[0].size();
  size_t most = fewest;
  for (const auto& held : stages) {
    fewest = std::min(fewest, held.size());
    most = std::max(most, held.size());
  }
  const std::string each =
      fewest == most
          ? count(most, "stage") + (stages.size() == 1 ? "" : " each")
          : std::to_string(fewest) + " to " + count(most, "stage") + " each";
  return count(stages.size(), "rank") + " of " + each + ", " +
         std::to_string(schedule.num_microbatches) +
         (schedule.num_microbatches == 1 ? " microbatch" : " microbatches");
}

std::string bubble_text(const Timing& timing) {
  std::string text = "bubble " + percent(timing.bubble);
  if (percent(timing.bubble) != percent(timing.span_bubble)) {
    text += ", or " + percent(timing.span_bubble) +
            " where ranks go on to the next step without waiting";
  }
  return text;
}

// ---- the grid

const char* colour(ActionKind kind) {
  switch (kind) {
    case ActionKind::forward:
      return "\033[30;46m";
    case ActionKind::backward:
      return "\033[30;43m";
    case ActionKind::backward_input:
      return "\033[30;45m";
    case ActionKind::backward_weight:
      return "\033[30;42m";
  }
  return "";
}

// Each action as wide as its time; a line for each rank, in bands as wide as
// the terminal.
class Grid {
 public:
  Grid(const Schedule& schedule, const Timing& timing, const TextStyle& style)
      : schedule_(schedule), timing_(timing), style_(style) {
    bool one_each = true;
    size_t longest = 1;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      for (const auto& action : schedule.ranks[rank]) {
        one_each = one_each && action.stage == schedule.ranks[rank][0].stage;
      }
    }
    with_stage_ = !one_each;
    for (const auto& list : schedule.ranks) {
      for (const auto& action : list) {
        longest = std::max(longest, name(action).size());
      }
    }
    width_ = longest + 1;
    label_ = std::string("rank ").size() +
             std::to_string(schedule.num_ranks() - 1).size() + 2;
    ticks_ = static_cast<size_t>(timing.makespan);
    const size_t room = style.columns > label_ ? style.columns - label_ : 1;
    const size_t most = std::max<size_t>(room / width_, 1);
    const size_t bands = std::max<size_t>((ticks_ + most - 1) / most, 1);
    band_ = std::max<size_t>((ticks_ + bands - 1) / bands, 1);
    const size_t rounded =
        (band_ + 4) / 5 * 5;  // every fifth tick has a number
    if (bands > 1 && rounded <= most) band_ = rounded;
  }

  /// Lines of text.
  size_t height() const {
    const size_t bands = (ticks_ + band_ - 1) / band_;
    return bands * (schedule_.ranks.size() + 2);
  }
  bool with_stage() const { return with_stage_; }

  void print(std::ostream& out) const {
    for (size_t first = 0; first < ticks_; first += band_) {
      const size_t last = std::min(first + band_, ticks_);
      out << std::string(label_, ' ');
      for (size_t tick = first; tick < last; ++tick) {
        const std::string number = tick % 5 == 0 ? std::to_string(tick) : "";
        out << number;
        if (tick + 1 < last) {
          out << std::string(width_ - std::min(number.size(), width_), ' ');
        }
      }
      out << "\n";
      for (size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
        print_rank(rank, first, last, out);
      }
      out << "\n";
    }
  }

 private:
  std::string name(const echelon::Action& action) const {
    const std::string whole = to_string(action);
    return with_stage_ ? whole : whole.substr(whole.find(letter(action.kind)));
  }

  void
  print_rank(size_t rank, size_t first, size_t last, std::ostream& out) const {
    std::string label = "rank " + std::to_string(rank);
    label.resize(label_, ' ');
    out << label;
    const auto& list = schedule_.ranks[rank];
    const auto& times = timing_.actions[rank];
    size_t next = 0;
    while (next < list.size() && times[next].end <= double(first)) ++next;
    for (size_t tick = first; tick < last; ++tick) {
      if (next == list.size() || times[next].begin > double(tick)) {
        out << "." << (tick + 1 < last ? std::string(width_ - 1, ' ') : "");
        continue;
      }
      const bool begins = times[next].begin == double(tick);
      const bool ends = times[next].end <= double(tick + 1);
      print_cell(list[next], begins, ends, tick + 1 < last, out);
      if (ends) ++next;
    }
    out << "\n";
  }

  // One tick of an action: its name, then a line to where it ends.
  void print_cell(
      const echelon::Action& action, bool begins, bool ends, bool space,
      std::ostream& out) const {
    std::string text = begins ? name(action) : "";
    const size_t filled = ends ? width_ - 1 : width_;
    if (text.size() < filled) {
      const bool line = !(begins && ends);
      text += std::string(filled - text.size(), line ? '-' : ' ');
    }
    if (style_.colours) {
      out << colour(action.kind) << text << "\033[0m";
    } else {
      out << text;
    }
    if (ends && space) out << ' ';
  }

  const Schedule& schedule_;
  const Timing& timing_;
  const TextStyle& style_;
  bool with_stage_ = false;
  size_t width_ = 0;  // of a tick
  size_t label_ = 0;
  size_t ticks_ = 0;
  size_t band_ = 0;  // ticks of a line
};

constexpr size_t kMaxGridLines = 100;
constexpr size_t kMaxGridActions = 20'000;

void print_grid(
    const Schedule& schedule, const TextStyle& style, std::ostream& out) {
  size_t actions = 0;
  for (const auto& list : schedule.ranks) actions += list.size();
  if (actions <= kMaxGridActions) {
    const Timing timing = time_schedule(schedule, {}, true);
    const Grid grid(schedule, timing, style);
    if (grid.height() <= kMaxGridLines) {
      out << "\nBy tick. "
          << (grid.with_stage() ? "2F0: stage 2, forward of microbatch 0"
                                : "F0: forward of microbatch 0")
          << ". B: backward; I, W: its halves.\n\n";
      grid.print(out);
      return;
    }
  }
  out << "The grid of its " << actions
      << " actions is left out: --format csv has all\nof them, --format html "
         "draws how it begins.\n\n";
}

// ---- the table

std::string listed(const std::vector<int32_t>& numbers) {
  constexpr size_t kMost = 8;
  std::string text;
  for (size_t i = 0; i < std::min(numbers.size(), kMost); ++i) {
    text += (i == 0 ? "" : " ") + std::to_string(numbers[i]);
  }
  return numbers.size() > kMost ? text + " …" : text;
}

void print_table(
    const Stages& stages, const Timing& timing, const StoredActivations& stored,
    std::ostream& out) {
  constexpr size_t kEnds = 20;  // lines of the first and of the last ranks
  bool one_each = true;
  for (const auto& held : stages) one_each = one_each && held.size() == 1;
  std::vector<std::vector<std::string>> rows = {
      {"rank", one_each ? "stage" : "stages", "stored at most", "idle"}};
  if (!one_each) rows[0].insert(rows[0].begin() + 3, "together");
  for (size_t rank = 0; rank < stages.size(); ++rank) {
    if (stages.size() > 2 * kEnds + 1 && rank == kEnds) {
      rank = stages.size() - kEnds;
      rows.push_back({"…"});
    }
    std::vector<int32_t> peaks;
    for (const int32_t stage : stages[rank]) {
      peaks.push_back(stored.stages[static_cast<size_t>(stage)]);
    }
    auto& row = rows.emplace_back();
    row = {std::to_string(rank), listed(stages[rank]), listed(peaks)};
    if (!one_each) row.push_back(std::to_string(stored.ranks[rank]));
    row.push_back(percent(timing.rank_bubble(static_cast<int32_t>(rank))));
  }
  out << aligned(rows);
  if (stages.size() > 2 * kEnds + 1) {
    out << "--format json has all " << stages.size() << " ranks.\n";
  }
}

// ---- the picture

BlockKind block_kind(ActionKind kind) {
  switch (kind) {
    case ActionKind::forward:
      return BlockKind::forward;
    case ActionKind::backward:
      return BlockKind::backward;
    case ActionKind::backward_input:
      return BlockKind::backward_input;
    case ActionKind::backward_weight:
      return BlockKind::backward_weight;
  }
  return BlockKind::forward;
}

PipelinePicture
picture(const Schedule& schedule, const Stages& stages, const Timing& timing) {
  // What is drawn is less; more would only be carried along.
  const size_t rows = std::min(stages.size(), kMaxPipelineRows + 1);
  const size_t most = kMaxPipelineBlocks + 1;
  PipelinePicture picture{
      .id = "schedule",
      .title = schedule.name,
      .unit = "forwards",
      .bubble = timing.bubble,
      .makespan = timing.makespan};
  for (size_t rank = 0; rank < stages.size(); ++rank) {
    picture.rows.push_back({.name = "rank " + std::to_string(rank)});
  }
  for (size_t rank = 0; rank < rows; ++rank) {
    const auto& list = schedule.ranks[rank];
    for (size_t i = 0; i < std::min(list.size(), most); ++i) {
      const auto& held = stages[rank];
      const auto chunk =
          std::lower_bound(held.begin(), held.end(), list[i].stage) -
          held.begin();
      picture.blocks.push_back(
          {.row = static_cast<int32_t>(rank),
           .kind = block_kind(list[i].kind),
           .stage = list[i].stage,
           .microbatch = list[i].microbatch,
           .chunk = static_cast<int32_t>(chunk),
           .begin = timing.actions[rank][i].begin,
           .end = timing.actions[rank][i].end});
    }
  }
  return picture;
}

std::string range(std::vector<int32_t> numbers) {
  const auto [least, most] =
      std::minmax_element(numbers.begin(), numbers.end());
  return *least == *most
             ? std::to_string(*most)
             : std::to_string(*least) + " to " + std::to_string(*most);
}

}  // namespace

void print_schedule_text(
    const Schedule& schedule, const TextStyle& style, std::ostream& out) {
  const Timing timing = time_schedule(schedule);
  const Stages stages = stages_by_rank(schedule);
  out << schedule.name << ": " << sizes(schedule, stages) << "\n"
      << "length " << time_text(timing.makespan) << " when " << kCosts << "\n"
      << bubble_text(timing) << "\n";
  print_grid(schedule, style, out);
  print_table(stages, timing, stored_activations(schedule), out);
}

void print_schedule_json(const Schedule& schedule, std::ostream& out) {
  using nlohmann::json;
  const Timing timing = time_schedule(schedule, {}, true);
  const auto stored = stored_activations(schedule);
  const auto stages = stages_by_rank(schedule);
  nlohmann::ordered_json head = {
      {"name", schedule.name},
      {"num_ranks", schedule.num_ranks()},
      {"num_stages", schedule.num_stages()},
      {"num_microbatches", schedule.num_microbatches},
      {"costs", {{"F", 1}, {"B", 2}, {"I", 1}, {"W", 1}}},
      {"length", timing.makespan},
      {"bubble", timing.bubble},
      {"span_bubble", timing.span_bubble},
      {"rank_of_stage", schedule.rank_of_stage},
      {"stored_activations", stored.stages}};
  // Written rank by rank: the actions may be many millions.
  std::string text = head.dump();
  text.pop_back();
  out << text << ",\"ranks\":[";
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    nlohmann::ordered_json one = {
        {"stages", stages[rank]},
        {"stored_activations", stored.ranks[rank]},
        {"bubble", timing.rank_bubble(static_cast<int32_t>(rank))}};
    text = one.dump();
    text.pop_back();
    out << (rank == 0 ? "\n" : ",\n") << text << ",\"actions\":[";
    const auto& list = schedule.ranks[rank];
    text.clear();
    for (size_t i = 0; i < list.size(); ++i) {
      text += (i == 0 ? "\"" : ",\"") + to_string(list[i]) + '"';
    }
    text += "],\"begin\":[";
    for (size_t i = 0; i < list.size(); ++i) {
      text += (i == 0 ? "" : ",") + time_text(timing.actions[rank][i].begin);
    }
    out << text << "]}";
  }
  out << "\n]}\n";
}

void print_schedule_html(const Schedule& schedule, std::ostream& out) {
  const Timing timing = time_schedule(schedule, {}, true);
  const auto stored = stored_activations(schedule);
  const auto stages = stages_by_rank(schedule);
  PipelinePage page{
      .title = schedule.name + ": " + sizes(schedule, stages),
      .lead = std::string("As long as it takes when ") + kCosts +
              " and transfers take no time.",
      .pictures = {picture(schedule, stages, timing)}};
  page.facts = {
      {"bubble", percent(timing.bubble)},
      {"bubble where ranks go on without waiting", percent(timing.span_bubble)},
      {"length", time_text(timing.makespan)},
      {"activations that a stage stores at most", range(stored.stages)},
      {"activations that a rank stores at most", range(stored.ranks)}};
  out << pipeline_page(page);
}

}  // namespace echelon::cli
