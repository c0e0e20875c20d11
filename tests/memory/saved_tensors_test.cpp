#include "echelon/memory/saved_tensors.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <optional>
#include <thread>
#include <vector>

#include "tests/support/error_text.h"

namespace echelon::saved_tensors_test {

using torch::Tensor;

// Takes tensors of one size (0: all of them), and counts.
struct Taker : SavedTensorHooks {
  explicit Taker(int64_t size = 0) : size(size) {}

  std::function<Tensor()> pack(const Tensor& tensor) override {
    EXPECT_FALSE(tensor.requires_grad());
    EXPECT_FALSE(torch::GradMode::is_enabled());
    ++asked;
    if (size != 0 && tensor.numel() != size) return nullptr;
    ++taken;
    const auto alive = std::make_shared<Alive>(*this);
    return [this, alive, copy = tensor.clone()] {
      ++returned;
      return copy;
    };
  }

  struct Alive {
    explicit Alive(Taker& taker) : taker(taker) { ++taker.alive; }
    ~Alive() { --taker.alive; }
    Taker& taker;
  };
  int64_t size;
  int asked = 0;
  int taken = 0;
  int returned = 0;
  int alive = 0;
};

struct Net {
  Tensor weight = torch::randn({3, 4}, torch::kDouble).requires_grad_();
  Tensor x = torch::randn({2, 3}, torch::kDouble).requires_grad_();

  Tensor forward() const { return torch::tanh(x.mm(weight)).sum(); }
  Tensor forward(std::shared_ptr<SavedTensorHooks> hooks) const {
    const SavedTensorScope scope(std::move(hooks));
    return forward();
  }
  std::vector<Tensor> gradients_without_hooks() {
    forward().backward();
    return gradients();
  }
  std::vector<Tensor> gradients() {
    std::vector<Tensor> all = {x.grad().clone(), weight.grad().clone()};
    x.mutable_grad().reset();
    weight.mutable_grad().reset();
    return all;
  }
};

void expect_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
}

TEST(SavedTensors, HooksGiveBackWhatBackwardNeeds) {
  Net net;
  const auto expected = net.gradients_without_hooks();
  const auto taker = std::make_shared<Taker>();
  const auto loss = net.forward(taker);
  EXPECT_EQ(taker->taken, 3);  // both factors, and what tanh returned
  EXPECT_EQ(taker->returned, 0);
  EXPECT_EQ(taker->alive, 3);
  loss.backward();
  EXPECT_EQ(taker->returned, 3);
  EXPECT_EQ(taker->alive, 0) << "with the graph's nodes";
  expect_same(expected, net.gradients());
  net.forward();
  EXPECT_EQ(taker->asked, 3) << "the scope has ended";
}

TEST(SavedTensors, GraphsThatNeverRunBackwardsReleaseTheirTensors) {
  const Net net;
  const auto taker = std::make_shared<Taker>();
  net.forward(taker);
  EXPECT_EQ(taker->alive, 0);
}

TEST(SavedTensors, OuterHooksGetTensorsThatInnerOnesLeave) {
  Net net;
  const auto expected = net.gradients_without_hooks();
  const auto outer = std::make_shared<Taker>();
  const auto inner = std::make_shared<Taker>(12);  // the weight
  Tensor loss;
  {
    const SavedTensorScope scope(outer);
    loss = net.forward(inner);
  }
  EXPECT_EQ(inner->asked, 3);
  EXPECT_EQ(inner->taken, 1);
  EXPECT_EQ(outer->taken, 2);
  loss.backward();
  expect_same(expected, net.gradients());
}

// Takes its tensors before other hooks see them.
struct Owner : Taker {
  using Taker::Taker;
  bool owns(const Tensor& tensor) const override {
    return tensor.numel() == size;
  }
};

TEST(SavedTensors, OwnersAreAskedFirst) {
  Net net;
  const auto outer = std::make_shared<Owner>(12);  // the weight
  const auto inner = std::make_shared<Taker>();
  const SavedTensorScope scope(outer);
  net.forward(inner);
  EXPECT_EQ(outer->asked, 1);
  EXPECT_EQ(outer->taken, 1);
  EXPECT_EQ(inner->asked, 2);
}

TEST(SavedTensors, ASnapshotOfHooksCanBeRestored) {
  const auto taker = std::make_shared<Taker>();
  std::optional<SavedTensorState> state;
  {
    const SavedTensorScope scope(taker);
    state.emplace();
  }
  const Net net;
  const auto other = std::make_shared<Taker>();
  const SavedTensorScope scope(other);
  {
    const SavedTensorState::Scope again(*state);
    net.forward();
  }
  EXPECT_EQ(taker->asked, 3);
  EXPECT_EQ(other->asked, 0);
  net.forward();
  EXPECT_EQ(other->asked, 3) << "as it was";
}

TEST(SavedTensors, NullHooksHideOuterOnes) {
  Net net;
  const auto expected = net.gradients_without_hooks();
  const auto outer = std::make_shared<Taker>();
  Tensor loss;
  {
    const SavedTensorScope scope(outer);
    loss = net.forward(nullptr);
    EXPECT_EQ(outer->asked, 0);
    net.forward();
    EXPECT_EQ(outer->asked, 3) << "the inner scope has ended";
  }
  loss.backward();
  expect_same(expected, net.gradients());
}

TEST(SavedTensors, TensorsThatNoHookTakesAreKeptByAutograd) {
  Net net;
  const auto expected = net.gradients_without_hooks();
  const auto loss = net.forward(std::make_shared<Taker>(1000));
  // A leaf is kept itself, with the data that it has when backward runs, as
  // autograd does.
  net.weight.set_data(net.weight.detach() * 2);
  loss.backward();
  EXPECT_TRUE(net.x.grad().equal(expected[0] * 2));
  EXPECT_TRUE(net.weight.grad().equal(expected[1]));
}

TEST(SavedTensors, ChangesInPlaceAreFound) {
  for (const bool taken : {false, true}) {
    const Net net;
    const auto taker = std::make_shared<Taker>(taken ? 0 : 1000);
    const auto loss = net.forward(taker);
    {
      const torch::NoGradGuard no_grad;
      net.weight.add_(1);
    }
    EXPECT_THAT(
        error_text([&] { loss.backward(); }),
        testing::HasSubstr("changed in place"))
        << "taken " << taken;
  }
}

struct Square : torch::autograd::Function<Square> {
  static Tensor
  forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    return {2 * gradients[0] * context->get_saved_variables()[0]};
  }
};

TEST(SavedTensors, FunctionsInCppSaveThroughHooks) {
  const auto x = torch::randn({5}, torch::kDouble).requires_grad_();
  const auto taker = std::make_shared<Taker>();
  Tensor y;
  {
    const SavedTensorScope scope(taker);
    y = Square::apply(x);
  }
  EXPECT_EQ(taker->taken, 1);
  y.sum().backward();
  EXPECT_EQ(taker->returned, 1);
  EXPECT_EQ(taker->alive, 0);
  EXPECT_TRUE(x.grad().equal(2 * x.detach()));
}

TEST(SavedTensors, RetainedGraphsAskAgain) {
  Net net;
  const auto taker = std::make_shared<Taker>();
  const auto loss = net.forward(taker);
  loss.backward({}, /*retain_graph=*/true);
  const auto once = net.gradients();
  EXPECT_EQ(taker->alive, 3);
  loss.backward();
  expect_same(once, net.gradients());
  EXPECT_EQ(taker->returned, 6);
  EXPECT_EQ(taker->alive, 0);
}

TEST(SavedTensors, SecondDerivatives) {
  Net net;
  const auto second = [&] {
    const auto loss = net.forward();
    const auto first =
        torch::autograd::grad({loss}, {net.x}, {}, true, true)[0];
    return torch::autograd::grad({first.square().sum()}, {net.weight})[0];
  };
  const auto expected = second();
  const auto taker = std::make_shared<Taker>();
  const SavedTensorScope scope(taker);
  EXPECT_TRUE(second().equal(expected));
  EXPECT_GT(taker->taken, 3) << "backward saved, too";
}

TEST(SavedTensors, ScopesBelongToTheirThread) {
  const auto here = std::make_shared<Taker>();
  const auto there = std::make_shared<Taker>();
  const SavedTensorScope scope(here);
  const Net net;
  Tensor loss;
  std::thread([&] {
    net.forward();
    EXPECT_EQ(here->asked, 0);
    loss = net.forward(there);
  }).join();
  EXPECT_EQ(here->asked, 0);
  EXPECT_EQ(there->taken, 3);
  loss.backward();  // saved there, asked for here
  EXPECT_EQ(there->returned, 3);
}

TEST(SavedTensors, SaveTensorSavesAsAnOperatorDoes) {
  const auto x = torch::randn({5}, torch::kDouble).requires_grad_();
  const auto y = x * 2;
  const auto taker = std::make_shared<Taker>();
  {
    std::function<Tensor()> plain = save_tensor(y);
    std::function<Tensor()> taken;
    {
      const SavedTensorScope scope(taker);
      taken = save_tensor(y);
    }
    EXPECT_EQ(taker->taken, 1);
    EXPECT_TRUE(taken().equal(y));
    EXPECT_TRUE(plain().equal(y));
    EXPECT_FALSE(plain().requires_grad());
    EXPECT_EQ(taker->returned, 1);
    const torch::NoGradGuard no_grad;
    y.add_(1);
    EXPECT_ANY_THROW(taken());
    EXPECT_ANY_THROW(plain());
  }
  EXPECT_EQ(taker->alive, 0);
}

}  // namespace echelon::saved_tensors_test
