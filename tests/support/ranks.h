// How many ranks a test runs, and over which backend: the parameter of the
// suites that every backend passes.
//
//   class Parity : public testing::TestWithParam<Ranks> {};
//   INSTANTIATE_TEST_SUITE_P(
//       Ranks, Parity, testing::ValuesIn(ranks_of({1, 2, 3, 4})),
//       testing::PrintToStringParamName());
//   TEST_P(Parity, Sum) { GetParam().run([](World& world) { … }); }
#pragma once

#include <functional>
#include <ostream>
#include <vector>

#include "echelon/comm/world.h"

namespace echelon {

struct Ranks {
  int size = 1;
  BackendKind backend = BackendKind::local;

  /// The ranks are threads of this process.
  void run(const std::function<void(World&)>& body) const {
    run_ranks(
        size, body, {.backend = backend, .timeout = std::chrono::minutes(2)});
  }
};

inline void PrintTo(const Ranks& ranks, std::ostream* out) {
  *out << (ranks.backend == BackendKind::gloo ? "gloo_" : "local_")
       << ranks.size;
}

/// Each of `sizes` over `local` and over `gloo`.
inline std::vector<Ranks> ranks_of(const std::vector<int>& sizes) {
  std::vector<Ranks> all;
  for (const auto backend : {BackendKind::local, BackendKind::gloo}) {
    for (const int size : sizes) all.push_back({size, backend});
  }
  return all;
}

}  // namespace echelon
