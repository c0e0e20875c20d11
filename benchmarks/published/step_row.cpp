#include "benchmarks/published/step_row.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <utility>

#include "echelon/error.h"

namespace echelon {
namespace {

using Text = std::pair<const char*, std::string StepRow::*>;
using Whole = std::pair<const char*, int64_t StepRow::*>;
using Real = std::pair<const char*, double StepRow::*>;

const Text kTexts[] = {
    {"file", &StepRow::file},
    {"source", &StepRow::source},
    {"table", &StepRow::table},
    {"notes", &StepRow::notes},
    {"gpu", &StepRow::gpu},
    {"model", &StepRow::model},
    {"zero_or_fsdp", &StepRow::sharding},
    {"recompute", &StepRow::recompute},
    {"precision", &StepRow::precision},
    {"schedule", &StepRow::schedule}};

const Whole kWholes[] = {
    {"gpus", &StepRow::gpus},
    {"layers", &StepRow::layers},
    {"hidden", &StepRow::hidden},
    {"heads", &StepRow::heads},
    {"kv_heads", &StepRow::kv_heads},
    {"ffn", &StepRow::ffn},
    {"vocab", &StepRow::vocab},
    {"seq", &StepRow::seq},
    {"global_batch", &StepRow::global_batch},
    {"microbatch_size", &StepRow::microbatch_size},
    {"tp", &StepRow::tp},
    {"pp", &StepRow::pp},
    {"virtual_stages", &StepRow::virtual_stages},
    {"cp", &StepRow::cp},
    {"ep", &StepRow::ep},
    {"dp", &StepRow::dp}};

const Real kReals[] = {
    {"step_seconds", &StepRow::step_seconds},
    {"memory_gib", &StepRow::memory_gib}};

const char* const kRequired[] = {"gpu", "gpus", "model", "seq", "global_batch"};

std::string trimmed(const std::string& cell) {
  const auto space = [](unsigned char c) { return std::isspace(c) != 0; };
  auto begin = std::find_if_not(cell.begin(), cell.end(), space);
  auto end = std::find_if_not(cell.rbegin(), cell.rend(), space).base();
  return begin < end ? std::string(begin, end) : std::string();
}

bool says_nothing(const std::string& cell) {
  return cell.empty() || cell == "-" || cell == "None" || cell == "none" ||
         cell == "NA" || cell == "n/a" || cell == "nan";
}

/// "8", "8.0", "1e3". Nothing for any other text or a number below 0.
bool read_number(const std::string& cell, double& value) {
  const char* end = cell.data() + cell.size();
  const auto [stop, error] = std::from_chars(cell.data(), end, value);
  return error == std::errc() && stop == end && std::isfinite(value) &&
         value >= 0;
}

std::string quoted(const char* column, const std::string& cell) {
  return std::string(column) + " \"" + cell.substr(0, 40) + "\"";
}

void read_cells(const CsvTable& table, const CsvRow& from, StepRow& row) {
  const auto cell = [&](const char* column) {
    const int64_t i = table.column(column);
    return i < 0 ? std::string() : trimmed(from.cells[static_cast<size_t>(i)]);
  };
  const auto wrong = [&](const std::string& what) {
    if (row.wrong.empty()) row.wrong = what;
  };
  for (const auto& [column, member] : kTexts) row.*member = cell(column);
  for (const auto& [column, member] : kWholes) {
    const std::string text = cell(column);
    double value = 0;
    if (says_nothing(text)) continue;
    if (!read_number(text, value) || value != std::floor(value) ||
        value > 1e12) {
      wrong(quoted(column, text) + " is no whole number");
      continue;
    }
    row.*member = static_cast<int64_t>(value);
  }
  for (const auto& [column, member] : kReals) {
    const std::string text = cell(column);
    if (says_nothing(text) || read_number(text, row.*member)) continue;
    row.*member = 0;
    wrong(quoted(column, text) + " is no number");
  }
}

}  // namespace

std::string lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return text;
}

std::string StepRow::text() const {
  return lower(source + "\n" + table + "\n" + notes + "\n" + file);
}

std::vector<StepRow> step_rows(const CsvTable& table) {
  std::string missing;
  for (const char* column : kRequired) {
    if (table.column(column) >= 0) continue;
    missing += (missing.empty() ? "" : ", ") + std::string(column);
  }
  if (!missing.empty()) {
    throw DataError(
        table.name + ":1: no column " + missing +
        "; a table of steps has gpu, gpus, model, layers, hidden, heads, seq, "
        "global_batch, microbatch_size, tp, pp, dp, … as "
        "benchmarks/published/step_times.csv");
  }
  std::vector<StepRow> rows;
  for (const auto& from : table.rows) {
    StepRow row;
    row.number = static_cast<int64_t>(rows.size()) + 1;
    row.line = from.line;
    read_cells(table, from, row);
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace echelon
