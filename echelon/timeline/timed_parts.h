// What a typical step's time goes to, in parts that a measured timeline and a
// simulated one have in common: a prediction is compared with a run by them.
//
// A step lasts from a rank's first begin to its last end (step_activities):
// ranks of data parallelism may begin at different times, and are ahead then in
// the next one. In a pipeline it lasts from the first begin of any rank to the
// last end. Each part is a mean over ranks and typical steps; they add up to
// the step.
//
//   forward, backward, optimizer   computing
//   exposed, by axis   communication while nothing computes, waiting for slower
//                      ranks inside of it
//   stages             a pipeline's ranks wait for other stages: bubble,
//   transfers data               waiting for the batch other              none
//   of them was recorded
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
  /// "tp", "dp_shard", …; "world": figures of the step; "": an axis that is not
  /// known. A pipeline's own are in `stages`.
  std::map<std::string, double> exposed;
  double stages = 0;
  double data = 0;
  double other = 0;

  double step_seconds() const;
};

/// `diagnosis` is that of `timeline`: its outliers are left out. All 0 when no
/// step was recorded.
TimedParts timed_parts(const Timeline& timeline, const Diagnosis& diagnosis);

/// One part of both, as tables and pictures show it.
struct ComparedPart {
  std::string name;
  const char* color;  // class of the report's style
  double predicted = 0;
  double measured = 0;
};

/// The parts that either has, in the order above.
std::vector<ComparedPart>
compared_parts(const TimedParts& predicted, const TimedParts& measured);

}  // namespace echelon
