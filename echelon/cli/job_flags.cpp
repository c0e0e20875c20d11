#include "echelon/cli/job_flags.h"

namespace echelon::cli {

void add_job_flags(CLI::App& command, JobFlags& flags) {
  const auto option = [&](const char* name, std::string& value,
                          const char* type, const char* help) {
    command.add_option(name, value, help)->type_name(type);
  };
  option(
      "--model", flags.model, "MODEL",
      "a name of the catalogue (gpt3-175b, llama3.1-8b, resnet50, …), a "
      "Hugging "
      "Face config.json or the folder that has one");
  option(
      "--cluster", flags.cluster, "CLUSTER",
      "DEVICE:NODESxDEVICES (h100-sxm:64x8), DEVICE:DEVICES, several joined by "
      "+, "
      "or a cluster file");
  option("--batch", flags.batch, "SAMPLES", "of one step, over all ranks");
  option("--seq-len", flags.seq_len, "TOKENS", "of a sample (the model's)");
  option(
      "--precision", flags.precision, "PRECISION",
      "of matrix products: bf16, fp16, fp8, fp32, … (bf16; plan: else what the "
      "devices have)");
  option(
      "--stack", flags.stack, "SOFTWARE",
      "whose ways and rates count: echelon, megatron-core, fsdp, … (echelon)");
}

}  // namespace echelon::cli
