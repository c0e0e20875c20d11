// Ranks with equal plans are one group with one line, so that the text stays
// short for any number of ranks. The largest value of a table decides the unit
// of all of it, and the fullest rank or the limit decides the scale of all
// bars, so that lines can be compared at a glance. JSON has the same groups
// with exact bytes.
#include "echelon/memory_plan/memory_plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "echelon/text/format.h"
#include "echelon/text/table.h"
#include "echelon/text/units.h"

namespace echelon::memory_plan {
namespace {

using Rows = std::vector<std::vector<std::string>>;

// One character and one colour (of a terminal) for each kind.
constexpr std::array<char, 7> kLetters = {'p', 'g', 'o', 'a', 'G', 'c', 'w'};
constexpr std::array<int, 7> kColours = {34, 31, 33, 32, 35, 36, 90};

// Numbers to the right, words to the left.
std::string aligned(const Rows& rows, const std::vector<bool>& right) {
  std::vector<size_t> widths(right.size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], columns(row[i]));
    }
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line = " ";
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - columns(row[i]), ' ');
      line += " " + (right[i] ? space + row[i] : row[i] + space) + " ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

// "0 to 3", "0 and 2", "0, 2, 4 to 7"
std::string list_of(const std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i > 2) {
      parts.push_back(format("{} to {}", ranks[i], ranks[end - 1]));
    } else {
      for (size_t k = i; k < end; ++k)
        parts.push_back(std::to_string(ranks[k]));
    }
    i = end;
  }
  constexpr size_t kShown = 4;
  if (parts.size() <= kShown) return join(parts, ", ");
  return join(std::span(parts).first(kShown), ", ") + ", …";
}

bool alike(const RankPlan& a, const RankPlan& b) {
  return a.peak.bytes == b.peak.bytes && a.host_bytes == b.host_bytes &&
         a.snapshot_bytes == b.snapshot_bytes &&
         a.resting.bytes == b.resting.bytes && a.calls == b.calls;
}

std::vector<RankPlan> folded(const std::vector<RankPlan>& ranks) {
  std::vector<RankPlan> groups;
  for (const auto& rank : ranks) {
    const auto found = std::ranges::find_if(
        groups, [&](const auto& group) { return alike(group, rank); });
    if (found == groups.end()) {
      groups.push_back(rank);
      continue;
    }
    auto& all = found->ranks;
    all.insert(all.end(), rank.ranks.begin(), rank.ranks.end());
    std::ranges::sort(all);
  }
  return groups;
}

struct Unit {
  int64_t bytes;
  std::string name;
};

Unit unit_for(int64_t most) {
  constexpr std::array<const char*, 4> kNames = {"KiB", "MiB", "GiB", "TiB"};
  Unit unit{1024, "KiB"};
  for (size_t i = 1; i < kNames.size() && most / unit.bytes >= 10'000; ++i) {
    unit = {unit.bytes * 1024, kNames[i]};
  }
  return unit;
}

std::string number(int64_t bytes, const Unit& unit) {
  if (bytes == 0) return "-";
  const double value =
      static_cast<double>(bytes) / static_cast<double>(unit.bytes);
  if (value < 0.05) return "< 0.1";
  return value < 9.95 ? format("{:.1f}", value) : format("{:.0f}", value);
}

// A stacked bar, `width` wide for `most` bytes.
std::string
bar(const timeline::MemoryByKind& memory, int64_t most, size_t width,
    bool colours) {
  std::string text;
  int64_t sum = 0;
  size_t drawn = 0;
  for (const timeline::MemoryKind kind : timeline::kMemoryKinds) {
    sum += memory[kind];
    // The running sum is rounded, not each part, so that the parts of a bar are
    // together as long as their sum.
    const auto end = static_cast<size_t>(std::llround(
        static_cast<double>(sum) /
        static_cast<double>(std::max<int64_t>(1, most)) *
        static_cast<double>(width)));
    if (end <= drawn) continue;
    const auto index = static_cast<size_t>(kind);
    if (colours) text += format("\x1b[{}m", kColours[index]);
    for (; drawn < end; ++drawn) {
      text += colours ? "█" : std::string(1, kLetters[index]);
    }
    if (colours) text += "\x1b[0m";
  }
  return text;
}

std::string headline(const MemoryModel& model, const Job& job) {
  const auto& layout = job.layout;
  std::string text = format(
      "{}, {} parameters, on {}: {}\n", job.model.name,
      format_count(model.num_parameters), to_string(layout),
      counted(layout.num_ranks(), "rank"));
  std::vector<std::string> said = {"batch " + std::to_string(job.train.batch)};
  const int64_t passes = model.schedule.num_microbatches;
  if (passes > 1) {
    said.push_back(
        format("{} {}", passes, layout.pp > 1 ? "microbatches" : "passes"));
  }
  if (layout.pp > 1) said.push_back(model.schedule.name);
  if (layout.dp_shard > 1) {
    said.push_back("shard stage " + std::to_string(job.shard.stage));
  }
  const auto add = [&](const char* what, auto value, auto usual) {
    if (value != usual) said.push_back(format("{} {}", what, to_string(value)));
  };
  add("recompute", job.memory.recompute, Recompute::none);
  add("activations", job.memory.activations, Activations::keep);
  add("offload", job.memory.offload, Offload::none);
  const ComputeDtype compute = job.precision.compute;
  if (compute == ComputeDtype::tf32 || in_16_bits(compute)) {
    said.push_back("computes in " + to_string(compute));
  }
  said.push_back(to_string(job.optimizer.name));
  return text + join(said, ", ") + "\n";
}

std::string peaks(
    const std::vector<RankPlan>& groups, const PlanTextOptions& options,
    int64_t limit) {
  int64_t most = 0;
  bool host = false;
  bool copies = false;
  std::set<size_t> kinds;
  for (const auto& group : groups) {
    most = std::max(most, group.peak.total());
    host |= group.host_bytes > 0;
    copies |= group.snapshot_bytes > 0;
    for (size_t i = 0; i < timeline::kMemoryKinds.size(); ++i) {
      if (group.peak.bytes[i] != 0) kinds.insert(i);
    }
  }
  const Unit unit = unit_for(most);
  Rows rows = {{"rank"}};
  for (const size_t kind : kinds) {
    std::string name(timeline::to_string(timeline::kMemoryKinds[kind]));
    if (name == "optimizer state") name = "optimizer";
    if (name == "communication") name = "comm";
    rows[0].push_back(name);
  }
  rows[0].insert(rows[0].end(), {"peak", "at rest"});
  if (host) rows[0].push_back("host");
  if (copies) rows[0].push_back("snapshot");
  std::vector<bool> right(rows[0].size(), true);
  right[0] = false;
  for (const auto& group : groups) {
    auto& row = rows.emplace_back();
    row.push_back(list_of(group.ranks));
    for (const size_t kind : kinds) {
      row.push_back(number(group.peak.bytes[kind], unit));
    }
    row.push_back(number(group.peak.total(), unit));
    row.push_back(number(group.resting.total(), unit));
    if (host) row.push_back(number(group.host_bytes, unit));
    if (copies) row.push_back(number(group.snapshot_bytes, unit));
  }
  std::string text = "\nPeak of each rank, by kind, in " + unit.name + "\n\n" +
                     aligned(rows, right) + "\n";
  const int64_t scale = std::max(most, limit);
  const size_t width = options.columns > 50 ? options.columns - 4 : 46;
  for (const auto& group : groups) {
    text += format(
        "  {}\n  rank {}, fullest in the {}\n",
        bar(group.peak, scale, width, options.colours), list_of(group.ranks),
        group.moment);
  }
  text += "\n ";
  for (const size_t kind : kinds) {
    const std::string name(timeline::to_string(timeline::kMemoryKinds[kind]));
    text += " " +
            (options.colours ? format("\x1b[{}m█\x1b[0m", kColours[kind])
                             : std::string(1, kLetters[kind])) +
            " " + name;
  }
  return text + "\n";
}

// Calls for several layers as one line: "parameters of 14 layers".
std::vector<PlannedCalls> merged_calls(const std::vector<PlannedCalls>& calls) {
  std::vector<PlannedCalls> lines;
  std::vector<int64_t> parts;
  for (const auto& call : calls) {
    const auto of = call.what.find(" of ");
    const std::string what = call.what.substr(0, of);
    const auto found = std::ranges::find_if(lines, [&](const auto& line) {
      return line.operation == call.operation && line.axis == call.axis &&
             line.what == what;
    });
    if (found == lines.end()) {
      lines.push_back(call);
      lines.back().what = what;
      parts.push_back(of == std::string::npos ? 0 : 1);
      continue;
    }
    found->count += call.count;
    found->bytes += call.bytes;
    ++parts[static_cast<size_t>(found - lines.begin())];
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    if (parts[i] > 0) {
      lines[i].what += " of " + counted(parts[i], "layer");
    }
  }
  return lines;
}

std::string collectives(const std::vector<RankPlan>& groups) {
  int64_t most = 0;
  for (const auto& group : groups) {
    for (const auto& call : merged_calls(group.calls)) {
      most = std::max(most, call.bytes);
    }
  }
  if (most == 0) return "\nNo collectives in a step.\n";
  const Unit unit = unit_for(most);
  Rows rows = {{"rank", "operation", "axis", "calls", unit.name, "of"}};
  for (const auto& group : groups) {
    std::string ranks = list_of(group.ranks);
    for (const auto& call : merged_calls(group.calls)) {
      rows.push_back(
          {std::exchange(ranks, ""), call.operation,
           std::string(short_axis_name(call.axis)), format_count(call.count),
           number(call.bytes, unit), call.what});
    }
  }
  return "\nWhat each rank gives to the collectives of a step\n\n" +
         aligned(rows, {false, false, false, true, true, false});
}

nlohmann::json by_kind(const timeline::MemoryByKind& memory) {
  nlohmann::json bytes;
  for (const timeline::MemoryKind kind : timeline::kMemoryKinds) {
    std::string name(timeline::to_string(kind));
    std::ranges::replace(name, ' ', '_');
    bytes[name] = memory[kind];
  }
  return bytes;
}

}  // namespace

std::string to_text(
    const MemoryPlan& plan, const MemoryModel& model, const Job& job,
    const PlanTextOptions& options) {
  const auto groups = folded(plan.ranks);
  const int64_t limit = job.memory.limit_bytes;
  std::string text = headline(model, job) + peaks(groups, options, limit) +
                     collectives(groups);
  if (limit > 0) {
    const std::string excess = explain_limit(model, job, limit);
    text += excess.empty()
                ? "\nFits the limit of " + format_bytes(limit) + ".\n"
                : "\nDoes not fit: " + excess + "\n";
  }
  if (options.host_bytes > 0) {
    const std::string excess = explain_host_memory(
        model, job, all_ranks(job.layout), options.host_bytes);
    if (!excess.empty()) text += "\nDoes not fit this host: " + excess + "\n";
  }
  for (const auto& note : plan.notes) text += "\nnote: " + note + "\n";
  return text;
}

std::string
to_json(const MemoryPlan& plan, const MemoryModel& model, const Job& job) {
  using nlohmann::json;
  json ranks = json::array();
  for (const auto& group : folded(plan.ranks)) {
    json calls = json::array();
    for (const auto& call : group.calls) {
      calls.push_back(
          {{"operation", call.operation},
           {"axis", short_axis_name(call.axis)},
           {"of", call.what},
           {"calls", call.count},
           {"bytes", call.bytes}});
    }
    ranks.push_back(
        {{"ranks", group.ranks},
         {"pipeline_rank", group.pipeline_rank},
         {"peak_bytes", group.peak.total()},
         {"bytes", by_kind(group.peak)},
         {"moment", group.moment},
         {"resting_bytes", group.resting.total()},
         {"host_bytes", group.host_bytes},
         {"snapshot_bytes", group.snapshot_bytes},
         {"collectives", calls}});
  }
  json advices = json::array();
  for (const auto& advice : advise(model, job)) {
    advices.push_back(
        {{"setting", advice.setting},
         {"peak_bytes", advice.peak_bytes},
         {"saves_bytes", advice.saves_bytes}});
  }
  const int64_t limit = job.memory.limit_bytes;
  const json all = {
      {"parameters", model.num_parameters},
      {"layout", to_string(job.layout)},
      {"ranks", ranks},
      {"limit_bytes", limit},
      {"fits", limit == 0 || plan.largest().peak.total() <= limit},
      {"advice", advices},
      {"notes", plan.notes}};
  return all.dump(2);
}

}  // namespace echelon::memory_plan
