#include "echelon/explain/run_record.h"

#include <algorithm>

#include "echelon/cluster/cluster_file.h"
#include "echelon/error.h"
#include "echelon/explain/cut_trace.h"
#include "echelon/predict/counted_layers.h"
#include "echelon/text/text_file.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The first line of an error: notes have one each.
std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

constexpr int32_t kMostRanks = 1 << 20;

// What no recorder writes.
void check_spans(const Timeline& timeline, const std::string& place) {
  for (const Span& span : timeline.spans) {
    const bool is_rank = span.rank >= 0 && span.rank < kMostRanks;
    if (is_rank && span.end_ns >= span.begin_ns) continue;
    throw DataError(
        "[timeline] " + place + ": span \"" + span.name.substr(0, 40) +
        "\" of rank " + std::to_string(span.rank) +
        (is_rank ? " ends before it begins" : " is of no rank"));
  }
}

bool has_steps(const Timeline& timeline) {
  return std::any_of(
      timeline.spans.begin(), timeline.spans.end(), [](const Span& span) {
        return span.step >= 0 && span.kind != SpanKind::evaluation;
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
      note(
          "there is no timeline.json, which a run writes at its end: what "
          "follows "
          "is from the metrics");
      return;
    }
    try {
      CutTrace cut =
          parse_cut_trace(read_text_file(timeline_), timeline_.string());
      check_spans(cut.timeline, timeline_.string());
      record_.timeline = std::move(cut.timeline);
      record_.title = record_.timeline.title;
      if (cut.cut_rank >= 0) note_cut(cut.cut_rank);
      if (has_steps(record_.timeline)) return;
      record_.timeline.spans.clear();
      broken_ = timeline_.string() + ": no step was recorded";
      note("the timeline has no step (train.timeline_steps)");
    } catch (const DataError& error) {
      broken_ = first_line(error.what());
      note(broken_);
    }
  }

  void note_cut(int32_t rank) {
    const bool alone = std::any_of(
        record_.timeline.spans.begin(), record_.timeline.spans.end(),
        [&](const Span& span) { return span.rank == rank; });
    note(
        "the timeline is cut off in the spans of rank " + std::to_string(rank) +
        (alone ? ": its last step is left out"
               : ": this rank and those after it are left out"));
  }

  void read_steps() {
    const fs::path path = folder_ / "metrics.jsonl";
    if (!is_there(path)) {
      if (!record_.timeline.spans.empty()) return;
      throw DataError(
          broken_.empty()
              ? folder_.string() +
                    ": is no run, it has neither timeline.json nor "
                    "metrics.jsonl; name a folder that `echelon train` wrote"
              : broken_ + "; and there is no metrics.jsonl beside it");
    }
    try {
      MetricsFile file = read_metrics(path);
      record_.steps = std::move(file.steps);
      if (file.truncated) note("the last line of metrics.jsonl is cut off");
    } catch (const DataError& error) {
      if (record_.timeline.spans.empty()) throw;
      note(first_line(error.what()));
    }
    if (record_.steps.empty() && record_.timeline.spans.empty()) {
      throw DataError(
          path.string() +
          ": has no step, and there is no timeline; explain the run "
          "when it has trained some steps");
    }
  }

  void read_simulated_cluster() {
    const fs::path path = folder_ / "cluster.toml";
    if (!is_there(path)) return;
    try {
      record_.cluster = read_cluster(path);
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
      record_.job = load_job(path.string());
      record_.configuration = path.string();
      if (!is_of_this_timeline(*record_.job)) {
        record_.job.reset();
        return;
      }
      if (record_.title.empty()) {
        record_.title =
            record_.job->model.name + " on " + record_.job->data.name;
      }
      record_.layers = read_counted_layers(folder_);
    } catch (const Error& error) {
      note(first_line(error.what()));
    }
  }

  // A timeline may lie beside another run's configuration.
  bool is_of_this_timeline(const Job& job) {
    int32_t most = -1;
    for (const Span& span : record_.timeline.spans)
      most = std::max(most, span.rank);
    const int64_t ranks = job.layout.num_ranks();
    if (most < ranks) return true;
    note(
        "config.toml is of " + std::to_string(ranks) +
        (ranks == 1 ? " rank" : " ranks") + ", and the timeline has a rank " +
        std::to_string(most) +
        ": it is another run's, and no fix is simulated");
    return false;
  }

  void note_unfinished() {
    if (!record_.job || record_.steps.empty() || record_.simulated) return;
    const int64_t last = record_.steps.back().step;
    const int64_t all = record_.job->train.steps;
    if (all == 0 || last >= all) return;
    note(
        "the metrics end at step " + std::to_string(last) + " of " +
        std::to_string(all) + ": the run goes on, was stopped, or failed");
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
        ": there is no such run; name a folder that `echelon train` "
        "wrote, or a timeline.json");
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

}  // namespace echelon
