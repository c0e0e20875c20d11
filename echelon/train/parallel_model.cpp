#include "echelon/train/parallel_model.h"

namespace echelon {
namespace {

BucketHook hook_of(const TrainOptions& options) {
  if (options.compress == "bf16") return bf16_hook();
  if (options.compress == "fp16") return fp16_hook();
  if (options.compress == "powersgd") {
    return powersgd_hook(
        {.rank = options.powersgd_rank, .seed = options.seed});
  }
  return all_reduce_hook();
}

}  // namespace

torch::Dtype dtype_of(const std::string& name) {
  return name == "float64" ? torch::kFloat64 : torch::kFloat32;
}

DistributedDataParallelOptions data_parallel_options(const Job& job) {
  DistributedDataParallelOptions options;
  options.bucket_bytes = job.train.bucket_bytes;
  options.find_unused_parameters = job.train.find_unused_parameters;
  options.sync_batch_norm = job.model.sync_batch_norm;
  options.hook = hook_of(job.train);
  return options;
}

Batch prepared(const Batch& batch, torch::Device device, torch::Dtype dtype) {
  Batch ready = batch;
  ready.inputs = batch.inputs.to(device, dtype, /*non_blocking=*/true);
  ready.targets = batch.targets.to(device, /*non_blocking=*/true);
  return ready;
}

torch::Tensor
loss_sum_of(const torch::Tensor& scores, const torch::Tensor& targets) {
  return torch::nn::functional::cross_entropy(
      scores,
      targets,
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

int64_t
count_correct(const torch::Tensor& scores, const torch::Tensor& targets) {
  return scores.argmax(1).eq(targets).sum().item<int64_t>();
}

std::unique_ptr<ParallelModel> make_parallel_model(
    const Job& job,
    const std::vector<int64_t>& input_shape,
    int64_t classes,
    const MeshGroups& groups,
    torch::Device device) {
  return make_data_parallel_model(job, input_shape, classes, groups, device);
}

}  // namespace echelon
