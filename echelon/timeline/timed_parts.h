// Where the time of a typical step goes, in parts that measured and simulated
// timelines have in common: these compare a prediction with a run.
//
// A step lasts from a rank's first begin to its last end (step_activities):
// ranks of data parallelism may begin at different times, and one that begins
// late is behind in the next step too. In a pipeline a step lasts from the
// first begin of any rank to the last end. Each part is a mean over ranks and
// typical steps; the parts add up to the step.
//
//   forward, backward, optimizer   computing
//   exposed, by axis               communication while nothing computes, with
//                                  the wait for slower ranks inside of it
//   stages                         a pipeline's ranks wait for other stages:
//                                  bubble and transfers
//   data                           waiting for the batch
//   other                          none of them was recorded
#pragma once

#include <map>
#include <string>
#include <vector>

#include "echelon/timeline/overlap.h"
#include "echelon/timeline/timeline.h"

namespace echelon {

/// Seconds.
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

}  // namespace echelon
