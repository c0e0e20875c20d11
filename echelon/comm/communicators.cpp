#include "echelon/comm/communicators.h"

#include <exception>

namespace echelon {
namespace {

void abort_one(c10d::Backend& communicator) noexcept {
  try {
    communicator.abort();
  } catch (const std::exception&) {
    // An error is on its way already.
  }
}

}  // namespace

Communicators::Communicator Communicators::find(const Key& key) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [of, communicator] : made_) {
    if (of == key) return communicator;
  }
  return nullptr;
}

void Communicators::add(const Key& key, Communicator communicator) {
  const std::lock_guard lock(mutex_);
  if (aborted_) return abort_one(*communicator);
  made_.emplace_back(key, std::move(communicator));
}

bool Communicators::empty() const {
  const std::lock_guard lock(mutex_);
  return made_.empty();
}

std::vector<Communicators::Communicator> Communicators::take() {
  const std::lock_guard lock(mutex_);
  std::vector<Communicator> all;
  for (auto& [of, communicator] : made_) {
    all.push_back(std::move(communicator));
  }
  made_.clear();
  return all;
}

void Communicators::shut_down() {
  for (const auto& communicator : take()) communicator->shutdown();
}

void Communicators::abort() noexcept {
  {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
  }
  for (const auto& communicator : take()) abort_one(*communicator);
}

}  // namespace echelon
