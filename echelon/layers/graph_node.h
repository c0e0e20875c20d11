// How a node of autograd's graph is made and owned, which depends on the
// version of LibTorch.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <utility>

namespace echelon {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
template <class Node>
using NodePointer = std::shared_ptr<Node>;

/// Its deleter frees a deep graph without recursion.
template <class Node, class... Arguments>
NodePointer<Node> make_node(Arguments&&... arguments) {
  return NodePointer<Node>(
      new Node(std::forward<Arguments>(arguments)...),
      torch::autograd::deleteNode);
}
#else
template <class Node>
using NodePointer = c10::intrusive_ptr<Node>;

template <class Node, class... Arguments>
NodePointer<Node> make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}
#endif

}  // namespace echelon
