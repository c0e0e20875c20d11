// What the training wing does on a device with streams: each layout equals one
// device, and nothing that it queues is unordered.
//
// One row in twelve of doc/composition.md runs by default, and every row with
// ECHELON_EVERY_LAYOUT=1. ECHELON_ROW=TEXT runs the rows with TEXT in their
// name.
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <barrier>
#include <cctype>
#include <chrono>
#include <latch>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "echelon/layers/host_copy.h"
#include "echelon/memory_plan/memory_plan.h"
#include "echelon/parallel/expert/exchange.h"
#include "echelon/parallel/expert/routing.h"
#include "echelon/parallel/tensor/rotary.h"
#include "echelon/profiling/event_clock.h"
#include "echelon/timeline/metrics.h"
#include "echelon/timeline/recorder.h"
#include "echelon/train/chosen_precision.h"
#include "echelon/train/device_batches.h"
#include "echelon/train/replicas.h"
#include "echelon/train/step_sums.h"
#include "echelon/train/strategies/count_job.h"
#include "echelon/train/trainer.h"
#include "echelon/train/verify.h"
#include "tests/support/temp_folder.h"
#include "tests/test_device/places.h"
#include "tests/train/composition_cases.h"

namespace echelon::training_test {

using namespace composition;
using namespace test_device;

CommOptions on_test_device() {
  return {
      .device = DeviceKind::test,
      .backend = BackendKind::nccl,
      .timeout = std::chrono::seconds(60)};
}

TEST(OnTheTestDevice, EveryLayoutEqualsOneDevice) {
  TempFolder folder;
  const bool all = std::getenv("ECHELON_EVERY_LAYOUT") != nullptr;
  const char* only = std::getenv("ECHELON_ROW");
  size_t number = 0;
  for (const auto& one : all_cases(write_tokens(folder))) {
    const Row row = row_of(one);
    const std::string name = row.model + " " + row.layout + " " + row.also;
    const bool chosen = only != nullptr ? name.find(only) != std::string::npos
                                        : all || number++ % 12 == 0;
    if (!chosen) continue;
    SCOPED_TRACE(name);
    try {
      run_ranks(
          static_cast<int>(row.ranks),
          [&](World& world) {
            at::set_num_threads(1);
            const VerifyOptions options{.steps = 2, .tolerance = 1e-10};
            const VerifyResult result =
                verify(one.job, world, options, layers_of(one.job));
            if (world.rank() == 0) {
              EXPECT_TRUE(result.passed) << to_text(result, options);
            }
          },
          on_test_device());
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    std::printf("%s\n", name.c_str());
    std::fflush(stdout);
    for (int rank = 0; rank < row.ranks; ++rank) {
      drain(rank);
      clear_error(rank);
      guard().synchronizeDevice(static_cast<c10::DeviceIndex>(rank));
    }
    for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
  }
}

// The rows of a vocabulary of 67 ids are padded to 128 on a device, and not on
// a CPU. The head is tied.
TEST(OnTheTestDevice, TheVocabularyIsPadded) {
  TempFolder folder;
  Job job = small_gpt(write_tokens(folder));
  job.layout.dp_shard = 2;
  for (const bool on_device : {false, true}) {
    run_ranks(
        2,
        [&](World& world) {
          at::set_num_threads(1);
          SmallRun run(job, world);
          std::map<std::string, int64_t> elements;
          for (const auto& group : run.state.model().optimizer_groups(0)) {
            for (const auto& [name, shard] : group.parameters) {
              elements[name] = shard.numel();
            }
          }
          // Two equal shards; without padding the last one ends earlier.
          const int64_t all = job.model.hidden_size * (on_device ? 128 : 67);
          const int64_t first = (all / 2 + 15) / 16 * 16;
          EXPECT_EQ(
              elements.at("transformer.wte/decay"),
              world.rank() == 0 ? first : all - first);
          for (const auto& part : run.state.model().parameters()) {
            if (part.name != "transformer.wte.weight") continue;
            EXPECT_LE(part.range->end, 67 * job.model.hidden_size);
          }
        },
        on_device ? on_test_device() : CommOptions());
  }
}

// A model of stages 1 and 2 begins to unshard after its update.
TEST(OnTheTestDevice, AModelMayEndWhileItUnshards) {
  TempFolder folder;
  for (const auto offload : {Offload::none, Offload::parameters}) {
    Job job = job_of(tiny_gpt(), write_tokens(folder));
    job.layout.dp_shard = 2;
    job.shard.stage = offload == Offload::none ? 2 : 3;
    job.memory.offload = offload;
    run_ranks(
        2,
        [&](World& world) {
          at::set_num_threads(1);
          for (int i = 0; i < 2; ++i) SmallRun(job, world).train(0, 1);
        },
        on_test_device());
    for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
  }
}

// The copy of a table to rank 0's device waits for the all-reduce, which rank 1
// calls when it has its own table.
TEST(OnTheTestDevice, ATableForOneRankKeepsNoOtherWaiting) {
  using namespace std::chrono_literals;
  std::latch begun(1);
  auto options = on_test_device();
  options.timeout = 5s;
  run_ranks(
      2,
      [&](World& world) {
        const torch::Device device = world.device();
        const auto x = torch::ones({4}, torch::TensorOptions().device(device));
        const auto make = [&] {
          rotary_table({.theta = 77}, 8, 0, 16, x.options());
        };
        if (world.rank() == 0) {
          world.group().all_reduce(x).wait();
          begun.count_down();
          make();
        } else {
          begun.wait();
          std::this_thread::sleep_for(100ms);
          make();
          world.group().all_reduce(x).wait();
        }
      },
      options);
}

TEST(OnTheTestDevice, ThePlanCountsTheCommunicatorsOfAStep) {
  TempFolder folder;
  Job job = job_of(tiny_gpt(), write_tokens(folder));
  job.model.layers = 4;
  for (const auto& [layout, schedule] :
       std::vector<std::pair<std::string, std::string>>{
           {"dp=1", "1f1b"},
           {"dp=2", "1f1b"},
           {"fsdp=2,tp=2", "1f1b"},
           {"dp=2,fsdp=2,tp=2", "1f1b"},
           {"pp=2", "1f1b"},
           {"pp=3", "1f1b"},
           {"pp=3", "zb-v"},
           {"pp=2", "interleaved"},
           {"fsdp=2,pp=2,tp=2", "interleaved"}}) {
    SCOPED_TRACE(layout + " " + schedule);
    job.layout = parse_layout(layout);
    job.pipeline.schedule = schedule_kind(schedule);
    if (schedule == "zb-v") job.model.layers = 6;
    reset_calls();
    const auto ranks = static_cast<int>(job.layout.num_ranks());
    run_ranks(
        ranks,
        [&](World& world) {
          at::set_num_threads(1);
          SmallRun(job, world).train(0, 1);
        },
        on_test_device());
    int64_t most = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      most = std::max<int64_t>(
          most, std::ranges::count_if(calls(rank), [](const auto& call) {
            return call.ends_with("made") ||
                   call.find("connected") != std::string::npos;
          }));
    }
    const auto planned =
        memory_plan::communicator_sizes(count_memory(job), job.layout);
    EXPECT_EQ(static_cast<int64_t>(planned.size()), most);
  }
}

// LibTorch's context says for the whole process what GPUs round.
TEST(OnTheTestDevice, ProductsOfFloat32AreTf32WhereAJobSaysSo) {
  TempFolder folder;
  Job job = job_of(tiny_gpt(), write_tokens(folder));
  job.train.steps = 1;
  for (const auto compute :
       {ComputeDtype::tf32, ComputeDtype::same, ComputeDtype::automatic}) {
    job.precision.compute = compute;
    run_ranks(
        1,
        [&](World& world) {
          EXPECT_EQ(
              chosen_precision(job, world).compute == ComputeDtype::tf32,
              compute == ComputeDtype::tf32);
          train(job, world, folder.path() + "/" + to_string(compute), nullptr);
        },
        on_test_device());
    EXPECT_EQ(
        at::globalContext().allowTF32CuBLAS(), compute == ComputeDtype::tf32);
  }
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

// Sentences of the same few words.
std::string sentences() {
  constexpr std::array kWords = {"each", "rank",  "holds", "a",         "shard",
                                 "of",   "the",   "model", "gradients", "and",
                                 "its",  "peers", "wait",  "for",       "one"};
  std::mt19937 random(7);
  std::string text;
  while (text.size() < 17000) {
    for (int word = 0; word < 9; ++word) {
      text += kWords.at(random() % kWords.size());
      text += word < 8 ? " " : ".\n";
    }
  }
  return text;
}

// Linear layers whose products have 8 bits, which this device computes from the
// rounded numbers. Measured, in parts of the loss in bf16: at most 0.0006.
TEST(OnTheTestDevice, Fp8LearnsAsBf16Does) {
  TempFolder folder;
  Job job;
  job.data.name = DataKind::text;
  job.data.sources = {folder.write("words.txt", sentences())};
  job.data.sequence = 32;
  job.model.layers = 2;
  job.model.hidden_size = 64;
  job.model.heads = 4;
  job.model.intermediate_size = 192;
  job.model.max_positions = 32;
  job.optimizer.learning_rate = 5e-4;
  job.train.batch = 8;
  // ECHELON_STEPS=1000 shows where training ends, on one rank.
  const char* longer = std::getenv("ECHELON_STEPS");
  job.train.steps = longer != nullptr ? std::stoll(longer) : 40;
  if (longer != nullptr) job.optimizer.schedule = RateSchedule::cosine;
  int number = 0;
  const auto losses = [&](const Layout& layout, ComputeDtype compute) {
    job.layout = layout;
    job.precision.compute = compute;
    const std::string run = folder.path(std::to_string(number++));
    run_ranks(
        static_cast<int>(layout.num_ranks()),
        [&](World& world) {
          at::set_num_threads(1);
          train(job, world, run, nullptr);
        },
        on_test_device());
    std::vector<double> all;
    for (const auto& step :
         timeline::read_metrics(run + "/metrics.jsonl").steps) {
      all.push_back(step.loss);
    }
    return all;
  };
  for (const char* name : {"gpt", "llama"}) {
    job.model.name = name;
    for (const Layout& layout :
         {Layout{}, Layout{.tp = 2}, Layout{.dp_shard = 2}}) {
      if (longer != nullptr && layout.num_ranks() > 1) continue;
      const auto exact = losses(layout, ComputeDtype::bf16);
      const auto low = losses(layout, ComputeDtype::fp8);
      ASSERT_EQ(low.size(), exact.size());
      EXPECT_LT(exact.back(), 0.8 * exact.front());
      // The mean of the last steps, which one batch does not decide.
      const auto mean = [](const std::vector<double>& all) {
        return std::accumulate(all.end() - 10, all.end(), 0.0) / 10;
      };
      const double apart = std::abs(mean(low) / mean(exact) - 1);
      std::printf(
          "%s %s: loss %.4f to %.4f, fp8 is apart by %.5f\n", name,
          to_string(layout).c_str(), exact.front(), mean(exact), apart);
      EXPECT_LT(apart, 0.005);
      EXPECT_NE(low.back(), exact.back());
    }
  }
  if (longer == nullptr) {
    // What is computed again is rounded to the same numbers.
    const auto kept = losses({}, ComputeDtype::fp8);
    for (const auto recompute : {Recompute::selective, Recompute::all}) {
      job.memory.recompute = recompute;
      EXPECT_EQ(losses({}, ComputeDtype::fp8), kept);
    }
  }
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

// On devices that are not CPUs, convolutions of 16 bits get images with
// channels last, and cuDNN tries its algorithms.
TEST(OnTheTestDevice, ImagesOf16BitsHaveChannelsLast) {
  TempFolder folder;
  const auto convolutions = [&](ComputeDtype compute) {
    static std::mutex mutex;
    static std::set<bool> last;
    last.clear();
    const auto callback = at::addGlobalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction& call)
                -> std::unique_ptr<at::ObserverContext> {
              if (std::string(call.name()) == "aten::conv2d") {
                const std::lock_guard lock(mutex);
                last.insert(
                    call.inputs()[0].toTensor().suggest_memory_format() ==
                    torch::MemoryFormat::ChannelsLast);
              }
              return nullptr;
            })
            .needsInputs(true));
    for (const auto& model : {kSimpleCnn, kResnet18}) {
      Job job = job_of(model, "");
      job.layout = parse_layout("dp=2");
      job.precision.compute = compute;
      run_ranks(
          2,
          [&](World& world) {
            at::set_num_threads(1);
            SmallRun(job, world).train(0, 2);
          },
          on_test_device());
    }
    at::removeCallback(callback);
    for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
    return last;
  };
  EXPECT_EQ(convolutions(ComputeDtype::bf16), std::set<bool>{true});
  EXPECT_EQ(convolutions(ComputeDtype::same), std::set<bool>{false});
}

TEST(OnTheTestDevice, CudnnTriesItsAlgorithmsOnImagesAlone) {
  TempFolder folder;
  const auto tries = [&](const ModelOptions& model) {
    Job job = job_of(model, write_tokens(folder));
    job.train.steps = 1;
    run_ranks(
        1,
        [&](World& world) {
          train(job, world, folder.path() + "/" + model.name, nullptr);
        },
        on_test_device());
    return at::globalContext().benchmarkCuDNN();
  };
  EXPECT_TRUE(tries(kSimpleCnn));
  EXPECT_FALSE(tries(tiny_gpt()));
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

// A copy on the computing stream would come behind the step before.
TEST(OnTheTestDevice, BatchesAreCopiedOnAStreamOfTheirOwn) {
  run_ranks(
      1,
      [&](World& world) {
        const torch::Device device = world.device();
        Batch batch;
        batch.inputs = torch::randn({4, 3}).pin_memory();
        batch.targets = torch::arange(4).pin_memory();
        batch.more = {torch::arange(8).view({4, 2}).pin_memory()};
        static std::set<int64_t> streams;
        streams.clear();
        const auto callback = at::addGlobalCallback(at::RecordFunctionCallback(
            [](const at::RecordFunction& call)
                -> std::unique_ptr<at::ObserverContext> {
              if (std::string(call.name()) == "aten::copy_") {
                streams.insert(current().id());
              }
              return nullptr;
            }));
        const DeviceBatches batches(device);
        for (int i = 0; i < 3; ++i) {
          const Batch there = batches.copy(batch);
          EXPECT_EQ(there.inputs.device(), device);
          EXPECT_TRUE((there.inputs + 0).cpu().equal(batch.inputs));
          EXPECT_TRUE((there.targets + 0).cpu().equal(batch.targets));
          EXPECT_TRUE((there.more[0] + 0).cpu().equal(batch.more[0]));
        }
        at::removeCallback(callback);
        // Those to the host are on the computing stream.
        EXPECT_EQ(streams.size(), 2u);
        EXPECT_TRUE(streams.contains(current().id()));
      },
      on_test_device());
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

// The host queues all of it before the collective may begin.
TEST(OnTheTestDevice, SpansAreTimedByTheDevice) {
  using namespace std::chrono_literals;
  constexpr std::chrono::nanoseconds kApart = 20ms;
  std::barrier queued(2);
  std::atomic<int64_t> released{0};
  run_ranks(
      2,
      [&](World& world) {
        timeline::Recorder recorder(world.rank(), 0, 1, [&] {
          return std::make_unique<profiling::EventClock>(world.device().type());
        });
        recorder.begin_step(0);
        std::optional<CollectiveRecord> reduced;
        world.history().mark_with([&] { return recorder.mark(); });
        world.history().on_end(
            [&](const CollectiveRecord& record) { reduced = record; });
        const auto x = torch::ones({8}, world.device());
        queued.arrive_and_wait();
        if (world.rank() == 0) hold(true);
        queued.arrive_and_wait();
        c10::Event begun(world.device().type());
        {
          const timeline::ScopedSpan span(
              &recorder, "compute", "reduce", timeline::SpanKind::other);
          begun.record(current(world.rank()));
          world.group().all_reduce(x);
        }
        {
          const timeline::ScopedSpan span(
              &recorder, "compute", "work", timeline::SpanKind::forward);
          x.mul_(2);
        }
        recorder.begin_step(1);
        begun.synchronize();
        // More than what the clocks of host and device may differ by.
        std::this_thread::sleep_for(2 * kApart);
        queued.arrive_and_wait();
        if (world.rank() == 0) {
          released = timeline::steady_now_ns();
          hold(false);
        }
        queued.arrive_and_wait();
        guard().synchronizeDevice(static_cast<c10::DeviceIndex>(world.rank()));
        world.group().barrier();  // the observer asks the calls before it
        world.history().on_end(nullptr);
        world.history().mark_with(nullptr);
        const auto spans = recorder.take();
        ASSERT_EQ(spans.size(), 2u);
        EXPECT_LT(spans[0].begin_ns, released - kApart / 1ns);
        EXPECT_GT(spans[0].end_ns, released - kApart / 1ns);
        EXPECT_GE(spans[1].begin_ns, spans[0].end_ns);
        for (const auto& span : spans) EXPECT_EQ(span.step, 0);
        ASSERT_TRUE(reduced);
        EXPECT_EQ(reduced->operation, "all_reduce");
        EXPECT_GT(reduced->end_mark, reduced->begin_mark);
      },
      on_test_device());
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

TEST(OnTheTestDevice, AStepThatIsSkippedChangesNothing) {
  Job job = job_of(kResnet18, "");
  job.layout.dp_replicate = 2;
  job.train.batch = 8;
  job.train.on_non_finite = OnNonFinite::skip;
  run_ranks(
      2,
      [&](World& world) {
        at::set_num_threads(1);
        SmallRun run(job, world);
        run.train(0, 1);
        const auto state = [&] {
          std::vector<torch::Tensor> all;
          for (const auto& [_, part] : parts_by_name(run)) {
            all.push_back(part.value.detach().cpu().clone());
          }
          return all;
        };
        const auto update = [&](float skip) {
          run.state.before_forward();
          run.state.model().forward_backward(
              run.next_batch(), run.counts_units());
          run.state.update_on_device(
              1, false, nullptr, nullptr,
              torch::full(
                  {}, skip,
                  torch::dtype(torch::kFloat32).device(world.device())));
        };
        const auto before = state();
        update(1);
        const auto left_out = state();
        update(0);
        const auto after = state();
        size_t changed = 0;
        for (size_t i = 0; i < before.size(); ++i) {
          EXPECT_TRUE(before[i].equal(left_out[i])) << i;
          changed += before[i].equal(after[i]) ? 0 : 1;
        }
        EXPECT_GT(changed, before.size() / 2);
      },
      on_test_device());
}

TEST(OnTheTestDevice, ReplicasAreCompared) {
  Job job = job_of(kSimpleCnn, "");
  job.layout.dp_replicate = 3;
  run_ranks(
      3,
      [&](World& world) {
        at::set_num_threads(1);
        SmallRun run(job, world);
        run.train(0, 2);
        const ReplicaCheck check(world, run.groups, run.state.model());
        EXPECT_EQ(check.compare().value_or("equal"), "equal");
        const auto part = run.state.model().parameters().back();
        if (world.rank() == 1) part.value.detach().view(-1)[0].mul_(1.5);
        EXPECT_EQ(
            check.compare().value_or("equal"),
            "the parameters of rank 1 differ from those of ranks 0 and 2, "
            "which agree: " +
                part.name);
      },
      on_test_device());
}

// ------------------------------------------------------------ waits of a step

struct Step {
  std::string name;
  Job job;
};

void PrintTo(const Step& step, std::ostream* out) {
  *out << step.name;
}

std::vector<Step> steps() {
  std::vector<Step> all;
  const auto add = [&](const ModelOptions& model, const std::string& layout,
                       const std::string& also,
                       const std::function<void(Job&)>& change) {
    Job job = job_of(model, "");
    job.layout = parse_layout(layout);
    job.optimizer.name = OptimizerKind::adamw;
    job.train.steps = 4;
    job.train.batch = 8;  // several whole batches an epoch
    if (model.name == "resnet18") job.pipeline.microbatches = 2;
    change(job);
    std::string name = model.name + "_" + layout + "_" + also;
    std::erase_if(name, [](char c) { return c == '='; });
    std::ranges::replace_if(
        name, [](char c) { return !std::isalnum(c) && c != '_'; }, '_');
    all.push_back({name, job});
  };
  const auto nothing = [](Job&) {};
  for (const auto& model : {tiny_gpt(), llama(), kSimpleCnn, kResnet18}) {
    const bool text = model.name == "gpt" || model.name == "llama";
    add(model, "dp=2", "", nothing);
    add(model, "dp=2", "skip",
        [](Job& job) { job.train.on_non_finite = OnNonFinite::skip; });
    for (const int64_t stage : {1, 2, 3}) {
      add(model, "fsdp=2", stage_text(stage),
          [&](Job& job) { job.shard.stage = stage; });
    }
    add(model, "pp=2", "1f1b", nothing);
    for (const char* schedule : {"interleaved", "zb-v"}) {
      if (!text) continue;
      add(model, "pp=2", schedule, [&](Job& job) {
        job.model.layers = 4;
        job.pipeline.schedule = schedule_kind(schedule);
      });
    }
    if (text) {
      add(model, "tp=2", "", nothing);
      add(model, "fsdp=2,tp=2,pp=2", "", nothing);
      for (const char* layout : {"tp=2", "cp=2", "fsdp=2,tp=2"}) {
        add(model, layout, "sharded tokens", [](Job& job) {
          job.tensor.sequence_parallel = true;
          job.data.documents = Documents::packed;
        });
      }
      add(model, "dp=2", "dropout, accumulated, scaled", [](Job& job) {
        if (job.model.name == "gpt") job.model.dropout = 0.3;
        job.train.accumulate = 3;
        job.precision.loss_scale = 128;
      });
    }
  }
  return all;
}

class StepOnTheTestDevice : public testing::TestWithParam<Step> {};

TEST_P(StepOnTheTestDevice, NeverWaitsForTheDevice) {
  TempFolder folder;
  Job job = GetParam().job;
  if (!job.data.sources.empty()) job.data.sources = {write_tokens(folder)};
  run_ranks(
      static_cast<int>(job.layout.num_ranks()),
      [&](World& world) {
        at::set_num_threads(1);
        SmallRun run(job, world);
        run.train(0, 1);  // connects, allocates
        const auto batch = run.next_batch();
        world.group().barrier();
        reset_counts(world.rank());
        run.state.before_forward();
        const auto score =
            run.state.model().forward_backward(batch, run.counts_units());
        StepShare share;
        share.score = score;
        const auto sums = sum_over_ranks(share, world);
        const HostCopy numbers({run.state.update_on_device(
            1, true, nullptr, nullptr, must_skip(sums, world.size()))});
        for (const auto& wait : counts(world.rank()).host_waits) {
          ADD_FAILURE() << wait.call << "\n" << wait.stack;
        }
        world.group().barrier();
        guard().synchronizeDevice(static_cast<c10::DeviceIndex>(world.rank()));
      },
      on_test_device());
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

// The choices of a router are sorted, and their rows spread and collected, by
// the device alone. One kernel for all products needs no more.
TEST(OnTheTestDevice, RowsOfExpertsAreSortedWithoutAWait) {
  run_ranks(
      1,
      [&](World& world) {
        const auto experts =
            torch::tensor({{0, 2}, {2, 3}, {3, 2}}, torch::kInt64)
                .to(world.device());
        const auto x = torch::ones({3, 4}).to(world.device());
        const auto weights = torch::ones({3, 2}).to(world.device());
        reset_counts(world.rank());
        const Assignment assignment(experts, 4);
        Exchange exchange(assignment.counts(), world.group(), x, "layer");
        exchange.settle();
        const auto rows =
            exchange.give_back(exchange.send(assignment.spread(x)));
        const auto ends = exchange.counts().ends_on(world.device());
        const auto y = assignment.collect(rows, weights);
        EXPECT_TRUE(counts(world.rank()).host_waits.empty());
        EXPECT_TRUE(
            ends.cpu().equal(torch::tensor({1, 1, 4, 6}, torch::kInt32)));
        EXPECT_TRUE(y.cpu().equal(torch::full({3, 4}, 2.0)));
      },
      on_test_device());
  for (const auto& report : take_reports()) ADD_FAILURE() << report.text;
}

// A product for each expert needs the number of its rows, and so does an
// exchange with other ranks. The host reads both at once, once for each
// mixture, and once more where tokens are dropped. Counting loads reads
// nothing.
TEST(OnTheTestDevice, AMixtureReadsNoMoreThanItsCounts) {
  TempFolder folder;
  const auto tokens = write_tokens(folder);
  for (const char* layout : {"dp=2", "ep=2"}) {
    for (const double capacity : {0.0, 0.6}) {
      for (auto model : {mixture("mixtral"), deepseek()}) {
        SCOPED_TRACE(format("{} {} {}", model.name, layout, capacity));
        model.capacity_factor = capacity;
        Job job = job_of(model, tokens);
        job.layout = parse_layout(layout);
        const bool spread = job.layout.ep == 2;
        const size_t expected = spread && capacity > 0 ? 4 : 2;
        const int64_t experts = job.model.experts;
        run_ranks(
            2,
            [&](World& world) {
              at::set_num_threads(1);
              SmallRun run(job, world);
              run.train(0, 1);
              const auto batch = run.next_batch();
              world.group().barrier();
              reset_counts(world.rank());
              StepShare share;
              share.score =
                  run.state.model().forward_backward(batch, run.counts_units());
              share.expert_counts = run.state.model().expert_counts();
              const int64_t read = counts(world.rank()).copied_to_host_bytes;
              const HostCopy numbers({sum_over_ranks(share, world)});
              const auto waits = counts(world.rank()).host_waits;
              // Numbers that are there already are no wait, so what is read is
              // what two mixtures read: with ep the rows that go and those that
              // come from two ranks.
              EXPECT_LE(waits.size(), expected);
              const int64_t own = even_range(experts, world.rank(), 2).size();
              int64_t numbers_of_one = experts;
              if (spread) numbers_of_one += 2 * own;
              if (spread && capacity > 0) numbers_of_one += experts;
              EXPECT_EQ(read, 2 * 8 * numbers_of_one);
              if (waits.size() > expected) {
                for (const auto& wait : waits) {
                  ADD_FAILURE() << wait.call << "\n" << wait.stack;
                }
              }
              world.group().barrier();
              guard().synchronizeDevice(
                  static_cast<c10::DeviceIndex>(world.rank()));
            },
            on_test_device());
        for (const auto& report : take_reports()) {
          ADD_FAILURE() << report.text;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, StepOnTheTestDevice, testing::ValuesIn(steps()),
    [](const auto& info) { return info.param.name; });

}  // namespace echelon::training_test
