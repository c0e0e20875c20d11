// The edges of the graph are cut at InputNodes, which take the places of the
// stage's inputs. backward_input() sorts the nodes: those on a path to an input
// run now. A node of these that also leads to weights captures its gradients in
// a pre-hook; any other releases its saved tensors in a post-hook.
// backward_weight() starts at the captured gradients and at the roots that lead
// to weights alone, after the edges to inputs are removed.
#include "echelon/parallel/pipeline/stage_graph.h"

#include <torch/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <unordered_map>

#include "echelon/layers/graph_node.h"

namespace echelon::pipeline {
namespace {

namespace autograd = torch::autograd;
using autograd::Edge;
using autograd::Node;
using autograd::variable_list;
using NodePtr = NodePointer<Node>;

// The end of a stage's graph. Unlike a leaf it holds no tensor, so an input
// that no operator saved is freed, and the input may be changed in place.
struct InputNode : Node {
  variable_list apply(variable_list&& gradients) override {
    gradient = std::move(gradients[0]);
    return {};
  }
  std::string name() const override { return "PipelineInput"; }

  torch::Tensor gradient;
};

// A node on a path to the inputs that also leads to weights.
struct WeightNode {
  NodePtr node;
  std::shared_ptr<variable_list> gradients;  // that reached the node
};

struct Capture : autograd::FunctionPreHook {
  explicit Capture(std::shared_ptr<variable_list> to) : to(std::move(to)) {}
  variable_list operator()(const variable_list& gradients) override {
    *to = gradients;
    return gradients;
  }
  std::shared_ptr<variable_list> to;
};

struct Release : autograd::FunctionPostHook {
  explicit Release(Node* node) : node(node) {}
  variable_list
  operator()(const variable_list& results, const variable_list&) override {
    node->release_variables();
    return results;
  }
  Node* node;
};

variable_list execute(
    const autograd::edge_list& roots, const variable_list& gradients,
    bool keep_graph, bool accumulate, const autograd::edge_list& inputs) {
  if (roots.empty()) return variable_list(inputs.size());
  return autograd::Engine::get_default_engine().execute(
      roots, gradients, keep_graph, /*create_graph=*/false, accumulate, inputs);
}

using Paths = std::unordered_map<Node*, bool>;

// Finds the nodes that lead to an input. It does not recurse, since graphs are
// deep.
Paths find_paths(
    const autograd::edge_list& roots,
    const std::vector<NodePointer<InputNode>>& inputs) {
  Paths on_path;
  for (const auto& input : inputs) {
    if (input) on_path[input.get()] = true;
  }
  std::vector<std::pair<Node*, size_t>> stack;  // nodes with their next edges
  const auto enter = [&](Node* node) {
    if (node != nullptr && on_path.emplace(node, false).second) {
      stack.emplace_back(node, 0);
    }
  };
  for (const auto& root : roots) {
    enter(root.function.get());
    while (!stack.empty()) {
      auto& [node, next] = stack.back();
      const auto& edges = node->next_edges();
      if (next < edges.size()) {
        enter(edges[next++].function.get());
        continue;
      }
      bool reaches = false;
      for (const auto& edge : edges) {
        reaches |= edge.is_valid() && on_path[edge.function.get()];
      }
      on_path[node] = reaches;
      stack.pop_back();
    }
  }
  return on_path;
}

}  // namespace

struct StageGraph::Impl {
  std::vector<NodePointer<InputNode>> inputs;  // of the tracked ones
  autograd::edge_list roots;                   // of outputs with gradient
  variable_list root_gradients;                // kept for the second half
  std::vector<WeightNode> weights;

  // Selects the roots that a gradient reached.
  void arrived(
      const Tensors& gradients, autograd::edge_list& edges,
      variable_list& values) const {
    for (size_t i = 0; i < roots.size(); ++i) {
      if (!gradients[i].defined()) continue;
      edges.push_back(roots[i]);
      values.push_back(gradients[i]);
    }
  }

  void watch(const Paths& on_path) {
    for (const auto& [node, reaches] : on_path) {
      if (!reaches || dynamic_cast<InputNode*>(node) != nullptr) continue;
      bool leads_to_weights = false;
      for (const auto& edge : node->next_edges()) {
        leads_to_weights |= edge.is_valid() && !on_path.at(edge.function.get());
      }
      if (leads_to_weights) {
        auto gradients = std::make_shared<variable_list>();
        node->add_pre_hook(std::make_unique<Capture>(gradients));
        weights.push_back({node->getptr(), std::move(gradients)});
      } else {
        node->add_post_hook(std::make_unique<Release>(node));
      }
    }
  }

  // Removes the edges to inputs, so that only those to weights remain.
  void drop_input_edges(const Paths& on_path) {
    for (auto& weight : weights) {
      // The hooks have run for these gradients already.
      weight.node->pre_hooks().clear();
      weight.node->tensor_pre_hooks().clear();
      for (auto& edge : weight.node->next_edges()) {
        if (edge.is_valid() && on_path.at(edge.function.get())) edge = Edge();
      }
    }
  }
};

StageGraph::StageGraph() : impl_(std::make_unique<Impl>()) {}
StageGraph::~StageGraph() = default;
StageGraph::StageGraph(StageGraph&&) noexcept = default;
StageGraph& StageGraph::operator=(StageGraph&&) noexcept = default;

Tensors StageGraph::track(const Tensors& inputs, const TupleShape& shape) {
  Tensors tracked;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!shape[i].requires_grad) {
      tracked.push_back(inputs[i]);
      continue;
    }
    auto node = make_node<InputNode>();
    torch::Tensor input = inputs[i].detach();
    autograd::set_history(input, node);
    impl_->inputs.push_back(std::move(node));
    tracked.push_back(std::move(input));
  }
  return tracked;
}

void StageGraph::set_outputs(const Tensors& outputs) {
  for (const auto& output : outputs) {
    if (!output.requires_grad()) continue;
    impl_->roots.push_back(autograd::impl::gradient_edge(output));
  }
}

Tensors StageGraph::backward(const Tensors& gradients) {
  autograd::edge_list edges;
  variable_list values;
  impl_->arrived(gradients, edges, values);
  execute(edges, values, false, true, {});
  Tensors results;
  for (const auto& input : impl_->inputs) results.push_back(input->gradient);
  *impl_ = Impl();
  return results;
}

// Splits the roots into those that lead to inputs, which run now without
// accumulating, and the rest, which are kept for the second half.
Tensors StageGraph::backward_input(const Tensors& gradients) {
  autograd::edge_list edges;
  variable_list values;
  impl_->arrived(gradients, edges, values);
  impl_->roots.clear();
  const Paths on_path = find_paths(edges, impl_->inputs);
  autograd::edge_list to_inputs;
  variable_list their_values;
  for (size_t i = 0; i < edges.size(); ++i) {
    const bool now = on_path.at(edges[i].function.get());
    (now ? to_inputs : impl_->roots).push_back(edges[i]);
    (now ? their_values : impl_->root_gradients).push_back(values[i]);
  }
  impl_->watch(on_path);
  autograd::edge_list inputs;
  for (const auto& input : impl_->inputs) inputs.emplace_back(input, 0);
  Tensors results = execute(to_inputs, their_values, true, false, inputs);
  impl_->drop_input_edges(on_path);
  impl_->inputs.clear();
  return results;
}

void StageGraph::backward_weight() {
  autograd::edge_list edges = std::move(impl_->roots);
  variable_list values = std::move(impl_->root_gradients);
  for (auto& weight : impl_->weights) {
    for (size_t i = 0; i < weight.gradients->size(); ++i) {
      if (!(*weight.gradients)[i].defined()) continue;
      edges.emplace_back(weight.node, static_cast<uint32_t>(i));
      values.push_back(std::move((*weight.gradients)[i]));
    }
  }
  *impl_ = Impl();
  execute(edges, values, false, true, {});
}

}  // namespace echelon::pipeline
