#include "echelon/data/sources/csv_table.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <fstream>
#include <set>
#include <utility>

#include "echelon/data/sources/parquet.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"

namespace echelon {
namespace {

constexpr const char* kTarget = "target";

// Reads one record after the other.
class Records {
 public:
  Records(const std::string& text, const std::string& name)
      : text_(text), name_(name) {
    if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;  // of Windows' programs
  }

  // False at the end of the file. Empty lines are passed over.
  bool next(std::vector<std::string>& fields) {
    while (at_ < text_.size() && ends_line()) ++line_;
    if (at_ >= text_.size()) return false;
    begin_ = line_;
    fields.clear();
    do {
      fields.push_back(text_[at_] == '"' ? quoted() : plain());
    } while (takes(','));
    if (at_ < text_.size() && !ends_line()) {
      fail(
          "text behind a closing quote; double a quote that is part of a "
          "field");
    }
    ++line_;
    return true;
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw DataError(format("{}:{}: {}", name_, begin_, why));
  }

 private:
  bool takes(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  // Takes "\n" or "\r\n".
  bool ends_line() {
    if (text_.compare(at_, 2, "\r\n") == 0) {
      at_ += 2;
      return true;
    }
    return takes('\n');
  }
  std::string plain() {
    const size_t end = std::min(text_.find_first_of(",\n", at_), text_.size());
    std::string field = text_.substr(at_, end - at_);
    at_ = end;
    const bool crlf =
        field.ends_with('\r') && (end == text_.size() || text_[end] == '\n');
    if (crlf) field.pop_back();
    const size_t first = field.find_first_not_of(" \t");
    if (first == std::string::npos) return "";
    return field.substr(first, field.find_last_not_of(" \t") + 1 - first);
  }
  std::string quoted() {
    std::string field;
    for (++at_;; ++at_) {
      if (at_ >= text_.size()) fail("a quoted field does not end");
      if (text_[at_] == '"') {
        ++at_;
        if (at_ >= text_.size() || text_[at_] != '"') return field;
      } else if (text_[at_] == '\n') {
        ++line_;
      }
      field += text_[at_];
    }
  }

  const std::string& text_;
  const std::string& name_;
  size_t at_ = 0;
  int64_t line_ = 1;   // of `at_`
  int64_t begin_ = 1;  // of the record
};

template <class Number>
bool parse(const std::string& field, Number& number) {
  const char* begin = field.data();
  const char* end = begin + field.size();
  if (field.size() > 1 && *begin == '+') ++begin;
  const auto [rest, error] = std::from_chars(begin, end, number);
  return error == std::errc() && rest == end;
}

}  // namespace

bool is_table(const std::string& path) {
  std::string name = path;
  for (char& c : name) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return name.ends_with(".csv") || name.ends_with(".parquet");
}

CsvTable parse_csv(const std::string& text, const std::string& name) {
  Records records(text, name);
  std::vector<std::string> header;
  if (!records.next(header)) throw DataError(name + ": is empty");
  const auto target =
      static_cast<size_t>(std::ranges::find(header, kTarget) - header.begin());
  if (target == header.size()) {
    throw DataError(format(
        "{}: no column is called \"{}\", which has the classes; there are {}; "
        "the first line names the columns",
        name, kTarget, join(header, ", ")));
  }
  CsvTable table;
  std::set<std::string> seen;
  for (const std::string& column : header) {
    if (!seen.insert(column).second) {
      records.fail(format("two columns are called \"{}\"", column));
    }
    if (column != kTarget) table.columns.push_back(column);
  }
  if (table.columns.empty()) {
    throw DataError(format(
        "{}: has no column beside \"{}\"; the others are the inputs", name,
        kTarget));
  }
  std::vector<std::string> fields;
  while (records.next(fields)) {
    if (fields.size() != header.size()) {
      records.fail(format(
          "{} fields; the first line names {} columns", fields.size(),
          header.size()));
    }
    for (size_t i = 0; i < fields.size(); ++i) {
      if (i == target) {
        int64_t value = -1;
        if (!parse(fields[i], value) || value < 0 ||
            value >= int64_t{1} << 31) {
          records.fail(format(
              "{} is \"{}\"; a class is a whole number from 0 and below 2^31",
              kTarget, fields[i]));
        }
        table.targets.push_back(value);
        table.classes = std::max(table.classes, value + 1);
        continue;
      }
      float value = 0;
      if (!parse(fields[i], value) || !std::isfinite(value)) {
        records.fail(format(
            "column \"{}\" is \"{}\"; inputs are finite numbers", header[i],
            fields[i]));
      }
      table.inputs.push_back(value);
    }
  }
  if (table.targets.empty()) throw DataError(name + ": has no row of numbers");
  return table;
}

CsvTable read_table(const std::string& path, const std::string& name) {
  std::string begin(4, '\0');
  std::ifstream(path, std::ios::binary).read(begin.data(), 4);
  if (!is_parquet(begin)) return parse_csv(read_text_file(path), name);
  std::string lines;
  read_parquet(path, ParquetRows::csv, {}, [&](std::string_view row) {
    lines.append(row) += '\n';
  });
  return parse_csv(lines, name);
}

}  // namespace echelon
