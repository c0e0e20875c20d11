// A schedule, generated or read from CSV, is checked before one of kFormats
// prints it. The default costs make every action one or two units long, so that
// all actions begin and end at whole ticks and a grid of text can show them.
// The times of single actions are asked for only where they are printed, since
// a schedule may have many millions of actions.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <span>

#include "echelon/cli/arguments.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/report/pipeline_page.h"
#include "echelon/schedule/check.h"
#include "echelon/schedule/csv.h"
#include "echelon/schedule/memory.h"
#include "echelon/schedule/options.h"
#include "echelon/schedule/timing.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

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

std::string percent(double part) {
  return format("{:.1f} %", 100 * part);
}

// Times are nearly always whole numbers.
std::string time_text(double time) {
  if (time < 1e15 && time == std::floor(time)) {
    return std::to_string(static_cast<int64_t>(time));
  }
  return format("{:.10g}", time);
}

// For people: "50,175".
std::string length_text(double time) {
  return time == std::floor(time) ? format_count(time) : time_text(time);
}

std::string sizes(const Schedule& schedule, const Stages& stages) {
  const auto [few, many] = std::ranges::minmax_element(
      stages, {}, [](const auto& held) { return held.size(); });
  const size_t fewest = few->size();
  const size_t most = many->size();
  return format(
      "{} of {}{}{}, {}", counted(std::ssize(stages), "rank"),
      fewest == most ? "" : std::to_string(fewest) + " to ",
      counted(std::ssize(*many), "stage"),
      fewest == most && stages.size() == 1 ? "" : " each",
      counted(schedule.num_microbatches, "microbatch"));
}

std::string bubble_text(const Timing& timing) {
  std::string text = "bubble " + percent(timing.bubble);
  if (percent(timing.bubble) != percent(timing.span_bubble)) {
    text += format(
        ", or {} where ranks start the next step without waiting",
        percent(timing.span_bubble));
  }
  return text;
}

// By kind of action.
constexpr const char* kColours[] = {
    "\033[30;46m", "\033[30;43m", "\033[30;45m", "\033[30;42m"};

// The actions as text: a line for each rank, where each action is as wide as
// its time. Lines longer than the terminal are split into bands.
class Grid {
 public:
  Grid(const Schedule& schedule, const Timing& timing, const Style& style)
      : schedule_(schedule), timing_(timing), style_(style) {
    for (const auto& list : schedule.ranks) {
      with_stage_ |= std::ranges::any_of(list, [&](const auto& action) {
        return action.stage != list[0].stage;
      });
    }
    size_t longest = 1;
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
    // Every fifth tick has a number. Where bands have a multiple of five ticks,
    // each begins with a numbered one.
    const size_t rounded = (band_ + 4) / 5 * 5;
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
    const std::string full = to_string(action);
    return with_stage_ ? full : full.substr(full.find(letter(action.kind)));
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

  // One tick of an action: its name, then dashes up to its end.
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
      out << kColours[static_cast<size_t>(action.kind)] << text << "\033[0m";
    } else {
      out << text;
    }
    if (ends && space) out << ' ';
  }

  const Schedule& schedule_;
  const Timing& timing_;
  const Style& style_;
  bool with_stage_ = false;
  size_t width_ = 0;  // columns of a tick
  size_t label_ = 0;
  size_t ticks_ = 0;
  size_t band_ = 0;  // ticks per line
};

constexpr size_t kMaxGridLines = 100;
constexpr size_t kMaxGridActions = 20'000;

void print_grid(
    const Schedule& schedule, const Style& style, std::ostream& out) {
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
  out << "The grid of its " << counted(static_cast<int64_t>(actions), "action")
      << " is left out: --format csv has all\nof them, --format html "
         "draws the first ones.\n\n";
}

std::string listed(const std::vector<int32_t>& numbers) {
  constexpr size_t kMost = 8;
  const auto shown = std::span(numbers).first(std::min(numbers.size(), kMost));
  return join(shown, " ") + (numbers.size() > kMost ? " …" : "");
}

void print_ranks(
    const Stages& stages, const Timing& timing, const StoredActivations& stored,
    std::ostream& out) {
  constexpr size_t kEnds = 20;  // lines for the first and for the last ranks
  const bool one_each = std::ranges::all_of(
      stages, [](const auto& held) { return held.size() == 1; });
  Rows rows = {
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
    out << "--format json has all " << counted(std::ssize(stages), "rank")
        << ".\n";
  }
}

timeline::BlockKind block_kind(ActionKind kind) {
  switch (kind) {
    case ActionKind::forward:
      return timeline::BlockKind::forward;
    case ActionKind::backward:
      return timeline::BlockKind::backward;
    case ActionKind::backward_input:
      return timeline::BlockKind::backward_input;
    case ActionKind::backward_weight:
      return timeline::BlockKind::backward_weight;
  }
  return timeline::BlockKind::forward;
}

report::PipelinePicture drawing_of(
    const Schedule& schedule, const Stages& stages, const Timing& timing) {
  // The page draws less than this; the rest would only make it larger.
  const size_t rows = std::min(stages.size(), report::kMaxPipelineRows + 1);
  const size_t most = report::kMaxPipelineBlocks + 1;
  report::PipelinePicture drawing{
      .id = "schedule",
      .title = schedule.name,
      .unit = "forwards",
      .bubble = timing.bubble,
      .makespan = timing.makespan};
  for (size_t rank = 0; rank < stages.size(); ++rank) {
    drawing.rows.push_back({.name = "rank " + std::to_string(rank)});
  }
  for (size_t rank = 0; rank < rows; ++rank) {
    const auto& list = schedule.ranks[rank];
    for (size_t i = 0; i < std::min(list.size(), most); ++i) {
      const auto& held = stages[rank];
      const auto chunk =
          std::lower_bound(held.begin(), held.end(), list[i].stage) -
          held.begin();
      drawing.blocks.push_back(
          {.row = static_cast<int32_t>(rank),
           .kind = block_kind(list[i].kind),
           .stage = list[i].stage,
           .microbatch = list[i].microbatch,
           .chunk = static_cast<int32_t>(chunk),
           .begin = timing.actions[rank][i].begin,
           .end = timing.actions[rank][i].end});
    }
  }
  return drawing;
}

std::string range(const std::vector<int32_t>& numbers) {
  const auto [least, most] = std::ranges::minmax(numbers);
  return least == most ? std::to_string(most) : format("{} to {}", least, most);
}

// Its numbers, the grid of ranks and ticks if it is small, and a line for each
// rank: how many activations its stages store at most, and how long it is idle.
void print_schedule_text(
    const Schedule& schedule, const Style& style, std::ostream& out) {
  const Timing timing = time_schedule(schedule);
  const Stages stages = stages_by_rank(schedule);
  out << schedule.name << ": " << sizes(schedule, stages) << "\n"
      << "length " << length_text(timing.makespan) << " when " << kCosts << "\n"
      << bubble_text(timing) << "\n";
  print_grid(schedule, style, out);
  print_ranks(stages, timing, stored_activations(schedule), out);
}

// The same numbers, and all actions with the times at which they begin.
void print_schedule_json(
    const Schedule& schedule, const Style&, std::ostream& out) {
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
  // Written rank by rank: there may be many millions of actions.
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
    out << join(
               list, ",",
               [](const auto& action) { return in_quotes(to_string(action)); })
        << "],\"begin\":["
        << join(
               timing.actions[rank], ",",
               [](const auto& times) { return time_text(times.begin); })
        << "]}";
  }
  out << "\n]}\n";
}

void print_schedule_html(
    const Schedule& schedule, const Style&, std::ostream& out) {
  const Timing timing = time_schedule(schedule, {}, true);
  const auto stored = stored_activations(schedule);
  const auto stages = stages_by_rank(schedule);
  report::PipelinePage page{
      .title = schedule.name + ": " + sizes(schedule, stages),
      .lead =
          format("Lengths hold when {} and transfers take no time.", kCosts),
      .pictures = {drawing_of(schedule, stages, timing)}};
  page.facts = {
      {"bubble", percent(timing.bubble)},
      {"bubble where ranks do not wait between steps",
       percent(timing.span_bubble)},
      {"length", length_text(timing.makespan)},
      {"largest number of activations of a stage", range(stored.stages)},
      {"largest number of activations of a rank", range(stored.ranks)}};
  out << report::pipeline_page(page);
}

constexpr struct {
  const char* name;
  void (*print)(const Schedule&, const Style&, std::ostream&);
} kFormats[] = {
    {"text", print_schedule_text},
    {"csv", [](const Schedule& schedule, const Style&,
               std::ostream& out) { write_schedule_csv(schedule, out); }},
    {"json", print_schedule_json},
    {"html", print_schedule_html}};

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const auto& format : kFormats) names.push_back(format.name);
  return names;
}

struct ScheduleArguments {
  std::string kind;
  std::string stages;
  std::string microbatches;
  std::string per_rank;
  std::string file;
  std::string format = "text";
  std::string output;
  bool json = false;
};

int32_t
count_of(const std::string& flag, const std::string& text, int32_t otherwise) {
  if (text.empty()) return otherwise;
  return static_cast<int32_t>(parse_count(flag, text, 1, kMaxScheduleCells));
}

Schedule generate(const ScheduleArguments& arguments) {
  if (arguments.stages.empty()) {
    throw ConfigError(
        "echelon schedule: --stages is missing: how many pipeline ranks, as in "
        "--kind 1f1b --stages 4 --microbatches 8; or name a --file");
  }
  ScheduleOptions options;
  if (!arguments.kind.empty()) options.kind = schedule_kind(arguments.kind);
  options.ranks = count_of("--stages", arguments.stages, 1);
  options.microbatches = count_of(
      "--microbatches", arguments.microbatches,
      static_cast<int32_t>(
          std::min(int64_t{2} * options.ranks, kMaxScheduleCells)));
  options.stages_per_rank = count_of("--per-rank", arguments.per_rank, 0);
  return make_schedule(options);
}

Schedule read_schedule(const ScheduleArguments& arguments) {
  for (const auto& [flag, value] :
       {std::pair("--kind", arguments.kind),
        std::pair("--stages", arguments.stages),
        std::pair("--microbatches", arguments.microbatches),
        std::pair("--per-rank", arguments.per_rank)}) {
    if (value.empty()) continue;
    throw ConfigError(format(
        "echelon schedule: {} {} with --file {}: the file says it; leave one "
        "out",
        flag, value, arguments.file));
  }
  return read_schedule_csv(arguments.file);
}

std::string format_of(const ScheduleArguments& arguments) {
  if (arguments.json) {
    if (arguments.format != "text" && arguments.format != "json") {
      throw ConfigError(
          "echelon schedule: --json with --format " + arguments.format +
          ": leave one out");
    }
    return "json";
  }
  check_choice("--format", arguments.format, format_names());
  return arguments.format;
}

int print_schedule(const ScheduleArguments& arguments) {
  const std::string name = format_of(arguments);
  const auto* format = std::ranges::find_if(
      kFormats, [&](const auto& one) { return one.name == name; });
  const Schedule schedule =
      arguments.file.empty() ? generate(arguments) : read_schedule(arguments);
  check(schedule);
  if (arguments.output.empty()) {
    format->print(schedule, terminal_style(120), std::cout);
  } else {
    write_output("--output", arguments.output, [&](std::ostream& out) {
      format->print(schedule, {.columns = 120}, out);
    });
  }
  return 0;
}

}  // namespace

void add_schedule(Command& root) {
  auto [command, arguments] = root.add(
      "schedule",
      "print and check the order in which the ranks of a pipeline compute, its "
      "bubble, and the activations that its stages store",
      "echelon schedule --kind 1f1b --stages 4 --microbatches 8\n"
      "echelon schedule --kind interleaved --stages 4 --per-rank 2 "
      "--microbatches 8\n"
      "echelon schedule --kind zb-v --stages 4 --format html --output "
      "zb-v.html\n"
      "echelon schedule --kind gpipe --stages 2 --format csv --output "
      "mine.csv\n"
      "echelon schedule --file mine.csv",
      print_schedule);
  command.option(
      "--kind", arguments.kind, join(schedule_names(), "|"),
      "which schedule (default: 1f1b)");
  command.option(
      "--stages", arguments.stages, "RANKS",
      "pipeline ranks; each holds one stage of the model, or --per-rank");
  command.option(
      "--microbatches", arguments.microbatches, "NUMBER",
      "microbatches of a step (default: twice the ranks)");
  command.option(
      "--per-rank", arguments.per_rank, "NUMBER",
      "stages of each rank, so that the model has RANKS * NUMBER (default: 2 "
      "for interleaved, breadth_first, zb-v and dualpipev, else 1)");
  command.option(
      "--file", arguments.file, "F.csv",
      "read a schedule from CSV instead: a row for each rank, cells such as "
      "0F1, 0B1, 0I1 and 0W1");
  command.option(
      "--format", arguments.format, join(format_names(), "|"),
      "what to print (default: text)");
  command.option(
      "--output", arguments.output, "FILE", "write to a file instead");
  command.flag("--json", arguments.json, "the same as --format json");
}

}  // namespace echelon::cli
