// A cluster from what `echelon bench --save` measured on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cluster/local_machine.h"

namespace echelon {

/// A call of a collective; bytes of the tensor that a rank ends with.
struct MeasuredCall {
  std::string operation;  // "all_reduce"
  int64_t bytes = 0;
  double seconds = 0;
};

/// Of one rank, while all ranks did the same.
struct MachineMeasurement {
  int64_t ranks = 1;
  std::vector<MatrixRate> matrix_rates;
  std::vector<OperatorRate> operator_rates;
  double memory_bytes_per_second = 0;  // read and written
  double launch_seconds = 0;           // of one operator on a few elements
  std::vector<LaunchRate> launch_rates;
  std::vector<HostWork> host_work;  // by what is computed between
  double jitter_seconds = 0;        // of 1 ms, from rank to rank
  std::vector<MeasuredCall> calls;  // empty with one rank
  int64_t repeated = 0;             // rounds, for others slowed the cores down
};

/// Delay and rate by which all_reduces of the ranks take
/// latency + 2 (ranks - 1) / ranks * bytes / rate; of their smallest and
/// largest size. Throws Error when there are not two sizes.
Link link_of(const MachineMeasurement& measured);

/// One node of `measured.ranks` devices with the measured figures; what was not
/// measured (memory, adapters, peaks of GPUs that the catalogue has) as
/// `machine` has it.
Cluster
cluster_of(const MachineMeasurement& measured, const LocalMachine& machine);

/// A table for people, or one JSON object.
std::string to_text(const MachineMeasurement& measured);
std::string to_json(const MachineMeasurement& measured);

}  // namespace echelon
