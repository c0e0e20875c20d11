// Ranks of the local backend that are threads of the test.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "echelon/comm/shared_memory/host.h"

namespace echelon::local::testing {

/// Runs `body` on one thread per rank; the first error ends the others and
/// fails the test.
inline void
run_threads(int size, const std::function<void(std::shared_ptr<Host>)>& body) {
  auto hub = make_hub(size);
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(join_threads(hub, rank));
      } catch (const std::exception& error) {
        errors[rank] = error.what();
        hub->abort("rank " + std::to_string(rank) + " failed");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(errors[rank], "") << "rank " << rank;
  }
}

/// For checks on the ranks' threads.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("wrong: " + what);
}

/// The error that `call` throws, which must be an ErrorType.
template <typename ErrorType, typename Call>
ErrorType thrown_by(const Call& call) {
  try {
    call();
  } catch (const ErrorType& error) {
    return error;
  }
  throw std::runtime_error("wrong: no error");
}

}  // namespace echelon::local::testing
