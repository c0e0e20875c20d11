#include <array>
#include <filesystem>
#include <iostream>
#include <memory>

#include "echelon/architecture/adapters.h"
#include "echelon/architecture/check_weights.h"
#include "echelon/architecture/hugging_face.h"
#include "echelon/architecture/weights_source.h"
#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/format/float_convert.h"
#include "echelon/checkpoint/remote/object_checkpoints.h"
#include "echelon/checkpoint/weights/checkpoint_tensors.h"
#include "echelon/cli/arguments.h"
#include "echelon/cli/new_folder.h"
#include "echelon/error.h"
#include "echelon/job/run_folder.h"
#include "echelon/text/format.h"
#include "echelon/text/units.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

/// The weights of a run, and their model.
struct ExportSource {
  std::string name;  // "runs/first/checkpoints/step-00000100"
  std::unique_ptr<TensorSource> tensors;
  std::string trained;  // where trained_job() finds their configuration
};

ExportSource open_checkpoint(const std::vector<CheckpointPlace>& places) {
  std::string way_out;
  if (places.size() > 1) {
    way_out = format(
        "; `echelon export {} …` writes the one before it",
        places[1].path.string());
  }
  const std::string name = places[0].path.string();
  try {
    return {
        name,
        std::make_unique<CheckpointTensors>(
            std::make_unique<CheckpointReader>(name), way_out),
        name};
  } catch (const CheckpointError& error) {
    throw CheckpointError(error.what() + way_out);
  }
}

/// Opens the checkpoint at `place`, or the newest one of a folder of
/// checkpoints or of a run; checkpoints/last.safetensors of a run without any.
/// Throws CheckpointError when there is none, and for a checkpoint whose
/// manifest or files cannot be trusted.
ExportSource open_export_source(const std::string& place) {
  const auto last = last_weights(place);
  if (last.empty()) {
    return open_checkpoint(find_checkpoints(local_checkpoint(place)));
  }
  return {last, std::make_unique<MappedTensors>(WeightsSource(last)), place};
}

struct ExportArguments {
  std::string run;
  std::string out;
  std::string format = "safetensors";
  std::string dtype;
  std::string max_shard_bytes = "5GB";
  bool overwrite = false;
};

struct DtypeName {
  const char* name;    // in configurations and in transformers
  const char* stored;  // in safetensors
};
// The widest first.
constexpr std::array<DtypeName, 4> kDtypes = {{
    {"float64", "F64"},
    {"float32", "F32"},
    {"bfloat16", "BF16"},
    {"float16", "F16"},
}};

// "bfloat16" -> "BF16"; "", which keeps each tensor's dtype, -> "".
std::string stored_dtype(const std::string& name) {
  if (name.empty()) return "";
  for (const auto& dtype : kDtypes) {
    if (name == dtype.name) return dtype.stored;
  }
  throw ConfigError(
      "--dtype " + name + ": must be float32, bfloat16, float16 or float64");
}

// The widest dtype of the tensors, for config.json.
std::string dtype_of(const std::vector<TensorToWrite>& tensors) {
  for (const auto& dtype : kDtypes) {
    for (const auto& tensor : tensors) {
      if (tensor.dtype == dtype.stored) return dtype.name;
    }
  }
  return "float32";
}

void check_file(const std::string& out, bool overwrite) {
  check_parent(out);
  std::error_code error;
  if (fs::is_directory(out, error)) {
    throw ConfigError(
        out + ": is a folder; name a file, as in model.safetensors");
  }
  if (fs::exists(fs::symlink_status(out, error)) && !overwrite) {
    throw ConfigError(
        out + ": exists already; name a new file, or give --overwrite");
  }
}

// The language model of a run, with the vocabulary of its weights.
LanguageModelShape
shape_of(const ModelOptions& options, const TensorSource& weights) {
  if (!is_language_model(options)) {
    throw ConfigError(
        "[model] name=\"" + options.name +
        "\": transformers can load Echelon's language models only; leave out "
        "--format huggingface");
  }
  const auto embedding =
      list_language_layers(language_model_shape(options, 1)).front() +
      ".weight";
  for (const auto& tensor : weights.tensors()) {
    if (tensor.name != embedding || tensor.shape.size() != 2) continue;
    return language_model_shape(options, tensor.shape[0]);
  }
  throw DataError(weights.path() + ": has no matrix \"" + embedding + "\"");
}

// Writes the files that AutoTokenizer needs next to config.json. Returns a
// remark to print.
std::string copy_tokenizer(
    const std::string& tokenizer, const LanguageModelShape& shape,
    const NewFolder& out) {
  const fs::path source(tokenizer);
  if (source.extension() != ".json") return "";
  std::error_code error;
  fs::copy_file(source, out.path() / "tokenizer.json", error);
  if (error) {
    return format(
        "no tokenizer.json: {} cannot be copied, {}\n", source.string(),
        error.message());
  }
  out.write(
      "tokenizer_config.json",
      "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
      "  \"model_max_length\": " +
          std::to_string(shape.max_positions) + "\n}\n");
  return "";
}

std::string describe(const std::vector<std::string>& files) {
  if (files.size() == 1) return files[0];
  return std::to_string(files.size() - 1) + " shards of weights";
}

void refuse_overwrite(const ExportArguments& arguments) {
  if (!arguments.overwrite) return;
  throw ConfigError(format(
      "--overwrite: replaces a file; for --format {} name a new folder",
      arguments.format));
}

// The weights of the model that was trained, without its adapters if the
// checkpoint has those alone.
std::shared_ptr<TensorSource>
base_of(const Job& job, const std::shared_ptr<TensorSource>& checkpoint) {
  if (!saves_adapters_alone(job.model)) return checkpoint;
  try {
    return std::make_shared<MappedTensors>(WeightsSource(
        job.model.weights,
        base_prefix(list_language_layers(language_model_shape(job.model, 1)))));
  } catch (const CheckpointError& error) {
    throw CheckpointError(format(
        "[model] weights: the adapters' model is not there any more: {}; "
        "--format peft writes the adapters alone",
        error.what()));
  }
}

// Adapters as peft reads them.
int export_peft(const ExportArguments& arguments) {
  refuse_overwrite(arguments);
  const auto dtype = stored_dtype(arguments.dtype);
  auto source = open_export_source(arguments.run);
  const Job job = trained_job(source.trained);
  if (!job.model.lora.used()) {
    throw ConfigError(format(
        "--format peft: {} has no adapters ([lora] rank = 0); --format "
        "huggingface writes its model",
        source.name));
  }
  auto& adapters = *source.tensors;
  const auto shape = language_model_shape(job.model, 1);
  const auto tensors = peft_tensors(adapters, dtype);
  NewFolder out(arguments.out);
  out.write(
      "adapter_config.json",
      peft_config(
          job.model.lora, job.model.weights,
          list_language_parameters(shape, job.model.dtype), shape.kind->gpt));
  write_tensors(
      (out.path() / "adapter_model.safetensors").string(), adapters, tensors,
      {{"format", "pt"}});
  out.move_into_place();
  std::cout << format(
      "wrote {}: adapter_config.json, adapter_model.safetensors; adapters of "
      "{}, from {}\n",
      arguments.out, counted(std::ssize(tensors) / 2, "layer"), source.name);
  return 0;
}

int export_hugging_face(const ExportArguments& arguments) {
  refuse_overwrite(arguments);
  const auto dtype = stored_dtype(arguments.dtype);
  const int64_t max_shard_bytes = parse_size(
      "--max-shard-bytes", arguments.max_shard_bytes, 1, int64_t{1} << 60);
  auto source = open_export_source(arguments.run);
  const Job job = trained_job(source.trained);
  std::shared_ptr<TensorSource> all = std::move(source.tensors);
  const auto base = base_of(job, all);
  const auto shape = shape_of(job.model, *base);
  if (job.model.lora.used()) {
    all = std::make_shared<AdaptedTensors>(
        base, all, job.model.lora.scale(), shape.kind->gpt);
  }
  auto& weights = *all;
  const auto parameters = list_language_parameters(shape, job.model.dtype);
  check_weights(weights.tensors(), parameters, source.name);
  const auto tensors = hugging_face::owned_tensors(weights, parameters, dtype);

  hugging_face::ConfigText text{.dtype = dtype_of(tensors)};
  if (job.data.end_of_text_id >= 0) text.end_of_text = job.data.end_of_text_id;
  NewFolder out(arguments.out);
  out.write("config.json", hugging_face::write_config(shape, text));
  out.write("generation_config.json", hugging_face::generation_config(text));
  const auto remark = copy_tokenizer(job.data.tokenizer, shape, out);
  const auto files = hugging_face::write_weights(
      weights, tensors, out.path().string(), max_shard_bytes);
  out.move_into_place();
  std::cout << format(
      "wrote {}: config.json, {}; {} in {}, from {}\n{}", arguments.out,
      describe(files), counted(num_parameters(parameters), "parameter"),
      text.dtype, source.name, remark);
  return 0;
}

int export_file(const ExportArguments& arguments) {
  const auto dtype = stored_dtype(arguments.dtype);
  check_file(arguments.out, arguments.overwrite);
  const auto source = open_export_source(arguments.run);
  std::vector<TensorToWrite> tensors;
  for (size_t i = 0; i < source.tensors->tensors().size(); ++i) {
    const auto& tensor = source.tensors->tensors()[i];
    const bool converts = !dtype.empty() && is_float_dtype(tensor.dtype);
    tensors.push_back({i, tensor.name, converts ? dtype : tensor.dtype});
  }
  write_tensors(arguments.out, *source.tensors, tensors, {{"format", "pt"}});
  std::cout << format(
      "wrote {}: {}, from {}\n", arguments.out,
      counted(std::ssize(tensors), "tensor"), source.name);
  return 0;
}

int export_run(const ExportArguments& arguments) {
  if (arguments.format == "huggingface") return export_hugging_face(arguments);
  if (arguments.format == "peft") return export_peft(arguments);
  if (arguments.format == "safetensors") return export_file(arguments);
  throw ConfigError(
      "--format " + arguments.format +
      ": must be safetensors, huggingface or peft");
}

}  // namespace

void add_export(Command& root) {
  auto [command, arguments] = root.add(
      "export",
      "write a run's weights as one safetensors file, or a language model as "
      "a folder for Hugging Face's transformers",
      "echelon export runs/first first.safetensors\n"
      "echelon export runs/gpt gpt-folder --format huggingface\n"
      "echelon export runs/gpt gpt-bf16 --format huggingface --dtype bfloat16\n"
      "echelon export runs/tuned adapters --format peft\n"
      "echelon export runs/gpt/checkpoints/step-00000100 gpt-100 --format "
      "huggingface",
      export_run);
  command.positional(
      "RUN", arguments.run,
      "a checkpoint, or a run's folder (its newest checkpoint)");
  command.positional("OUT", arguments.out, "the file or folder to write");
  command.option(
      "--format", arguments.format, "safetensors|huggingface|peft",
      "safetensors: one file (default); huggingface: a folder with "
      "config.json, adapters added to their matrices; peft: a folder with the "
      "adapters alone");
  command.option(
      "--dtype", arguments.dtype, "DTYPE",
      "dtype of the written weights, rounded to nearest: float32, bfloat16, "
      "float16 or float64 (default: as trained)");
  command.flag(
      "--overwrite", arguments.overwrite,
      "safetensors: replace the file if it exists");
  command.option(
      "--max-shard-bytes", arguments.max_shard_bytes, "BYTES",
      "huggingface: larger weights are written as several files (default: "
      "5GB)");
}

}  // namespace echelon::cli
