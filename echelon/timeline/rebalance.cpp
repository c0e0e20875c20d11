#include "echelon/timeline/rebalance.h"

#include <algorithm>
#include <span>

#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::timeline {
namespace {

constexpr size_t kRanksInText = 8;

template <class T, class Text>
std::string list_text(const std::vector<T>& all, const Text& text) {
  const auto shown = std::span(all).first(std::min(all.size(), kRanksInText));
  return join(shown, ", ", text) + (all.size() > kRanksInText ? ", …" : "");
}

std::string number_list(const std::vector<int64_t>& samples) {
  return list_text(samples, [](int64_t one) { return std::to_string(one); });
}

}  // namespace

double Rebalance::slowest_before() const {
  return std::ranges::max(seconds);
}

double Rebalance::slowest_after() const {
  if (of == Divided::layers) return expected_seconds;
  double most = 0;
  for (size_t rank = 0; rank < after.size(); ++rank) {
    most = std::max(
        most, seconds[rank] * static_cast<double>(after[rank]) /
                  static_cast<double>(before[rank]));
  }
  return most;
}

std::string to_text(const Rebalance& rebalance) {
  const bool layers = rebalance.of == Divided::layers;
  return format(
      "after step {}: {} work {} {} {} {}; from now on they {} {}, "
      "with which the slowest should work {} instead of {}",
      rebalance.step, layers ? "pipeline ranks" : "ranks",
      list_text(rebalance.seconds, format_seconds),
      layers ? "with stages of" : "for", number_list(rebalance.before),
      layers ? "layers" : "samples", layers ? "have" : "take",
      number_list(rebalance.after), format_seconds(rebalance.slowest_after()),
      format_seconds(rebalance.slowest_before()));
}

}  // namespace echelon::timeline
