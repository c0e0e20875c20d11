// Checkpoints that small runs save and restore: shared by tests of saving.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/tensors/tensor_file.h"
#include "tests/train/small_run.h"

namespace echelon {

using SavedValues = std::map<std::string, torch::Tensor>;

// Every rank calls it. FOLDER/step-…
inline void
save(SmallRun& run, const std::filesystem::path& folder, int64_t step) {
  StateSnapshot snapshot;
  snapshot.take(parts_to_save(run));
  if (run.world.rank() == 0) begin_checkpoint(folder, step, 0);
  run.world.group().barrier();
  write_rank_file(
      partial_checkpoint(folder, step), rank_file_name(run.world.rank()),
      snapshot.slices());
  run.world.group().barrier();
  if (run.world.rank() == 0) {
    const int ranks = run.world.size();
    commit_checkpoint(folder, {.step = step, .ranks = ranks}, ranks);
  }
  run.world.group().barrier();
}

inline std::filesystem::path newest(const std::filesystem::path& folder) {
  return list_checkpoints(folder).front().path;
}

inline SavedValues read_all(const std::filesystem::path& checkpoint) {
  CheckpointReader reader(checkpoint);
  SavedValues values;
  for (const auto& saved : reader.manifest().tensors) {
    if (saved.kind == SavedKind::random) continue;
    torch::Tensor value =
        torch::empty(saved.shape, dtype_from_safetensors(saved.dtype));
    reader.read(
        saved, whole_box(saved.shape),
        static_cast<std::byte*>(value.mutable_data_ptr()));
    values[saved.name] = value;
  }
  return values;
}

inline std::vector<std::string>
load(SmallRun& run, const std::filesystem::path& checkpoint) {
  CheckpointReader reader(checkpoint);
  return load_state(run.state, reader, run.source, run.world, run.groups);
}

// Compares what a rank has with the full tensors; tolerance 0: to the last bit.
inline void
expect_equal(const SmallRun& run, const SavedValues& whole, double tolerance) {
  for (const auto& [name, part] : parts_by_name(run)) {
    const torch::Tensor expected = local_values(whole.at(name), part);
    const torch::Tensor value = part.value.detach();
    const bool equal =
        tolerance == 0 ? torch::equal(expected, value)
                       : torch::allclose(expected, value, tolerance, tolerance);
    EXPECT_TRUE(equal) << name << " of rank " << run.world.rank();
  }
}

inline Job with_seed(Job job, uint64_t seed) {
  job.train.seed = seed;
  return job;
}

}  // namespace echelon
