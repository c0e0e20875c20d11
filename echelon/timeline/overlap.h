// Where each rank's time went: the figures behind the report's picture.
//
// A step of a rank lasts from the begin of its first span to the end of its
// last. An evaluation or a checkpoint that begins after the last computation
// ends the step: it is not part of it, nor are collectives that begin after it.
// The time of a step falls into four parts that add up to it:
//
//   compute   some track is in forward, backward or optimizer
//   exposed   communication runs and nothing computes
//   data      waiting for the batch, with neither of the above
//   idle      the rest
//
// Communication is `overlapped` (with compute; it costs no time) plus exposed.
// On a track with nested spans the innermost one counts (timeline.h). Spans of
// kind `evaluation` and spans outside of steps are always left out.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "echelon/timeline/intervals.h"
#include "echelon/timeline/timeline.h"

namespace echelon::timeline {

/// A stretch of a track's time and the span that says what it was.
struct Piece {
  const Span* span;
  Interval time;
};

/// One rank, one step, as sets of times.
struct StepActivity {
  int32_t rank = 0;
  int64_t step = 0;
  Interval window;                 // the step
  std::vector<const Span*> spans;  // of the step, in the timeline
  std::vector<Piece> pieces;       // of all tracks
  Intervals compute;
  Intervals communication;  // any collective on its way
  Intervals overlapped;     // communication and compute
  Intervals exposed;        // communication without compute
  Intervals data;           // data wait, with neither
};

/// In seconds; for several steps, the mean.
struct StepBreakdown {
  int32_t rank = 0;
  int64_t step = -1;  // -1: the mean over steps
  double step_seconds = 0;
  double compute_seconds = 0;
  double communication_seconds = 0;
  double overlapped_seconds = 0;
  double exposed_seconds = 0;
  double data_seconds = 0;
  double idle_seconds = 0;
};

struct Diagnosis {
  std::vector<StepBreakdown> steps;  // sorted by step, then rank
  std::vector<StepBreakdown> ranks;  // means over the typical steps, by rank
  StepBreakdown mean;                // over ranks
  int64_t num_steps = 0;             // recorded
  /// Steps longer than three times the median (a first step, a pause). Means
  /// leave them out.
  int64_t num_outliers = 0;
  std::set<int64_t> outliers;  // those steps
  /// The rank with the most compute and data wait, for which the others wait;
  /// -1 with one rank.
  int32_t slowest_rank = -1;
  double slowest_excess = 0;  // its work over the mean of the ranks, less 1
  std::string sentence;       // what held the run back; empty without spans
};

/// Gives each moment of one track to the span that began last; sorted by begin.
std::vector<Piece> owned_pieces(std::vector<const Span*> track);

/// The times that belong to spans of one kind, on any track.
Intervals times_of_kind(const StepActivity& step, SpanKind kind);

/// Sorted by step, then rank.
std::vector<StepActivity> step_activities(const Timeline& timeline);

/// The window of each step: from the first begin of any rank to the last end.
std::map<int64_t, Interval>
step_windows(const std::vector<StepActivity>& activities);

Diagnosis diagnose(const Timeline& timeline);

/// Where the time of a typical step goes, in seconds: parts that measured and
/// simulated timelines have in common, to compare a prediction with a run.
///
/// A step lasts from a rank's first begin to its last end (step_activities):
/// ranks of data parallelism may begin at different times, and one that begins
/// late is behind in the next step too. In a pipeline a step lasts from the
/// first begin of any rank to the last end. Each part is a mean over ranks and
/// typical steps; the parts add up to the step.
///
///   forward, backward, optimizer   computing
///   exposed, by axis               communication while nothing computes, with
///                                  the wait for slower ranks inside of it
///   stages                         a pipeline's ranks wait for other stages:
///                                  bubble and transfers
///   data                           waiting for the batch
///   other                          none of them was recorded
struct TimedParts {
  double forward = 0;
  double backward = 0;
  double optimizer = 0;
  /// "tp", "dp_shard", …; "world": figures of the step; "": an unknown axis.
  /// The communication of a pipeline is in `stages`.
  std::map<std::string, double> exposed;
  double stages = 0;
  double data = 0;
  double other = 0;

  double step_seconds() const;
};

/// `diagnosis` is that of `timeline`: its outliers are left out. All 0 when no
/// step was recorded.
TimedParts timed_parts(const Timeline& timeline, const Diagnosis& diagnosis);

/// One part of a prediction and of a measurement.
struct ComparedPart {
  std::string name;
  const char* color;  // a class of report/assets/report.css
  double predicted = 0;
  double measured = 0;
};

/// The parts that either of the two has, in the order above.
std::vector<ComparedPart>
compared_parts(const TimedParts& predicted, const TimedParts& measured);

}  // namespace echelon::timeline
