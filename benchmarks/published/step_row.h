// One measured (or asked for) training step: a row of a table such as
// benchmarks/published/step_times.csv.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/published/csv.h"

namespace echelon {

/// The text in lower case.
std::string lower(std::string text);

/// The cells, read but not yet understood. Numbers: 0 where the cell is empty.
struct StepRow {
  int64_t number = 0;  // from 1, without the line of columns
  int64_t line = 0;
  std::string file, source, table, notes;
  std::string gpu, model;
  std::string sharding;  // column zero_or_fsdp
  std::string recompute, precision, schedule;
  int64_t gpus = 0;
  int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, ffn = 0;
  int64_t vocab = 0, seq = 0;
  int64_t global_batch = 0, microbatch_size = 0;
  int64_t tp = 0, pp = 0, virtual_stages = 0, cp = 0, ep = 0, dp = 0;
  double step_seconds = 0;  // measured
  double memory_gib = 0;    // measured, the fullest device
  /// The first cell that is no number where one is asked for; empty: none.
  std::string wrong;

  /// source, table, notes and file in lower case: where a row says what no
  /// column has.
  std::string text() const;
};

/// Columns may stand in any order; further ones are not read. Throws DataError
/// that names the columns that are missing: gpu, gpus, model, seq and
/// global_batch must be there, every other may be left out, which says no more
/// than empty cells.
std::vector<StepRow> step_rows(const CsvTable& table);

}  // namespace echelon
