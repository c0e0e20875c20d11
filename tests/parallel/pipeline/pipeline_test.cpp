#include "echelon/parallel/pipeline/pipeline.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>

#include "tests/parallel/pipeline/schedules.h"
#include "tests/parallel/pipeline/training.h"
#include "tests/support/ranks.h"

namespace echelon::pipeline_test {

using training::Plan;

struct Case {
  std::string net;
  std::string kind;
  int ranks;
  BackendKind backend = BackendKind::local;
  Plan plan = {};
  bool in_order = false;
  int32_t ahead = 2;
};

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::string name = c.net + "_" + c.kind + "_" + std::to_string(c.ranks);
  if (c.backend == BackendKind::gloo) name += "_gloo";
  if (c.plan.steps > 3) name += "_everything";
  if (c.in_order) name += "_in_order";
  if (c.ahead != 2) name += "_ahead_" + std::to_string(c.ahead);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::vector<std::string> kinds() {
  auto kinds = schedule_names();
  kinds.push_back("random");
  return kinds;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* net : {"mlp", "conv", "skip", "tied", "masked"}) {
    for (const auto& kind : kinds()) {
      for (int ranks : {1, 2, 3, 4}) {
        all.push_back({net, kind, ranks, BackendKind::local});
        if (kind == "dualpipev") all.back().plan.microbatches = 2 * ranks + 1;
      }
    }
    all.push_back({net, "1f1b", 2, BackendKind::gloo});
    all.push_back({net, "zb-v", 3, BackendKind::gloo});
  }
  const Plan everything{
      .steps = 5, .uneven = true, .growing = true, .evaluate = true};
  for (const char* kind : {"gpipe", "1f1b", "interleaved", "zb-v", "random"}) {
    for (auto on : {BackendKind::local, BackendKind::gloo}) {
      all.push_back({"masked", kind, 2, on, everything});
      all.push_back({"tied", kind, 3, on, everything});
    }
  }
  for (const auto& kind : kinds()) {
    for (auto on : {BackendKind::local, BackendKind::gloo}) {
      all.push_back({"masked", kind, 2, on, everything, true});
      all.back().plan.microbatches = 6;
    }
    for (int32_t ahead : {1, 5}) {
      all.push_back({"tied", kind, 3, BackendKind::local, everything, true});
      all.back().plan.microbatches = 7;
      all.back().ahead = ahead;
    }
    all.push_back(all.back());
    all.back().in_order = false;
  }
  return all;
}

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.net << " " << c.kind << " " << c.ranks;
}

class Parity : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Pipeline, Parity, testing::ValuesIn(cases()), name_of);

TEST_P(Parity, EqualsOneDevice) {
  const Case& c = GetParam();
  const LayerList list = nets::named(c.net);
  auto schedule = schedules::named(c.kind, c.ranks, c.plan.microbatches);
  if (schedule.num_stages() > static_cast<int32_t>(list.size())) {
    FAIL() << "the model has too few layers";
  }
  const auto expected = training::on_one_device(list, c.plan);
  std::mutex mutex;
  std::set<std::string> seen;
  Ranks{c.ranks, c.backend}.run([&](World& world) {
    const auto actual = training::on_ranks(
        list, c.plan, schedule, world.group(),
        {.receives_ahead = c.ahead, .messages_in_order = c.in_order});
    std::lock_guard lock(mutex);
    for (const auto& [name, _] : actual.parameters) seen.insert(name);
    training::expect_part(
        expected, actual, schedule.rank_of_stage.back() == world.rank(),
        parity::kRounding);
  });
  EXPECT_EQ(seen.size(), expected.parameters.size());
}

}  // namespace echelon::pipeline_test
