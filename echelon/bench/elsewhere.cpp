#include "echelon/bench/elsewhere.h"

#include <chrono>
#include <utility>

#include "echelon/bench/bench_passes.h"

namespace echelon {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kLongerElsewhere = 1.25;  // than a pass there takes

}  // namespace

Elsewhere::Elsewhere(BenchMeter& meter, const std::vector<int64_t>& samples) {
  for (const int64_t count : samples) {
    Place place;
    if (count > 0) {
      place.pass = convolutions_pass(count);
      place.seconds = kLongerElsewhere * meter.seconds_of(place.pass);
    }
    places_.push_back(std::move(place));
  }
}

void Elsewhere::spend() const {
  const Place& place = places_[chosen_];
  const auto end = Clock::now() + std::chrono::duration<double>(place.seconds);
  if (place.pass) place.pass();
  while (Clock::now() < end) {
  }
}

}  // namespace echelon
