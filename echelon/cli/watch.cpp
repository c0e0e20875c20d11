// Shows a run while it trains: on a terminal by a screen that is drawn anew
// each second, elsewhere by lines. The screen is the terminal's other one, so
// that a window of any size is left as it was; the last state stays below.
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string_view>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/terminal.h"
#include "echelon/cli/watch_text.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/watch/run_watch.h"
#include "echelon/watch/web_page.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr milliseconds kBetweenScreens{1000};
constexpr milliseconds kBetweenLines{10'000};
constexpr size_t kAllRows = 10'000;

struct WatchArguments {
  std::string run;
  bool once = false;
  bool json = false;
  std::string web;
  bool serves = false;
};

volatile sig_atomic_t asked_to_end = 0;
volatile sig_atomic_t asked_to_suspend = 0;

void on_signal(int signal) {
  (signal == SIGTSTP ? asked_to_suspend : asked_to_end) = signal;
}

// SIGWINCH alone needs no flag: it ends the wait.
void take_watch_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGTSTP}) {
    ::sigaction(signal, &action, nullptr);
  }
  action.sa_handler = [](int) {};
  ::sigaction(SIGWINCH, &action, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
}

// False when the user wants to end.
bool wait_on(milliseconds time) {
  if (asked_to_end == 0 && asked_to_suspend == 0) {
    ::poll(nullptr, 0, static_cast<int>(time.count()));
  }
  return asked_to_end == 0;
}

size_t window_rows() {
  winsize size{};
  if (::ioctl(1, TIOCGWINSZ, &size) == 0 && size.ws_row > 1) return size.ws_row;
  return 24;
}

// The terminal's other screen, as long as this lives.
class OtherScreen {
 public:
  OtherScreen() { enter(); }
  ~OtherScreen() { leave(); }
  OtherScreen(const OtherScreen&) = delete;
  OtherScreen& operator=(const OtherScreen&) = delete;

  void draw(const std::vector<std::string>& lines) {
    std::cout << "\033[H";
    for (size_t i = 0; i < lines.size(); ++i) {
      if (i > 0) std::cout << "\r\n";
      std::cout << lines[i] << "\033[K";
    }
    std::cout << "\033[J" << std::flush;
  }
  /// Ctrl-Z: the shell gets its own screen, until `fg`.
  void suspend() {
    leave();
    asked_to_suspend = 0;
    ::kill(::getpid(), SIGSTOP);
    enter();
  }

 private:
  static void enter() { std::cout << "\033[?1049h\033[?25l" << std::flush; }
  static void leave() { std::cout << "\033[?25h\033[?1049l" << std::flush; }
};

bool is_terminal() {
  const char* term = std::getenv("TERM");
  return ::isatty(1) == 1 && term != nullptr && *term != '\0' &&
         std::string_view(term) != "dumb";
}

Style watch_style() {
  Style style = terminal_style();
  style.columns = std::clamp<size_t>(style.columns, 20, 160);
  return style;
}

void print_lines(const std::vector<std::string>& lines) {
  for (const auto& line : lines) std::cout << line << "\n";
  std::cout << std::flush;
}

// One run.
class Watched {
 public:
  Watched(const fs::path& run, bool json) : watch_(run, {.last_step = json}) {}

  void look() { view_ = &watch_.look(); }
  bool is_over() const { return watch::is_over(view_->state); }
  std::vector<std::string> lines(const Style& style, size_t rows) const {
    return lines_of(*view_, style, rows);
  }
  std::string line() const { return short_line(*view_); }
  std::string json() const { return watch::to_json(*view_, false) + "\n"; }

 private:
  watch::RunWatch watch_;
  const watch::RunView* view_ = nullptr;
};

// All runs in a folder.
class WatchedFolder {
 public:
  explicit WatchedFolder(fs::path folder) : folder_(std::move(folder)) {}

  void look() {
    views_.clear();
    for (const auto& run : watch::find_runs(folder_)) {
      auto& one = runs_[run];
      if (!one) {
        one = std::make_unique<watch::RunWatch>(
            run, watch::WatchOptions{.findings = false, .brief = true});
      }
      views_.push_back(one->look());
      // What they have in common says nothing.
      views_.back().path = run.lexically_relative(folder_).string();
    }
  }
  static bool is_over() { return false; }
  std::vector<std::string> lines(const Style& style, size_t rows) const {
    if (views_.empty()) return {"no run in " + folder_.string() + " yet"};
    return lines_of(views_, style, rows);
  }
  std::string line() const {
    std::map<std::string, int> states;
    for (const auto& view : views_) {
      ++states[std::string(watch::to_string(view.state))];
    }
    std::string text;
    for (const auto& [state, count] : states) {
      text += format("{}{} {}", text.empty() ? "" : ", ", count, state);
    }
    return text.empty() ? "no run yet" : text;
  }
  std::string json() const {
    std::string text = "[";
    for (const auto& view : views_) {
      text += (text.size() > 1 ? ",\n" : "\n") + watch::to_json(view, false);
    }
    return text + "\n]\n";
  }

 private:
  fs::path folder_;
  std::map<fs::path, std::unique_ptr<watch::RunWatch>> runs_;
  std::vector<watch::RunView> views_;
};

template <class What>
void watch_on_terminal(What& what) {
  {
    OtherScreen screen;
    for (;;) {
      what.look();
      screen.draw(what.lines(watch_style(), window_rows() - 1));
      if (what.is_over() || !wait_on(kBetweenScreens)) break;
      if (asked_to_suspend != 0) screen.suspend();
    }
  }
  print_lines(what.lines(watch_style(), kAllRows));
}

template <class What>
void watch_in_lines(What& what) {
  std::string before;
  do {
    what.look();
    const std::string line = what.line();
    if (line != before) std::cout << line << "\n" << std::flush;
    before = line;
    if (!std::cout) return;  // nobody reads any more
    if (asked_to_suspend != 0) {
      asked_to_suspend = 0;
      ::kill(::getpid(), SIGSTOP);
    }
  } while (!what.is_over() && wait_on(kBetweenLines));
}

int serve_run(const WatchArguments& arguments) {
  constexpr const char* kPort = "9465";
  if (arguments.once || arguments.json) {
    throw ConfigError(
        "echelon watch: --web serves until Ctrl-C; leave --once and --json "
        "out");
  }
  watch::WebWatch web(
      arguments.run, arguments.web.empty() ? kPort : arguments.web);
  take_watch_signals();
  std::cout << format(
                   "the run is at {}\nfor this host alone, and for those who "
                   "have this address; Ctrl-C ends it\n",
                   web.url())
            << std::flush;
  while (asked_to_end == 0) web.serve(milliseconds(250));
  return 0;
}

template <class What>
int show_watched(What what, const WatchArguments& arguments) {
  if (arguments.json || arguments.once) {
    what.look();
    if (arguments.json) {
      std::cout << what.json();
    } else {
      print_lines(what.lines(watch_style(), kAllRows));
    }
    return 0;
  }
  take_watch_signals();
  if (is_terminal()) {
    watch_on_terminal(what);
  } else {
    watch_in_lines(what);
  }
  return 0;
}

int watch_run(const WatchArguments& arguments) {
  if (arguments.run.empty()) {
    throw DataError("RUN is empty; name a run's folder, or one of runs");
  }
  const fs::path path = arguments.run;
  std::error_code error;
  if (fs::exists(path, error) && !fs::is_directory(path, error)) {
    throw DataError(
        path.string() + ": is a file; name a run's folder, or one of runs");
  }
  if (!fs::exists(path, error)) {
    const fs::path parent =
        fs::absolute(path, error).lexically_normal().parent_path();
    if (!fs::is_directory(parent, error)) {
      throw DataError(format(
          "{}: there is no such run, and no folder {} in which it could begin; "
          "name a folder that `echelon train` writes",
          path.string(), parent.string()));
    }
    return arguments.serves
               ? serve_run(arguments)
               : show_watched(Watched(path, arguments.json), arguments);
  }
  const fs::directory_iterator entries(path, error);
  if (error) {
    throw DataError(path.string() + ": cannot be read: " + error.message());
  }
  if (arguments.serves) return serve_run(arguments);
  if (!watch::is_run(path) && !watch::find_runs(path).empty()) {
    return show_watched(WatchedFolder(path), arguments);
  }
  return show_watched(Watched(path, arguments.json), arguments);
}

}  // namespace

void add_watch(Command& root) {
  auto given = std::make_shared<WatchArguments>();
  auto& arguments = *given;
  Command command = root.add(
      "watch", "what a run does now, or each run in a folder",
      "echelon watch runs/digits             until it ends, or Ctrl-C\n"
      "echelon watch runs                    all runs in a folder, a line "
      "each\n"
      "echelon watch runs/digits --once      as it is now\n"
      "echelon watch runs/digits --json\n"
      "echelon watch runs/digits --web       in a browser\n"
      "ssh -t host-0 echelon watch runs/digits");
  command.positional(
      "RUN", arguments.run,
      "a run's folder, also one that is to begin; or a folder of runs");
  command.flag("--once", arguments.once, "print one state, and end");
  command.flag("--json", arguments.json, "print one state as JSON, and end");
  command.option_with_optional_value(
      "--web", arguments.web, "[PORT]",
      "serve a page that moves, to this host alone (default: 9465)");
  command.act([command, given] {
    given->serves = command.given("--web");
    return watch_run(*given);
  });
}

}  // namespace echelon::cli
