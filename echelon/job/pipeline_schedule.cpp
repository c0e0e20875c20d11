#include "echelon/job/pipeline_schedule.h"

#include <algorithm>
#include <numeric>

#include "echelon/error.h"

namespace echelon {
namespace {

constexpr int64_t kMicrobatchesPerRank = 4;

// What every data rank's batch divides by; 0 when their number does not divide
// the batch at all.
int64_t common_batch(const Job& job) {
  int64_t common = 0;
  for (const int64_t batch : job.train.rank_batch) {
    common = std::gcd(common, batch);
  }
  if (common > 0) return common;
  const int64_t degree = job.layout.data_degree();
  return job.train.batch % degree == 0 ? job.train.batch / degree : 0;
}

bool is_defined(const PipelineLayout& pipeline, int64_t ranks) {
  try {
    make_schedule(pipeline, ranks);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

}  // namespace

int64_t microbatches_of(const Job& job) {
  if (job.layout.pp == 1) return 1;
  if (!job.pipeline.schedule_file.empty()) {
    return make_schedule(job.pipeline, job.layout.pp).num_microbatches;
  }
  if (job.pipeline.microbatches > 0) return job.pipeline.microbatches;
  const int64_t most = kMicrobatchesPerRank * job.layout.pp;
  const int64_t common = common_batch(job);
  PipelineLayout pipeline = job.pipeline;
  for (int64_t count = most; count > 1; --count) {
    if (common % count != 0) continue;
    pipeline.microbatches = count;
    if (is_defined(pipeline, job.layout.pp)) return count;
  }
  return job.layout.pp;  // does not fit; the checks say so with this number
}

Schedule pipeline_schedule(const Job& job) {
  PipelineLayout pipeline = job.pipeline;
  if (pipeline.schedule_file.empty()) {
    pipeline.microbatches = microbatches_of(job);
  }
  return make_schedule(pipeline, job.layout.pp);
}

}  // namespace echelon
