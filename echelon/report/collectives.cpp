// Calls of typical steps (without outliers) are summed by axis, operation, pass
// and label, then divided by ranks and steps. A call belongs to the pass of its
// rank that is open when it begins, and the part of it during which its rank
// computes is hidden. Labels that differ in numbers alone ("h.0.attn",
// "h.1.attn") become one row with ranges.
#include "echelon/report/collectives.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <ranges>
#include <set>
#include <tuple>
#include <utility>

#include "echelon/report/page.h"
#include "echelon/text/units.h"
#include "echelon/timeline/pipeline_blocks.h"

namespace echelon::report {
namespace {

constexpr size_t kMaxRows = 24;  // of one axis

// --- From spans to costs ----------------------------------------------------

struct RankStep {
  timeline::Intervals compute;
  std::vector<const timeline::Span*> passes;  // by begin
  std::vector<const timeline::Span*> calls;
};

std::string pass_at(const RankStep& step, int64_t time) {
  // Passes nest: the last one that began may have ended.
  for (const timeline::Span* pass : step.passes | std::views::reverse) {
    if (pass->begin_ns <= time && time < pass->end_ns) {
      return timeline::span_kind_name(pass->kind);
    }
  }
  return "";
}

int64_t length_within(
    const timeline::Intervals& sorted, const timeline::Interval& time) {
  auto it = std::ranges::upper_bound(
      sorted, time.begin, {}, &timeline::Interval::end);
  int64_t length = 0;
  for (; it != sorted.end() && it->begin < time.end; ++it) {
    length += std::min(it->end, time.end) - std::max(it->begin, time.begin);
  }
  return length;
}

using RankSteps = std::map<std::pair<int32_t, int64_t>, RankStep>;

bool is_pass(const timeline::Span& span) {
  return span.kind == timeline::SpanKind::forward ||
         span.kind == timeline::SpanKind::backward ||
         span.kind == timeline::SpanKind::optimizer;
}

bool is_call(const timeline::Span& span) {
  return span.kind == timeline::SpanKind::communication && !span.axis.empty();
}

RankSteps typical_steps(
    const timeline::Timeline& timeline, const timeline::Diagnosis& diagnosis) {
  RankSteps steps;
  for (auto& activity : timeline::step_activities(timeline)) {
    if (diagnosis.outliers.contains(activity.step)) continue;
    RankStep& step = steps[{activity.rank, activity.step}];
    step.compute = std::move(activity.compute);
    for (const timeline::Span* span : activity.spans) {
      if (is_pass(*span)) step.passes.push_back(span);
      if (is_call(*span)) step.calls.push_back(span);
    }
  }
  for (auto& [key, step] : steps) {
    std::ranges::stable_sort(step.passes, {}, &timeline::Span::begin_ns);
  }
  return steps;
}

using Key = std::tuple<std::string, std::string, std::string, std::string>;

struct Sum {
  CollectiveCost cost;
  std::set<int32_t> ranks;
};

void divide(CollectiveCost& cost, double by) {
  cost.calls /= by;
  cost.bytes /= by;
  cost.seconds /= by;
  cost.hidden_seconds /= by;
}

void add(CollectiveCost& to, const CollectiveCost& from) {
  to.calls += from.calls;
  to.bytes += from.bytes;
  to.seconds += from.seconds;
  to.hidden_seconds += from.hidden_seconds;
}

// --- Labels that differ in numbers alone ------------------------------------

// Numbers that are a part of a name by themselves: in "h.12.attn" and "bucket
// 3", not in "conv1".
struct NumberedLabel {
  std::string pattern;  // with '\1' for each number
  std::vector<int64_t> numbers;
};

NumberedLabel numbered(const std::string& label) {
  NumberedLabel result;
  const auto border = [&](size_t i) {
    return i >= label.size() || label[i] == '.' || label[i] == ' ';
  };
  for (size_t i = 0; i < label.size();) {
    size_t end = i;
    while (end < label.size() && label[end] >= '0' && label[end] <= '9') ++end;
    const bool begins = i == 0 || border(i - 1);
    if (end > i && end - i < 10 && begins && border(end)) {
      result.pattern += '\1';
      result.numbers.push_back(std::stoll(label.substr(i, end - i)));
      i = end;
    } else {
      result.pattern += label[i++];
    }
  }
  return result;
}

// "0F3 shape" becomes "activations of stage 0 shape".
std::string pipeline_label(const std::string& label) {
  const size_t space = label.find(' ');
  const auto block = timeline::block_of_name(label.substr(0, space));
  if (!block) return label;
  return format(
      "{} of stage {}{}",
      block->kind == timeline::BlockKind::forward ? "activations" : "gradients",
      block->stage, space == std::string::npos ? "" : label.substr(space));
}

struct Range {
  int64_t least;
  int64_t most;
};

std::string
with_ranges(const std::string& pattern, const std::vector<Range>& ranges) {
  std::string text;
  size_t next = 0;
  for (const char c : pattern) {
    if (c != '\1') {
      text += c;
      continue;
    }
    const auto [least, most] = ranges[next++];
    text +=
        most > least ? format("{}\u2013{}", least, most) : format("{}", least);
  }
  return text;
}

// --- The table ---------------------------------------------------------------

std::string axis_name(const std::string& axis) {
  if (axis == "dp_replicate") return "dp";
  if (axis == "dp_shard") return "fsdp";
  if (axis == "shard") return "fsdp with ep";
  return axis == "world" ? "all ranks" : axis;
}

int axis_order(const std::string& axis) {
  constexpr std::array kOrder = {"tp",       "cp",    "ep",          "pp",
                                 "dp_shard", "shard", "dp_replicate"};
  const auto* it = std::find(kOrder.begin(), kOrder.end(), axis);
  return axis == "world" ? 100 : static_cast<int>(it - kOrder.begin());
}

const char* axis_meaning(const std::string& axis) {
  if (axis == "tp") return "pieces of a layer";
  if (axis == "pp") return "stages of the pipeline";
  if (axis == "dp_replicate") return "replicas of the model";
  if (axis == "dp_shard") return "shards of the model's state";
  if (axis == "shard") return "shards of all but the experts";
  if (axis == "world") return "figures of the step";
  return "";
}

std::string calls_text(double calls) {
  return calls < 10 ? format_number(calls) : format_count(calls);
}

void draw_cost_row(
    Markup& page, const std::string& name, const CollectiveCost& cost,
    double longest, bool all) {
  std::string operation = cost.operation;
  std::ranges::replace(operation, '_', '-');
  page.add(
      "<tr class='{}'><th scope='row' class='where'>{}</th><td>{}</td>"
      "<td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>",
      all ? "all" : "one", name, operation, cost.pass, calls_text(cost.calls),
      format_bytes(cost.bytes + 0.5), format_seconds(cost.seconds),
      cost.seconds > 0 ? format_percent(cost.hidden_seconds / cost.seconds)
                       : "\u2013");
  draw_bar_cell(
      page,
      {{"ex", cost.seconds - cost.hidden_seconds},
       {"hid", cost.hidden_seconds}},
      longest);
  page.add("</tr>");
}

struct AxisCosts {
  std::vector<CollectiveCost> rows;
  CollectiveCost total;
};

// The rows after the first kMaxRows become one.
void draw_axis(Markup& page, const AxisCosts& axis, double longest) {
  const auto& [rows, total] = axis;
  const std::string meaning = axis_meaning(total.axis);
  draw_cost_row(
      page, axis_name(total.axis) + (meaning.empty() ? "" : ": " + meaning),
      total, longest, true);
  CollectiveCost rest;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i < kMaxRows || rows.size() == kMaxRows + 1) {
      draw_cost_row(page, rows[i].label, rows[i], longest, false);
    } else {
      add(rest, rows[i]);
    }
  }
  if (rows.size() > kMaxRows + 1) {
    draw_cost_row(
        page, format("{} others", rows.size() - kMaxRows), rest, longest,
        false);
  }
}

using ByAxis = std::map<std::pair<int, std::string>, AxisCosts>;

std::string lead_of(const ByAxis& axes) {
  std::string text;
  for (const auto& [key, axis] : axes) {
    const CollectiveCost& total = axis.total;
    if (total.axis == "world") continue;
    const std::string hidden =
        total.seconds > 0
            ? format(
                  ", {} of it hidden behind computing",
                  format_percent(total.hidden_seconds / total.seconds))
            : "";
    const std::string calls = calls_text(total.calls);
    text += format(
        "{}{} {} on {} ({}, {}{})",
        text.empty() ? "A step of a rank makes " : "; ", calls,
        calls == "1" ? "call" : "calls", axis_name(total.axis),
        format_bytes(total.bytes + 0.5), format_seconds(total.seconds), hidden);
  }
  return text.empty() ? text : text + ".";
}

CollectiveCost cost_of(const timeline::Span& call, const RankStep& step) {
  const timeline::Interval time = {call.begin_ns, call.end_ns};
  const size_t space = call.name.find(' ');
  return {
      .axis = call.axis,
      .operation = call.name.substr(0, space),
      .label = space == std::string::npos ? "" : call.name.substr(space + 1),
      .pass = pass_at(step, call.begin_ns),
      .calls = 1,
      .bytes = static_cast<double>(call.bytes),
      .seconds = 1e-9 * static_cast<double>(time.end - time.begin),
      .hidden_seconds =
          1e-9 * static_cast<double>(length_within(step.compute, time))};
}

}  // namespace

std::vector<CollectiveCost> collective_costs(
    const timeline::Timeline& timeline, const timeline::Diagnosis& diagnosis) {
  const RankSteps steps = typical_steps(timeline, diagnosis);
  std::map<int32_t, int64_t> steps_of_rank;
  for (const auto& [key, step] : steps) ++steps_of_rank[key.first];
  std::map<Key, Sum> sums;
  for (const auto& [place, step] : steps) {
    for (const timeline::Span* call : step.calls) {
      CollectiveCost one = cost_of(*call, step);
      divide(one, static_cast<double>(steps_of_rank[place.first]));
      Sum& sum = sums[{one.axis, one.label, one.operation, one.pass}];
      if (sum.ranks.empty()) {
        sum.cost = std::move(one);
      } else {
        add(sum.cost, one);
      }
      sum.ranks.insert(place.first);
    }
  }
  std::map<std::string, std::set<int32_t>> ranks_of_axis;
  for (const auto& [key, sum] : sums) {
    ranks_of_axis[sum.cost.axis].insert(sum.ranks.begin(), sum.ranks.end());
  }
  std::vector<CollectiveCost> costs;
  for (auto& [key, sum] : sums) {
    const auto ranks = static_cast<double>(sum.ranks.size());
    divide(sum.cost, ranks);
    sum.cost.share_of_ranks =
        ranks / static_cast<double>(ranks_of_axis[sum.cost.axis].size());
    costs.push_back(std::move(sum.cost));
  }
  return costs;
}

std::vector<CollectiveCost> put_together(std::vector<CollectiveCost> costs) {
  struct Together {
    CollectiveCost cost;
    std::vector<Range> ranges;
  };
  std::map<Key, Together> all;
  for (auto& cost : costs) {
    if (cost.axis == "pp") cost.label = pipeline_label(cost.label);
    auto label = numbered(cost.label);
    const auto [it, is_new] = all.try_emplace(
        Key{cost.axis, label.pattern, cost.operation, cost.pass});
    Together& together = it->second;
    if (is_new) {
      together.cost = cost;
      for (const int64_t n : label.numbers) together.ranges.push_back({n, n});
      continue;
    }
    add(together.cost, cost);
    for (size_t i = 0; i < label.numbers.size(); ++i) {
      auto& range = together.ranges[i];
      range.least = std::min(range.least, label.numbers[i]);
      range.most = std::max(range.most, label.numbers[i]);
    }
  }
  std::vector<CollectiveCost> result;
  for (auto& [key, together] : all) {
    together.cost.label = with_ranges(std::get<1>(key), together.ranges);
    result.push_back(std::move(together.cost));
  }
  std::ranges::stable_sort(result, std::greater(), &CollectiveCost::seconds);
  return result;
}

void draw_collectives(
    Markup& page, const timeline::Timeline& timeline,
    const timeline::Diagnosis& diagnosis) {
  ByAxis axes;
  auto costs = collective_costs(timeline, diagnosis);
  // A rank of a pipeline sends what its neighbour receives: rows are those of
  // different ranks, and their sum would be no rank's.
  for (CollectiveCost cost : costs) {
    AxisCosts& axis = axes[{axis_order(cost.axis), cost.axis}];
    axis.total.axis = cost.axis;
    divide(cost, 1 / cost.share_of_ranks);
    add(axis.total, cost);
  }
  for (auto& cost : put_together(std::move(costs))) {
    axes[{axis_order(cost.axis), cost.axis}].rows.push_back(std::move(cost));
  }
  if (axes.empty()) return;
  double longest = 0;
  for (const auto& [key, axis] : axes) {
    longest = std::max(longest, axis.total.seconds);
    for (const auto& row : axis.rows) longest = std::max(longest, row.seconds);
  }
  page.add(
      "<section id='collectives'><h2>Collectives</h2><p class='lead'>{}</p>",
      unbroken(lead_of(axes)));
  open_table(
      page, "Collectives of a step, by axis",
      {"Per rank and step", "Operation", "During", "Calls", "Bytes", "Time",
       "Hidden", "Exposed, hidden"});
  for (const auto& [key, axis] : axes) draw_axis(page, axis, longest);
  close_table(page);
  page.add(
      "<p class='note'>Time: from the begin of a call to its end, summed over "
      "the calls, with the wait for slower ranks. Hidden: the part of it "
      "during which the rank computed. Bytes: the rank\u2019s own input. Means "
      "over the recorded steps; those of an axis over all ranks, those of a "
      "call over the ranks that make it.</p>"
      "</section>");
}

}  // namespace echelon::report
