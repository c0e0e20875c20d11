#include "echelon/models/options.h"

#include "echelon/config/section.h"

namespace echelon {

void bind(config::Section& section, ModelOptions& options) {
  section.field("name", options.name, "which model")
      .one_of(
          {"simple_cnn",
           "mlp",
           "resnet18",
           "resnet34",
           "resnet50",
           "resnet101",
           "resnet152"});
  section
      .field(
          "classes",
          options.classes,
          "how many classes it tells apart; 0: as many as the data has")
      .at_least(0)
      .at_most(1 << 24);
  section.field("hidden", options.hidden, "mlp: widths of the hidden layers")
      .at_least(1)
      .at_most(1 << 24)
      .length(0, 1024);
  section.field(
      "weights",
      options.weights,
      "start from this .safetensors file; empty: from train.seed");
  section.field("dtype", options.dtype, "type of the parameters")
      .one_of({"float32", "float64"});
  section.field(
      "sync_batch_norm",
      options.sync_batch_norm,
      "batch normalization takes its statistics over all ranks");
  section.field(
      "cut",
      options.cut,
      "layers that begin a new pipeline stage or device; empty: by balance");
  section
      .field(
          "balance",
          options.balance,
          "what the stages or devices share out evenly: floating-point "
          "operations, memory, or the time of a few timed microbatches")
      .one_of({"time", "memory", "measured"});
  section
      .field(
          "devices",
          options.devices,
          "model parallel: devices of each process that share out the layers, "
          "such as \"cuda:0\", \"cuda:1\"; empty: one device")
      .length(0, 1024);
  section
      .field(
          "device_bytes",
          options.device_bytes,
          "memory of each of the devices, or of each pipeline rank; empty: what "
          "a GPU has, no limit on CPUs")
      .at_least(1)
      .length(0, 1024);
}

}  // namespace echelon
