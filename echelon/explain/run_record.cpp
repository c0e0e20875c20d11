// The files of a run are read one by one, and one that is missing or broken
// becomes a note: explaining is most useful for runs that did not end well.
// Only a run with neither a timeline nor metrics is an error. A timeline that
// breaks off is taken up to its last complete event, without the rank or the
// step in which it does, since half a step would look like a short one.
#include "echelon/explain/run_record.h"

#include <algorithm>
#include <set>

#include "echelon/cluster/cluster_file.h"
#include "echelon/error.h"
#include "echelon/predict/counted_layers.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/timeline/chrome_trace.h"
#include "echelon/timeline/last_step.h"

namespace echelon::explain {
namespace {

namespace fs = std::filesystem;

// A timeline whose file may be truncated: by a full disk, or a broken copy.
struct TruncatedTrace {
  timeline::Timeline timeline;
  // Left out, because its spans break off; -1: none.
  int32_t truncated_rank = -1;
  bool truncated = false;  // whether anything is missing at its end
};

constexpr const char* kEnd = "\n]}\n";

bool is_complete(std::string_view text) {
  const auto ends_with = [&](char c) {
    text = text.substr(0, text.find_last_not_of(" \t\r\n") + 1);
    if (!text.ends_with(c)) return false;
    text.remove_suffix(1);
    return true;
  };
  return ends_with('}') && ends_with(']');
}

// Each event has a line of its own.
std::string complete_events(const std::string& text) {
  const size_t last = text.rfind("},\n");
  if (last == std::string::npos) return "";
  return text.substr(0, last + 1) + kEnd;
}

// The last span of the file, where it breaks off.
const timeline::Span* last_written(const timeline::Timeline& timeline) {
  int32_t rank = -1;
  const timeline::Span* last = nullptr;
  for (const timeline::Span& span : timeline.spans) {
    if (span.rank < rank) continue;
    rank = span.rank;
    last = &span;
  }
  return last;
}

void omit_truncated_rank(TruncatedTrace& trace) {
  timeline::Timeline& timeline = trace.timeline;
  const timeline::Span* last = last_written(timeline);
  // Memory comes after all spans, which are then complete.
  if (last == nullptr || !timeline.memory.empty()) return;
  trace.truncated_rank = last->rank;
  std::set<int32_t> ranks;
  for (const timeline::Span& span : timeline.spans) ranks.insert(span.rank);
  int64_t last_step = -1;
  for (const timeline::Span& span : timeline.spans) {
    if (span.rank == trace.truncated_rank)
      last_step = std::max(last_step, span.step);
  }
  std::erase_if(timeline.spans, [&](const timeline::Span& span) {
    if (span.rank != trace.truncated_rank) return false;
    return ranks.size() > 1 || span.step == last_step;
  });
}

// Like parse_chrome_trace, but takes the complete events of a text that breaks
// off. A file has one rank after another: the rank in whose events it breaks
// off is left out, or, when it is the only one, its last step. Throws DataError
// when no event is complete.
TruncatedTrace
parse_truncated_trace(const std::string& text, const std::string& place) {
  const std::string events = complete_events(text);
  // Without a complete event this throws with the reason.
  if (is_complete(text) || events.empty()) {
    return {timeline::parse_chrome_trace(text, place)};
  }
  TruncatedTrace trace{
      .timeline = timeline::parse_chrome_trace(events, place),
      .truncated = true};
  omit_truncated_rank(trace);
  if (trace.timeline.spans.empty()) {
    throw DataError(
        "[timeline] " + place + " breaks off before its first whole step");
  }
  return trace;
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The first line of an error: notes have one each.
std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

constexpr int32_t kMostRanks = 1 << 20;

// Throws for spans that no recorder writes.
void check_spans(const timeline::Timeline& timeline, const std::string& place) {
  for (const timeline::Span& span : timeline.spans) {
    const bool is_rank = span.rank >= 0 && span.rank < kMostRanks;
    if (is_rank && span.end_ns >= span.begin_ns) continue;
    throw DataError(format(
        "[timeline] {}: span \"{}\" of rank {} {}", place,
        span.name.substr(0, 40), span.rank,
        is_rank ? "ends before it begins" : "is of no rank"));
  }
}

bool has_steps(const timeline::Timeline& timeline) {
  return std::ranges::any_of(timeline.spans, [](const timeline::Span& span) {
    return span.step >= 0 && span.kind != timeline::SpanKind::evaluation;
  });
}

class Reader {
 public:
  Reader(fs::path folder, fs::path timeline)
      : folder_(std::move(folder)), timeline_(std::move(timeline)) {}

  RunRecord read() {
    read_timeline();
    read_steps();
    record_.simulated =
        record_.timeline.simulated ||
        (!record_.steps.empty() && record_.steps.back().simulated);
    if (record_.simulated) read_simulated_cluster();
    read_configuration();
    note_unfinished();
    return std::move(record_);
  }

 private:
  void read_timeline() {
    if (!is_there(timeline_)) {
      if (read_last_step()) return;
      note(
          "there is no timeline.json, which a run writes at its end: this "
          "report uses the metrics");
      return;
    }
    try {
      TruncatedTrace trace =
          parse_truncated_trace(read_text_file(timeline_), timeline_.string());
      check_spans(trace.timeline, timeline_.string());
      record_.timeline = std::move(trace.timeline);
      record_.title = record_.timeline.title;
      if (trace.truncated_rank >= 0) {
        note_truncated(trace.truncated_rank);
      } else if (trace.truncated) {
        note(
            "the timeline is truncated in what it says of memory: the end of "
            "that is left out");
      }
      if (has_steps(record_.timeline)) return;
      record_.timeline.spans.clear();
      broken_ = timeline_.string() + ": no step was recorded";
      note("the timeline has no step (train.timeline_steps)");
    } catch (const DataError& error) {
      broken_ = first_line(error.what());
      note(broken_);
    }
  }

  // While a run trains, its ranks record a step every few seconds.
  bool read_last_step() {
    try {
      auto last = timeline::read_last_step(folder_);
      if (!last || !has_steps(*last)) return false;
      check_spans(*last, (folder_ / timeline::kLastStepFolder).string());
      record_.timeline = std::move(*last);
    } catch (const DataError& error) {
      note(first_line(error.what()));
      return false;
    }
    note(
        "there is no timeline.json, which a run writes at its end: this report "
        "uses the step that the ranks recorded last, which may not be typical");
    return true;
  }

  void note_truncated(int32_t rank) {
    const bool alone = std::ranges::any_of(
        record_.timeline.spans,
        [&](const timeline::Span& span) { return span.rank == rank; });
    note(format(
        "the timeline is truncated in the spans of rank {}: {}", rank,
        alone ? "its last step is left out"
              : "this rank and those after it are left out"));
  }

  void read_steps() {
    const fs::path path = folder_ / "metrics.jsonl";
    if (!is_there(path)) {
      if (!record_.timeline.spans.empty()) {
        note("there is no metrics.jsonl: losses and rates are not known");
        return;
      }
      throw DataError(
          broken_.empty()
              ? folder_.string() +
                    ": is no run, it has neither timeline.json nor "
                    "metrics.jsonl; name a folder that `echelon train` wrote"
              : broken_ +
                    "; and there is no metrics.jsonl next to it; name a folder "
                    "that `echelon train` wrote");
    }
    try {
      timeline::MetricsFile file = timeline::read_metrics(path);
      record_.steps = std::move(file.steps);
      record_.evaluations = std::move(file.evaluations);
      record_.rebalances = std::move(file.rebalances);
      record_.rollbacks = timeline::read_rollbacks(path);
      if (file.truncated) note("the last line of metrics.jsonl is truncated");
    } catch (const DataError& error) {
      if (record_.timeline.spans.empty()) throw;
      note(first_line(error.what()));
    }
    if (record_.steps.empty() && record_.timeline.spans.empty()) {
      throw DataError(
          path.string() +
          ": has no step, and there is no timeline; explain the run when it "
          "has trained some steps");
    }
    if (record_.steps.empty()) {
      note("metrics.jsonl has no step: losses and rates are not known");
    }
  }

  void read_simulated_cluster() {
    const fs::path path = folder_ / "cluster.toml";
    if (!is_there(path)) return;
    try {
      record_.cluster = cluster::read_cluster(path);
    } catch (const Error& error) {
      note(first_line(error.what()));
    }
  }

  void read_configuration() {
    const fs::path path = folder_ / "config.toml";
    if (!is_there(path)) {
      note("there is no config.toml: no fix is simulated");
      return;
    }
    try {
      const std::string text = read_text_file(path);
      if (text.empty()) {
        note("config.toml is empty: no fix is simulated");
        return;
      }
      if (!text.ends_with('\n')) {
        note("the last line of config.toml is truncated");
      }
      record_.job = load_job(path.string());
      record_.configuration = path.string();
      if (!is_of_this_timeline(*record_.job)) {
        record_.job.reset();
        return;
      }
      if (record_.title.empty()) {
        record_.title = record_.job->model.name + " on " +
                        to_string(record_.job->data.name);
      }
      record_.layers = predict::read_counted_layers(folder_);
    } catch (const Error& error) {
      note(first_line(error.what()));
    }
  }

  // A timeline may be next to another run's configuration.
  bool is_of_this_timeline(const Job& job) {
    int32_t most = -1;
    for (const timeline::Span& span : record_.timeline.spans)
      most = std::max(most, span.rank);
    const int64_t ranks = job.layout.num_ranks();
    if (most < ranks) return true;
    note(format(
        "config.toml is for {} {}, and the timeline has a rank {}: it is "
        "another run's, and no fix is simulated",
        ranks, ranks == 1 ? "rank" : "ranks", most));
    return false;
  }

  void note_unfinished() {
    if (!record_.job || record_.steps.empty() || record_.simulated) return;
    const int64_t last = record_.steps.back().step;
    const int64_t all = record_.job->train.steps;
    if (all == 0 || last >= all) return;
    note(format(
        "the metrics end at step {} of {}: the run continues, was stopped, or "
        "failed",
        last, all));
  }

  void note(std::string line) { record_.notes.push_back(std::move(line)); }

  fs::path folder_;
  fs::path timeline_;
  std::string broken_;  // why the timeline could not be read
  RunRecord record_;
};

}  // namespace

RunRecord read_run(const fs::path& run) {
  if (run.empty()) throw DataError("RUN is empty; name a run's folder");
  std::error_code error;
  if (!fs::exists(run, error)) {
    if (error) throw DataError(run.string() + ": " + error.message());
    throw DataError(
        run.string() +
        ": there is no such run; name a folder that `echelon train` wrote, or "
        "a timeline.json");
  }
  if (fs::is_directory(run, error)) {
    const fs::directory_iterator entries(run, error);
    if (error) {
      throw DataError(run.string() + ": cannot be read: " + error.message());
    }
    return Reader(run, run / "timeline.json").read();
  }
  return Reader(run.parent_path(), run).read();
}

}  // namespace echelon::explain
