// How long collectives take, for `echelon bench collectives`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/options/comm.h"

namespace echelon::bench {

struct BenchOptions {
  std::vector<BackendKind> backends = {BackendKind::local, BackendKind::gloo};
  std::vector<int64_t> bytes = {4 << 10, 1 << 20, 64 << 20};
  std::vector<std::string> operations = {"all_reduce",     "all_gather",
                                         "reduce_scatter", "broadcast",
                                         "all_to_all",     "send_recv"};
};

/// Microseconds of one call, over the calls of a few rounds in which the
/// backends take turns. On a device with streams each round gives one time, the
/// mean of its calls.
struct BenchRow {
  std::string backend;
  std::string operation;
  int ranks = 0;
  int64_t bytes = 0;  // of the tensor: nccl-tests' "size"
  double min_microseconds = 0;
  double median_microseconds = 0;
  int64_t calls = 0;
};

/// GB/s of a median call, in the terms of nccl-tests (its PERFORMANCE.md).
struct Bandwidth {
  double algorithm = 0;  // algbw: bytes over time
  /// busbw: what each rank's link carries, which no number of ranks changes: of
  /// n ranks, algbw times 2 (n - 1) / n for all_reduce, (n - 1) / n for
  /// all_gather, reduce_scatter and all_to_all, else 1.
  double bus = 0;
};
Bandwidth bandwidth_of(const BenchRow& row);

/// Collective; returns this rank's times. Tensors are float32.
std::vector<BenchRow>
bench_collectives(World& world, const BenchOptions& options);

/// A table for people, or one JSON array.
std::string to_text(const std::vector<BenchRow>& rows);
std::string to_json(const std::vector<BenchRow>& rows);

}  // namespace echelon::bench
