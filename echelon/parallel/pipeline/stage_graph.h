// The autograd graph of one microbatch through one stage. Its backward runs at
// once or in two halves: gradients of the inputs first, those of the weights
// later.
//
// The halves work for any module, without recomputation. The first half runs
// the nodes on the paths from the outputs to the inputs. Nodes among them that
// also lead to weights keep the gradient that reached them; the second half
// runs these again, for their weights alone. Gradients accumulate in the second
// half, so hooks on parameters fire there.
//
// Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023,
// arXiv:2401.10241, section 2.
#pragma once

#include <torch/types.h>

#include <memory>
#include <vector>

#include "echelon/layers/layer_list.h"
#include "echelon/parallel/pipeline/tuple_shape.h"

namespace echelon::pipeline {

class StageGraph {
 public:
  StageGraph();
  ~StageGraph();
  StageGraph(StageGraph&&) noexcept;
  StageGraph& operator=(StageGraph&&) noexcept;

  /// Returns the inputs for the stage's forward; those that require a gradient
  /// by `shape` are tracked. They may be changed in place, as on one device.
  Tensors track(const Tensors& inputs, const TupleShape& shape);
  /// Sets where the backward begins. Keeps no tensor of `outputs`.
  void set_outputs(const Tensors& outputs);

  /// `gradients`: one for each output that requires one; undefined if none
  /// reached it. Returns one for each tracked input, undefined if the outputs
  /// do not depend on it. Accumulates gradients of the weights. Frees the
  /// graph.
  Tensors backward(const Tensors& gradients);
  /// The first half: as backward, but without the gradients of weights. Frees
  /// what the second half does not need. Without tracked inputs it does
  /// nothing.
  Tensors backward_input(const Tensors& gradients);
  /// The second half: accumulates gradients of the weights. Frees the graph.
  void backward_weight();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echelon::pipeline
