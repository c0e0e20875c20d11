#include "echelon/report/prediction_section.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "echelon/report/stacked_bars.h"
#include "echelon/text/units.h"

namespace echelon {
namespace {

constexpr size_t kMostRanks = 8;  // in the table of memory

std::string seconds_text(double seconds) {
  return seconds < 0.5e-9 ? "\u2013" : format_seconds(seconds);
}

std::string ratio_text(double predicted, double measured) {
  if (!(predicted > 0) || !(measured > 0)) return "\u2013";
  const double ratio = measured / predicted;
  if (ratio >= 10) return format_number(ratio);
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f", ratio);
  return text;
}

// --- Time -------------------------------------------------------------------

StackedRow row_of(
    const std::string& name, const std::vector<ComparedPart>& parts,
    double ComparedPart::*side) {
  StackedRow row{.name = name, .total = {}, .parts = {}};
  for (const auto& part : parts) {
    if (!row.parts.empty() && row.parts.back().color == part.color) {
      row.parts.back().value += part.*side;  // another axis
      continue;
    }
    const bool axis = part.color == std::string("ex");
    row.parts.push_back(
        {part.color,
         axis ? "communication, not hidden" : part.name,
         part.*side,
         {}});
  }
  for (auto& part : row.parts) part.text = format_seconds(part.value);
  row.total = format_seconds(row.sum());
  return row;
}

void draw_bars(
    Markup& page, const std::vector<ComparedPart>& parts, bool measured) {
  StackedBars bars{
      .id = "prediction",
      .title = "A step",
      .description = {},
      .rows = {row_of("predicted", parts, &ComparedPart::predicted)},
      .limit_name = {}};
  if (measured) {
    bars.rows.push_back(row_of("measured", parts, &ComparedPart::measured));
  }
  bars.description = "What a step is spent on:";
  for (const auto& row : bars.rows) {
    bars.description += " " + row.name + " " + row.total + ",";
  }
  bars.description.back() = '.';
  page.open("div", {{"class", "grid2 only"}});
  draw_stacked_bars(page, bars);
  page.close();
}

void open_table(Markup& page, const char* label) {
  page.open(
      "div", {{"class", "scroll"},
              {"tabindex", "0"},
              {"role", "region"},
              {"aria-label", label}});
  page.open("table", {{"class", "compared"}})
      .leaf("caption", {{"class", "hidden"}}, label);
}

void draw_heads(Markup& page, const char* first, bool measured) {
  page.open("thead").open("tr").leaf("th", {{"scope", "col"}}, first);
  page.leaf("th", {{"scope", "col"}}, "Predicted");
  if (measured) {
    page.leaf("th", {{"scope", "col"}}, "Measured");
    page.leaf("th", {{"scope", "col"}}, "Ratio");
  } else {
    page.leaf("th", {{"scope", "col"}}, "Share");
  }
  page.close().close();
}

void draw_time_row(
    Markup& page, const ComparedPart& part, double step, bool measured,
    const char* css) {
  page.open("tr", {{"class", css}});
  page.leaf("th", {{"scope", "row"}}, part.name);
  page.leaf("td", {}, seconds_text(part.predicted));
  if (measured) {
    page.leaf("td", {}, seconds_text(part.measured));
    page.leaf("td", {}, ratio_text(part.predicted, part.measured));
  } else {
    page.leaf("td", {}, format_percent(step > 0 ? part.predicted / step : 0));
  }
  page.close();
}

void draw_times(
    Markup& page, const std::vector<ComparedPart>& parts, bool measured) {
  ComparedPart step{"the step", "", 0, 0};
  for (const auto& part : parts) {
    step.predicted += part.predicted;
    step.measured += part.measured;
  }
  open_table(
      page, measured ? "Predicted and measured time of a step"
                     : "Predicted time of a step");
  draw_heads(page, "Time", measured);
  page.open("tbody");
  draw_time_row(page, step, step.predicted, measured, "all");
  for (const auto& part : parts) {
    draw_time_row(page, part, step.predicted, measured, "part");
  }
  page.close().close().close();
}

// --- Memory -----------------------------------------------------------------

struct RankRow {
  int32_t rank = 0;
  int64_t others =
      0;  // ranks of which the same was predicted, nothing measured
  MemoryByKind predicted;
  std::optional<MemoryByKind> measured;

  int64_t size() const {
    return std::max(
        predicted.total(), measured ? measured->total() : int64_t{0});
  }
};

std::vector<RankRow>
rank_rows(const StepPrediction& prediction, const Timeline& timeline) {
  const auto measured = fullest_moments(timeline);
  std::vector<RankRow> rows;
  for (const auto& one : prediction.memory) {
    RankRow row{one.rank, 0, one.memory, std::nullopt};
    const auto found = std::find_if(
        measured.begin(), measured.end(),
        [&](const PredictedMemory& other) { return other.rank == one.rank; });
    if (found != measured.end()) row.measured = found->memory;
    const auto same =
        std::find_if(rows.begin(), rows.end(), [&](const RankRow& other) {
          return !row.measured && !other.measured &&
                 other.predicted.bytes == row.predicted.bytes;
        });
    if (same != rows.end()) {
      ++same->others;
    } else {
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

std::string bytes_text(int64_t bytes) {
  return bytes > 0 ? format_bytes(bytes) : "\u2013";
}

void draw_memory_row(
    Markup& page, const std::string& name, int64_t predicted,
    std::optional<int64_t> measured, int64_t whole, bool any_measured,
    const char* css) {
  page.open("tr", {{"class", css}});
  page.leaf("th", {{"scope", "row"}}, name);
  page.leaf("td", {}, bytes_text(predicted));
  const auto share = [](int64_t part, int64_t of) {
    return static_cast<double>(part) / static_cast<double>(of);
  };
  if (any_measured) {
    page.leaf("td", {}, bytes_text(measured.value_or(0)));
    page.leaf(
        "td", {},
        ratio_text(
            static_cast<double>(predicted),
            static_cast<double>(measured.value_or(0))));
  } else {
    page.leaf(
        "td", {}, whole > 0 ? format_percent(share(predicted, whole)) : "");
  }
  page.close();
}

std::string rank_text(const RankRow& row) {
  std::string text = "rank " + std::to_string(row.rank);
  if (row.others > 0) {
    text += " and " + format_count(static_cast<double>(row.others)) +
            (row.others == 1 ? " other" : " others");
  }
  return text;
}

// The fullest rank by kind, then the others' sums.
void draw_memory(
    Markup& page, const StepPrediction& prediction, const Timeline& timeline) {
  auto rows = rank_rows(prediction, timeline);
  if (rows.empty()) return;
  const bool any = std::any_of(
      rows.begin(), rows.end(),
      [](const RankRow& row) { return row.measured.has_value(); });
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
    return a.size() > b.size();
  });
  const size_t shown = std::min(rows.size(), kMostRanks);
  open_table(page, any ? "Predicted and measured memory" : "Predicted memory");
  draw_heads(page, "Memory, fullest moment", any);
  page.open("tbody");
  const auto total = [](const RankRow& row) {
    return row.measured ? std::optional(row.measured->total()) : std::nullopt;
  };
  for (size_t i = 0; i < shown; ++i) {
    const RankRow& row = rows[i];
    draw_memory_row(
        page, rank_text(row), row.predicted.total(), total(row), 0, any, "all");
    if (i > 0) continue;
    for (const MemoryKind kind : kMemoryKinds) {
      const int64_t measured = row.measured ? (*row.measured)[kind] : 0;
      if (row.predicted[kind] <= 0 && measured <= 0) continue;
      draw_memory_row(
          page, std::string(to_string(kind)), row.predicted[kind], measured,
          row.predicted.total(), any, "part");
    }
  }
  page.close().close().close();
  if (rows.size() > shown) {
    page.leaf(
        "p", {{"class", "note"}},
        "The " + std::to_string(shown) + " ranks of " +
            std::to_string(rows.size()) + " that hold most.");
  }
}

const char* kNote =
    "Both steps are cut into the same parts, means over the ranks. Not hidden: "
    "communication while nothing computes, with the wait for slower ranks. Not "
    "predicted are the wait for data and what else the host does. Ratio: "
    "measured "
    "over predicted. Memory is that of tensors.";

}  // namespace

std::vector<PredictedMemory> fullest_moments(const Timeline& timeline) {
  std::vector<PredictedMemory> list;
  for (const auto& rank : timeline.memory) {
    const auto fullest = std::max_element(
        rank.samples.begin(), rank.samples.end(),
        [](const MemorySample& a, const MemorySample& b) {
          return a.memory.total() < b.memory.total();
        });
    if (fullest == rank.samples.end()) continue;
    list.push_back({rank.rank, fullest->memory});
  }
  return list;
}

std::string prediction_sentence(
    const StepPrediction& prediction, const TimedParts& measured) {
  const double predicted = prediction.step_seconds;
  const double real = measured.step_seconds();
  if (!(predicted > 0) || !(real > 0)) return "";
  std::string text =
      "On " + prediction.cluster + " a step was predicted to take " +
      format_seconds(predicted) + ", and took " + format_seconds(real) + ", " +
      ratio_text(predicted, real) + " times that.";
  const auto parts = compared_parts(prediction.parts, measured);
  const auto off = [](const ComparedPart& part) {
    return std::abs(part.measured - part.predicted);
  };
  const auto most = std::max_element(
      parts.begin(), parts.end(),
      [&](const auto& a, const auto& b) { return off(a) < off(b); });
  if (most != parts.end() && off(*most) > 0.02 * real) {
    text += " Most of the difference is in " + most->name + ": " +
            format_seconds(off(*most)) +
            (most->measured > most->predicted ? " more." : " less.");
  }
  return text;
}

void draw_prediction(
    Markup& page, const StepPrediction& prediction, const Timeline& timeline,
    const Diagnosis& diagnosis) {
  const bool measured = !timeline.simulated;
  page.open("section", {{"id", "predicted"}});
  page.leaf("h2", {}, measured ? "Prediction and measurement" : "Prediction");
  if (!prediction.is_there()) {
    page.leaf("p", {{"class", "finding"}}, prediction.missing).close();
    return;
  }
  const TimedParts real =
      measured ? timed_parts(timeline, diagnosis) : TimedParts{};
  const bool any = real.step_seconds() > 0;
  const std::string sentence =
      any ? prediction_sentence(prediction, real)
          : "On " + prediction.cluster + " a step takes " +
                format_seconds(prediction.step_seconds) + ", simulated.";
  page.leaf("p", {{"class", "lead"}}, sentence);
  const auto parts = compared_parts(prediction.parts, real);
  draw_bars(page, parts, any);
  draw_times(page, parts, any);
  draw_memory(page, prediction, timeline);
  if (any) page.leaf("p", {{"class", "note"}}, kNote);
  page.close();
}

}  // namespace echelon
