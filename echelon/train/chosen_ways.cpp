#include "echelon/train/chosen_ways.h"

#include <cstdlib>
#include <string>

#include "echelon/predict/choices.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

// Rank 0's text, on every rank.
template <class Choose>
std::string told_by_first(World& world, const Choose& choose) {
  return world.exchange(world.rank() == 0 ? choose() : "").front();
}

void print_why(const std::string& why, std::FILE* out) {
  if (why.empty()) return;
  std::fprintf(out, "%s\n", why.c_str());
  std::fflush(out);
}

}  // namespace

Job with_chosen_ways(Job job, World& world, std::FILE* out) {
  const bool on_processor = world.device().is_cpu();
  if (job.layout.cp > 1 && cost::is_open(job.context)) {
    const std::string text = told_by_first(world, [&] {
      const auto choice =
          predict::choose_context(job, world.local_size(), on_processor);
      print_why(choice.why, out);
      return format(
          "{} {}", static_cast<int>(choice.options.way),
          choice.options.ulysses);
    });
    char* rest = nullptr;
    job.context.way =
        static_cast<ContextWay>(std::strtol(text.c_str(), &rest, 10));
    job.context.ulysses = std::strtol(rest, nullptr, 10);
  }
  if (job.layout.tp > 1 && !on_processor && job.tensor.overlap_chunks == 0) {
    const std::string text = told_by_first(world, [&] {
      const auto choice =
          predict::choose_chunks(job, world.local_size(), on_processor);
      print_why(choice.why, out);
      return std::to_string(choice.chunks);
    });
    job.tensor.overlap_chunks = std::strtol(text.c_str(), nullptr, 10);
  }
  return job;
}

}  // namespace echelon
