// How commands print: colours, tables, JSON, progress.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <streambuf>
#include <string>
#include <vector>

namespace echelon::cli {

using Rows = std::vector<std::vector<std::string>>;

/// How text is printed on a terminal or into a file.
struct Style {
  bool colours = false;
  size_t columns = 80;  // of the terminal; texts are wrapped there

  std::string bold(const std::string& text) const;
  std::string dim(const std::string& text) const;
  std::string red(const std::string& text) const;
};

/// True when `stream` (1 or 2) is a terminal that wants colours: not with
/// NO_COLOR or TERM=dumb.
bool has_colours(int stream);

/// While it lives, std::cout and std::cerr spell the characters of tables and
/// units (…, ·, µ, ×) in ASCII, each where it is a terminal whose locale is not
/// UTF-8. Files and pipes are always UTF-8.
class AsciiOutput {
 public:
  AsciiOutput();
  AsciiOutput(const AsciiOutput&) = delete;
  AsciiOutput& operator=(const AsciiOutput&) = delete;
  ~AsciiOutput();

 private:
  std::unique_ptr<std::streambuf> out_, err_;
  std::streambuf* cout_ = nullptr;
  std::streambuf* cerr_ = nullptr;
};

/// The style of standard output; `otherwise` columns where it is no terminal.
Style terminal_style(size_t otherwise = 80);

/// Prose from `indent` up to column `last`, as wrapped() breaks it. `Commands`
/// between backticks, which a page sets as code, are between quotes.
std::string prose(const std::string& text, size_t indent, size_t last);

/// The rows as aligned columns. Where those pass column `last`, a paragraph for
/// each row instead. `headed`: the first row names the columns.
std::string fitted(const Rows& rows, size_t last, bool headed);

/// The rows as aligned columns, the first row as a bold heading.
void print_table(const Rows& rows, const Style& style, std::ostream& out);

/// Indented, with a line break at the end. Bytes that are not UTF-8 are
/// replaced.
void print_json(const nlohmann::ordered_json& json, std::ostream& out);

/// NaN and infinity, which JSON does not have, as strings.
nlohmann::ordered_json json_number(double value);

/// With four significant digits: "0.3124", "1.3e-05".
std::string number_text(double value);

/// The parts of a text, each of which ends with `end`.
std::vector<std::string> split(const std::string& text, char end = '\n');

/// The progress of reading files, on standard error: one line that is redrawn
/// on a terminal, a line every ten seconds elsewhere, nothing where it is over
/// at once.
class ReadingProgress {
 public:
  ReadingProgress(std::string what, int64_t total_bytes);
  ~ReadingProgress();
  void operator()(int64_t done_bytes);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  int64_t total_bytes_;
  bool on_terminal_;
  bool shown_ = false;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point next_;
};

}  // namespace echelon::cli
