#include "echelon/train/chosen_context.h"

#include <cstdlib>

#include "echelon/predict/context.h"
#include "echelon/text/format.h"

namespace echelon {

Job with_chosen_context(Job job, World& world, std::FILE* out) {
  if (job.layout.cp == 1 || !cost::is_open(job.context)) return job;
  std::string told;
  if (world.rank() == 0) {
    const auto choice = predict::choose_context(
        job, world.local_size(), world.device().is_cpu());
    std::fprintf(out, "%s\n", choice.why.c_str());
    std::fflush(out);
    told = format(
        "{} {}", static_cast<int>(choice.options.way), choice.options.ulysses);
  }
  const std::string text = world.exchange(told).front();
  char* rest = nullptr;
  job.context.way =
      static_cast<ContextWay>(std::strtol(text.c_str(), &rest, 10));
  job.context.ulysses = std::strtol(rest, nullptr, 10);
  return job;
}

}  // namespace echelon
