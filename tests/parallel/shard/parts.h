// Compares shards of parameters with whole parameters.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "echelon/comm/differentiable.h"
#include "echelon/parallel/shard/sharded_units.h"
#include "tests/support/parity.h"

namespace echelon::sharding_test {

using torch::Tensor;

inline void expect_part(
    const std::string& what, const Tensor& whole, const Tensor& part,
    const IndexRange& range, double floor, double tolerance) {
  if (!whole.defined()) {
    if (part.defined() && part.numel() > 0) {
      EXPECT_EQ(part.abs().max().item<double>(), 0) << what;
    }
    return;
  }
  ASSERT_TRUE(part.defined()) << what;
  ASSERT_EQ(part.numel(), range.size()) << what;
  const Tensor expected = whole.flatten().slice(0, range.begin, range.end);
  const double scale = std::max(parity::detail::largest(whole), floor);
  EXPECT_LE(
      parity::detail::largest(
          expected.to(torch::kFloat64) - part.to(torch::kCPU, torch::kFloat64)),
      tolerance * scale)
      << what;
}

enum class Which { gradients, values };

/// Compares all parts of this rank with the whole parameters, and checks that
/// the ranks of the shard group together have every element of each parameter.
inline void expect_parts(
    const std::string& place, const parity::NamedTensors& whole,
    const ShardedUnits& units, const Group& shard, Which which,
    double tolerance) {
  const double floor = parity::detail::floor_of(whole);
  const auto parts = units.parts();
  std::vector<int64_t> here;
  ASSERT_EQ(parts.size(), whole.size());
  for (const auto& part : parts) {
    ASSERT_TRUE(whole.count(part.name)) << part.name;
    expect_part(
        place + " " + part.name, whole.at(part.name),
        which == Which::gradients ? part.gradient : part.value, part.range,
        floor, tolerance);
    here.push_back(part.range.size());
  }
  const Tensor counts = torch::tensor(here, torch::kInt64);
  shard.all_reduce(counts);
  for (size_t i = 0; i < parts.size(); ++i) {
    int64_t numel = 1;
    for (const int64_t size : parts[i].shape) numel *= size;
    EXPECT_EQ(counts[static_cast<int64_t>(i)].item<int64_t>(), numel)
        << parts[i].name;
  }
}

}  // namespace echelon::sharding_test
