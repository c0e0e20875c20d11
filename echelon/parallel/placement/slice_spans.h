// When a slice computes: one span for its forward pass, one for its backward
// pass, which begins when gradients of its outputs arrive and ends when those
// of its inputs leave. A forward without gradients is an evaluation's.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "echelon/layers/layer_list.h"
#include "echelon/timeline/recorder.h"

namespace echelon::placement {

/// One pass through one slice: enter, compute, leave. The backward's span is
/// recorded when it happens, if it does: the recorder must be there still.
class SliceSpans {
 public:
  SliceSpans(Recorder* recorder, std::string track, torch::Device device);
  ~SliceSpans();
  SliceSpans(const SliceSpans&) = delete;
  SliceSpans& operator=(const SliceSpans&) = delete;

  /// The inputs, as the slice shall use them.
  Tensors enter(const Tensors& inputs);
  /// The outputs, as the next one shall use them.
  Tensors leave(const Tensors& outputs);

 private:
  struct Times;
  std::shared_ptr<Times> times_;
};

}  // namespace echelon::placement
