#include "echelon/parallel/placement/placed_network.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "tests/parallel/placement/lists.h"
#include "tests/support/error_text.h"
#include "tests/support/parity.h"

namespace echelon::placement::placed_network_test {

using testing::HasSubstr;

constexpr uint64_t kSeed = 5;
constexpr int kSteps = 2;

Placement placement_of(const Case& c, size_t slices) {
  PlacementOptions options{
      .devices = std::vector<torch::Device>(slices, torch::kCPU),
      .inputs = {{c.input.sizes().vec(), c.input.scalar_type()}}};
  return plan_placement(c.layers, options);
}

torch::Tensor loss_of(const torch::Tensor& scores) {
  return at::cross_entropy_loss(
      scores, torch::arange(scores.size(0)).remainder(10));
}

template <class N>
parity::Record train(N& network, const torch::Tensor& input) {
  parity::Record record;
  torch::optim::SGD optimizer(
      network.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    network.zero_grad();
    const auto loss = loss_of(network.forward(input));
    loss.backward();
    record.step(network, loss.template item<double>());
    optimizer.step();
  }
  record.end(network);
  return record;
}

class PlacedParity : public testing::TestWithParam<const char*> {
 protected:
  static Case make() {
    const std::string name = GetParam();
    if (name == "skip") return skip_case();
    if (name == "tied") return tied_case();
    return model_case(GetParam());
  }
};

TEST_P(PlacedParity, EqualsOneDeviceToTheLastBit) {
  const auto c = make();
  const auto whole = build_network(c.layers, 0, c.layers.size(), kSeed);
  const auto expected = train(*whole, c.input);
  EXPECT_NE(expected.losses[0], expected.losses[1]) << c.name;
  for (size_t slices = 1; slices <= std::min<size_t>(4, c.layers.size());
       ++slices) {
    SCOPED_TRACE(std::string(c.name) + " on " + std::to_string(slices));
    PlacedNetwork placed(c.layers, placement_of(c, slices), kSeed);
    // Recording changes nothing.
    timeline::Recorder recorder(0, 0, 1);
    recorder.begin_step(0);
    if (slices % 2 == 0) placed.set_recorder(&recorder);
    parity::expect_parity(expected, train(placed, c.input), parity::kExact);
    EXPECT_EQ(
        recorder.take().size(), slices % 2 == 0 ? 2 * slices * kSteps : 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, PlacedParity,
    testing::Values("simple_cnn", "mlp", "resnet18", "skip", "tied"),
    [](const auto& info) { return std::string(info.param); });

TEST(PlacedNetwork, IsAModuleLikeAnyOther) {
  const auto c = model_case("resnet18");
  PlacedNetwork placed(c.layers, placement_of(c, 3), kSeed);
  const auto whole = build_network(c.layers, 0, c.layers.size(), kSeed);
  EXPECT_EQ(placed.named_parameters().keys(), whole->named_parameters().keys());
  EXPECT_EQ(placed.named_buffers().keys(), whole->named_buffers().keys());
  placed.eval();
  whole->eval();
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(placed.forward(c.input).equal(whole->forward(c.input)));
  placed.to(torch::kFloat32);
  EXPECT_EQ(
      placed.forward(c.input.to(torch::kFloat32)).scalar_type(),
      torch::kFloat32);
  EXPECT_THAT(
      error_text([&] { placed.to(torch::Device("cpu")); }),
      HasSubstr("cannot be moved to one device"));
}

TEST(PlacedNetwork, SeveralForwardsBeforeTheirBackwards) {
  const auto c = tied_case();
  PlacedNetwork placed(c.layers, placement_of(c, 3), kSeed);
  const auto whole = build_network(c.layers, 0, c.layers.size(), kSeed);
  const auto gradients = [&](auto& network) {
    const auto a = loss_of(network.forward(c.input));
    const auto b = loss_of(network.forward(c.input + 1));
    {
      const torch::NoGradGuard no_grad;
      network.forward(c.input);
    }
    (b * 2).backward();
    a.backward();
    return parity::gradients_of(network);
  };
  const auto expected = gradients(*whole);
  EXPECT_EQ(expected.size(), 5u);
  parity::expect_same(
      "gradient", expected, gradients(placed), parity::kRounding);
}

TEST(PlacedNetwork, ListsAModuleThatTwoSlicesShareOnce) {
  const auto shared = linear(6, 6);
  LayerList layers;
  layers.add("first", [=] { return shared; });
  layers.add_function("tanh", [](torch::Tensor x) { return x.tanh(); });
  layers.add("second", [=] { return shared; });
  const auto placement = plan_placement(
      layers, {.devices = {torch::kCPU, torch::kCPU},
               .inputs = {{{4, 6}, torch::kFloat64}},
               .partition_at = {"second"}});
  EXPECT_EQ(placement.devices[0].parameters, 42);
  EXPECT_EQ(placement.devices[1].parameters, 0);
  PlacedNetwork placed(layers, placement, kSeed);
  EXPECT_EQ(
      placed.named_parameters().keys(),
      (std::vector<std::string>{"first.weight", "first.bias"}));
  const auto x = parity::random({4, 6}, 1);
  const auto plain = [&] {
    auto fc = shared;
    return fc(fc(x).tanh());
  }();
  EXPECT_TRUE(placed.forward(x).equal(plain));
}

struct Pass {
  std::string track, name;
  int64_t begin, end;
};

std::vector<Pass> passes_of(timeline::Recorder& recorder) {
  std::vector<Pass> passes;
  for (const auto& span : recorder.take()) {
    EXPECT_EQ(span.name, span_kind_name(span.kind));
    passes.push_back({span.track, span.name, span.begin_ns, span.end_ns});
  }
  std::sort(passes.begin(), passes.end(), [](const auto& a, const auto& b) {
    return a.begin < b.begin;
  });
  return passes;
}

TEST(PlacedNetwork, RecordsWhichDeviceWorksWhen) {
  const auto c = skip_case();
  PlacedNetwork placed(c.layers, placement_of(c, 3), kSeed);
  timeline::Recorder recorder(0, 1, 1);
  placed.set_recorder(&recorder);
  recorder.begin_step(0);  // not recorded
  loss_of(placed.forward(c.input)).backward();
  recorder.begin_step(1);
  loss_of(placed.forward(c.input)).backward();
  const auto passes = passes_of(recorder);
  ASSERT_EQ(passes.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    const size_t device = i < 3 ? i : 5 - i;
    EXPECT_EQ(passes[i].track, "device " + std::to_string(device));
    EXPECT_EQ(passes[i].name, i < 3 ? "forward" : "backward");
    EXPECT_GT(passes[i].end, passes[i].begin);
    if (i > 0) {
      EXPECT_GE(passes[i].begin, passes[i - 1].end);
    }
  }
}

// Otherwise the step before it would have the most passes of all.
TEST(PlacedNetwork, AnEvaluationIsNoPartOfAStep) {
  const auto c = skip_case();
  PlacedNetwork placed(c.layers, placement_of(c, 2), kSeed);
  timeline::Recorder recorder(0, 0, 1);
  placed.set_recorder(&recorder);
  recorder.begin_step(0);
  loss_of(placed.forward(c.input)).backward();
  {
    const torch::NoGradGuard no_grad;
    placed.forward(c.input);
  }
  std::vector<timeline::SpanKind> kinds;
  for (const auto& span : recorder.take()) kinds.push_back(span.kind);
  EXPECT_THAT(
      kinds,
      testing::ElementsAre(
          timeline::SpanKind::forward, timeline::SpanKind::forward,
          timeline::SpanKind::backward, timeline::SpanKind::backward,
          timeline::SpanKind::evaluation, timeline::SpanKind::evaluation));
}

TEST(PlacedNetwork, AFrozenSliceHasNoBackward) {
  const auto c = model_case("mlp");
  PlacedNetwork placed(c.layers, placement_of(c, 2), kSeed);
  const auto& frozen = placed.placement().devices[0];
  const auto first_trained = c.layers[frozen.num_layers].name;
  for (auto& item : placed.named_parameters()) {
    if (item.key().starts_with(first_trained)) break;
    item.value().set_requires_grad(false);
  }
  timeline::Recorder recorder(0, 0, 1);
  placed.set_recorder(&recorder);
  recorder.begin_step(0);
  loss_of(placed.forward(c.input)).backward();
  const auto passes = passes_of(recorder);
  ASSERT_EQ(passes.size(), 3u);
  EXPECT_EQ(passes[2].name, "backward");
  EXPECT_EQ(passes[2].track, "device 1");
}

TEST(PlacedNetwork, FindsTheFirstNonFiniteLayer) {
  const auto c = model_case("resnet18");
  PlacedNetwork placed(c.layers, placement_of(c, 3), kSeed);
  EXPECT_FALSE(placed.first_nonfinite_layer({c.input}));
  const auto before = placed.named_buffers()["bn1.running_mean"].clone();
  {
    const torch::NoGradGuard no_grad;
    placed.named_parameters()["fc.bias"].fill_(NAN);
  }
  const auto found = placed.first_nonfinite_layer({c.input});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->layer, "fc");
  EXPECT_EQ(found->what, "parameter fc.bias");
  EXPECT_TRUE(placed.named_buffers()["bn1.running_mean"].equal(before));
}

TEST(PlacedNetwork, RefusesAnotherListsPlacement) {
  const auto c = tied_case();
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        PlacedNetwork(c.layers, placement_of(skip_case(), 2), kSeed);
      }),
      HasSubstr(
          "a placement of 6 layers on 2 devices is used for a list of 5"));
}

}  // namespace echelon::placement::placed_network_test
