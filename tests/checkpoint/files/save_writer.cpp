// save_writer FOLDER STEP [BYTES]: saves a small checkpoint, with a table of
// BYTES, and exits, with 3 after a CheckpointError. Its calls between the two
// marks are those of a save.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "echelon/error.h"
#include "tests/checkpoint/files/small_save.h"

namespace {

// A call that a trace shows.
void mark(const char* text) {
  if (::access(text, F_OK) == 0) std::exit(1);
}

int save(
    const std::filesystem::path& folder, int64_t step, int64_t table_bytes) {
  try {
    const echelon::CheckpointLock lock(folder);
    echelon::save_small(folder, step, {}, table_bytes);
    echelon::keep_checkpoints(folder, {});
    return 0;
  } catch (const echelon::CheckpointError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    echelon::abandon_checkpoint(folder, step);
    return 3;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  mark("mark: save begins");
  const int code =
      save(argv[1], std::atoll(argv[2]), argc == 4 ? std::atoll(argv[3]) : 0);
  mark("mark: save ends");
  return code;
}
