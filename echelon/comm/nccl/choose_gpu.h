// Chooses the GPU that each rank takes on its host.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace echelon {

/// What one rank sees.
struct RankGpus {
  int rank = 0;
  int node = 0;  // its host's number
  int local_rank = 0;
  std::vector<std::string> gpus;  // UUIDs, by the rank's own index
  std::string problem;            // why GPUs that are there cannot be used
};

/// As one line, and back.
std::string to_text(const RankGpus& gpus);
RankGpus rank_gpus_from_text(const std::string& text);

struct GpuChoice {
  std::optional<int> index;  // of the rank's own list; none: the CPU
  std::string note;          // for the user, when it may surprise
};

/// The ranks of a host choose by their local rank, each the first GPU in its
/// list that no rank before it has: local rank i takes the i-th of a list that
/// all share, and the one that it sees where each has its own. `all`: what
/// every rank of the job sees. Throws ConfigError when a GPU that is there
/// cannot be used, and, if GPUs are `needed`, when a rank has none. Every rank
/// of the job comes to the same.
GpuChoice choose_gpu(const std::vector<RankGpus>& all, int rank, bool needed);

/// What this process sees. Loads the driver alone. Never throws.
RankGpus gpus_of_process(int rank, int node, int local_rank) noexcept;

}  // namespace echelon
