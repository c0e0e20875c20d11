// A cluster from what `echelon bench --save` measured on this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/cluster/cluster.h"
#include "echelon/cluster/local_machine.h"

namespace echelon::cluster {

/// A call of a collective; bytes of the tensor that a rank ends with.
struct MeasuredCall {
  std::string operation;  // "all_reduce"
  int64_t bytes = 0;
  double seconds = 0;
};

/// Figures of one rank, measured while all ranks did the same.
struct MachineMeasurement {
  int64_t ranks = 1;
  std::vector<MatrixRate> matrix_rates;
  std::vector<OperatorRate> operator_rates;
  double memory_bytes_per_second = 0;  // read and written
  double launch_seconds = 0;           // overhead of the smallest operator
  std::vector<LaunchRate> launch_rates;
  std::vector<MeasuredCall> calls;  // empty with one rank
};

/// Latency and bandwidth with which all_reduces of the ranks take
/// latency + 2 (ranks - 1) / ranks * bytes / bandwidth, fitted to the smallest
/// and largest size. Throws Error when there are not two sizes.
Link link_of(const MachineMeasurement& measured);

/// One node of `measured.ranks` devices with the measured figures. What was not
/// measured (memory, adapters, peaks of GPUs in the catalogue) is taken from
/// `machine`.
Cluster
cluster_of(const MachineMeasurement& measured, const LocalMachine& machine);

/// A table for people, or one JSON object.
std::string to_text(const MachineMeasurement& measured);
std::string to_json(const MachineMeasurement& measured);

}  // namespace echelon::cluster
