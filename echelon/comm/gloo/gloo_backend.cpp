#include "echelon/comm/gloo/gloo_backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "echelon/comm/store/store.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr int kAttempts = 3;

// The first line alone: the rest of Gloo's reasons are source positions.
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
    const std::string name = format("attempt/{}", attempt);
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
        format("group \"{}\"", member.group));
    const auto first = std::find_if(
        reasons.begin(), reasons.end(),
        [](const std::string& text) { return !text.empty(); });
    if (first == reasons.end()) return backend;
    if (attempt == kAttempts) {
      if (failure) std::rethrow_exception(failure);
      throw CommError(format("group \"{}\": {}", member.group, *first));
    }
    if (member.rank == 0) {
      std::fprintf(
          stderr,
          "warning: group \"%s\": connecting failed, trying again (%s)\n",
          member.group.c_str(), first->c_str());
    }
  }
}

void avoid_flight_recorder() {
  ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const std::string& address, std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(
      c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(
      store, rank, size, options);
}

}  // namespace echelon
