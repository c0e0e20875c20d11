// How many microbatches wait for their backward, by formula: what
// schedule/memory.h counts, without making the schedule.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

struct PipelineShape {
  std::string schedule = "1f1b";
  int64_t ranks = 1;            // p
  int64_t stages_per_rank = 1;  // v
  int64_t microbatches = 1;     // m
};

/// The stages of a rank, first to last: interleaved, or there and back in a V.
std::vector<int64_t> stages_of_rank(const PipelineShape& shape, int64_t rank);

/// By stages_of_rank: microbatches that are stored at the rank's fullest
/// moment. They sum to stored_activations().ranks; of zb-v and dualpipev with
/// fewer than 2p microbatches, to at most that and two more.
std::vector<double>
stored_microbatches(const PipelineShape& shape, int64_t rank);

}  // namespace echelon
