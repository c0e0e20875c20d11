#include "echelon/job/trained_job.h"

#include <filesystem>

#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/reader.h"

namespace echelon {

Job trained_job(const std::string& place) {
  if (!last_weights(place).empty()) {
    return load_job((std::filesystem::path(place) / "config.toml").string());
  }
  const auto checkpoint = find_checkpoints(place).front().path.string();
  const CheckpointReader reader(checkpoint);
  return parse_job(
      reader.manifest().config, checkpoint + "/manifest.json: config");
}

}  // namespace echelon
