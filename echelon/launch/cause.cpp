// The error of a rank is, in this order: the report that our own programs leave
// in a file, an error that the end of its stderr shows in a known form, or its
// last lines. Among the ranks that failed, those whose error is a lost
// connection (a consequence) come last, then the earliest comes first: the
// guards' clocks are those of one host. A rank that somebody killed cannot have
// failed by another's end, so its end counts as up to a second earlier. Among
// hosts, the order in which they began to fail stands in for the clock.
#include "echelon/launch/cause.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include <algorithm>
#include <regex>
#include <sstream>

#include "echelon/error.h"
#include "echelon/launch/signals.h"
#include "echelon/text/format.h"
#include "echelon/text/plain.h"

namespace echelon::launch {
namespace {

constexpr size_t kMaxLines = 5;
constexpr size_t kMaxLineBytes = 400;
// The others may notice a killed rank sooner than its guard does.
constexpr int64_t kNoticedLateNs = 1'000'000'000;

// The line without colours, cursor movements and text that a carriage return
// has overwritten.
std::string shown_text(const std::string& line) {
  std::string text;
  for (size_t i = 0; i < line.size(); ++i) {
    const unsigned char c = line[i];
    if (c == 0x1b) {
      if (i + 1 < line.size() && line[i + 1] == '[') {
        i += 2;
        while (i < line.size() && (line[i] < '@' || line[i] > '~')) ++i;
      }
    } else if (c == '\r') {
      if (i + 1 < line.size()) text.clear();
    } else if (c >= 0x20 || c == '\t') {
      text += line[i];
    }
  }
  text = plain(text, "\t");
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) {
    text.pop_back();
  }
  return text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(shown_text(line));
  }
  return lines;
}

// Lines [begin, end) as one text, truncated to a readable size.
std::string
join(const std::vector<std::string>& lines, size_t begin, size_t end) {
  std::string text;
  size_t taken = 0;
  for (size_t i = begin; i < end; ++i) {
    if (taken == kMaxLines) {
      text += "\n…";
      break;
    }
    std::string line = lines[i].substr(0, kMaxLineBytes);
    if (line.size() < lines[i].size()) line += "…";
    text += (taken++ == 0 ? "" : "\n") + line;
  }
  return text;
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// "./wrapper: line 3: 4711 Killed    program": bash reports the end of a child.
bool is_shell_report(const std::string& line) {
  static const std::regex pattern(": line [0-9]+: +[0-9]+ [A-Z]");
  return std::regex_search(line, pattern);
}

// Lines that shells and the runtime add after the error itself.
bool is_noise(const std::string& line) {
  return line.empty() || is_shell_report(line) || line.starts_with("Aborted") ||
         line.starts_with("note: run with `RUST_BACKTRACE") ||
         contains(line, "Aborted (core dumped)") ||
         contains(line, "Aborted                 ");
}

size_t last_with(const std::vector<std::string>& lines, const char* part) {
  for (size_t i = lines.size(); i-- > 0;) {
    if (contains(lines[i], part)) return i;
  }
  return std::string::npos;
}

// terminate called after throwing an instance of 'std::runtime_error'
//   what():  text, of one or more lines
std::string find_terminate(const std::vector<std::string>& lines) {
  const char* start = "terminate called after throwing an instance of '";
  const size_t at = last_with(lines, start);
  if (at == std::string::npos) return "";
  std::string type = lines[at].substr(lines[at].find('\'') + 1);
  type = type.substr(0, type.rfind('\''));
  if (at + 1 >= lines.size() || !contains(lines[at + 1], "what():")) {
    return type;
  }
  std::vector<std::string> text(lines.begin() + at + 1, lines.end());
  text[0] = text[0].substr(text[0].find("what():") + 7);
  text[0].erase(0, text[0].find_first_not_of(' '));
  size_t end = 1;
  while (end < text.size() && !is_noise(text[end]) &&
         !text[end].starts_with("Exception raised from ") &&
         !text[end].starts_with("terminate called")) {
    ++end;
  }
  return type + ": " + join(text, 0, end);
}

// The lines after the frames of a traceback, which are indented.
std::string find_traceback(const std::vector<std::string>& lines) {
  const size_t at = last_with(lines, "Traceback (most recent call last):");
  if (at == std::string::npos) return "";
  size_t begin = at + 1;
  while (begin < lines.size() && lines[begin].starts_with(" ")) ++begin;
  size_t end = begin;
  while (end < lines.size() && !lines[end].empty()) ++end;
  return join(lines, begin, end);
}

std::string find_known_line(const std::vector<std::string>& lines) {
  for (const char* part :
       {"ERROR: AddressSanitizer", "ERROR: LeakSanitizer",
        "WARNING: ThreadSanitizer", "runtime error: ",
        "error while loading shared libraries", "*** stack smashing detected",
        "terminate called without an active exception"}) {
    const size_t at = last_with(lines, part);
    if (at != std::string::npos) return join(lines, at, at + 1);
  }
  const size_t rust = last_with(lines, "' panicked at ");
  if (rust != std::string::npos) {
    return join(lines, rust, std::min(rust + 2, lines.size()));
  }
  const size_t go = last_with(lines, "panic: ");
  if (go != std::string::npos && lines[go].starts_with("panic: ")) {
    return join(lines, go, go + 1);
  }
  return "";
}

// True when the loader could not start the program.
bool loader_failed(const RankEnd& end, const std::string& text) {
  return WIFEXITED(end.status) && WEXITSTATUS(end.status) == 127 &&
         contains(text, "error while loading shared libraries");
}

// The rank's own status, if the launcher had not killed it while it was
// exiting.
int own_status(const RankEnd& end) {
  const bool cut_off = end.report && end.told_to_end && WIFSIGNALED(end.status);
  return cut_off ? W_EXITCODE(end.report->exit_code, 0) : end.status;
}

// True for the end of a rank that somebody told to stop.
bool was_asked_to_stop(const RankEnd& end) {
  if (end.report || !WIFEXITED(end.status)) return false;
  const int code = WEXITSTATUS(end.status);
  return code == static_cast<int>(ExitCode::preempted) ||
         code == static_cast<int>(ExitCode::interrupted);
}

// A shell that runs the program ends with 128 + the signal's number.
bool was_killed(const RankEnd& end) {
  const int code = exit_code_of(end.status);
  return !end.report && (code == 128 + SIGKILL || code == 128 + SIGTERM);
}

Cause describe(const RankEnd& end) {
  Cause cause;
  cause.rank = end.rank;
  cause.exit_code = exit_code_of(own_status(end));
  cause.ending = describe_status(own_status(end));
  if (was_killed(end)) cause.kind = FailureKind::outside;
  if (!end.killed_because.empty()) cause.kind = FailureKind::memory;
  const bool by_signal = WIFSIGNALED(end.status);
  if (end.report) {
    const auto lines = lines_of(end.report->message);
    const bool ours = end.report->type.starts_with("echelon::");
    const bool bare = ours || end.report->type.empty() ||
                      end.report->type == "std::terminate";
    cause.text =
        (bare ? "" : end.report->type + ": ") + join(lines, 0, lines.size());
    cause.consequence =
        end.report->consequence || (!ours && speaks_of_lost_peer(cause.text));
    if (speaks_of_memory(cause.text)) cause.kind = FailureKind::memory;
    return cause;
  }
  cause.text = find_error(end.stderr_tail);
  if (speaks_of_memory(cause.text)) cause.kind = FailureKind::memory;
  if (loader_failed(end, cause.text)) {
    cause.exit_code = static_cast<int>(ExitCode::configuration);
    cause.text +=
        "\nthe program did not start; install the library, or name its folder "
        "in LD_LIBRARY_PATH";
  }
  if (cause.text.empty() && (!by_signal || WTERMSIG(end.status) == SIGABRT)) {
    cause.text = last_lines(end.stderr_tail, 3);
  }
  cause.consequence = speaks_of_lost_peer(cause.text);
  if (cause.text.empty()) {
    cause.text = by_signal ? "killed by " + cause.ending : cause.ending;
    if (!end.killed_because.empty()) cause.text += "; " + end.killed_because;
  }
  return cause;
}

}  // namespace

std::optional<Cause> find_cause(const std::vector<RankEnd>& ends) {
  struct Candidate {
    Cause cause;
    int64_t time_ns;
  };
  std::vector<Candidate> candidates;
  for (const auto& end : ends) {
    if (end.status == 0 || was_asked_to_stop(end)) continue;
    const bool own_error = end.report && !end.report->consequence;
    if (!end.told_to_end || own_error) {
      const int64_t time_ns = end.report ? end.report->time_ns : end.time_ns;
      const int64_t late_ns = was_killed(end) ? kNoticedLateNs : 0;
      candidates.push_back({describe(end), time_ns - late_ns});
    }
  }
  if (candidates.empty()) return std::nullopt;
  const auto order = [](const Candidate& candidate) {
    return std::pair(candidate.cause.consequence, candidate.time_ns);
  };
  return std::ranges::min_element(candidates, {}, order)->cause;
}

Outcome combine(const std::vector<Outcome>& hosts) {
  // A host with a cause counts most, then one with an exit code, then one that
  // was stopped.
  const auto weight = [](const Outcome& o) {
    return o.cause ? (o.cause->consequence ? 3 : 4)
                   : (o.exit_code != 0 ? 2 : 0) + (o.stopped_by != 0 ? 1 : 0);
  };
  const auto best = std::ranges::max_element(hosts, {}, weight);
  return best != hosts.end() ? *best : Outcome{};
}

int exit_code_of(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string describe_status(int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    const char* words = sigdescr_np(signal);
    return signal_name(signal) +
           (words != nullptr ? std::string(" (") + words + ")" : "") +
           (WCOREDUMP(status) ? ", core dumped" : "");
  }
  const int code = WEXITSTATUS(status);
  const bool by_shell =
      code > 128 && code - 128 < NSIG && sigabbrev_np(code - 128) != nullptr;
  return format("exit code {}", code) +
         (by_shell ? format(" (a shell's for {})", signal_name(code - 128))
                   : "");
}

std::string find_error(const std::string& stderr_tail) {
  const auto lines = lines_of(stderr_tail);
  for (auto* find : {find_terminate, find_traceback, find_known_line}) {
    const std::string text = find(lines);
    if (!text.empty()) return text;
  }
  return "";
}

std::string last_lines(const std::string& stderr_tail, int lines) {
  const auto all = lines_of(stderr_tail);
  size_t end = all.size();
  while (end > 0 && is_noise(all[end - 1])) --end;
  size_t begin = end;
  while (begin > 0 && end - begin < static_cast<size_t>(lines) &&
         !all[begin - 1].empty()) {
    --begin;
  }
  return join(all, begin, end);
}

bool speaks_of_memory(const std::string& text) {
  static constexpr const char* kParts[] = {
      "out of memory", "std::bad_alloc", "can't allocate memory",
      "MemoryError"};
  return std::ranges::any_of(
      kParts, [&](const char* part) { return contains(text, part); });
}

bool speaks_of_lost_peer(const std::string& text) {
  static constexpr const char* kParts[] = {
      "Connection closed by peer", "Connection reset by peer",
      "NCCL communicator was aborted", "remote process exited",
      "failed to recv, got 0 bytes"};
  return std::ranges::any_of(
      kParts, [&](const char* part) { return contains(text, part); });
}

}  // namespace echelon::launch
