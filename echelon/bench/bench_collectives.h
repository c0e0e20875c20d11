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
  int64_t bytes = 0;  // of a rank's resulting tensor
  double min_microseconds = 0;
  double median_microseconds = 0;
  int64_t calls = 0;
};

/// Collective; returns this rank's times. Tensors are float32.
std::vector<BenchRow>
bench_collectives(World& world, const BenchOptions& options);

/// A table for people, or one JSON array.
std::string to_text(const std::vector<BenchRow>& rows);
std::string to_json(const std::vector<BenchRow>& rows);

}  // namespace echelon::bench
