#include "echelon/comm/gloo/connect_together.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <vector>

#include "echelon/comm/store/store.h"
#include "echelon/error.h"

namespace echelon {
namespace {

constexpr int kAttempts = 3;

// One line is enough: Gloo's reasons go on with where they arose.
std::string reason_of(const std::exception& error) {
  const std::string text = error.what();
  const std::string line = text.substr(0, text.find('\n'));
  return line.empty() ? "unknown error" : line;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_together(
    const c10::intrusive_ptr<c10d::Store>& store, const GroupMember& member,
    std::chrono::milliseconds timeout, const Connect& connect) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + timeout;
  for (int attempt = 1;; ++attempt) {
    const std::string name = "attempt/" + std::to_string(attempt);
    c10::intrusive_ptr<c10d::Backend> backend;
    std::exception_ptr failure;
    std::string reason;
    try {
      backend = connect(c10::make_intrusive<c10d::PrefixStore>(name, store));
    } catch (const std::exception& error) {
      failure = std::current_exception();
      reason = reason_of(error);
    }
    if (failure && Clock::now() >= end) std::rethrow_exception(failure);
    const auto reasons = exchange(
        *store, name + "/failure", member.rank, member.size, reason, timeout,
        "group \"" + member.group + "\"");
    const auto first = std::find_if(
        reasons.begin(), reasons.end(),
        [](const std::string& text) { return !text.empty(); });
    if (first == reasons.end()) return backend;
    if (attempt == kAttempts) {
      if (failure) std::rethrow_exception(failure);
      throw CommError("group \"" + member.group + "\": " + *first);
    }
    if (member.rank == 0) {
      std::fprintf(
          stderr,
          "warning: group \"%s\": connecting failed, trying again (%s)\n",
          member.group.c_str(), first->c_str());
    }
  }
}

}  // namespace echelon
