#include "echelon/schedule/csv.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <ostream>
#include <sstream>

#include "echelon/error.h"
#include "echelon/schedule/timing.h"
#include "echelon/schedule/walk.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

// When each action begins if every action takes one tick.
std::vector<std::vector<ActionTime>> ticks(const Schedule& schedule) {
  if (!detail::Walk(schedule).run([](int32_t, size_t, const Action&) {})) {
    throw ConfigError(
        "schedule " + schedule.name +
        " deadlocks and cannot be written; check() says where");
  }
  const std::vector<StageCost> costs(
      schedule.rank_of_stage.size(), {.backward = 1});
  return time_schedule(schedule, costs, /*with_actions=*/true).actions;
}

// Reads one file; line_, column_ and cell_ say where.
class Reader {
 public:
  Reader(std::string_view text, const std::string& name) : name_(name) {
    constexpr std::string_view kMark = "\xEF\xBB\xBF";  // spreadsheets put it
    if (text.starts_with(kMark)) text.remove_prefix(kMark.size());
    schedule_.name = name;
    while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
    if (text.empty()) {
      throw ConfigError(
          name +
          ": holds no schedule; it needs a row of actions for each rank");
    }
    text_ = text;
  }

  Schedule read() {
    size_t begin = 0;
    while (begin <= text_.size()) {
      const size_t end = std::min(text_.find('\n', begin), text_.size());
      read_row(text_.substr(begin, end - begin));
      begin = end + 1;
    }
    check_names();
    schedule_.rank_of_stage.assign(static_cast<size_t>(num_stages_), -1);
    for (int32_t rank = 0; rank < schedule_.num_ranks(); ++rank) {
      for (const auto& action : schedule_.ranks[static_cast<size_t>(rank)]) {
        int32_t& owner =
            schedule_.rank_of_stage[static_cast<size_t>(action.stage)];
        if (owner < 0) owner = rank;
      }
    }
    return std::move(schedule_);
  }

 private:
  static bool is_blank(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n' || c == ',';
  }

  static std::string_view trimmed(std::string_view text) {
    const char* kSpace = " \t\r";
    const size_t begin = text.find_first_not_of(kSpace);
    if (begin == std::string_view::npos) return {};
    return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
  }

  [[noreturn]] void refuse(std::string_view cell, const std::string& rule) {
    constexpr size_t kLongest = 40;
    std::string shown;
    for (const char c : cell.substr(0, kLongest)) {
      shown += c >= ' ' && c <= '~' ? c : '?';
    }
    if (cell.size() > kLongest) shown += "…";
    throw ConfigError(format(
        "{}, line {}, column {} (cell {}): \"{}\" {}", name_, line_, column_,
        cell_, shown, rule));
  }

  void read_row(std::string_view row) {
    ++line_;
    cell_ = 0;
    list_ = &schedule_.ranks.emplace_back();
    size_t begin = 0;
    while (begin <= row.size()) {
      const size_t end = std::min(row.find(',', begin), row.size());
      const auto whole = row.substr(begin, end - begin);
      const auto cell = trimmed(whole);
      ++cell_;
      column_ = cell.empty()
                    ? begin + 1
                    : static_cast<size_t>(cell.data() - row.data()) + 1;
      if (!cell.empty()) read_cell(cell);
      begin = end + 1;
    }
    if (list_->empty()) {
      throw ConfigError(format(
          "{}, line {}: rank {} has no actions; every rank has a row, and a "
          "stage in it",
          name_, line_, line_ - 1));
    }
  }

  void read_cell(std::string_view cell) {
    if (cell.front() != '(') {
      add(cell, cell);
      return;
    }
    constexpr std::string_view kOverlap = ")OVERLAP_F_B";
    if (!cell.ends_with(kOverlap)) {
      refuse(cell, "begins with ( but does not end as (0F1;3B0)OVERLAP_F_B");
    }
    auto rest = cell.substr(1, cell.size() - 1 - kOverlap.size());
    const size_t middle = rest.find(';');
    if (middle == std::string_view::npos) {
      refuse(cell, "overlaps a forward and a backward: name both, with ;");
    }
    const Action first = add(cell, trimmed(rest.substr(0, middle)));
    const Action second = add(cell, trimmed(rest.substr(middle + 1)));
    const auto forward = ActionKind::forward;
    if ((first.kind == forward) == (second.kind == forward)) {
      refuse(cell, "must overlap one forward and one backward");
    }
  }

  Action add(std::string_view cell, std::string_view text) {
    Action action;
    const char* const end = text.data() + text.size();
    const char* at = number(cell, text.data(), end, action.stage);
    if (at == nullptr || at == end) not_an_action(cell, text);
    const auto kind = kind_of(*at);
    if (!kind) not_an_action(cell, text);
    action.kind = *kind;
    at = number(cell, at + 1, end, action.microbatch);
    if (at != end) not_an_action(cell, text);
    num_stages_ = std::max(num_stages_, int64_t{action.stage} + 1);
    num_microbatches_ =
        std::max(num_microbatches_, int64_t{action.microbatch} + 1);
    list_->push_back(action);
    return action;
  }

  // Returns the end of the number, or null when there is none.
  const char* number(
      std::string_view cell, const char* at, const char* end, int32_t& value) {
    constexpr int32_t kLargest = std::numeric_limits<int32_t>::max() - 1;
    if (at == end || *at < '0' || *at > '9') return nullptr;
    const auto [rest, error] = std::from_chars(at, end, value);
    if (error != std::errc() || value > kLargest) {
      refuse(cell, "has a number above " + std::to_string(kLargest));
    }
    return rest;
  }

  static std::optional<ActionKind> kind_of(char c) {
    for (const auto kind :
         {ActionKind::forward, ActionKind::backward, ActionKind::backward_input,
          ActionKind::backward_weight}) {
      if (letter(kind) == c) return kind;
    }
    return std::nullopt;
  }

  [[noreturn]] void
  not_an_action(std::string_view cell, std::string_view text) {
    for (const char* word :
         {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD",
          "REDUCE_GRAD"}) {
      if (text.find(word) == std::string_view::npos) continue;
      refuse(
          cell,
          "computes nothing; leave it out, transfers follow from the order "
          "(the compute-only format has F, B, I and W alone)");
    }
    refuse(
        cell,
        "is no action; write stage, one of F, B, I and W, and microbatch, as "
        "in 0F1");
  }

  // Without this rule two numbers could ask for any amount of memory.
  void check_names() {
    int64_t actions = 0;
    for (const auto& list : schedule_.ranks) {
      actions += static_cast<int64_t>(list.size());
    }
    if (num_stages_ > actions || num_microbatches_ > actions) {
      const bool stages = num_stages_ > actions;
      throw ConfigError(format(
          "{}: names {} {}, but has {} in all; count from 0, without gaps",
          name_, stages ? "stage" : "microbatch",
          (stages ? num_stages_ : num_microbatches_) - 1,
          counted(actions, "action")));
    }
    schedule_.num_microbatches = static_cast<int32_t>(num_microbatches_);
  }

  std::string_view text_;
  std::string name_;
  Schedule schedule_;
  std::vector<Action>* list_ = nullptr;
  size_t line_ = 0;  // all three from 1
  size_t column_ = 0;
  size_t cell_ = 0;
  int64_t num_stages_ = 0;
  int64_t num_microbatches_ = 0;
};

}  // namespace

void write_schedule_csv(const Schedule& schedule, std::ostream& out) {
  const auto begin = ticks(schedule);
  constexpr size_t kChunk = 1 << 16;
  std::string text;
  for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
    const auto& list = schedule.ranks[rank];
    double tick = 0;
    for (size_t i = 0; i < list.size(); ++i, ++tick) {
      if (i > 0) text += ',';
      for (; tick < begin[rank][i].begin; ++tick) text += ',';
      text += to_string(list[i]);
      if (text.size() < kChunk) continue;
      out << text;
      text.clear();
    }
    text += '\n';
  }
  out << text;
}

Schedule parse_schedule_csv(std::string_view text, const std::string& name) {
  return Reader(text, name).read();
}

Schedule read_schedule_csv(const std::string& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (file) text << file.rdbuf();  // fails alone for an empty file
  if (!file.is_open() || errno != 0) {
    throw ConfigError(
        path + ": cannot be read: " + std::strerror(errno) +
        "; name a schedule's CSV file");
  }
  return parse_schedule_csv(std::move(text).str(), path);
}

}  // namespace echelon
