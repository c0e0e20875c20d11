// What seconds of small networks say of one operator, and of the host's work of
// a step: differences between runs that have more or less of it, and between
// what was measured and what the operators take.
#pragma once

#include <cstdint>
#include <vector>

#include "echelon/cluster/device.h"

namespace echelon {

/// The middle one, of two the lower. `values` are one or more.
double median(std::vector<double> values);

/// Operators of a pass through a network.
struct OperatorCounts {
  double computing = 0;
  double views = 0;  // compute nothing
};

/// Seconds of launching an operator of each kind.
struct Launches {
  double computing = 0;
  double view = 0;
};

/// From what two networks of which neither has more of both take in all. Where
/// noise is larger than their difference: the same for each operator.
Launches fit_launches(
    const OperatorCounts& a, double a_seconds, const OperatorCounts& b,
    double b_seconds);

/// Median of the largest of `ranks` numbers of a standard normal distribution.
double usual_largest(int64_t ranks);

/// Standard deviation of 1 ms of computing of one of `ranks`, by which they
/// wait for the slowest `waiting` seconds after each computed for `seconds`, as
/// a random walk has it: w = usual_largest(ranks) * s * sqrt(T / 1 ms). At
/// least 0.
double fit_jitter(int64_t ranks, double seconds, double waiting);

/// Microbatches of two runs that are else alike.
struct Microbatches {
  int64_t few = 1;
  int64_t many = 2;
};

/// Small networks whose steps are timed: data parallel with few layers and with
/// few and many microbatches, and with many layers and few microbatches; and,
/// with more than one rank, a pipeline of few layers on each rank.
struct SmallSteps {
  int64_t ranks = 1;
  int64_t few_layers = 2;
  int64_t many_layers = 10;
  Microbatches of_data;
  Microbatches of_pipeline;
};

/// Seconds of a small network, each stage of which begins a microbatch
/// elsewhere.
struct SmallSeconds {
  double elsewhere = 0;  // spent there each time
  double step = 0;
  double pass = 0;        // through all layers by themselves
  double plain_pass = 0;  // the same, with no time spent elsewhere
};

/// By how much the step is longer than `predicted`, beside what is spent
/// elsewhere and what layers take longer behind it. A rank passes through its
/// stage once for each microbatch, and waits for the other stages before or
/// behind.
double longer_than_predicted(
    const SmallSeconds& seconds, int64_t stages, int64_t microbatches,
    double predicted);

/// What each of `kinds` operators takes longer behind time spent elsewhere, by
/// passes through all layers by themselves, one for each round. At least 0.
double fit_operator(
    const std::vector<SmallSeconds>& rounds, int64_t stages, double kinds);

/// What the trainer does in any step: of the step, of each layer with
/// parameters, of each microbatch. `beside`: seconds by which a step of the
/// three data-parallel networks is longer than what its operators and
/// collectives take, by round, in the order above. Medians of their
/// differences, none below 0.
HostWork fit_host_work(
    const SmallSteps& steps, const std::vector<std::vector<double>>& beside);

/// `work`, with what a pipeline adds: of an action, and of a step. `beside`:
/// the same of the pipeline with few and with many microbatches, beside `work`
/// as well. Unchanged with one rank.
HostWork with_pipeline_work(
    HostWork work, const SmallSteps& steps,
    const std::vector<std::vector<double>>& beside);

}  // namespace echelon
