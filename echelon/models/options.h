// Settings of the model. Free of LibTorch: the command line checks them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

namespace config { class Section; }

struct ModelOptions {
  std::string name = "simple_cnn";  // simple_cnn | mlp | resnet18/34/50/101/152
  int64_t classes = 0;              // 0: as many as the data has
  std::vector<int64_t> hidden = {512, 512};  // mlp: widths of the hidden layers
  std::string weights;              // start from this .safetensors file
  std::string dtype = "float32";    // float32 | float64
  bool sync_batch_norm = false;     // batch statistics over all ranks

  // How the list of layers is cut into pipeline stages, or over devices.
  /// The layers that begin a new slice; empty: by `balance`.
  std::vector<std::string> cut;
  std::string balance = "time";     // time | memory | measured
  /// Devices of one process that share out the layers: "cpu", "cuda:1". Empty:
  /// the rank's one device.
  std::vector<std::string> devices;
  /// Memory of each of `devices`, or of each pipeline rank; empty: what a GPU
  /// has, no limit on CPUs.
  std::vector<int64_t> device_bytes;
};

void bind(config::Section& section, ModelOptions& options);  // [model]

}  // namespace echelon
