// A rank for launchers_test: prints its place and the sum of all ranks' values.
// argv[1]: the backend.
#include <torch/torch.h>

#include <cstdio>
#include <cstring>

#include "echelon/comm/world.h"

int main(int argc, char** argv) {
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
