// Backwards in two halves against the whole, on one rank.
#include "echelon/parallel/pipeline/stage_graph.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "tests/parallel/pipeline/nets.h"
#include "tests/support/parity.h"

namespace echelon::pipeline::stage_graph_test {

using torch::Tensor;

Tensor weight(at::IntArrayRef shape, uint64_t seed) {
  return (parity::random(shape, seed) * 0.4).requires_grad_();
}

/// Inputs and weights, and what a stage computes of them.
struct Work {
  Tensors inputs;
  std::vector<bool> tracked;
  Tensors weights;
  std::function<Tensors(const Tensors&)> forward;
};

struct Gradients {
  Tensors inputs;
  Tensors weights;
};

enum class Way { whole, halves };

Gradients run(const Work& work, Way way, const Tensors& gradients) {
  StageGraph graph;
  TupleShape shape = shape_of(work.inputs, "test");
  for (size_t i = 0; i < shape.size(); ++i) {
    shape[i].requires_grad = work.tracked[i];
  }
  graph.set_outputs(work.forward(graph.track(work.inputs, shape)));
  Gradients result;
  if (way == Way::whole) {
    result.inputs = graph.backward(gradients);
  } else {
    result.inputs = graph.backward_input(gradients);
    for (const auto& w : work.weights) EXPECT_FALSE(w.grad().defined());
    graph.backward_weight();
  }
  for (const auto& w : work.weights) {
    result.weights.push_back(w.grad());
    Tensor clear = w;
    clear.mutable_grad().reset();
  }
  return result;
}

void expect_equal(const Tensors& a, const Tensors& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << what << " " << i;
    if (!a[i].defined()) continue;
    EXPECT_TRUE(torch::equal(a[i], b[i])) << what << " " << i;
  }
}

/// Both ways have the same bits, and those are autograd's without a StageGraph.
void expect_same(const Work& work, const Tensors& gradients) {
  const auto whole = run(work, Way::whole, gradients);
  const auto halves = run(work, Way::halves, gradients);
  expect_equal(whole.inputs, halves.inputs, "input");
  expect_equal(whole.weights, halves.weights, "weight");
  Tensors leaves;
  Tensors inputs;
  for (size_t i = 0; i < work.inputs.size(); ++i) {
    Tensor input = work.inputs[i].detach();
    if (work.tracked[i]) leaves.push_back(input.requires_grad_());
    inputs.push_back(input);
  }
  Tensors roots;
  Tensors values;
  size_t next = 0;
  for (const auto& output : work.forward(inputs)) {
    if (!output.requires_grad()) continue;
    const Tensor& value = gradients[next++];
    if (!value.defined()) continue;
    roots.push_back(output);
    values.push_back(value);
  }
  torch::autograd::backward(roots, values);
  Tensors plain;
  for (const auto& leaf : leaves) plain.push_back(leaf.grad());
  expect_equal(plain, whole.inputs, "plain input");
  Tensors weights;
  for (const auto& w : work.weights) {
    weights.push_back(w.grad());
    Tensor clear = w;
    clear.mutable_grad().reset();
  }
  expect_equal(weights, whole.weights, "plain weight");
}

Tensor input() {
  return parity::random({5, 4}, 1);
}
Tensor gradient() {
  return parity::random({5, 4}, 2);
}

// The same for one tracked input and one output.
void expect_same_of_one(
    const Tensors& weights, const std::function<Tensor(const Tensor&)>& layer) {
  const auto forward = [=](const Tensors& in) -> Tensors {
    return {layer(in[0])};
  };
  expect_same({{input()}, {true}, weights, forward}, {gradient()});
}

TEST(StageGraph, LayersInARow) {
  const Tensor w1 = weight({4, 4}, 3), w2 = weight({4, 4}, 4),
               b = weight({4}, 5);
  expect_same_of_one({w1, w2, b}, [=](const Tensor& in) {
    return torch::tanh(torch::addmm(b, in, w1)).mm(w2);
  });
}

TEST(StageGraph, OneWeightUsedManyTimes) {
  const Tensor w = weight({4, 4}, 3);
  expect_same_of_one({w}, [=](const Tensor& in) {
    Tensor x = in;
    for (int i = 0; i < 4; ++i) x = torch::tanh(x.mm(w)) + x;
    return x;
  });
}

TEST(StageGraph, WeightsThatAreComputed) {
  const Tensor v = weight({4, 4}, 3), g = weight({4, 1}, 4);
  expect_same_of_one({v, g}, [=](const Tensor& in) {
    const Tensor w = g * v / v.norm(2, {1}, true);  // used twice
    return torch::tanh(in.mm(w)).mm(w);
  });
}

TEST(StageGraph, OutputsThatPassOrNeedNoInput) {
  const Tensor w = weight({4, 4}, 3), b = weight({5, 4}, 4);
  expect_same(
      {{input(), input() * 2},
       {true, true},
       {w, b},
       [=](const Tensors& in) -> Tensors {
         return {in[1], in[0].mm(w) + b.exp(), b * 3, in[0].detach()};
       }},
      {gradient(), gradient() * 2, gradient() * 3});
}

TEST(StageGraph, GradientsThatAreMissing) {
  const Tensor w = weight({4, 4}, 3), u = weight({4, 4}, 4);
  expect_same(
      {{input(), input() * 2},
       {true, true},
       {w, u},
       [=](const Tensors& in) -> Tensors {
         return {in[0].mm(w), in[1].mm(u)};
       }},
      {gradient(), Tensor()});
}

TEST(StageGraph, InputsWithoutGradient) {
  const Tensor w = weight({4, 4}, 3);
  expect_same(
      {{input(), input() > 0},
       {false, false},
       {w},
       [=](const Tensors& in) -> Tensors { return {in[0].mm(w) * in[1]}; }},
      {gradient()});
}

TEST(StageGraph, ChangesInPlace) {
  const Tensor w = weight({4, 4}, 3);
  const auto change = [=](const Tensors& in) -> Tensors {
    Tensor x = in[0] * 1.0;
    x.relu_();
    return {x.mm(w).add_(1.0)};
  };
  expect_same({{input()}, {true}, {w}, change}, {gradient()});
  StageGraph graph;
  TupleShape shape = shape_of({input()}, "test");
  shape[0].requires_grad = true;
  Tensor tracked = graph.track({input()}, shape)[0];
  tracked.relu_();  // a leaf would refuse
  graph.set_outputs({tracked.mm(w)});
  EXPECT_TRUE(graph.backward({gradient()})[0].defined());
}

// Computes both gradients at once, whatever is asked for.
struct Whole : torch::autograd::Function<Whole> {
  static Tensor
  forward(torch::autograd::AutogradContext* context, Tensor x, Tensor w) {
    context->save_for_backward({x, w});
    return x.mm(w);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1].t()), saved[0].t().mm(gradients[0])};
  }
};

TEST(StageGraph, FunctionsOfTheUser) {
  const Tensor w = weight({4, 4}, 3), u = weight({4, 4}, 4);
  expect_same_of_one({w, u}, [=](const Tensor& in) {
    return Whole::apply(torch::tanh(Whole::apply(in, w)), u);
  });
}

TEST(StageGraph, HooksSeeEachGradientOnce) {
  const Tensor w = weight({4, 4}, 3);
  int on_activation = 0;
  int on_weight = 0;
  w.register_hook([&](const Tensor& g) {
    ++on_weight;
    return g;
  });
  expect_same_of_one({w}, [&](const Tensor& in) {
    Tensor y = in.mm(w);
    y.register_hook([&](const Tensor& g) {
      ++on_activation;
      return g * 2;
    });
    return torch::tanh(y);
  });
  EXPECT_EQ(on_activation, 3);  // whole, halves, plain
  EXPECT_EQ(on_weight, 3);
}

TEST(StageGraph, DeepGraphs) {
  const Tensor w = weight({4}, 3);
  expect_same_of_one({w}, [=](const Tensor& in) {
    Tensor x = in * w;
    for (int i = 0; i < 30000; ++i) x = x + 0.001;
    return x;
  });
}

TEST(StageGraph, WholeModels) {
  for (const char* name : {"mlp", "conv"}) {
    const LayerList list = nets::named(name);
    std::vector<BuiltLayer> layers;
    Tensors weights;
    for (size_t i = 0; i < list.size(); ++i) {
      layers.push_back(list[i].build());
      if (!layers.back().module) continue;
      for (auto& p : layers.back().module->parameters()) weights.push_back(p);
    }
    expect_same(
        {{parity::random({5, 6}, 1)},
         {true},
         weights,
         [=](const Tensors& in) {
           // An input that the first layer may change.
           Tensors tensors = {in[0] * 1.0};
           for (const auto& layer : layers) tensors = layer.forward(tensors);
           return tensors;
         }},
        {gradient()});
  }
}

// A tensor of 5 x 4 that tells when it is freed.
Tensor counted(int& alive) {
  auto* values = new double[20];
  std::fill(values, values + 20, 0.5);
  ++alive;
  return torch::from_blob(
      values, {5, 4},
      [&alive, values](void*) {
        delete[] values;
        --alive;
      },
      torch::kFloat64);
}

TEST(StageGraph, FreesWhatEachHalfNeeded) {
  const Tensor w = weight({5, 4}, 3);
  int for_inputs = 0;
  int for_weights = 0;
  const auto forward = [&](StageGraph& graph) {
    TupleShape shape = shape_of({input()}, "test");
    shape[0].requires_grad = true;
    const Tensor x = graph.track({input()}, shape)[0];
    graph.set_outputs({x * counted(for_inputs) + w * counted(for_weights)});
  };
  StageGraph graph;
  forward(graph);
  EXPECT_EQ(for_inputs, 1);
  EXPECT_EQ(for_weights, 1);
  graph.backward_input({gradient()});
  EXPECT_EQ(for_inputs, 0);
  EXPECT_EQ(for_weights, 1);
  graph.backward_weight();
  EXPECT_EQ(for_weights, 0);
  forward(graph);
  graph.backward({gradient()});
  EXPECT_EQ(for_inputs, 0);
  EXPECT_EQ(for_weights, 0);
}

}  // namespace echelon::pipeline::stage_graph_test
