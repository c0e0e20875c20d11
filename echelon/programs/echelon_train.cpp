// echelon-train: the part of the command line that needs LibTorch. `echelon`
// checks what it is given and starts this program, once per rank. A command
// takes its arguments one by one, and end() refuses what is left before
// anything is done. Rank 0 alone prints results, or the terminal would show
// them once per rank. main() turns an exception into the rank's error report,
// which the launcher reads, and into the exit code.
#include <torch/version.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "echelon/bench/bench_collectives.h"
#include "echelon/bench/bench_machine.h"
#include "echelon/cluster/cluster_file.h"
#include "echelon/comm/world.h"
#include "echelon/cost/model_shape.h"
#include "echelon/environment/rank_environment.h"
#include "echelon/error.h"
#include "echelon/error_report.h"
#include "echelon/job/job.h"
#include "echelon/job/run_folder.h"
#include "echelon/launch/fork_server.h"
#include "echelon/memory_plan/memory_plan.h"
#include "echelon/predict/choices.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"
#include "echelon/train/plugin.h"
#include "echelon/train/sample.h"
#include "echelon/train/stop_signals.h"
#include "echelon/train/strategies/count_job.h"
#include "echelon/train/trainer.h"
#include "echelon/train/verify.h"

namespace echelon {
namespace {

constexpr const char* kUsage =
    "usage: echelon-train train CONFIG [--threads N] [--made]\n"
    "       echelon-train plan CONFIG [--json | --fits] [--host-bytes N]\n"
    "                     [--colours] [--columns N]\n"
    "       echelon-train count CONFIG [--json | --save FILE]\n"
    "       echelon-train verify CONFIG [--steps K] [--tolerance T] [--json]\n"
    "                     [--save FOLDER | --resume FOLDER] [--threads N]\n"
    "       echelon-train sample RUN [--tokens N] [--temperature T] [--top-k "
    "K]\n"
    "                     [--top-p P] [--seed S] [--config CONFIG]\n"
    "                     [--threads N] --prompt TEXT\n"
    "       echelon-train bench machine --save FILE [--json] [--threads N]\n"
    "       echelon-train bench collectives [--backend local,gloo]\n"
    "                     [--bytes 4096,1048576] [--operations all_reduce]\n"
    "                     [--json] [--threads N]\n"
    "       echelon-train version\n"
    "Started by `echelon`, one process per rank; --threads N runs N ranks as\n"
    "threads of this process instead.\n";

/// "--name value" pairs and flags behind the positional arguments.
class Arguments {
 public:
  Arguments(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) words_.push_back(argv[i]);
  }

  std::string positional(const char* what) {
    if (next_ >= words_.size() || words_[next_].rfind("--", 0) == 0) {
      throw ConfigError(
          std::string("echelon-train: ") + what + " is missing\n" + kUsage);
    }
    return words_[next_++];
  }
  bool flag(const std::string& name) {
    for (auto it = words_.begin() + static_cast<long>(next_);
         it != words_.end(); ++it) {
      if (*it != name) continue;
      words_.erase(it);
      return true;
    }
    return false;
  }
  std::string value(const std::string& name, const std::string& otherwise) {
    for (size_t i = next_; i + 1 < words_.size(); ++i) {
      if (words_[i] != name) continue;
      const std::string found = words_[i + 1];
      words_.erase(
          words_.begin() + static_cast<long>(i),
          words_.begin() + static_cast<long>(i) + 2);
      return found;
    }
    return otherwise;
  }
  int64_t number(const std::string& name, int64_t otherwise) {
    const std::string text = value(name, std::to_string(otherwise));
    try {
      size_t used = 0;
      const int64_t parsed = std::stoll(text, &used);
      if (used == text.size()) return parsed;
    } catch (const std::exception&) {
    }
    throw ConfigError(
        format("echelon-train: {} {} is not a whole number", name, text));
  }
  double fraction(const std::string& name, double otherwise) {
    const std::string text = value(name, "");
    if (text.empty()) return otherwise;
    char* end = nullptr;
    const double parsed = std::strtod(text.c_str(), &end);
    if (*end == '\0') return parsed;
    throw ConfigError(
        format("echelon-train: {} {} is not a number", name, text));
  }
  void end() const {
    if (next_ < words_.size()) {
      throw ConfigError(
          "echelon-train: unknown argument " + words_[next_] + "\n" + kUsage);
    }
  }

 private:
  std::vector<std::string> words_;
  size_t next_ = 0;
};

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> items;
  std::istringstream stream(list);
  for (std::string item; std::getline(stream, item, ',');) {
    items.push_back(item);
  }
  return items;
}

/// This process as one rank, or its threads as `threads` ranks.
void with_world(
    int64_t threads, const CommOptions& options,
    const std::function<void(World&)>& body) {
  if (threads > 0) {
    run_ranks(static_cast<int>(threads), body, options);
    return;
  }
  World world = World::from_environment(options);
  try {
    body(world);
  } catch (const std::exception& error) {
    // The end of the world ends the other ranks: the cause is told before.
    report_error(error);
    throw;
  }
}

int run_train(Arguments& arguments) {
  end_on_stop_signals();
  // Training goes on when nobody reads what it prints: `| head`. A file that
  // may not grow (`ulimit -f`) is an error of its write, as on a full disk.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  const std::string config = arguments.positional("CONFIG");
  const int64_t threads = arguments.number("--threads", 0);
  // Whether a launcher made the run's folder, and keeps its lock.
  const bool made = arguments.flag("--made");
  arguments.end();
  Job job = load_job(config);
  // "never" is said of the first start; a restart goes on from its own state.
  if (job.checkpoint.resume == "never" && read_environment().generation > 0) {
    job.checkpoint.resume = "auto";
  }
  const std::filesystem::path folder = job.train.run;
  std::error_code error;
  const bool is_in_folder =
      std::filesystem::equivalent(config, folder / "config.toml", error);
  bool interrupted = false;
  bool preempted = false;
  with_world(threads, job.comm, [&](World& world) {
    install_stop_signals();
    std::unique_ptr<CheckpointLock> lock;  // rank 0's
    if (!made) {
      if (world.rank() == 0) {
        lock = is_in_folder ? std::make_unique<CheckpointLock>(folder)
                            : make_run_folder(job).lock;
      }
      world.group().barrier();
      // Ranks on other hosts may not see the folder of rank 0.
      std::filesystem::create_directories(folder);
    }
    const TrainResult result = train(job, world, folder, load_plugin(job));
    if (world.rank() != 0) return;
    interrupted = result.interrupted;
    preempted = result.preempted;
    if (result.evaluation.samples > 0) {
      const auto& last = result.evaluation;
      const std::string value =
          last.perplexity ? format("perplexity {:.2f}", *last.perplexity)
          : last.accuracy ? format("accuracy {:.2f} %", 100 * *last.accuracy)
                          : format("held-out loss {:.4f}", last.loss);
      std::printf(
          "%s after %s\n", value.c_str(),
          counted(result.steps, "step").c_str());
    }
    if (result.interrupted) {
      std::printf(
          "stopped by %s after %s\n", result.preempted ? "SIGTERM" : "the user",
          counted(result.steps, "step").c_str());
    }
    std::printf("report: %s\n", (folder / "report.html").c_str());
    std::fflush(stdout);
  });
  if (preempted) return static_cast<int>(ExitCode::preempted);
  return static_cast<int>(interrupted ? ExitCode::interrupted : ExitCode::done);
}

int run_plan(Arguments& arguments) {
  const std::string config = arguments.positional("CONFIG");
  const bool json = arguments.flag("--json");
  const bool fits = arguments.flag("--fits");  // says only what does not
  const memory_plan::PlanTextOptions options{
      .host_bytes = arguments.number("--host-bytes", 0),
      .colours = arguments.flag("--colours"),
      .columns = static_cast<size_t>(arguments.number("--columns", 80))};
  arguments.end();
  Job job = with_compute_dtype_here(load_job(config));
  const bool on_processor = job.comm.device == DeviceKind::cpu;
  const auto context =
      predict::choose_context(job, job.layout.num_ranks(), on_processor);
  job.context = context.options;
  const auto chunks =
      predict::choose_chunks(job, job.layout.num_ranks(), on_processor);
  job.tensor.overlap_chunks = chunks.chunks;
  const memory_plan::MemoryModel model = count_memory(job, load_plugin(job));
  if (fits) {
    std::string excess = memory_plan::explain_limit(
        model, job, job.memory.limit_bytes, /*most_advice=*/2);
    if (excess.empty() && options.host_bytes > 0) {
      excess = memory_plan::explain_host_memory(
          model, job, memory_plan::all_ranks(job.layout), options.host_bytes);
    }
    if (!excess.empty()) throw ConfigError(excess);
    return 0;
  }
  const memory_plan::MemoryPlan plan = memory_plan::plan_memory(model, job);
  for (const std::string& why : {context.why, chunks.why}) {
    if (!json && !why.empty()) std::cout << why << "\n";
  }
  std::cout << (json ? memory_plan::to_json(plan, model, job) + "\n"
                     : memory_plan::to_text(plan, model, job, options))
            << std::flush;
  return 0;
}

void write_whole(const std::string& path, const std::string& text) {
  try {
    write_file_atomically(path, text);
  } catch (const Error&) {
    throw DataError(path + ": cannot be written");
  }
}

int run_count(Arguments& arguments) {
  const std::string config = arguments.positional("CONFIG");
  arguments.flag("--json");  // there is no other form
  const std::string path = arguments.value("--save", "");
  arguments.end();
  const Job job = with_compute_dtype_here(load_job(config));
  const std::string text =
      cost::counted_model_json(counted_shape(job, load_plugin(job)));
  if (path.empty()) {
    std::cout << text << std::endl;
  } else {
    write_whole(path, text);
  }
  return 0;
}

int run_verify(Arguments& arguments) {
  const std::string config = arguments.positional("CONFIG");
  VerifyOptions options;
  options.steps = arguments.number("--steps", options.steps);
  const std::string tolerance = arguments.value("--tolerance", "1e-10");
  options.tolerance = std::strtod(tolerance.c_str(), nullptr);
  options.plant_error = arguments.value("--plant-error-in", "");
  if (arguments.flag("--plant-error")) options.plant_error = "first";
  options.resume = arguments.value("--resume", "");
  const std::string save = arguments.value("--save", "");
  const bool json = arguments.flag("--json");
  const int64_t threads = arguments.number("--threads", 0);
  arguments.end();
  const Job job = load_job(config);
  if (!save.empty()) {
    with_world(threads, job.comm, [&](World& world) {
      save_steps(job, world, options.steps, save, load_plugin(job));
    });
    return 0;
  }
  bool passed = false;
  with_world(threads, job.comm, [&](World& world) {
    const VerifyResult result = verify(job, world, options, load_plugin(job));
    if (world.rank() != 0) return;
    passed = result.passed;
    std::cout << (json ? to_json(result, options) + "\n"
                       : to_text(result, options))
              << std::flush;
  });
  // Only rank 0 fails, so that the launcher reports one error.
  const char* rank = std::getenv("RANK");
  const bool first = threads > 0 || rank == nullptr || std::string(rank) == "0";
  return static_cast<int>(
      passed || !first ? ExitCode::done : ExitCode::failure);
}

int run_sample(Arguments& arguments) {
  const std::string run = arguments.positional("RUN");
  SampleOptions options;
  // It comes first, since it may look like another argument.
  options.prompt = arguments.value("--prompt", "");
  options.tokens = arguments.number("--tokens", options.tokens);
  options.temperature =
      arguments.fraction("--temperature", options.temperature);
  options.top_k = arguments.number("--top-k", options.top_k);
  options.top_p = arguments.fraction("--top-p", options.top_p);
  options.seed = static_cast<uint64_t>(arguments.number("--seed", 0));
  // The run's configuration with the ranks that continue the text; without it,
  // one device does.
  const std::string config = arguments.value("--config", "");
  const int64_t threads = arguments.number("--threads", 0);
  arguments.end();
  const auto print = [](std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
  };
  if (config.empty()) {
    sample_text(trained_job(run), run, options, print);
    print("\n");
    return 0;
  }
  const Job job = load_job(config);
  with_world(threads, job.comm, [&](World& world) {
    sample_text(job, run, world, options, print);
    if (world.rank() == 0) print("\n");
  });
  return 0;
}

int run_bench_machine(Arguments& arguments) {
  const std::string path = arguments.value("--save", "");
  const bool json = arguments.flag("--json");
  const int64_t threads = arguments.number("--threads", 0);
  arguments.end();
  with_world(threads, CommOptions{}, [&](World& world) {
    const cluster::MachineMeasurement measured = bench::bench_machine(world);
    if (world.rank() != 0) return;
    write_whole(
        path, cluster::to_toml(
                  cluster::cluster_of(measured, cluster::look_at_machine())));
    std::cout << (json ? cluster::to_json(measured) + "\n"
                       : cluster::to_text(measured) + "cluster: " + path + "\n")
              << std::flush;
  });
  return 0;
}

int run_bench(Arguments& arguments) {
  const std::string what = arguments.positional("what to measure");
  if (what == "machine") return run_bench_machine(arguments);
  if (what != "collectives") {
    throw ConfigError("echelon-train: bench measures collectives or machine");
  }
  const std::map<std::string, BackendKind> kinds = {
      {"local", BackendKind::local},
      {"gloo", BackendKind::gloo},
      {"nccl", BackendKind::nccl}};
  bench::BenchOptions options;
  options.backends.clear();
  for (const auto& name : split(arguments.value("--backend", "local,gloo"))) {
    const auto kind = kinds.find(name);
    if (kind == kinds.end()) {
      throw ConfigError(
          "bench: unknown backend \"" + name +
          "\"; there are local, gloo and nccl");
    }
    options.backends.push_back(kind->second);
  }
  const std::string bytes = arguments.value("--bytes", "");
  if (!bytes.empty()) {
    options.bytes.clear();
    for (const auto& item : split(bytes)) {
      options.bytes.push_back(std::strtoll(item.c_str(), nullptr, 10));
      if (options.bytes.back() < 4) {
        throw ConfigError("bench: --bytes " + item + " must be 4 or more");
      }
    }
  }
  const std::string operations = arguments.value("--operations", "");
  if (!operations.empty()) options.operations = split(operations);
  const bool json = arguments.flag("--json");
  const int64_t threads = arguments.number("--threads", 0);
  arguments.end();
  CommOptions comm;
  comm.backend = options.backends.front();
  with_world(threads, comm, [&](World& world) {
    const auto rows = bench::bench_collectives(world, options);
    if (world.rank() != 0) return;
    std::cout << (json ? bench::to_json(rows) + "\n" : bench::to_text(rows))
              << std::flush;
  });
  return 0;
}

int run(int argc, char** argv) {
  Arguments arguments(argc, argv);
  if (arguments.flag("--help")) {
    std::cout << kUsage;
    return 0;
  }
  const std::string command = arguments.positional("a command");
  if (command == "train") return run_train(arguments);
  if (command == "plan") return run_plan(arguments);
  if (command == "count") return run_count(arguments);
  if (command == "verify") return run_verify(arguments);
  if (command == "sample") return run_sample(arguments);
  if (command == "bench") return run_bench(arguments);
  if (command == "version") {
    std::cout << "echelon-train, LibTorch " << TORCH_VERSION << "\n";
    return 0;
  }
  throw ConfigError(
      "echelon-train: unknown command " + command + "\n" + kUsage);
}

// Ends the process without the destructors of static objects: LibTorch takes
// 0.1 s and more to remove its operators one by one. Sanitizers report there.
int leave(int exit_code) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(exit_code);
#endif
  return exit_code;
}

}  // namespace
}  // namespace echelon

int main(int argc, char** argv) {
  echelon::launch::serve_forks();
  try {
    return echelon::leave(echelon::run(argc, argv));
  } catch (const std::exception& error) {
    return echelon::leave(echelon::report_error(error));
  }
}
