#include "echelon/timeline/progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <optional>

namespace echelon::timeline::progress_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kSecond = 1'000'000'000;

// As much of a terminal as Progress speaks to; fails on anything else.
class Screen {
 public:
  explicit Screen(int columns) : columns_(columns) {}

  void write(std::string_view text) {
    ++writes;
    for (size_t i = 0; i < text.size(); ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      if (byte == '\x1b') {
        i = escape(text, i);
      } else if (byte == '\r') {
        column_ = 0;
      } else if (byte == '\n') {
        next_row();
      } else {
        put(text, i);
      }
    }
  }

  std::vector<std::string> lines() const {
    std::vector<std::string> result;
    for (const auto& row : rows_) {
      std::string line;
      for (const auto& cell : row) line += cell;
      line.erase(line.find_last_not_of(' ') + 1);
      result.push_back(line);
    }
    return result;
  }
  std::string last() const { return lines().back(); }
  int column() const { return column_; }

  // Moves the cursor's row as a terminal does that wraps its lines again.
  void resize(int columns) {
    auto row = rows_.back();
    rows_.pop_back();
    columns_ = columns;
    do {
      const size_t count = std::min<size_t>(row.size(), columns);
      rows_.emplace_back(row.begin(), row.begin() + count);
      row.erase(row.begin(), row.begin() + count);
    } while (!row.empty());
    row_ = rows_.size() - 1;
    column_ = static_cast<int>(rows_.back().size());
  }

  int writes = 0;

 private:
  size_t escape(std::string_view text, size_t at) {
    const size_t end = text.find_first_of("mKJA", at);
    if (text[at + 1] != '[' || end == text.npos) {
      ADD_FAILURE() << "unknown escape sequence";
      return at;
    }
    const std::string number(text.substr(at + 2, end - at - 2));
    if (text[end] == 'K' || text[end] == 'J') {
      auto& row = rows_[row_];
      row.resize(std::min<size_t>(row.size(), column_));
      if (text[end] == 'J') rows_.resize(row_ + 1);
    } else if (text[end] == 'A') {
      row_ -= std::min<size_t>(row_, std::stoul(number));
    }
    return end;
  }

  void put(std::string_view text, size_t& i) {
    std::string cell(1, text[i]);
    while (i + 1 < text.size() &&
           (static_cast<unsigned char>(text[i + 1]) & 0xc0) == 0x80) {
      cell += text[++i];
    }
    if (column_ == columns_) next_row();
    auto& row = rows_[row_];
    if (row.size() <= static_cast<size_t>(column_))
      row.resize(column_ + 1, " ");
    row[column_++] = cell;
  }

  void next_row() {
    if (++row_ == rows_.size()) rows_.emplace_back();
    column_ = 0;
  }

  std::vector<std::vector<std::string>> rows_ = {{}};
  size_t row_ = 0;
  int column_ = 0;
  int columns_;
};

class ProgressTest : public testing::Test {
 protected:
  ProgressOptions options(bool terminal) {
    return {
        .terminal = terminal,
        .color = false,
        .unicode = false,
        .every = 10,
        .columns = [this] { return columns_; },
        .now_ns = [this] { return now_; },
        .write =
            [this](std::string_view text) {
              output_ += text;
              screen_.write(text);
            }};
  }

  static ProgressState state(int64_t step) {
    return {
        .step = step,
        .epoch = 1.25,
        .loss = 0.51239,
        .samples_per_second = 5120.4};
  }

  int columns_ = 100;
  int64_t now_ = 7 * kSecond;
  std::string output_;
  Screen screen_{100};
};

TEST_F(ProgressTest, OneLineWithEverything) {
  Progress progress(1000, options(true));
  progress.update(state(0));
  now_ += kSecond;
  auto s = state(250);
  s.slowest_rank = 3;
  s.slowest_excess = 0.14;
  progress.update(s);
  EXPECT_THAT(
      screen_.lines(),
      ElementsAre("###----------  250/1000  epoch 1.25  loss 0.5124  "
                  "5,120 samples/s  ETA 0:03  slowest rank 3 (+14 %)"));
}

TEST_F(ProgressTest, OfTextsItCountsTokens) {
  auto s = state(10);
  s.tokens_per_second = 81920;
  {
    Progress plain(100, options(false));
    plain.update(s);
  }
  EXPECT_EQ(output_, "step 10/100  epoch 1.25  loss 0.5124  81,920 tokens/s\n");
}

TEST_F(ProgressTest, TheLossScaleAndSkippedStepsAreShown) {
  auto s = state(10);
  s.loss_scale = 65536;
  {
    Progress plain(20, options(false));
    plain.update(s);
    s.step = 20;
    s.loss_scale = 0.75;
    s.skipped_steps = 1234;
    plain.update(s);
  }
  EXPECT_THAT(output_, HasSubstr("samples/s  scale 2^16\n"));
  EXPECT_THAT(output_, HasSubstr("  scale 0.75 (1,234 skipped)\n"));
  s.loss_scale = 0.125;
  Progress line(20, options(true));
  line.update(s);
  EXPECT_THAT(screen_.last(), HasSubstr("  scale 2^-3 (1,234 skipped)"));
  // Skipped steps matter more than the epoch, a scale that fits less.
  columns_ = 80;
  line.update((s.step = 11, now_ += kSecond, s));
  EXPECT_THAT(screen_.last(), HasSubstr("skipped)"));
  EXPECT_THAT(screen_.last(), Not(HasSubstr("epoch")));
}

TEST_F(ProgressTest, AtMostTenDrawingsASecond) {
  Progress progress(2000, options(true));
  for (int i = 0; i < 1000; ++i) {
    progress.update(state(i));
    now_ += kSecond / 1000;
  }
  EXPECT_EQ(screen_.writes, 10);
  progress.finish();
  EXPECT_EQ(screen_.lines().size(), 2u);
  EXPECT_THAT(screen_.lines()[0], HasSubstr("999/2000"));
}

TEST_F(ProgressTest, PartsFallAwayInANarrowWindow) {
  std::vector<std::string> seen;
  for (columns_ = 110; columns_ >= 1; --columns_) {
    screen_ = Screen(columns_);
    Progress progress(1000, options(true));
    progress.update(state(0));
    now_ += kSecond;
    auto s = state(500);
    s.slowest_rank = 3;
    progress.update(s);
    ASSERT_EQ(screen_.lines().size(), 1u) << columns_;
    EXPECT_LT(screen_.last().size(), static_cast<size_t>(columns_) + 0u);
    if (seen.empty() || seen.back() != screen_.last()) {
      seen.push_back(screen_.last());
    }
  }
  EXPECT_THAT(seen, testing::Contains("500/1000  loss 0.5124  ETA 0:01"));
  EXPECT_THAT(seen, testing::Contains("500/1000  loss 0.5124"));
  EXPECT_THAT(seen, testing::Contains("500/1000"));
  EXPECT_EQ(seen.back(), "");
}

TEST_F(ProgressTest, TheBarFillsTheRoomUpToItsLimit) {
  columns_ = 300;
  screen_ = Screen(300);
  Progress progress(4, options(true));
  const std::string bars[] = {
      std::string(32, '-'), std::string(8, '#') + std::string(24, '-'),
      std::string(16, '#') + std::string(16, '-'),
      std::string(24, '#') + std::string(8, '-'), std::string(32, '#')};
  for (int step = 0; step <= 4; ++step) {
    progress.update(state(step));
    now_ += kSecond;
    EXPECT_EQ(screen_.last().substr(0, 32), bars[step]);
  }
}

TEST_F(ProgressTest, AShorterLineLeavesNothingOfALongerOne) {
  Progress progress(1000, options(true));
  progress.update(state(999));
  now_ += kSecond;
  auto s = state(1000);
  s.samples_per_second = 1;
  s.loss = 1;
  progress.update(s);
  EXPECT_THAT(screen_.last(), HasSubstr("loss 1.0000  1 samples/s"));
  EXPECT_THAT(screen_.last(), Not(HasSubstr("5,120")));
}

TEST_F(ProgressTest, MessagesStandAboveTheLine) {
  Progress progress(100, options(true));
  progress.message("before");
  progress.update(state(10));
  progress.message("a message that is longer than nothing");
  progress.message("two\nlines\n");
  now_ += kSecond;
  progress.update(state(20));
  progress.finish();
  progress.message("after");
  EXPECT_THAT(
      screen_.lines(), ElementsAre(
                           "before", "a message that is longer than nothing",
                           "two", "lines", HasSubstr("20/100"), "after", ""));
}

TEST_F(ProgressTest, AWindowThatBecomesNarrowerKeepsOneLine) {
  Progress progress(1000, options(true));
  progress.message("above");
  progress.update(state(10));
  const auto wide = screen_.last();
  ASSERT_GT(wide.size(), 60u);
  columns_ = 30;
  screen_.resize(30);
  ASSERT_EQ(screen_.lines().size(), 1 + (wide.size() + 29) / 30);
  now_ += kSecond;
  progress.update(state(20));
  EXPECT_EQ(screen_.lines().size(), 2u);
  EXPECT_EQ(screen_.lines()[0], "above");
  EXPECT_THAT(screen_.last(), HasSubstr("20/1000"));
}

TEST_F(ProgressTest, FinishShowsTheLastStateAndEndsTheLine) {
  Progress progress(100, options(true));
  progress.update(state(50));
  progress.update(state(100));  // too soon to be drawn
  progress.finish();
  progress.finish();
  progress.update(state(1));
  EXPECT_THAT(screen_.lines()[0], HasSubstr("100/100"));
  EXPECT_EQ(screen_.lines().size(), 2u);
  EXPECT_EQ(screen_.last(), "");
}

TEST_F(ProgressTest, AnExceptionLeavesTheCursorOnANewLine) {
  {
    Progress progress(100, options(true));
    progress.update(state(50));
  }
  EXPECT_EQ(screen_.lines().size(), 2u);
  EXPECT_EQ(screen_.column(), 0);
  output_.clear();
  { Progress unused(100, options(true)); }
  {
    Progress plain(100, options(false));
    plain.update(state(10));
  }
  EXPECT_EQ(output_, "step 10/100  epoch 1.25  loss 0.5124  5,120 samples/s\n");
}

TEST_F(ProgressTest, PlainLinesEveryFewStepsAndAtTheEnd) {
  Progress progress(25, options(false));
  for (int step = 1; step <= 25; ++step) {
    progress.update(state(step));
    now_ += 2 * kSecond;
  }
  progress.message("saved");
  progress.finish();
  EXPECT_EQ(
      output_,
      "step 10/25  epoch 1.25  loss 0.5124  5,120 samples/s  ETA 0:30\n"
      "step 20/25  epoch 1.25  loss 0.5124  5,120 samples/s  ETA 0:10\n"
      "step 25/25  epoch 1.25  loss 0.5124  5,120 samples/s\n"
      "saved\n");
}

TEST_F(ProgressTest, ARunThatStopsEarlyPrintsItsLastStep) {
  Progress progress(100, options(false));
  progress.update(state(10));
  progress.update(state(13));
  progress.finish();
  EXPECT_THAT(output_, HasSubstr("step 10/100"));
  EXPECT_THAT(output_, HasSubstr("step 13/100"));
}

TEST_F(ProgressTest, EtaOfAResumedRunCountsItsOwnStepsOnly) {
  Progress progress(1000, options(true));
  progress.update(state(900));
  EXPECT_THAT(screen_.last(), Not(HasSubstr("ETA")));
  now_ += 10 * kSecond;
  progress.update(state(910));
  EXPECT_THAT(screen_.last(), HasSubstr("ETA 1:30"));
}

TEST_F(ProgressTest, EtaFollowsARunThatBecomesSlower) {
  Progress progress(10'000, options(true));
  int64_t step = 0;
  for (; step < 100; ++step, now_ += kSecond) progress.update(state(step));
  for (; step < 200; ++step, now_ += 3 * kSecond) progress.update(state(step));
  // Close to 9,801 steps of 3 s.
  EXPECT_THAT(screen_.last(), HasSubstr("ETA 8:1"));
}

TEST_F(ProgressTest, UnknownLengthHasNeitherBarNorEta) {
  Progress progress(0, options(true));
  progress.update(state(1));
  now_ += kSecond;
  progress.update(state(70));
  EXPECT_EQ(
      screen_.last(), "70 steps  epoch 1.25  loss 0.5124  5,120 samples/s");
}

TEST_F(ProgressTest, NumbersThatAreNotFiniteAreNamed) {
  Progress progress(10, options(true));
  auto s = state(1);
  s.loss = NAN;
  s.samples_per_second = INFINITY;
  progress.update(s);
  EXPECT_THAT(screen_.last(), HasSubstr("loss nan  inf samples/s"));
}

TEST_F(ProgressTest, ColourAndUnicodeDoNotChangeTheLayout) {
  auto colored = options(true);
  colored.color = true;
  colored.unicode = true;
  Progress progress(4, colored);
  progress.update(state(1));
  EXPECT_THAT(output_, HasSubstr("\x1b[32m"));
  std::string line = screen_.last();
  for (const char* bar : {"\u2501", "\u2500"}) {
    for (size_t at; (at = line.find(bar)) != std::string::npos;) {
      line.replace(at, 3, "x");
    }
  }
  EXPECT_EQ(
      line,
      std::string(32, 'x') + "  1/4  epoch 1.25  loss 0.5124  5,120 samples/s");
}

class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    value ? ::setenv(name, value, 1) : ::unsetenv(name);
  }
  ~Environment() {
    old_ ? ::setenv(name_, old_->c_str(), 1) : ::unsetenv(name_);
  }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

// A pseudo-terminal of 57 columns.
class Terminal {
 public:
  Terminal() {
    controller_ = ::posix_openpt(O_RDWR | O_NOCTTY);
    EXPECT_EQ(::grantpt(controller_), 0);
    EXPECT_EQ(::unlockpt(controller_), 0);
    file_ = ::open(::ptsname(controller_), O_RDWR | O_NOCTTY);
    winsize size{};
    size.ws_col = 57;
    ::ioctl(file_, TIOCSWINSZ, &size);
  }
  ~Terminal() {
    ::close(file_);
    ::close(controller_);
  }
  int file() const { return file_; }

 private:
  int controller_ = -1;
  int file_ = -1;
};

TEST(ProgressOptions, FollowTheTerminalAndTheEnvironment) {
  Terminal terminal;
  Environment locale("LC_ALL", "C.UTF-8");
  Environment term("TERM", "xterm");
  Environment color("NO_COLOR", nullptr);
  auto options = progress_options_for(terminal.file());
  EXPECT_TRUE(options.terminal);
  EXPECT_TRUE(options.color);
  EXPECT_TRUE(options.unicode);
  EXPECT_EQ(options.columns(), 57);
  {
    Environment no_color("NO_COLOR", "1");
    options = progress_options_for(terminal.file());
    EXPECT_TRUE(options.terminal);
    EXPECT_FALSE(options.color);
  }
  {
    Environment empty("NO_COLOR", "");
    EXPECT_TRUE(progress_options_for(terminal.file()).color);
  }
  {
    Environment c("LC_ALL", "C");
    EXPECT_FALSE(progress_options_for(terminal.file()).unicode);
  }
  for (const char* name : {"dumb", "", static_cast<const char*>(nullptr)}) {
    Environment dumb("TERM", name);
    EXPECT_FALSE(progress_options_for(terminal.file()).terminal);
    EXPECT_FALSE(progress_options_for(terminal.file()).color);
  }
  const int file = ::open("/dev/null", O_WRONLY);
  EXPECT_FALSE(progress_options_for(file).terminal);
  EXPECT_EQ(progress_options_for(file).columns(), 80);
  ::close(file);
}

}  // namespace echelon::timeline::progress_test
