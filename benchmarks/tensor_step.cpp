// What being sharded over a tensor-parallel group costs, and parts of a step
// beside LibTorch's own.
//
//   tensor_step [--part region|loss|norm] [--ranks N] [--tokens T]
//               [--hidden H] [--vocabulary V] [--rounds R] [--threads K]
//               [--backend local|gloo] [--json FILE]
//
// region: forward and backward of an MLP of 4 H features, sharded over N ranks
//         of one thread each. "products alone" is the same without
//         communication; "one after the other" communicates when nothing is
//         computed.
// loss:   cross-entropy of T rows of V logits on one rank.
// norm:   the root-mean-square norm of T rows of H features on one rank.
//
// Ranks are threads of this process. A ratio is a variant's time over the first
// one's in the same round (time_in_turn.h).
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/arguments.h"
#include "benchmarks/time_in_turn.h"
#include "echelon/comm/differentiable.h"
#include "echelon/comm/world.h"
#include "echelon/parallel/tensor/linear.h"
#include "echelon/parallel/tensor/norm.h"
#include "echelon/parallel/tensor/vocab.h"

namespace {

using namespace echelon;
using torch::Tensor;

struct Settings {
  int ranks = 2;
  int64_t tokens = 1024;
  int64_t hidden = 512;
  int64_t vocabulary = 8192;
  int rounds = 30;
  int threads = 1;
  CommOptions comm;
};

struct Result {
  std::string part;
  VariantTimes times;
};

std::vector<Result> measure(
    const std::string& part, const std::vector<Variant>& variants, int rounds,
    const std::function<void()>& meet) {
  std::vector<Result> results;
  for (auto& times : time_in_turn(variants, rounds, meet)) {
    results.push_back({part, std::move(times)});
  }
  return results;
}

// Region ---------------------------------------------------------------------

struct Region {
  Tensor x;
  Tensor up;
  Tensor up_bias;
  Tensor down;
  Tensor bias;
};

Region region_of(const Settings& settings, const TensorParallel& tp) {
  const int64_t inner = tp.part_of(4 * settings.hidden).size();
  const int64_t rows =
      tp.splits_tokens() ? tp.part_of(settings.tokens).size() : settings.tokens;
  const auto leaf = [](at::IntArrayRef shape) {
    return (torch::randn(shape) * 0.02).requires_grad_();
  };
  return {
      leaf({rows, settings.hidden}), leaf({inner, settings.hidden}),
      leaf({inner}), leaf({settings.hidden, inner}), leaf({settings.hidden})};
}

void clear(const Region& region) {
  for (Tensor leaf :
       {region.x, region.up, region.up_bias, region.down, region.bias}) {
    leaf.mutable_grad().reset();
  }
}

void cut_step(const Region& region, const TensorParallel& tp, int64_t tokens) {
  clear(region);
  const auto inner = column_linear(
      region.x, {{region.up, region.up_bias}}, WeightLayout::out_in, tp, tokens,
      "up");
  const auto y = row_linear(
      at::gelu(inner[0], "tanh"), region.down, region.bias,
      WeightLayout::out_in, tp, "down");
  y.backward(torch::ones_like(y));
}

// Each collective is a node of its own, between the matmuls.
void plain_step(const Region& region, const TensorParallel& tp) {
  clear(region);
  const bool sharded = tp.splits_tokens();
  const auto x = sharded ? all_gather(region.x, tp.group, 0, {}, "up")
                         : copy_to(region.x, tp.group, "up");
  const auto inner = at::linear(x, region.up, region.up_bias);
  const auto sum = at::linear(at::gelu(inner, "tanh"), region.down);
  const auto y = (sharded ? reduce_scatter(sum, tp.group, 0, {}, "down")
                          : reduce_from(sum, tp.group, "down")) +
                 region.bias;
  y.backward(torch::ones_like(y));
}

std::vector<Result>
region_on_rank(const Settings& settings, World& world, bool sharded) {
  at::set_num_threads(1);
  const TensorParallel whole{world.group(), {}};
  const auto way = [&](int64_t chunks) {
    return TensorParallel{
        world.group(),
        {.sequence_parallel = sharded, .overlap_chunks = chunks}};
  };
  // The matmuls of this rank, with inputs as if they had been gathered.
  Settings alone = settings;
  auto products = region_of(alone, whole);
  const TensorParallel nobody;
  const auto region = region_of(settings, way(1));
  std::vector<Variant> variants = {
      {"products alone", [=] { cut_step(products, nobody, settings.tokens); }},
      {"one after the other", [=] { plain_step(region, way(1)); }},
      {"overlapped", [=] { cut_step(region, way(1), settings.tokens); }}};
  for (const int64_t chunks : {2, 4}) {
    variants.push_back(
        {"overlapped, " + std::to_string(chunks) + " chunks",
         [=] { cut_step(region, way(chunks), settings.tokens); }});
  }
  return measure(
      sharded ? "region, sharded tokens" : "region", variants, settings.rounds,
      [&] { world.group().barrier(); });
}

std::vector<Result> measure_region(const Settings& settings) {
  std::vector<Result> results;
  run_ranks(
      settings.ranks,
      [&](World& world) {
        for (const bool sharded : {false, true}) {
          auto of_rank = region_on_rank(settings, world, sharded);
          if (world.rank() != 0) continue;
          for (auto& result : of_rank) results.push_back(std::move(result));
        }
      },
      settings.comm);
  return results;
}

// Loss and norm --------------------------------------------------------------

std::vector<Result> measure_loss(const Settings& settings) {
  at::set_num_threads(settings.threads);
  auto logits =
      torch::randn({settings.tokens, settings.vocabulary}).requires_grad_();
  const auto targets =
      torch::randint(settings.vocabulary, {settings.tokens}, torch::kInt64);
  const auto step = [&](const std::function<Tensor()>& loss) {
    return [&, loss] {
      logits.mutable_grad().reset();
      loss().backward();
    };
  };
  return measure(
      "loss",
      {{"at::cross_entropy",
        step([&] { return at::cross_entropy_loss(logits, targets); })},
       {"vocab_cross_entropy", step([&] {
          return vocab_cross_entropy(logits, targets, settings.vocabulary, {})
              .mean();
        })}},
      settings.rounds, [] {});
}

std::vector<Result> measure_norm(const Settings& settings) {
  at::set_num_threads(settings.threads);
  auto x = torch::randn({settings.tokens, settings.hidden}).requires_grad_();
  auto weight = torch::ones({settings.hidden}).requires_grad_();
  const auto gradient = torch::randn_like(x);
  const auto step = [&](const std::function<Tensor()>& norm) {
    return [&, norm] {
      x.mutable_grad().reset();
      weight.mutable_grad().reset();
      norm().backward(gradient);
    };
  };
  return measure(
      "norm",
      {{"at::rms_norm",
        step([&] { return at::rms_norm(x, {settings.hidden}, weight, 1e-5); })},
       {"rms_norm", step([&] { return rms_norm(x, weight, 1e-5); })}},
      settings.rounds, [] {});
}

// Output ---------------------------------------------------------------------

void print(const std::vector<Result>& results) {
  std::printf(
      "%-20s %-22s %10s   %s\n", "part", "variant", "median ms",
      "ratio: median, 10%, 90%");
  for (const auto& [part, times] : results) {
    std::printf(
        "%-20s %-22s %10.2f   %.3f  %.3f  %.3f\n", part.c_str(),
        times.name.c_str(), 1e3 * quantile(times.seconds, 0.5),
        quantile(times.ratios, 0.5), quantile(times.ratios, 0.1),
        quantile(times.ratios, 0.9));
  }
}

void write_json(const std::vector<Result>& results, const std::string& path) {
  std::ofstream out(path);
  out << "[";
  for (size_t i = 0; i < results.size(); ++i) {
    const auto& [part, times] = results[i];
    out << (i ? ",\n " : "\n ") << "{\"part\": \"" << part
        << "\", \"variant\": \"" << times.name
        << "\", \"seconds\": " << quantile(times.seconds, 0.5)
        << ", \"ratio\": " << quantile(times.ratios, 0.5)
        << ", \"ratio_10\": " << quantile(times.ratios, 0.1)
        << ", \"ratio_90\": " << quantile(times.ratios, 0.9) << "}";
  }
  out << "\n]\n";
}

Settings settings_of(const Arguments& arguments) {
  arguments.allow(
      {"--part", "--ranks", "--tokens", "--hidden", "--vocabulary", "--rounds",
       "--threads", "--backend", "--json"});
  Settings settings;
  const auto set = [&](const char* name, auto& value) {
    if (!arguments.has(name)) return;
    value = static_cast<std::decay_t<decltype(value)>>(arguments.integer(name));
    if (value < 1) throw ConfigError(std::string(name) + " must be 1 or more");
  };
  set("--ranks", settings.ranks);
  set("--tokens", settings.tokens);
  set("--hidden", settings.hidden);
  set("--vocabulary", settings.vocabulary);
  set("--rounds", settings.rounds);
  set("--threads", settings.threads);
  if (settings.tokens % settings.ranks != 0) {
    throw ConfigError("--tokens must be a multiple of --ranks");
  }
  if (arguments.has("--backend")) {
    const auto& name = arguments.text("--backend");
    if (name != "local" && name != "gloo") {
      throw ConfigError("--backend is local or gloo, not " + name);
    }
    settings.comm.backend =
        name == "gloo" ? BackendKind::gloo : BackendKind::local;
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments(argc, argv);
    const Settings settings = settings_of(arguments);
    const std::string part =
        arguments.has("--part") ? arguments.text("--part") : "";
    std::vector<Result> results;
    const auto add = [&](const char* name, const auto& of) {
      if (!part.empty() && part != name) return;
      for (auto& result : of(settings)) results.push_back(std::move(result));
    };
    add("region", measure_region);
    add("loss", measure_loss);
    add("norm", measure_norm);
    if (results.empty()) {
      throw ConfigError("--part is region, loss or norm, not " + part);
    }
    print(results);
    if (arguments.has("--json")) write_json(results, arguments.text("--json"));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tensor_step: %s\n", error.what());
    return 1;
  }
}
