// The memory of this host that the ranks of a job take.
#pragma once

#include <cstdint>
#include <string>

#include "echelon/job/check_job.h"
#include "echelon/job/job.h"

namespace echelon::cli {

/// What this host lets its processes have; 0: not known.
int64_t host_bytes();

/// The model's parameters, and of those that train the gradients and two
/// numbers of an optimizer.
double bytes_of_training(const Job& job, const JobFacts& facts);

/// What a checkpoint has: parameters, and two numbers of an optimizer for each
/// of those that train.
double bytes_of_state(const Job& job, const JobFacts& facts);

/// What copies of the state for a restart take of a host, at most.
double bytes_of_copies(const Job& job, const JobFacts& facts, int num_hosts);

/// Why its ranks will run out of memory, by their layers' counts; empty: they
/// will not, or the model is small. Counting takes up to minutes.
std::string memory_excess(const Job& job, const JobFacts& facts);

/// Whether [elastic] memory is on and the copies take a quarter of this host's
/// memory at most.
bool may_copy(const Job& job, const JobFacts& facts, int num_hosts);

/// A line for a dry run; empty when there are no copies.
std::string
describe_copies(const Job& job, const JobFacts& facts, int num_hosts);

}  // namespace echelon::cli
