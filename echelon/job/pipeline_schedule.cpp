#include "echelon/job/pipeline_schedule.h"

#include <algorithm>
#include <numeric>

#include "echelon/error.h"

namespace echelon {
namespace {

constexpr int64_t kMicrobatchesPerRank = 4;

// The greatest number that divides every data-parallel rank's batch; 0 when
// the ranks do not divide the batch.
int64_t common_batch(const TrainOptions& train, const Layout& layout) {
  int64_t common = 0;
  for (const int64_t batch : train.rank_batch) common = std::gcd(common, batch);
  if (common > 0) return common;
  const int64_t degree = layout.data_ranks();
  return train.batch % degree == 0 ? train.batch / degree : 0;
}

bool is_defined(const PipelineLayout& pipeline, int64_t ranks) {
  try {
    make_schedule(pipeline, ranks);
  } catch (const ConfigError&) {
    return false;
  }
  return true;
}

}  // namespace

int64_t microbatches_of(const Job& job) {
  if (job.layout.pp == 1) return 1;
  if (!job.pipeline.schedule_file.empty()) {
    return make_schedule(job.pipeline, job.layout.pp).num_microbatches;
  }
  if (job.pipeline.microbatches > 0) return job.pipeline.microbatches;
  const int64_t most = kMicrobatchesPerRank * job.layout.pp;
  const int64_t common = common_batch(job.train, job.layout);
  PipelineLayout pipeline = job.pipeline;
  for (int64_t count = most; count > 1; --count) {
    if (common % count != 0) continue;
    pipeline.microbatches = count;
    if (is_defined(pipeline, job.layout.pp)) return count;
  }
  return job.layout.pp;  // divides nothing; the checks name this number
}

Schedule pipeline_schedule(const Job& job) {
  PipelineLayout pipeline = job.pipeline;
  if (pipeline.schedule_file.empty()) {
    pipeline.microbatches = microbatches_of(job);
  }
  return make_schedule(pipeline, job.layout.pp);
}

}  // namespace echelon
