// Echelon's side of image loading, for versus_pytorch/run.py: JPEGs per second
// from a folder of class folders, cropped, flipped and normalised. Writes JSON.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <numeric>

#include "benchmarks/arguments.h"
#include "echelon/data/dataset.h"
#include "echelon/data/loader.h"

namespace {

using namespace echelon;

/// From the first batch on: starting the threads is not counted.
double images_per_second(Loader& loader) {
  loader.next();
  const auto start = std::chrono::steady_clock::now();
  int64_t images = 0;
  while (const auto batch = loader.next()) {
    images += batch->inputs.size(0);
  }
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - start;
  return static_cast<double>(images) / seconds.count();
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments(argc, argv);
  torch::set_num_threads(1);
  const DataOptions options{
      .name = DataKind::images,
      .path = arguments.text("--folder"),
      .holdout = 0,
      .image_size = 224,
      .crop = Crop::random_resized,
      .flip = true};
  const auto dataset = make_dataset(options, /*seed=*/0);
  std::vector<int64_t> samples(dataset->size());
  std::iota(samples.begin(), samples.end(), 0);
  Loader loader(
      *dataset, {.samples = samples,
                 .global_batch = 32,
                 .workers = arguments.integer("--workers")});
  std::ofstream(arguments.text("--out"))
      << "{\"images_per_second\": " << images_per_second(loader) << "}\n";
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
