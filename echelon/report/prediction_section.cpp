// Prediction and measurement are split into the same parts (compared_parts), so
// that each bar and row compares the same work. The bars show the communication
// of all axes as one part, the table each axis. Without a measurement the
// columns of the table are shares instead of ratios. Ranks that were not
// measured and are predicted to hold the same are one row, since a simulation
// may have thousands.
#include "echelon/report/prediction_section.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "echelon/report/chart.h"
#include "echelon/report/page.h"
#include "echelon/text/units.h"

namespace echelon::report {
namespace {

constexpr size_t kMostRanks = 8;  // in the table of memory

std::string seconds_text(double seconds) {
  return seconds < 0.5e-9 ? "\u2013" : format_seconds(seconds);
}

std::string bytes_text(int64_t bytes) {
  return bytes > 0 ? format_bytes(bytes) : "\u2013";
}

std::string ratio_text(double predicted, double measured) {
  if (!(predicted > 0) || !(measured > 0)) return "\u2013";
  const double ratio = measured / predicted;
  return ratio >= 10 ? format_number(ratio) : format("{:.2f}", ratio);
}

// A table of predicted figures, with those measured or with shares.
class ComparisonTable {
 public:
  ComparisonTable(
      Markup& page, const char* what, const char* first, bool measured)
      : page_(page), measured_(measured) {
    open_table(
        page, format("Predicted {}{}", measured ? "and measured " : "", what),
        measured
            ? std::vector<std::string>{first, "Predicted", "Measured", "Ratio"}
            : std::vector<std::string>{first, "Predicted", "Share"});
  }
  ~ComparisonTable() { close_table(page_); }

  // `whole` is what shares are of; 0: none.
  template <typename Text>
  void add_row(
      const char* css, const std::string& name, double predicted,
      double measured, double whole, const Text& text) {
    page_.add(
        "<tr class='{}'><th scope='row'>{}</th><td>{}</td>", css, name,
        text(predicted));
    if (measured_) {
      page_.add(
          "<td>{}</td><td>{}</td></tr>", text(measured),
          ratio_text(predicted, measured));
    } else {
      page_.add(
          "<td>{}</td></tr>",
          whole > 0 ? format_percent(predicted / whole) : "");
    }
  }

 private:
  Markup& page_;
  bool measured_;
};

// --- Time -------------------------------------------------------------------

StackedRow row_of(
    const std::string& name, const std::vector<timeline::ComparedPart>& parts,
    double timeline::ComparedPart::*side) {
  StackedRow row{.name = name};
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
    Markup& page, const std::vector<timeline::ComparedPart>& parts,
    bool measured) {
  StackedBars bars{
      .id = "prediction",
      .title = "A step",
      .rows = {row_of("predicted", parts, &timeline::ComparedPart::predicted)}};
  if (measured) {
    bars.rows.push_back(
        row_of("measured", parts, &timeline::ComparedPart::measured));
  }
  bars.description = "What a step is spent on:";
  for (const auto& row : bars.rows) {
    bars.description += " " + row.name + " " + row.total + ",";
  }
  bars.description.back() = '.';
  page.add("<div class='grid2 only'>");
  draw_stacked_bars(page, bars);
  page.add("</div>");
}

void draw_times(
    Markup& page, const std::vector<timeline::ComparedPart>& parts,
    bool measured) {
  double predicted_step = 0;
  double measured_step = 0;
  for (const auto& part : parts) {
    predicted_step += part.predicted;
    measured_step += part.measured;
  }
  ComparisonTable table(page, "time of a step", "Time", measured);
  table.add_row(
      "all", "the step", predicted_step, measured_step, predicted_step,
      seconds_text);
  for (const auto& part : parts) {
    table.add_row(
        "part", part.name, part.predicted, part.measured, predicted_step,
        seconds_text);
  }
}

// --- Memory -----------------------------------------------------------------

struct RankRow {
  int32_t rank = 0;
  int64_t others = 0;  // not measured, and predicted to hold the same
  timeline::MemoryByKind predicted;
  std::optional<timeline::MemoryByKind> measured;

  int64_t size() const {
    return std::max(
        predicted.total(), measured ? measured->total() : int64_t{0});
  }
};

std::vector<RankRow> rank_rows(
    const StepPrediction& prediction, const timeline::Timeline& timeline) {
  const auto measured = fullest_moments(timeline);
  std::vector<RankRow> rows;
  for (const auto& one : prediction.memory) {
    RankRow row{one.rank, 0, one.memory, std::nullopt};
    const auto found =
        std::ranges::find(measured, one.rank, &PredictedMemory::rank);
    if (found != measured.end()) row.measured = found->memory;
    const auto same = std::ranges::find_if(rows, [&](const RankRow& other) {
      return !row.measured && !other.measured &&
             other.predicted.bytes == row.predicted.bytes;
    });
    if (same != rows.end()) {
      ++same->others;
    } else {
      rows.push_back(row);
    }
  }
  return rows;
}

std::string rank_text(const RankRow& row) {
  if (row.others == 0) return format("rank {}", row.rank);
  return format(
      "rank {} and {} {}", row.rank, format_count(row.others),
      row.others == 1 ? "other" : "others");
}

// The fullest rank by kind, then the totals of the others.
void draw_memory(
    Markup& page, const StepPrediction& prediction,
    const timeline::Timeline& timeline) {
  auto rows = rank_rows(prediction, timeline);
  if (rows.empty()) return;
  const bool any = std::ranges::any_of(
      rows, [](const RankRow& row) { return row.measured.has_value(); });
  std::ranges::stable_sort(rows, std::greater(), &RankRow::size);
  const size_t shown = std::min(rows.size(), kMostRanks);
  const auto text = [](double bytes) {
    return bytes_text(static_cast<int64_t>(bytes));
  };
  {
    ComparisonTable table(page, "memory", "Memory, fullest moment", any);
    for (size_t i = 0; i < shown; ++i) {
      const RankRow& row = rows[i];
      const auto measured = row.measured.value_or(timeline::MemoryByKind{});
      const auto total = static_cast<double>(row.predicted.total());
      table.add_row(
          "all", rank_text(row), total, static_cast<double>(measured.total()),
          0, text);
      if (i > 0) continue;
      for (const timeline::MemoryKind kind : timeline::kMemoryKinds) {
        if (row.predicted[kind] <= 0 && measured[kind] <= 0) continue;
        table.add_row(
            "part", std::string(timeline::to_string(kind)),
            static_cast<double>(row.predicted[kind]),
            static_cast<double>(measured[kind]), total, text);
      }
    }
  }
  if (rows.size() > shown) {
    page.add(
        "<p class='note'>The {} ranks of {} that hold most.</p>", shown,
        format_count(rows.size()));
  }
}

const char* kNote =
    "Both steps are split into the same parts, means over the ranks. Not "
    "hidden: communication while nothing computes, with the wait for slower "
    "ranks. Not predicted are the wait for data and what else the host does. "
    "Ratio: measured over predicted. Memory is that of tensors.";

}  // namespace

std::vector<PredictedMemory>
fullest_moments(const timeline::Timeline& timeline) {
  std::vector<PredictedMemory> list;
  for (const auto& rank : timeline.memory) {
    const auto fullest = std::ranges::max_element(
        rank.samples, {}, [](const timeline::MemorySample& sample) {
          return sample.memory.total();
        });
    if (fullest == rank.samples.end()) continue;
    list.push_back({rank.rank, fullest->memory});
  }
  return list;
}

std::string prediction_sentence(
    const StepPrediction& prediction, const timeline::TimedParts& measured) {
  const double predicted = prediction.step_seconds;
  const double real = measured.step_seconds();
  if (!(predicted > 0) || !(real > 0)) return "";
  std::string text = format(
      "On {} a step was predicted to take {}, and took {}, {} times that.",
      prediction.cluster, format_seconds(predicted), format_seconds(real),
      ratio_text(predicted, real));
  const auto parts = timeline::compared_parts(prediction.parts, measured);
  const auto off = [](const timeline::ComparedPart& part) {
    return std::abs(part.measured - part.predicted);
  };
  const auto most = std::ranges::max_element(parts, {}, off);
  if (most != parts.end() && off(*most) > 0.02 * real) {
    text += " Most of the difference is in " + most->name + ": " +
            format_seconds(off(*most)) +
            (most->measured > most->predicted ? " more." : " less.");
  }
  return text;
}

void draw_prediction(
    Markup& page, const StepPrediction& prediction,
    const timeline::Timeline& timeline, const timeline::Diagnosis& diagnosis) {
  const bool measured = !timeline.simulated;
  page.add(
      "<section id='predicted'><h2>{}</h2>",
      measured ? "Prediction and measurement" : "Prediction");
  if (!prediction.is_there()) {
    page.add("<p class='finding'>");
    add_prose(page, prediction.missing);
    page.add("</p></section>");
    return;
  }
  const timeline::TimedParts real =
      measured ? timeline::timed_parts(timeline, diagnosis)
               : timeline::TimedParts{};
  const bool any = real.step_seconds() > 0;
  const std::string sentence =
      any ? prediction_sentence(prediction, real)
          : "On " + prediction.cluster + " a step takes " +
                format_seconds(prediction.step_seconds) + ", simulated.";
  page.add("<p class='lead'>{}</p>", sentence);
  const auto parts = timeline::compared_parts(prediction.parts, real);
  draw_bars(page, parts, any);
  draw_times(page, parts, any);
  draw_memory(page, prediction, timeline);
  if (any) page.add("<p class='note'>{}</p>", kNote);
  page.add("</section>");
}

}  // namespace echelon::report
