#include "echelon/cli/export_source.h"

#include "echelon/architecture/mapped_tensors.h"
#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/weights/checkpoint_tensors.h"
#include "echelon/error.h"
#include "echelon/job/trained_job.h"

namespace echelon::cli {
namespace {

ExportSource open_checkpoint(const std::vector<CheckpointPlace>& places) {
  std::string way_out;
  if (places.size() > 1) {
    way_out = "; `echelon export " + places[1].path.string() +
              " …` writes the one before it";
  }
  ExportSource source;
  source.name = places[0].path.string();
  try {
    auto tensors = std::make_unique<CheckpointTensors>(
        std::make_unique<CheckpointReader>(source.name), way_out);
    source.job = [name = source.name] { return trained_job(name); };
    source.tensors = std::move(tensors);
  } catch (const CheckpointError& error) {
    throw CheckpointError(error.what() + way_out);
  }
  return source;
}

ExportSource open_file(const std::string& weights, const std::string& run) {
  ExportSource source;
  source.name = weights;
  source.tensors = std::make_unique<MappedTensors>(WeightsSource(weights));
  source.job = [run] { return trained_job(run); };
  return source;
}

}  // namespace

ExportSource open_export_source(const std::string& place) {
  const auto last = last_weights(place);
  if (!last.empty()) return open_file(last, place);
  return open_checkpoint(find_checkpoints(place));
}

}  // namespace echelon::cli
