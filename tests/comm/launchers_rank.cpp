// A rank for launchers_test: prints its place and the sum of all ranks' values.
// argv[1]: the backend; "gpus": prints which GPU it takes of those that the
// driver shows it.
#include <torch/torch.h>

#include <cstdio>
#include <cstring>

#include "echelon/comm/nccl/choose_gpu.h"
#include "echelon/comm/world.h"

namespace echelon {
namespace {

// As a world of GPUs chooses, without one.
void print_gpu() {
  constexpr int64_t kMost = 256;
  auto world = World::from_environment(
      {.device = DeviceKind::cpu, .backend = BackendKind::gloo});
  const std::string mine = to_text(
      gpus_of_process(world.rank(), world.node_rank(), world.local_rank()));
  auto texts = torch::zeros({world.size(), kMost}, torch::kInt64);
  for (size_t i = 0; i < mine.size(); ++i) {
    texts[world.rank()][static_cast<int64_t>(i)] = mine[i];
  }
  world.group().all_reduce(texts);
  std::vector<RankGpus> all;
  for (int rank = 0; rank < world.size(); ++rank) {
    std::string text;
    for (int64_t i = 0; i < kMost; ++i) {
      const char c = static_cast<char>(texts[rank][i].item<int64_t>());
      if (c != '\0') text += c;
    }
    all.push_back(rank_gpus_from_text(text));
  }
  const auto& seen = all[static_cast<size_t>(world.rank())].gpus;
  const auto index = choose_gpu(all, world.rank(), /*needed=*/true).index;
  std::printf(
      "local rank %d of node %d takes cuda:%d of %zu, %.4s\n",
      world.local_rank(), world.node_rank(), *index, seen.size(),
      seen[static_cast<size_t>(*index)].c_str());
}

}  // namespace
}  // namespace echelon

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "gpus") == 0) {
    echelon::print_gpu();
    return 0;
  }
  const bool gloo = argc > 1 && std::strcmp(argv[1], "gloo") == 0;
  auto world = echelon::World::from_environment(
      {.backend = gloo ? echelon::BackendKind::gloo
                       : echelon::BackendKind::automatic});
  auto sum = torch::full({3}, world.rank() + 1, torch::kInt64);
  world.group().all_reduce(sum);
  std::printf(
      "rank %d of %d, %d of %d on node %d, %s, sum %lld\n", world.rank(),
      world.size(), world.local_rank(), world.local_size(), world.node_rank(),
      world.backend().c_str(), static_cast<long long>(sum[2].item<int64_t>()));
}
