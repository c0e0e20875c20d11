// The suite that every backend passes: each collective and dtype against values
// computed on one rank. However the ranks run, each calls every case in order.
#pragma once

#include <torch/types.h>

#include <vector>

#include "echelon/comm/world.h"

namespace echelon {

/// Where a case's tensors are; place(dtype) makes one's options.
struct Place {
  torch::Device device = torch::kCPU;
  torch::TensorOptions operator()(torch::Dtype dtype) const;
};

/// Every rank of `world` calls `run`; it reports through GoogleTest. Cases
/// leave the world as good as new: one world can run them all.
struct CollectiveCase {
  const char* name;
  void (*run)(World& world, const Place& place);
};

const std::vector<CollectiveCase>& collective_cases();

}  // namespace echelon
