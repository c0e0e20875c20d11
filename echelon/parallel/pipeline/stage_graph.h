// The autograd graph of one microbatch through one stage, run backwards whole
// or in two halves: gradients of the inputs first, of the weights later.
//
// The halves work for any module, without recomputing: nodes on the path from
// the outputs to the inputs run in the first half; those among them that also
// lead to weights keep the gradient that reached them, and run again for their
// weights alone in the second. Gradients accumulate in the second half, so
// hooks on parameters fire there. Source of the split: Qi et al., "Zero Bubble
// Pipeline Parallelism", 2023, arXiv:2401.10241, section 2.
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

  /// The inputs as the stage's forward takes them: those of which `shape` says
  /// so want a gradient. They may be changed in place, as on one device.
  Tensors track(const Tensors& inputs, const TupleShape& shape);
  /// Remembers where the backward begins; keeps no tensor of `outputs`.
  void set_outputs(const Tensors& outputs);

  /// `gradients`: one for each output that requires one; undefined means none
  /// reached it. Returns one for each tracked input, undefined when the outputs
  /// do not depend on it. Weights accumulate theirs. Frees the graph.
  Tensors backward(const Tensors& gradients);
  /// The first half: as backward, but weights get nothing yet, and what only
  /// this half needed is freed. Without tracked inputs it does nothing.
  Tensors backward_input(const Tensors& gradients);
  /// The second half. Frees the graph.
  void backward_weight();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace echelon::pipeline
