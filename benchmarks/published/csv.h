// Tables of comma-separated values, as RFC 4180 has them: cells in quotes may
// hold commas, doubled quotes and line breaks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

struct CsvRow {
  int64_t line = 0;                // where it begins, from 1
  std::vector<std::string> cells;  // as many as there are columns
};

struct CsvTable {
  std::string name;  // of the file, for messages
  std::vector<std::string> columns;
  std::vector<CsvRow> rows;  // empty lines are left out

  /// The place of the column, or -1 when the table has none of that name.
  int64_t column(std::string_view column) const;
};

/// The first row names the columns. Throws DataError with name, line and rule
/// for an open quote, text behind a closing quote, a row with more or fewer
/// cells than there are columns, a column named twice or not at all, and for a
/// table without columns.
CsvTable parse_csv(std::string_view text, const std::string& name);

/// Throws DataError also when the file cannot be read.
CsvTable read_csv(const std::filesystem::path& path);

}  // namespace echelon
