// What `export` writes: the weights of a run, and what their model is.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "echelon/checkpoint/format/tensor_stream.h"
#include "echelon/job/job.h"

namespace echelon::cli {

struct ExportSource {
  std::string name;  // "runs/first/checkpoints/step-00000100"
  std::unique_ptr<TensorSource> tensors;
  /// The configuration that they were trained by. Throws as load_job.
  std::function<Job()> job;
};

/// Opens what `place` leads to: a checkpoint, or the newest of a folder of
/// checkpoints or of a run; of a run without any, checkpoints/last.safetensors.
/// Throws CheckpointError, saying what `place` is instead, when there is
/// nothing of that, and for a checkpoint whose manifest or files cannot be
/// trusted.
ExportSource open_export_source(const std::string& place);

}  // namespace echelon::cli
