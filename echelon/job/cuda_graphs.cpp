#include "echelon/job/cuda_graphs.h"

#include "echelon/architecture/language_model.h"

namespace echelon {

std::string why_not_captured(const Job& job) {
  if (has_experts(job.model)) {
    return "the host reads how many tokens each expert gets";
  }
  if (!job.model.devices.empty()) {
    return "a graph is of one device, and [model] devices names several";
  }
  if (job.memory.offload != Offload::none ||
      job.memory.activations == Activations::offload) {
    return "[memory] keeps parts of the step in the host's memory";
  }
  if (job.train.compress == Compression::powersgd) {
    return "powersgd has new tensors for its errors in each step";
  }
  if (job.train.find_unused_parameters) {
    return "the host reads which parameters were used";
  }
  const bool sharded_tokens =
      job.layout.cp > 1 || (job.layout.tp > 1 && job.tensor.sequence_parallel);
  if (sharded_tokens && job.data.documents == Documents::respected) {
    return "the host reads whether a batch has several documents";
  }
  if (job.train.rebalance_every > 0) {
    return "[train] rebalance_every divides the work anew";
  }
  if (job.layout.num_ranks() > 1 && job.data.name == DataKind::images &&
      job.data.bad_image == BadImage::skip) {
    return "ranks skip broken images, each its own number of them";
  }
  if (job.comm.check_collectives) {
    return "[comm] check_collectives compares each call on the host";
  }
  return "";
}

bool captures_steps(const Job& job) {
  switch (job.train.cuda_graphs) {
    case CudaGraphs::off:
      return false;
    case CudaGraphs::on:
      return true;
    case CudaGraphs::automatic:
      break;
  }
  return job.model.name != kOwnModel && job.data.name != DataKind::own &&
         why_not_captured(job).empty();
}

}  // namespace echelon
