// Saving and loading a GPT's training, one process per rank, under `echelon
// run`: Echelon's side of versus_pytorch/checkpoint.py.
//
//   echelon run -n 2 -- checkpoint --mode dp|fsdp --layers L --hidden H --heads
//   N
//     --vocabulary V --positions P --learning-rate R --weights FILE --data FILE
//     --steps S --saves K --loads K --folder FOLDER --out FILE
//
// FILE of --data holds "tokens", int64 [batches, samples, P + 1]. After S steps
// come K saves beside steps, K saves that are waited for, and K loads of the
// last one, of files that are not in memory; before each of the three one more,
// to warm up. Rank 0 writes JSON.
#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/arguments.h"
#include "benchmarks/language_step.h"
#include "benchmarks/process_memory.h"
#include "echelon/checkpoint/files/folder.h"
#include "echelon/checkpoint/files/reader.h"
#include "echelon/comm/mesh_groups.h"
#include "echelon/comm/world.h"
#include "echelon/train/saving/saved_state.h"
#include "echelon/train/saving/saver.h"
#include "echelon/train/strategies/step.h"

namespace {

namespace fs = std::filesystem;
using namespace echelon;
using torch::Tensor;

// Steps that a save is beside, at least: a longer save gets more.
constexpr int64_t kStepsBeside = 3;

double now_seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

Job job_of(const Arguments& arguments) {
  Job job;
  job.model.name = "gpt";
  job.model.layers = arguments.integer("--layers");
  job.model.hidden_size = arguments.integer("--hidden");
  job.model.heads = arguments.integer("--heads");
  job.model.vocab_size = arguments.integer("--vocabulary");
  job.model.max_positions = arguments.integer("--positions");
  job.model.weights = arguments.text("--weights");
  job.layout = parse_layout(arguments.text("--mode") + "=2");
  job.optimizer.learning_rate = arguments.number("--learning-rate");
  job.optimizer.weight_decay = 0;
  job.train.threads = 1;
  return job;
}

SampleSpec sample_of(const Job& job) {
  return {
      .input_shape = {job.model.max_positions},
      .input_dtype = torch::kInt64,
      .target_shape = {job.model.max_positions},
      .classes = job.model.vocab_size,
      .every_target_counts = true};
}

void for_each_file(
    const fs::path& folder, const std::function<void(int)>& act) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) throw Error(entry.path().string() + ": cannot be opened");
    act(file);
    ::close(file);
  }
}

// The next reader waits for the disk.
void drop_cached(const fs::path& folder) {
  for_each_file(folder, [](int file) {
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  });
}

double folder_bytes(const fs::path& folder) {
  double bytes = 0;
  for_each_file(folder, [&](int file) {
    bytes += static_cast<double>(::lseek(file, 0, SEEK_END));
  });
  return bytes;
}

// VmHWM is counted anew from here on.
void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

// This rank's number, on every rank.
Tensor gather(const World& world, double value) {
  Tensor all = torch::empty({world.size()}, torch::kFloat64);
  world.group().all_gather(all, torch::tensor({value}, torch::kFloat64));
  return all;
}

class Measurement {
 public:
  Measurement(const Arguments& arguments, World& world)
      : job_(job_of(arguments)),
        folder_(arguments.text("--folder")),
        saves_(arguments.integer("--saves")),
        loads_(arguments.integer("--loads")),
        world_(world),
        groups_(world, job_.layout),
        source_(model_source(job_, sample_of(job_))),
        tokens_(read_tokens(arguments.text("--data"))
                    .chunk(world.size(), 1)[static_cast<size_t>(world.rank())]),
        state_(job_, {source_, world_, groups_}, 1000),
        saver_(job_, source_, world_, groups_, folder_, nullptr) {}

  std::string run(int64_t steps) {
    plain_steps(steps);
    add_memory("own_bytes", own_bytes());
    add_memory("training_peak_bytes", memory_of("VmHWM"));
    forget_peak();
    saves_beside_steps();
    add_memory("async_peak_bytes", memory_of("VmHWM"));
    saves();
    add_memory("rest_bytes", memory_of("VmRSS"));
    forget_peak();
    loads();
    add_memory("load_peak_bytes", memory_of("VmHWM"));
    remove_last();
    std::string text;
    for (const auto& [name, values] : figures_) {
      text += (text.empty() ? "{" : ", ");
      text += "\"" + name + "\": " + json_list(values);
    }
    return text + "}\n";
  }

 private:
  void step() {
    const Tensor tokens = tokens_[steps_ % tokens_.size(0)];
    const Batch batch{
        .inputs = tokens.slice(1, 0, -1).contiguous(),
        .targets = tokens.slice(1, 1).contiguous(),
        .global_count = tokens.size(0) * world_.size()};
    Score score;
    {
      const torch::AutoGradMode grad(true);
      score = state_.model().forward_backward(batch, false);
    }
    saver_.before_update();
    state_.update(steps_++, false, nullptr);
    auto sums = score.sums(world_.device());
    world_.group().all_reduce(sums);
    loss_ = (sums[0] / sums[1]).item<double>();
  }

  /// Seconds that all ranks take together.
  double clock(const std::function<void()>& action) {
    world_.group().barrier();
    const double begin = now_seconds();
    action();
    world_.group().barrier();
    return now_seconds() - begin;
  }

  CheckpointManifest manifest() const {
    CheckpointManifest now;
    now.step = steps_;
    now.total_steps = 1000;
    return now;
  }

  /// Frees the disk before the next save, so that its time does not count this.
  void remove_last() {
    world_.group().barrier();
    if (world_.rank() == 0) {
      fs::remove_all(saver_.last());
      ::sync();
    }
    world_.group().barrier();
  }

  void plain_steps(int64_t count) {
    for (int64_t i = 0; i <= count; ++i) {
      const double seconds = clock([&] { step(); });
      figures_["losses"].push_back(loss_);
      if (i > 0) figures_["step_seconds"].push_back(seconds);
    }
  }

  SaverNews share(SaverNews news) {
    auto sums =
        torch::tensor({news.ready, news.failed, news.request}, torch::kFloat64);
    world_.group().all_reduce(sums);
    const double* all = sums.data_ptr<double>();
    return {all[0], all[1], all[2]};
  }

  void saves_beside_steps() {
    for (int64_t i = 0; i <= saves_; ++i) {
      const double stopped = saver_.stopped_seconds();
      const auto path = checkpoint_path(folder_ / "checkpoints", steps_);
      world_.group().barrier();
      const double begin = now_seconds();
      saver_.after_step(state_, manifest(), {.request = 1});
      int64_t steps = 0;
      while (steps < kStepsBeside || saver_.last() != path) {
        step();
        ++steps;
        saver_.after_step(state_, manifest(), share(saver_.news()));
      }
      const double took = now_seconds() - begin;
      const double own = saver_.stopped_seconds() - stopped;
      const double slowest = gather(world_, own).max().item<double>();
      if (i > 0) {
        figures_["stopped_seconds"].push_back(slowest);
        figures_["beside_seconds"].push_back(took);
        figures_["beside_steps"].push_back(static_cast<double>(steps));
      }
      remove_last();
    }
  }

  void saves() {
    for (int64_t i = 0; i <= saves_; ++i) {
      if (i > 0) remove_last();
      step();  // another step's name
      const double seconds =
          clock([&] { saver_.save_and_wait(state_, manifest()); });
      if (i > 0) figures_["save_seconds"].push_back(seconds);
    }
    figures_["bytes"] = {folder_bytes(saver_.last())};
  }

  std::vector<Tensor> tensors() const {
    std::vector<Tensor> all;
    for (const auto& part : shards_to_load(state_, source_)) {
      all.push_back(part.tensor);
    }
    return all;
  }

  double own_bytes() const {
    double bytes = 0;
    for (const auto& tensor : tensors()) {
      bytes += static_cast<double>(tensor.nbytes());
    }
    return bytes;
  }

  std::vector<double> sums() const {
    std::vector<double> all;
    for (const auto& tensor : tensors()) {
      all.push_back(tensor.to(torch::kFloat64).sum().item<double>());
    }
    return all;
  }

  void loads() {
    const auto expected = sums();
    for (int64_t i = 0; i <= loads_; ++i) {
      const torch::NoGradGuard no_grad;
      for (auto& tensor : tensors()) tensor.fill_(-1);
      world_.group().barrier();
      drop_cached(saver_.last());
      const double seconds = clock([&] {
        CheckpointReader reader(saver_.last());
        load_state(state_, reader, source_, world_, groups_);
      });
      if (i > 0) figures_["load_seconds"].push_back(seconds);
      if (sums() != expected) {
        throw Error("the state that was loaded is not the saved one");
      }
    }
  }

  void add_memory(const std::string& name, double value) {
    const Tensor all = gather(world_, value);
    const double* first = all.data_ptr<double>();
    figures_[name] = {first, first + all.numel()};
  }

  Job job_;
  fs::path folder_;
  int64_t saves_;
  int64_t loads_;
  World& world_;
  MeshGroups groups_;
  ModelSource source_;
  Tensor tokens_;  // [batches, this rank's samples, positions + 1]
  TrainingState state_;
  Saver saver_;
  int64_t steps_ = 0;
  double loss_ = 0;
  std::map<std::string, std::vector<double>> figures_;
};

void run(const Arguments& arguments) {
  arguments.allow(
      {"--mode", "--layers", "--hidden", "--heads", "--vocabulary",
       "--positions", "--learning-rate", "--weights", "--data", "--steps",
       "--saves", "--loads", "--folder", "--out"});
  torch::set_num_threads(1);
  World world = World::from_environment(CommOptions{});
  Measurement measurement(arguments, world);
  const std::string text = measurement.run(arguments.integer("--steps"));
  if (world.rank() == 0) std::ofstream(arguments.text("--out")) << text;
}

}  // namespace

int main(int argc, char** argv) try {
  run(Arguments(argc, argv));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
