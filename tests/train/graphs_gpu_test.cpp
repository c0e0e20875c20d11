// [train] cuda_graphs on a GPU: steps that are replayed have the same losses as
// steps that run kernel by kernel.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "echelon/timeline/metrics.h"
#include "echelon/train/trainer.h"
#include "tests/support/gpu.h"
#include "tests/support/temp_folder.h"

namespace echelon::graphs_gpu_test {

class GraphsGpu : public GpuTest {};

TEST_F(GraphsGpu, ReplayedStepsHaveTheSameLosses) {
  if (!test_gpu().is_cuda()) GTEST_SKIP() << "graphs are for GPUs";
  TempFolder folder;
  std::string text;
  for (int line = 0; line < 400; ++line) {
    text += "line " + std::to_string(line) + " is followed by the next one\n";
  }
  Job job;
  job.data.name = DataKind::text;
  job.data.sources = {folder.write("lines.txt", text)};
  job.data.sequence = 64;
  job.model.layers = 2;
  job.model.hidden_size = 64;
  job.model.heads = 4;
  job.model.intermediate_size = 192;
  job.model.max_positions = 64;
  job.optimizer.schedule = RateSchedule::cosine;
  job.optimizer.clip_norm = 1;
  job.train.batch = 8;
  job.train.steps = 30;
  job.train.eval_every = 11;
  job.train.timeline_steps = 5;
  World world = World::alone({.device = DeviceKind::cuda});
  for (const char* name : {"gpt", "llama"}) {
    job.model.name = name;
    for (const auto compute : {ComputeDtype::same, ComputeDtype::bf16}) {
      job.precision.compute = compute;
      const auto losses = [&](CudaGraphs graphs) {
        job.train.cuda_graphs = graphs;
        const std::string run =
            folder.path(name + to_string(compute) + to_string(graphs));
        train(job, world, run, nullptr);
        std::vector<double> all;
        for (const auto& step :
             timeline::read_metrics(run + "/metrics.jsonl").steps) {
          all.push_back(step.loss);
        }
        return all;
      };
      const auto captured = losses(CudaGraphs::on);
      const auto as_they_are = losses(CudaGraphs::off);
      ASSERT_EQ(captured.size(), 30u);
      for (size_t i = 0; i < captured.size(); ++i) {
        // Some kernels of CUDA add in an order that differs from run to run.
        EXPECT_NEAR(captured[i], as_they_are[i], 1e-3 * as_they_are[i])
            << name << " " << to_string(compute) << " step " << i;
      }
    }
  }
}

}  // namespace echelon::graphs_gpu_test
