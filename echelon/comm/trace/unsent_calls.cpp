#include "echelon/comm/trace/unsent_calls.h"

#include <utility>

namespace echelon {
namespace {

thread_local UnsentCalls* innermost = nullptr;

}  // namespace

UnsentCalls::UnsentCalls() : outer_(std::exchange(innermost, this)) {}

UnsentCalls::~UnsentCalls() {
  innermost = outer_;
}

std::vector<UnsentCall> UnsentCalls::take() {
  return std::exchange(calls_, {});
}

void UnsentCalls::note(UnsentCall call) {
  if (innermost != nullptr) innermost->calls_.push_back(std::move(call));
}

bool UnsentCalls::listening() {
  return innermost != nullptr;
}

}  // namespace echelon
