// Made-up pipelines, the same each time, for tests of their pictures and for
// looking at them without training.
#pragma once

#include <cstdint>

#include "echelon/report/pipeline_page.h"

namespace echelon::report::sample {

enum class Order { gpipe, one_f_one_b, split, interleaved };

struct PipelineShape {
  Order order = Order::one_f_one_b;
  int32_t ranks = 4;  // of one pipeline
  int32_t microbatches = 8;
  int32_t replicas = 1;
  int64_t steps = 5;
  double slow_stage = 0;  // excess of the second rank's work
  double latency = 0.06;  // of a transfer, in forwards
  bool transfers = true;
};

/// What each rank computes in which order; begins are places in it.
timeline::PipelineRows pipeline_order(const PipelineShape& shape);

/// The picture of its ideal schedule, titled "1f1b <4 stages>".
PipelinePicture schedule_picture(const PipelineShape& shape);

/// A run of it: a forward takes 2 ms, more or less. Ranks of a stage are
/// neighbours: replica r of stage s is rank s * replicas + r.
timeline::Timeline pipeline_run(const PipelineShape& shape);

/// Model parallelism: one rank whose devices work one after another.
timeline::Timeline placement_run(int32_t devices, int64_t steps);

}  // namespace echelon::report::sample
