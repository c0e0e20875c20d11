#include "benchmarks/published/csv.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>

#include "echelon/error.h"

namespace echelon {
namespace {

class Reader {
 public:
  Reader(std::string_view text, const std::string& name)
      : text_(text), name_(name) {
    if (text_.starts_with("\xEF\xBB\xBF")) text_.remove_prefix(3);
  }

  bool more() const { return at_ < text_.size(); }

  CsvRow row() {
    CsvRow row;
    row.line = line_;
    while (true) {
      row.cells.push_back(cell());
      if (!more()) return row;
      const char end = text_[at_++];
      if (end == ',') continue;
      if (end == '\r' && more() && text_[at_] == '\n') ++at_;
      ++line_;
      return row;
    }
  }

  [[noreturn]] void fail(int64_t line, const std::string& what) const {
    throw DataError(name_ + ":" + std::to_string(line) + ": " + what);
  }

 private:
  static bool ends_cell(char c) { return c == ',' || c == '\n' || c == '\r'; }

  std::string cell() {
    if (more() && text_[at_] == '"') return quoted();
    const size_t from = at_;
    while (more() && !ends_cell(text_[at_])) {
      if (text_[at_] == '"') {
        fail(
            line_,
            "a quote inside a cell: put the whole cell in quotes and "
            "write the quote twice");
      }
      ++at_;
    }
    return std::string(text_.substr(from, at_ - from));
  }

  std::string quoted() {
    const int64_t opened = line_;
    std::string value;
    for (++at_; more(); ++at_) {
      const char c = text_[at_];
      if (c == '\n') ++line_;
      if (c != '"') {
        value += c;
        continue;
      }
      if (at_ + 1 < text_.size() && text_[at_ + 1] == '"') {
        value += c;
        ++at_;
        continue;
      }
      ++at_;
      if (more() && !ends_cell(text_[at_])) {
        fail(line_, "text behind a closing quote: a comma is missing");
      }
      return value;
    }
    fail(opened, "a quote that is opened here is never closed");
  }

  std::string_view text_;
  const std::string& name_;
  size_t at_ = 0;
  int64_t line_ = 1;
};

void check_columns(const CsvTable& table, const Reader& reader) {
  for (size_t i = 0; i < table.columns.size(); ++i) {
    const auto& column = table.columns[i];
    if (column.empty()) {
      reader.fail(1, "column " + std::to_string(i + 1) + " has no name");
    }
    if (table.column(column) != static_cast<int64_t>(i)) {
      reader.fail(1, "column \"" + column + "\" is there twice");
    }
  }
}

}  // namespace

int64_t CsvTable::column(std::string_view column) const {
  const auto found = std::find(columns.begin(), columns.end(), column);
  return found == columns.end() ? -1 : found - columns.begin();
}

CsvTable parse_csv(std::string_view text, const std::string& name) {
  Reader reader(text, name);
  if (!reader.more()) {
    reader.fail(1, "empty: the first line must name the columns");
  }
  CsvTable table;
  table.name = name;
  table.columns = reader.row().cells;
  check_columns(table, reader);
  while (reader.more()) {
    CsvRow row = reader.row();
    if (row.cells.size() == 1 && row.cells[0].empty()) continue;
    if (row.cells.size() != table.columns.size()) {
      reader.fail(
          row.line, std::to_string(row.cells.size()) + " cells, but " +
                        std::to_string(table.columns.size()) + " columns");
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

CsvTable read_csv(const std::filesystem::path& path) {
  const auto fail = [&](const std::string& why) {
    throw DataError(path.string() + ": cannot be read: " + why);
  };
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) fail("it is a folder");
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(std::strerror(errno));
  std::ostringstream text;
  text << file.rdbuf();
  if (file.bad()) fail("reading stopped");
  return parse_csv(text.str(), path.string());
}

}  // namespace echelon
