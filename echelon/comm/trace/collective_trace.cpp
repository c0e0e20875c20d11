#include "echelon/comm/trace/collective_trace.h"

#include <utility>

namespace echelon {
namespace {

thread_local CollectiveTrace* innermost = nullptr;

}  // namespace

CollectiveTrace::CollectiveTrace() : outer_(std::exchange(innermost, this)) {}

CollectiveTrace::~CollectiveTrace() {
  innermost = outer_;
}

std::vector<TracedCollective> CollectiveTrace::take() {
  return std::exchange(calls_, {});
}

void CollectiveTrace::record(TracedCollective call) {
  if (active()) innermost->calls_.push_back(std::move(call));
}

bool CollectiveTrace::active() {
  return innermost != nullptr;
}

}  // namespace echelon
