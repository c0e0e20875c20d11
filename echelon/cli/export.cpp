#include <CLI/CLI.hpp>
#include <array>
#include <filesystem>
#include <iostream>
#include <memory>

#include "echelon/architecture/check_weights.h"
#include "echelon/architecture/hugging_face.h"
#include "echelon/checkpoint/format/float_convert.h"
#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/export_source.h"
#include "echelon/cli/new_folder.h"
#include "echelon/error.h"

namespace echelon::cli {
namespace {

namespace fs = std::filesystem;

struct ExportArguments {
  std::string run;
  std::string out;
  std::string format = "safetensors";
  std::string dtype;
  std::string max_shard_bytes = "5000000000";
};

// As the configuration and transformers name a dtype, and as safetensors does;
// the widest first.
struct DtypeName {
  const char* name;
  const char* stored;
};
constexpr std::array<DtypeName, 4> kDtypes = {{
    {"float64", "F64"},
    {"float32", "F32"},
    {"bfloat16", "BF16"},
    {"float16", "F16"},
}};

// "BF16" of "bfloat16"; empty of nothing, which leaves each tensor as it is.
std::string stored_dtype(const std::string& name) {
  if (name.empty()) return "";
  for (const auto& dtype : kDtypes) {
    if (name == dtype.name) return dtype.stored;
  }
  throw ConfigError(
      "--dtype " + name + ": must be float32, bfloat16, float16 or float64");
}

// The widest of the tensors', for config.json.
std::string dtype_of(const std::vector<TensorToWrite>& tensors) {
  for (const auto& dtype : kDtypes) {
    for (const auto& tensor : tensors) {
      if (tensor.dtype == dtype.stored) return dtype.name;
    }
  }
  return "float32";
}

void check_file(const std::string& out) {
  check_parent(out);
  std::error_code error;
  if (fs::is_directory(out, error)) {
    throw ConfigError(
        out + ": is a folder; name a file, as in model.safetensors");
  }
}

// The language model of a run, with the vocabulary that its weights have.
LanguageModelShape
shape_of(const ModelOptions& options, const TensorSource& weights) {
  if (!is_language_model(options)) {
    throw ConfigError(
        "[model] name=\"" + options.name +
        "\": transformers has gpt and llama models of Echelon's; leave out "
        "--format huggingface");
  }
  const auto words =
      list_language_layers(language_model_shape(options, 1)).front() +
      ".weight";
  for (const auto& tensor : weights.tensors()) {
    if (tensor.name != words || tensor.shape.size() != 2) continue;
    return language_model_shape(options, tensor.shape[0]);
  }
  throw DataError(weights.path() + ": has no matrix \"" + words + "\"");
}

// What AutoTokenizer needs beside config.json. Returns what to tell of it.
std::string copy_tokenizer(
    const std::string& tokenizer, const LanguageModelShape& shape,
    const NewFolder& out) {
  const fs::path source(tokenizer);
  if (source.extension() != ".json") return "";
  std::error_code error;
  fs::copy_file(source, out.path() / "tokenizer.json", error);
  if (error) {
    return "no tokenizer.json: " + source.string() + " cannot be copied, " +
           error.message() + "\n";
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

int export_hugging_face(const ExportArguments& arguments) {
  const auto dtype = stored_dtype(arguments.dtype);
  const int64_t max_shard_bytes = parse_count(
      "--max-shard-bytes", arguments.max_shard_bytes, 1, int64_t{1} << 60);
  const auto source = open_export_source(arguments.run);
  auto& weights = *source.tensors;
  const Job job = source.job();
  const auto shape = shape_of(job.model, weights);
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
  std::cout << "wrote " << arguments.out << ": config.json, " << describe(files)
            << "; " << num_parameters(parameters) << " parameters in "
            << text.dtype << ", from " << source.name << "\n"
            << remark;
  return 0;
}

int export_file(const ExportArguments& arguments) {
  const auto dtype = stored_dtype(arguments.dtype);
  check_file(arguments.out);
  const auto source = open_export_source(arguments.run);
  std::vector<TensorToWrite> tensors;
  for (size_t i = 0; i < source.tensors->tensors().size(); ++i) {
    const auto& tensor = source.tensors->tensors()[i];
    const bool converts = !dtype.empty() && is_float_dtype(tensor.dtype);
    tensors.push_back({i, tensor.name, converts ? dtype : tensor.dtype});
  }
  write_tensors(arguments.out, *source.tensors, tensors, {{"format", "pt"}});
  std::cout << "wrote " << arguments.out << ": " << tensors.size()
            << " tensors, from " << source.name << "\n";
  return 0;
}

int export_run(const ExportArguments& arguments) {
  if (arguments.format == "huggingface") return export_hugging_face(arguments);
  if (arguments.format == "safetensors") return export_file(arguments);
  throw ConfigError(
      "--format " + arguments.format + ": must be safetensors or huggingface");
}

}  // namespace

void add_export(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand(
      "export",
      "write a run's weights as one safetensors file, or a gpt or llama as a "
      "folder that Hugging Face's transformers loads");
  command->footer(
      "echelon export runs/first first.safetensors\n"
      "echelon export runs/gpt gpt-folder --format huggingface\n"
      "echelon export runs/gpt gpt-bf16 --format huggingface --dtype bfloat16\n"
      "echelon export runs/gpt/checkpoints/step-00000100 gpt-100 --format "
      "huggingface");
  auto arguments = std::make_shared<ExportArguments>();
  command
      ->add_option(
          "RUN", arguments->run,
          "the run folder, whose newest checkpoint is taken, or a checkpoint")
      ->required();
  command->add_option("OUT", arguments->out, "the file or folder to write")
      ->required();
  command
      ->add_option(
          "--format", arguments->format,
          "safetensors: one file (the default); huggingface: a folder with "
          "config.json")
      ->type_name("safetensors|huggingface");
  command
      ->add_option(
          "--dtype", arguments->dtype,
          "of the written weights, rounded to the nearest value: float32, "
          "bfloat16, float16 or float64; as they were trained unless set")
      ->type_name("DTYPE");
  command
      ->add_option(
          "--max-shard-bytes", arguments->max_shard_bytes,
          "huggingface: weights of more bytes are written as several files; "
          "5000000000 unless set")
      ->type_name("BYTES");
  command->callback([&action, arguments] {
    action = [arguments] { return export_run(*arguments); };
  });
}

}  // namespace echelon::cli
