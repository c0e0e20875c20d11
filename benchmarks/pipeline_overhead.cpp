// Step time of a pipeline over its schedule's ideal.
//
//   pipeline_overhead [--part waits|real] [--stages P …] [--microbatches M]
//                     [--steps N] [--wait-ms T] [--width D] [--rows R]
//                     [--backend local|gloo] [--json FILE]
//
// waits: each forward, gradient of inputs and gradient of weights is a wait of
// T
//        ms, so that 4 and 8 ranks fit on few cores. The ideal is the schedule
//        with those times and transfers that take none.
// real:  blocks of linear layers on 2 ranks, one thread each. The ideal is the
//        schedule with the times that each stage takes without the executor and
//        without transfers: medians, measured on both ranks at once before each
//        step, since a machine is not equally quick all the time.
//
// Ranks are threads of this process. A step's time is that of the slowest rank;
// a ratio is one step's time over the ideal.
#include <sys/prctl.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/arguments.h"
#include "echelon/comm/world.h"
#include "echelon/parallel/pipeline/pipeline.h"
#include "echelon/parallel/pipeline/stage_graph.h"
#include "echelon/schedule/options.h"
#include "echelon/schedule/timing.h"

namespace {

using namespace echelon;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Settings {
  int32_t ranks = 4;
  int32_t microbatches = 16;
  int steps = 5;
  double wait_seconds = 0.01;
  int64_t width = 512;
  int64_t rows = 64;
  CommOptions comm;
};

struct Result {
  std::string part;
  std::string kind;
  int32_t ranks = 0;
  std::vector<double> ideals;   // of each step, in seconds
  std::vector<double> seconds;  // of each step

  std::vector<double> ratios() const {
    std::vector<double> sorted;
    for (size_t i = 0; i < seconds.size(); ++i) {
      sorted.push_back(seconds[i] / ideals[i]);
    }
    std::sort(sorted.begin(), sorted.end());
    return sorted;
  }
  double ratio(double of) const {
    const auto sorted = ratios();
    return sorted[static_cast<size_t>(
        of * static_cast<double>(sorted.size() - 1))];
  }
};

// Waits ----------------------------------------------------------------------

void wait_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Waits in forward, and in backward for each gradient that is asked for. The
// inputs of stage 0 need none, so the wait for its weights is as long as both.
struct Wait : torch::autograd::Function<Wait> {
  static Tensor forward(
      torch::autograd::AutogradContext* context, Tensor x, Tensor weight,
      double seconds, double weight_seconds) {
    context->saved_data["seconds"] = seconds;
    context->saved_data["weight_seconds"] = weight_seconds;
    context->save_for_backward({weight});
    wait_for(seconds);
    return x + 1;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    Tensor of_weight;
    if (context->needs_input_grad(0)) {
      wait_for(context->saved_data["seconds"].toDouble());
    }
    if (context->needs_input_grad(1)) {
      wait_for(context->saved_data["weight_seconds"].toDouble());
      of_weight = torch::zeros_like(context->get_saved_variables()[0]);
    }
    return {gradients[0], of_weight, Tensor(), Tensor()};
  }
};

struct WaitLayerImpl : torch::nn::Module {
  WaitLayerImpl(double seconds, double weight_seconds)
      : seconds(seconds), weight_seconds(weight_seconds) {
    weight = register_parameter("weight", torch::zeros({1}));
  }
  Tensor forward(const Tensor& x) {
    return Wait::apply(x, weight, seconds, weight_seconds);
  }
  double seconds;
  double weight_seconds;
  Tensor weight;
};
TORCH_MODULE(WaitLayer);

LayerList waiting_layers(const Settings& settings, int32_t num_stages) {
  LayerList list;
  for (int32_t i = 0; i < num_stages; ++i) {
    const double wait = settings.wait_seconds;
    list.add("wait" + std::to_string(i), [=] {
      return WaitLayer(wait, i == 0 ? 2 * wait : wait);
    });
  }
  return list;
}

std::vector<StageCost>
waiting_costs(const Settings& settings, int32_t num_stages) {
  const double wait = settings.wait_seconds;
  std::vector<StageCost> costs(
      static_cast<size_t>(num_stages), {wait, 2 * wait, wait, wait, 0});
  costs[0].backward_input = 0;
  costs[0].backward_weight = 2 * wait;
  return costs;
}

// Real computation -----------------------------------------------------------

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }
  Tensor forward(const Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

LayerList real_layers(const Settings& settings) {
  LayerList list;
  for (int i = 0; i < 8; ++i) {
    const int64_t width = settings.width;
    list.add("block" + std::to_string(i), [=] { return Block(width); });
  }
  return list;
}

Tensors run_stage(const PipelineStage& stage, Tensors tensors) {
  for (const auto& layer : stage.layers) {
    tensors = layer.forward(tensors);
  }
  return tensors;
}

Tensor loss_of(const Tensors& outputs) {
  return outputs[0].square().mean();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The median time of each action of a stage, without pipeline.
StageCost
measure_stage(const PipelineStage& stage, bool last, const Settings& settings) {
  std::vector<double> forward, backward, input, weight;
  const Tensor x = torch::randn({settings.rows, settings.width});
  const auto timed = [](std::vector<double>& times, const auto& call) {
    const auto start = Clock::now();
    call();
    times.push_back(seconds_since(start));
  };
  for (int round = 0; round < 7; ++round) {
    for (bool split : {false, true}) {
      pipeline::StageGraph graph;
      Tensors gradients;
      timed(forward, [&] {
        const auto in = graph.track(
            {x}, {{torch::kFloat32, x.sizes().vec(), stage.stage > 0}});
        Tensors out = run_stage(stage, in);
        if (last) out = {loss_of(out)};
        graph.set_outputs(out);
        gradients = {torch::ones_like(out[0].detach())};
      });
      if (split) {
        timed(input, [&] { graph.backward_input(gradients); });
        timed(weight, [&] { graph.backward_weight(); });
      } else {
        timed(backward, [&] { graph.backward(gradients); });
      }
    }
  }
  return {median(forward), median(backward), median(input), median(weight), 0};
}

// Every stage's costs, on every rank.
std::vector<StageCost> measure(
    const World& world, const std::vector<PipelineStage>& stages,
    int32_t num_stages, const Settings& settings) {
  Tensor table = torch::zeros({num_stages, 4}, torch::kFloat64);
  world.group().barrier();
  for (const auto& stage : stages) {
    const auto cost =
        measure_stage(stage, stage.stage + 1 == num_stages, settings);
    table[stage.stage] = torch::tensor(
        {cost.forward, cost.backward, cost.backward_input,
         cost.backward_weight},
        torch::kFloat64);
  }
  world.group().all_reduce(table);
  std::vector<StageCost> costs;
  for (int32_t i = 0; i < num_stages; ++i) {
    const double* row = table.data_ptr<double>() + 4 * i;
    costs.push_back({row[0], row[1], row[2], row[3], 0});
  }
  return costs;
}

// Both -----------------------------------------------------------------------

Result
run(const std::string& part, const std::string& kind,
    const Settings& settings) {
  const Schedule schedule = make_schedule(
      {.kind = schedule_kind(kind),
       .ranks = settings.ranks,
       .microbatches = settings.microbatches});
  const bool waits = part == "waits";
  const LayerList list = waits ? waiting_layers(settings, schedule.num_stages())
                               : real_layers(settings);
  Result result{part, kind, settings.ranks};
  run_ranks(
      settings.ranks,
      [&](World& world) {
        ::prctl(PR_SET_TIMERSLACK, 1);  // waits end when they should
        torch::set_num_threads(1);
        const auto build = [&] {
          return build_stages(
              list, partition_evenly(list, schedule.num_stages()),
              schedule.rank_of_stage, world.rank());
        };
        const auto alone = build();
        const auto ideal = [&] {
          const auto costs =
              waits ? waiting_costs(settings, schedule.num_stages())
                    : measure(world, alone, schedule.num_stages(), settings);
          return time_schedule(schedule, costs).makespan;
        };
        Pipeline pipeline(world.group(), schedule, build());
        std::vector<Tensors> batch;
        if (pipeline.has_first_stage()) {
          for (int32_t m = 0; m < settings.microbatches; ++m) {
            batch.push_back({torch::randn({settings.rows, settings.width})});
          }
        }
        for (int step = 0; step <= settings.steps; ++step) {
          const double least = ideal();
          world.group().barrier();
          const auto start = Clock::now();
          pipeline.step(batch, [](const Tensors& outputs, int64_t) {
            return loss_of(outputs);
          });
          Tensor seconds =
              torch::tensor({seconds_since(start)}, torch::kFloat64);
          world.group().all_reduce(seconds, ReduceOp::max);
          if (world.rank() == 0 && step > 0) {  // the first one warms up
            result.ideals.push_back(least);
            result.seconds.push_back(seconds.item<double>());
          }
        }
      },
      settings.comm);
  return result;
}

std::string list(const std::vector<double>& values) {
  std::string text;
  for (double value : values) {
    text += (text.empty() ? "" : ", ") + std::to_string(value);
  }
  return "[" + text + "]";
}

void write_json(const std::string& path, const std::vector<Result>& results) {
  std::ofstream out(path);
  out << "[";
  for (size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    out << (i == 0 ? "\n" : ",\n") << " {\"part\": \"" << r.part
        << "\", \"schedule\": \"" << r.kind << "\", \"ranks\": " << r.ranks
        << ", \"ideal_seconds\": " << list(r.ideals)
        << ", \"step_seconds\": " << list(r.seconds)
        << ", \"ratio\": {\"min\": " << r.ratio(0)
        << ", \"median\": " << r.ratio(0.5) << ", \"max\": " << r.ratio(1)
        << "}}";
  }
  out << "\n]\n";
}

void run_all(const Arguments& arguments) {
  arguments.allow(
      {"--backend", "--json", "--kind", "--part", "--stages", "--microbatches",
       "--steps", "--width", "--rows", "--wait-ms"});
  Settings settings;
  const auto number = [&](const char* name, auto& value) {
    if (arguments.has(name)) {
      value =
          static_cast<std::decay_t<decltype(value)>>(arguments.number(name));
    }
  };
  number("--microbatches", settings.microbatches);
  number("--steps", settings.steps);
  number("--width", settings.width);
  number("--rows", settings.rows);
  double wait_ms = 10;
  number("--wait-ms", wait_ms);
  settings.wait_seconds = wait_ms / 1e3;
  settings.comm.backend =
      arguments.has("--backend") && arguments.text("--backend") == "gloo"
          ? BackendKind::gloo
          : BackendKind::local;
  std::vector<Result> results;
  std::printf(
      "%-6s %-14s %5s %10s  step / ideal: median (min to max)\n", "part",
      "schedule", "ranks", "ideal");
  for (const std::string part : {"waits", "real"}) {
    if (arguments.has("--part") && arguments.text("--part") != part) continue;
    std::vector<int64_t> ranks = {4, 8};
    if (part == "real") ranks = {2};
    if (arguments.has("--stages")) ranks = arguments.integers("--stages");
    for (int64_t count : ranks) {
      settings.ranks = static_cast<int32_t>(count);
      for (const auto& kind : schedule_names()) {
        if (arguments.has("--kind") && arguments.text("--kind") != kind) {
          continue;
        }
        results.push_back(run(part, kind, settings));
        const Result& r = results.back();
        std::printf(
            "%-6s %-14s %5d %7.1f ms  %.3f (%.3f to %.3f)\n", part.c_str(),
            kind.c_str(), r.ranks, 1e3 * median(r.ideals), r.ratio(0.5),
            r.ratio(0), r.ratio(1));
        std::fflush(stdout);
      }
    }
  }
  if (arguments.has("--json")) write_json(arguments.text("--json"), results);
}

}  // namespace

int main(int argc, char** argv) try {
  run_all(Arguments(argc, argv));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
