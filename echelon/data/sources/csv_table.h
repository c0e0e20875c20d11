// A table of numbers in a CSV or Parquet file: a row for each sample.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

struct CsvTable {
  std::vector<std::string> columns;  // of the inputs, in the file's order
  std::vector<float> inputs;         // [rows, columns]
  std::vector<int64_t> targets;      // [rows], classes from 0
  int64_t classes = 0;               // the largest target plus one

  int64_t rows() const { return static_cast<int64_t>(targets.size()); }
};

/// True for .csv and .parquet, in any case.
bool is_table(const std::string& path);

/// Reads a file whose columns have names. The column "target" has the classes,
/// all others are inputs. `name` is the file's in errors.
///
/// CSV: the first line names the columns. Fields are separated by commas; one
/// in double quotes may have commas, lines and doubled quotes (RFC 4180). Lines
/// end in \n or \r\n. Parquet: columns of numbers, of one value each; errors
/// count its rows as the lines of such a CSV file.
///
/// Throws DataError with file, line and column for what is no such table, and
/// what read_parquet() throws.
CsvTable read_table(const std::string& path, const std::string& name);
/// The same of the text of a CSV file.
CsvTable parse_csv(const std::string& text, const std::string& name);

}  // namespace echelon
