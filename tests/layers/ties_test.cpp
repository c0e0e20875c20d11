#include "echelon/layers/ties.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "echelon/counting/meta_mode.h"
#include "echelon/layers/network.h"
#include "tests/support/error_text.h"

namespace echelon::ties_test {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::Tensor;

constexpr auto kDouble = torch::kFloat64;

// A minimal language model: embedding, two blocks, head.
LayerList language_model() {
  LayerList list;
  list.add("embed", [] {
    torch::nn::Embedding embed(5, 3);
    embed->to(kDouble);
    return embed;
  });
  for (const char* name : {"block.0", "block.1"}) {
    list.add(
        name,
        [] {
          torch::nn::Linear fc(3, 3);
          fc->to(kDouble);
          return fc;
        },
        [](auto& fc, const Tensor& x) { return torch::tanh(fc.forward(x)); });
  }
  list.add("head", [] {
    torch::nn::Linear head(torch::nn::LinearOptions(3, 5).bias(false));
    head->to(kDouble);
    return head;
  });
  return list;
}

LayerList tied_model() {
  auto list = language_model();
  list.tie("embed.weight", "head.weight");
  return list;
}

Tensor tokens() {
  return torch::tensor({0, 3, 4, 3}, torch::kInt64);
}

Tensor loss_of(const Tensor& scores) {
  return torch::nn::functional::cross_entropy(
      scores, torch::tensor({1, 2, 3, 4}, torch::kInt64));
}

// The same model written out: one weight, used twice.
Tensor by_hand(const Network& network, const Tensor& weight) {
  const auto parameters = network.named_parameters();
  auto x = torch::embedding(weight, tokens());
  for (const char* name : {"block.0", "block.1"}) {
    x = torch::tanh(torch::linear(
        x, parameters[name + std::string(".weight")].detach(),
        parameters[name + std::string(".bias")].detach()));
  }
  return torch::linear(x, weight);
}

TEST(Ties, GroupsAreTransitiveAndInTheOrderOfLayers) {
  LayerList list;
  for (const char* name : {"a", "b", "c", "d", "e"}) {
    list.add(name, [] { return torch::nn::Linear(2, 2); });
  }
  EXPECT_THAT(tied_groups(list), IsEmpty());
  list.tie("d.weight", "e.weight").tie("b.bias", "c.bias");
  list.tie("d.weight", "c.weight").tie("a.weight", "c.weight");
  const TiedGroup weights{
      {"a.weight", "c.weight", "d.weight", "e.weight"}, {0, 2, 3, 4}};
  const TiedGroup biases{{"b.bias", "c.bias"}, {1, 2}};
  EXPECT_THAT(tied_groups(list), ElementsAre(weights, biases));

  // One name for each slice, and only groups in several slices.
  EXPECT_THAT(
      tied_groups(list, {0, 1, 3, 5}),
      ElementsAre(TiedGroup{{"a.weight", "c.weight", "d.weight"}, {0, 2, 3}}));
  EXPECT_THAT(
      ties_across(list, {0, 1, 3, 5}),
      ElementsAre(Tie{"a.weight", "c.weight"}, Tie{"a.weight", "d.weight"}));
  EXPECT_THAT(
      tied_groups(list, {0, 2, 5}),
      ElementsAre(
          TiedGroup{{"a.weight", "c.weight"}, {0, 2}},
          TiedGroup{{"b.bias", "c.bias"}, {1, 2}}));
  EXPECT_THAT(tied_groups(list, {0, 5}), IsEmpty());
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        tied_groups(list, {0, 4});
      }),
      HasSubstr("a partition of 5 layers"));
}

TEST(Ties, InOneSliceTiedParametersAreOneTensor) {
  const auto network = build_network(tied_model(), 0, 4, 1);
  EXPECT_THAT(
      network->named_parameters().keys(),
      ElementsAre(
          "embed.weight", "block.0.weight", "block.0.bias", "block.1.weight",
          "block.1.bias"));
  auto weight = network->named_parameters()["embed.weight"];
  const auto scores = network->forward(tokens());
  EXPECT_TRUE(scores.equal(by_hand(*network, weight)));
  loss_of(scores).backward();

  auto one = weight.detach().clone().requires_grad_();
  loss_of(by_hand(*network, one)).backward();
  EXPECT_TRUE(torch::allclose(weight.grad(), one.grad(), 1e-12, 1e-14));

  // An update reaches both uses.
  torch::optim::SGD optimizer(network->parameters(), 0.5);
  optimizer.step();
  EXPECT_FALSE(scores.equal(network->forward(tokens())));
  EXPECT_TRUE(network->forward(tokens()).equal(by_hand(*network, weight)));
}

TEST(Ties, StayOneTensorWhenTheParameterMoves) {
  const auto network = build_network(tied_model(), 0, 4, 1);
  network->to(torch::kFloat32);
  auto weight = network->named_parameters()["embed.weight"];
  auto scores = network->forward(tokens());
  EXPECT_EQ(scores.scalar_type(), torch::kFloat32);
  loss_of(scores).backward();
  EXPECT_EQ(weight.grad().scalar_type(), torch::kFloat32);

  weight.mutable_grad().reset();
  weight.set_requires_grad(false);  // frozen: no use of it has a gradient
  loss_of(network->forward(tokens())).backward();
  EXPECT_FALSE(weight.grad().defined());
  const auto head = std::dynamic_pointer_cast<torch::nn::LinearImpl>(
      network->layers()[3].module);
  EXPECT_FALSE(head->weight.grad().defined());

  weight.set_requires_grad(true);
  weight.set_data(torch::ones({5, 3}));
  scores = network->forward(tokens());
  EXPECT_TRUE(scores.equal(by_hand(*network, weight)));
  loss_of(scores).backward();
  EXPECT_TRUE(weight.grad().defined());
}

TEST(Ties, ACloneHasTiesOfItsOwn) {
  const auto network = build_network(tied_model(), 0, 4, 1);
  const auto copy = std::dynamic_pointer_cast<Network>(network->clone());
  const auto before = network->forward(tokens());
  EXPECT_TRUE(copy->forward(tokens()).equal(before));
  {
    const torch::NoGradGuard no_grad;
    copy->named_parameters()["embed.weight"].mul_(2);
  }
  EXPECT_TRUE(network->forward(tokens()).equal(before));
  EXPECT_TRUE(copy->forward(tokens()).equal(
      by_hand(*copy, copy->named_parameters()["embed.weight"])));
}

// Each stage has a tensor of its own, which starts equal to the first one's.
TEST(Ties, InTwoSlicesTiedParametersStartEqual) {
  const auto list = tied_model();
  const auto whole = build_network(list, 0, 4, 9);
  const auto weight = whole->named_parameters()["embed.weight"];
  for (size_t begin = 1; begin < 4; ++begin) {
    const auto last = build_network(list, begin, 4, 9);
    EXPECT_TRUE(last->named_parameters()["head.weight"].equal(weight));
  }
  const auto alone = build_network(language_model(), 3, 4, 9);
  EXPECT_FALSE(alone->named_parameters()["head.weight"].equal(weight));
}

TEST(Ties, RefusesParametersThatCannotBeTied) {
  LayerList list;
  list.add("a", [] { return torch::nn::Linear(3, 2); });
  list.add_function("b", [](const Tensor& x) { return x; });
  list.add("c", [] { return torch::nn::Linear(2, 3); });
  auto shapes = list;
  shapes.tie("a.weight", "c.weight");
  const std::string message =
      "\"a.weight\" of shape [2, 3] is tied to \"c.weight\" of shape [3, 2]";
  for (size_t begin : {0, 2}) {
    EXPECT_THAT(
        error_text<ConfigError>([&] { build_network(shapes, begin, 3, 0); }),
        HasSubstr(message));
  }
  EXPECT_THAT(
      error_text<ConfigError>([&] { find_ties(shapes); }), HasSubstr(message));
  auto names = list;
  names.tie("a.weigth", "c.weight");
  for (const auto& call :
       {std::function<void()>([&] { build_network(names, 0, 3); }),
        std::function<void()>([&] { find_ties(names); })}) {
    EXPECT_THAT(
        error_text<ConfigError>(call),
        HasAll(
            "\"a.weigth\", which is no parameter of its layer",
            "did you mean \"a.weight\"?"));
  }
  auto functions = list;
  functions.tie("a.weight", "b.weight");
  EXPECT_THAT(
      error_text<ConfigError>([&] { build_network(functions, 0, 3); }),
      HasSubstr("\"b.weight\", which is no parameter"));
}

struct Head : torch::nn::Module {
  explicit Head(torch::nn::Embedding embed)
      : embed(register_module("inner", std::move(embed))) {}
  Tensor forward(const Tensor& x) { return torch::linear(x, embed->weight); }
  torch::nn::Embedding embed;
};
struct Borrowed : torch::nn::Module {
  explicit Borrowed(const Tensor& w) : weight(register_parameter("w", w)) {}
  Tensor forward(const Tensor& x) { return torch::linear(x, weight); }
  Tensor weight;
};

// Tensors that layers share because their functions captured them.
enum class Captured { module, inner_module, tensor, view };

LayerList capturing(Captured what) {
  auto list = LayerList();
  torch::nn::Embedding embed(5, 3);
  embed->to(kDouble);
  list.add("embed", [embed] { return embed; });
  const auto blocks = language_model();
  list.add_definition(blocks[1]).add_definition(blocks[2]);
  if (what == Captured::module) {
    list.add(
        "head", [embed] { return embed; },
        [](auto& embed, const Tensor& x) {
          return torch::linear(x, embed.weight);
        });
  } else if (what == Captured::inner_module) {
    list.add("head", [embed] { return std::make_shared<Head>(embed); });
  } else {
    const Tensor weight = what == Captured::tensor
                              ? embed->weight
                              : embed->weight.detach().requires_grad_();
    list.add("head", [weight] { return std::make_shared<Borrowed>(weight); });
  }
  return list;
}

TEST(Ties, AreFoundWhereLayersCapturedOneTensor) {
  const std::map<Captured, std::string> names = {
      {Captured::module, "head.weight"},
      {Captured::inner_module, "head.inner.weight"},
      {Captured::tensor, "head.w"},
      {Captured::view, "head.w"}};
  for (const auto& [what, name] : names) {
    auto list = capturing(what);
    EXPECT_THAT(find_ties(list), ElementsAre(Tie{"embed.weight", name}));
    EXPECT_THAT(
        find_ties(list, counting::build_on_meta),
        ElementsAre(Tie{"embed.weight", name}));
    list.tie("embed.weight", name);
    EXPECT_THAT(find_ties(list), IsEmpty());

    const auto network = build_network(list, 0, 4, 1);
    EXPECT_EQ(network->parameters().size(), 5u);
    const auto weight = network->named_parameters()["embed.weight"];
    const auto scores = network->forward(tokens());
    loss_of(scores).backward();
    auto one = weight.detach().clone().requires_grad_();
    const auto expected = by_hand(*network, one);
    EXPECT_TRUE(scores.equal(expected));
    loss_of(expected).backward();
    EXPECT_TRUE(torch::allclose(weight.grad(), one.grad(), 1e-12, 1e-14));

    // In another slice it has another name.
    const auto last = build_network(list, 3, 4);
    EXPECT_THAT(last->named_parameters().keys(), ElementsAre(name));
  }
}

TEST(Ties, FreshLayersShareNothing) {
  EXPECT_THAT(find_ties(language_model()), IsEmpty());
  EXPECT_THAT(find_ties(language_model(), counting::build_on_meta), IsEmpty());
  LayerList large;  // whose memory is reused from layer to layer
  for (const char* name : {"a", "b", "c", "d"}) {
    large.add(name, [] { return torch::nn::Linear(500, 500); });
  }
  EXPECT_THAT(find_ties(large), IsEmpty());
}

TEST(Ties, PartlySharedMemoryIsRefused) {
  const auto memory = torch::rand({4, 4});
  const auto with = [&](const Tensor& a, const Tensor& b) {
    LayerList list;
    list.add("a", [a] { return std::make_shared<Borrowed>(a); });
    list.add("b", [b] { return std::make_shared<Borrowed>(b); });
    return list;
  };
  EXPECT_THAT(
      find_ties(with(memory.narrow(0, 0, 2), memory.narrow(0, 2, 2))),
      IsEmpty());
  EXPECT_THAT(
      error_text<ConfigError>([&] {
        find_ties(with(memory.narrow(0, 0, 3), memory.narrow(0, 2, 2)));
      }),
      HasSubstr("\"a.w\" of shape [3, 4] shares a part of its memory with "
                "\"b.w\" of shape [2, 4]"));
}

}  // namespace echelon::ties_test
