// A table of numbers in a CSV file: a row for each sample.
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

/// True for .csv, in any case.
bool is_csv(const std::string& path);

/// Reads a file whose first line names the columns. The column "target" has the
/// classes, all others are inputs. Fields are separated by commas; one in
/// double quotes may have commas, lines and doubled quotes (RFC 4180). Lines
/// end in \n or \r\n. Throws DataError with file, line and column for what is
/// no such table.
CsvTable read_csv(const std::string& path);
/// The same of a file's content; `name` is the file's in errors.
CsvTable parse_csv(const std::string& text, const std::string& name);

}  // namespace echelon
