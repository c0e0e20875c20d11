// How long collectives take, for `echelon bench collectives`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "echelon/comm/world.h"
#include "echelon/options/comm.h"

namespace echelon {

struct BenchOptions {
  std::vector<BackendKind> backends = {BackendKind::local, BackendKind::gloo};
  std::vector<int64_t> bytes = {4 << 10, 1 << 20, 64 << 20};
  std::vector<std::string> operations = {"all_reduce",     "all_gather",
                                         "reduce_scatter", "broadcast",
                                         "all_to_all",     "send_recv"};
};

/// Microseconds of one call, over the calls of a few rounds that alternate
/// between the backends.
struct BenchRow {
  std::string backend;
  std::string operation;
  int ranks = 0;
  int64_t bytes = 0;  // of the tensor that a rank ends with
  double min_microseconds = 0;
  double median_microseconds = 0;
  int64_t calls = 0;
};

/// Every rank of the world calls; rank 0's times are returned. float32 sums.
std::vector<BenchRow>
bench_collectives(World& world, const BenchOptions& options);

/// A table for people, or one JSON array.
std::string to_text(const std::vector<BenchRow>& rows);
std::string to_json(const std::vector<BenchRow>& rows);

}  // namespace echelon
