#include "echelon/job/job.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "echelon/job/check_job.h"
#include "echelon/job/compute_dtype.h"
#include "echelon/job/cuda_graphs.h"
#include "echelon/job/pipeline_schedule.h"
#include "echelon/job/resize.h"
#include "echelon/job/run_folder.h"
#include "echelon/options/bind.h"
#include "echelon/text/format.h"
#include "tests/support/error_text.h"
#include "tests/support/temp_folder.h"

namespace echelon::job_test {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class JobTest : public testing::Test {
 protected:
  std::string write(const std::string& text) {
    return temp_.write("job.toml", text);
  }
  Job load(const std::string& text, const Overrides& overrides = {}) {
    return load_job(write(text), overrides);
  }
  // A job that passes, whose run folder is the test's own.
  Job small(const std::string& more = "", const Overrides& overrides = {}) {
    return load(
        "[train]\nsteps = 10\nrun = \"" + (folder_ / "run").string() + "\"\n" +
            more,
        overrides);
  }
  static std::string refused(const Job& job) {
    return error_text([&] { make_run_folder(job); });
  }

  TempFolder temp_;
  const fs::path folder_ = temp_.path();
};

TEST_F(JobTest, TheLayoutFlagReplacesTheDegreesAlone) {
  const Job job = load(
      "[layout]\ndp = 4\nmicrobatches = 6\nschedule = \"gpipe\"\n",
      {.layout = "pp=2"});
  EXPECT_EQ(job.layout.dp_replicate, 1);
  EXPECT_EQ(job.layout.pp, 2);
  EXPECT_EQ(job.pipeline.microbatches, 6);
  EXPECT_EQ(job.pipeline.schedule, ScheduleKind::gpipe);
}

// --set of steps replaces epochs of the file, and the reverse.
TEST_F(JobTest, ALengthFromTheCommandLineReplacesTheFiles) {
  const Job steps =
      load("[train]\nepochs = 20\n", {.set = {"train.steps=100"}});
  EXPECT_EQ(steps.train.steps, 100);
  EXPECT_EQ(steps.train.epochs, 0);
  const Job epochs =
      load("[train]\nsteps = 100\n", {.set = {"train.epochs=2"}});
  EXPECT_EQ(epochs.train.steps, 0);
  EXPECT_EQ(epochs.train.epochs, 2);
  // 0 is no length, and two lengths in one place contradict each other.
  EXPECT_EQ(
      load("[train]\nepochs = 3\n", {.set = {"train.steps=0"}}).train.epochs,
      3);
  EXPECT_THROW(
      check_job(load("[train]\nepochs = 2\nsteps = 3\n"), 1), ConfigError);
  EXPECT_THROW(
      check_job(
          load(
              "[train]\nsteps = 1\n",
              {.set = {"train.epochs=2", "train.steps=3"}}),
          1),
      ConfigError);
}

// Whoever writes another framework's name of a key is told ours, from whatever
// table.
TEST_F(JobTest, NamesOfOtherFrameworksLeadToOurKeys) {
  const auto ours = describe({});
  const auto is_key = [&](std::string_view key) {
    return std::ranges::any_of(ours.entries(), [&](const auto& entry) {
      return entry.table + "." + entry.key == key;
    });
  };
  std::set<std::string> seen;
  for (const auto& row : other_names()) {
    std::istringstream names{std::string(row.names)};
    for (std::string name; names >> name;) {
      if (row.key.empty()) {
        EXPECT_TRUE(seen.insert(name).second) << name << " is there twice";
        EXPECT_THAT(
            error_text([&] { load("", {.set = {"train." + name + "=1"}}); }),
            HasSubstr("unknown key; " + std::string(row.remark)));
        continue;
      }
      if (row.key.find('.') == std::string_view::npos) {
        EXPECT_FALSE(ours.help(std::string(row.key)).empty()) << row.key;
        continue;
      }
      EXPECT_TRUE(is_key(row.key)) << row.key;
      EXPECT_TRUE(seen.insert(name).second) << name << " is there twice";
      const bool has_table = name.find('.') != std::string::npos;
      const std::string place = has_table ? name : "comm." + name;
      EXPECT_FALSE(is_key(place)) << name;
      const bool same_table =
          row.key.starts_with(place.substr(0, place.find('.') + 1));
      const std::string key(
          same_table ? row.key.substr(row.key.find('.') + 1) : row.key);
      EXPECT_THAT(
          error_text([&] { load("", {.set = {place + "=1"}}); }),
          HasSubstr(
              std::string("unknown key; did you mean ") +
              (same_table ? "\"" : "") + key))
          << name;
    }
  }
  EXPECT_GT(seen.size(), 250u);
  const auto meant = [&](const std::string& name) {
    return error_text([&] { load("", {.set = {name + "=1"}}); });
  };
  // Where a name means less or more than ours, the message says how.
  EXPECT_THAT(
      meant("train.devices"), HasSubstr("layout.dp or fsdp, the number"));
  EXPECT_THAT(
      meant("comm.num_distributed_optimizer_instances"),
      HasSubstr("layout.dp, the replicas of what fsdp shards"));
  EXPECT_THAT(
      meant("comm.lr_decay_iters"),
      HasSubstr("train.steps, at which the decay ends"));
}

// A key of the pipeline is no degree: -n still says how many ranks there are.
TEST_F(JobTest, RanksAreDataParallelWhenNoDegreeIsSet) {
  const Job job = load("[layout]\nmicrobatches = 6\n", {.num_ranks = 3});
  EXPECT_EQ(job.layout.dp_replicate, 3);
}

// Its layers are known to no check, whatever the layout.
TEST_F(JobTest, LayersOfAProgramNeedThatProgram) {
  for (const int ranks : {1, 2}) {
    const Job job = small(
        "[model]\nname = \"own\"\n", {.layout = "pp=" + std::to_string(ranks)});
    EXPECT_THAT(
        error_text([&] { check_job(job, ranks); }),
        HasSubstr("start that program"));
  }
}

TEST_F(JobTest, MicrobatchesAreTheMostThatDivideTheBatch) {
  const auto count = [](int64_t batch, int64_t dp, int64_t pp,
                        const std::string& schedule = "1f1b") {
    Job job;
    job.train.batch = batch;
    job.layout.dp_replicate = dp;
    job.layout.pp = pp;
    job.pipeline.schedule = schedule_kind(schedule);
    return microbatches_of(job);
  };
  EXPECT_EQ(count(64, 1, 1), 1);
  EXPECT_EQ(count(64, 1, 2), 8);
  EXPECT_EQ(count(64, 1, 3), 8);  // not 12
  EXPECT_EQ(count(60, 2, 2), 6);  // 30 for each pipeline
  EXPECT_EQ(count(64, 1, 4), 16);
  EXPECT_EQ(count(7, 1, 2), 7);
  EXPECT_EQ(count(64, 1, 4, "dualpipev"), 16);
  Job job;
  job.layout.pp = 2;
  job.pipeline.microbatches = 5;
  EXPECT_EQ(microbatches_of(job), 5);
}

TEST_F(JobTest, ReadsEveryTable) {
  const Job job = load(
      "[model]\nname = \"mlp\"\nhidden = [32]\n[data]\nname = \"dummy\"\n"
      "samples = 128\n[layout]\ndp = 2\n[optimizer]\nname = \"sgd\"\n"
      "momentum = 0.9\n[train]\nepochs = 2\nbatch = 32\n[comm]\n"
      "backend = \"gloo\"\ntimeout = \"30s\"\n");
  EXPECT_EQ(job.model.name, "mlp");
  EXPECT_EQ(job.data.samples, 128);
  EXPECT_EQ(job.layout.dp_replicate, 2);
  EXPECT_EQ(job.optimizer.momentum, 0.9);
  EXPECT_EQ(job.train.epochs, 2);
  EXPECT_EQ(job.comm.backend, BackendKind::gloo);
  EXPECT_EQ(job.comm.timeout, std::chrono::seconds(30));
}

TEST_F(JobTest, WritesWhatItReadsBack) {
  Job job;
  job.model.weights = "a \"b\".safetensors";
  job.data.mean = {0.1, 0.2, 0.3};
  job.layout.dp_replicate = 3;
  job.optimizer.learning_rate = 1.0 / 3;
  job.train.rank_batch = {1, 2, 3};
  job.comm.timeout = std::chrono::milliseconds(1234);
  const Job again = load(to_toml(job));
  EXPECT_EQ(to_toml(again), to_toml(job));
  EXPECT_EQ(again.optimizer.learning_rate, 1.0 / 3);
  EXPECT_EQ(again.train.rank_batch, job.train.rank_batch);
  EXPECT_EQ(again.model.weights, job.model.weights);
}

TEST_F(JobTest, NumRanksIsTheDegreeWhenNoneIsGiven) {
  EXPECT_EQ(small("", {.num_ranks = 4}).layout.dp_replicate, 4);
  EXPECT_EQ(
      small("[layout]\ndp = 2\n", {.num_ranks = 4}).layout.dp_replicate, 2);
  const Job job = small("", {.num_ranks = 4});
  EXPECT_EQ(job.document.entry("layout.dp").place.text(), "-n 4");
}

TEST_F(JobTest, LayoutFlagReplacesTheTable) {
  const Job job =
      small("[layout]\ndp_replicate = 2\ntp = 2\n", {.layout = "dp=3"});
  EXPECT_EQ(job.layout, (Layout{.dp_replicate = 3}));
  EXPECT_THAT(
      error_text([&] { small("", {.layout = "dq=3"}); }),
      HasSubstr("--layout dq=3"));
}

TEST_F(JobTest, FlagsSaySo) {
  const Job job = small(
      "", {.set = {"train.batch=32"}, .ranks = "threads", .overwrite = true});
  EXPECT_EQ(job.train.ranks, RankKind::threads);
  EXPECT_TRUE(job.train.overwrite);
  EXPECT_EQ(
      job.document.entry("train.batch").place.text(), "--set train.batch=32");
  EXPECT_EQ(job.document.entry("train.ranks").place.text(), "--ranks threads");
  EXPECT_EQ(job.document.entry("train.overwrite").place.text(), "--overwrite");
  EXPECT_EQ(
      error_text([&] { small("", {.ranks = "tasks"}); }),
      "--ranks tasks: [train] ranks = \"tasks\": must be \"processes\" or "
      "\"threads\"");
}

TEST_F(JobTest, FactsOfAJobThatPasses) {
  const auto facts = check_job(small(), 1);
  EXPECT_EQ(facts.data.num_samples, 1797);
  EXPECT_EQ(facts.classes, 10);
  EXPECT_EQ(facts.steps, 10);
  EXPECT_THAT(facts.warnings, IsEmpty());
  // conv1 16*1*9+16, conv2 32*16*9+32, fc 10*32*2*2+10
  EXPECT_EQ(facts.num_parameters, 160 + 4640 + 1290);
  EXPECT_EQ(facts.num_trained, facts.num_parameters);
  EXPECT_EQ(facts.num_saved, facts.num_parameters);
}

TEST_F(JobTest, FrozenParametersAreSavedAndDoNotTrain) {
  Job job = small();
  job.model.freeze = {"conv?.*"};
  const auto facts = check_job(job, 1);
  EXPECT_EQ(facts.num_parameters, 160 + 4640 + 1290);
  EXPECT_EQ(facts.num_trained, 1290);
  EXPECT_EQ(facts.num_saved, facts.num_parameters);
}

TEST_F(JobTest, ChecksAJobOfAProgram) {
  Job job;
  job.train.steps = 5;
  EXPECT_EQ(check_job(job, 1).steps, 5);
  job.train.batch = 63;
  job.layout.dp_replicate = 2;
  EXPECT_EQ(
      error_text([&] { check_job(job, 2); }),
      "[train] batch = 63: does not divide by 2 ranks; 62 or 64 does");
}

TEST_F(JobTest, TheLayoutOfOtherRanksChangesLeast) {
  const auto layout = [&](const char* before, int64_t ranks, int64_t batch,
                          const char* model = "gpt") {
    Job job = small(
        format("batch = {}\n[model]\nname = \"{}\"\n", batch, model) +
        (std::string(model) == "gpt"
             ? "hidden_size = 48\nheads = 12\nlayers = 4\nmax_positions = 16\n"
               "[data]\n"
               "name = \"text\"\nsources = [\"" +
                   temp_.write("text.txt", std::string(4096, 'x')) +
                   "\"]\nsequence = 16\n"
             : ""));
    job.layout = parse_layout(before);
    const auto facts = check_job(job, job.layout.num_ranks());
    return to_string(layout_on(job, ranks, facts.data));
  };
  // Data parallelism alone, where the other axes leave room for it.
  EXPECT_EQ(layout("dp=4", 3, 24), "dp=3");
  EXPECT_EQ(layout("fsdp=4", 2, 24), "fsdp=2");
  EXPECT_EQ(layout("fsdp=4", 1, 24), "dp=1");
  EXPECT_EQ(layout("dp=2,fsdp=2", 6, 24), "dp=3,fsdp=2");
  EXPECT_EQ(layout("dp=2,fsdp=2", 3, 24), "fsdp=3");
  EXPECT_EQ(layout("fsdp=2,tp=2", 6, 24), "fsdp=3,tp=2");
  EXPECT_EQ(layout("dp=1", 2, 24), "dp=2");
  // One axis of the model, and the one that changes less.
  EXPECT_EQ(layout("dp=2,tp=2", 3, 24), "tp=3");
  EXPECT_EQ(layout("pp=2,tp=2", 6, 24), "pp=2,tp=3");
  // 25 samples leave no room for data parallelism.
  EXPECT_EQ(layout("tp=4", 2, 25), "tp=2");
  EXPECT_THAT(
      error_text([&] { layout("dp=4", 5, 24, "simple_cnn"); }),
      HasAll(
          "no layout of 5 ranks fits; dp=5: ", "does not divide by 5 ranks",
          "\n4 and 6 fit"));
}

TEST_F(JobTest, ErrorsOfTextsSayWhoSetTheKey) {
  ::setenv("ECHELON_CACHE", (folder_ / "cache").c_str(), 1);
  const std::string text = (folder_ / "text.txt").string();
  std::ofstream(text) << std::string(1000, 'a');
  const std::string model =
      "[model]\nname = \"gpt\"\nlayers = 1\nhidden_size = 8\nheads = 2\n"
      "max_positions = 8\n";
  const auto error = [&](const std::string& data) {
    const Job job =
        small("batch = 4\n" + model + "[data]\nname = \"text\"\n" + data);
    const std::string path = (folder_ / "job.toml").string();
    const std::string message = error_text([&] { check_job(job, 1); });
    return message.rfind(path + ":", 0) == 0 ? message.substr(path.size() + 1)
                                             : message;
  };
  const std::string good = "sequence = 8\nsources = [\"" + text + "\"]\n";
  EXPECT_EQ(error(good), "no error");
  const std::pair<std::string, const char*> cases[] = {
      {"sources = [\"/none.txt\"]", "13:11: /none.txt: cannot be read"},
      {good + "weights = [1, 2]", "15:11: [data] weights has 2 numbers"},
      {good + "tokenizer = \"words\"", "15:13: [data] tokenizer=\"words\""},
      {good + "tokenizer = \"/none.json\"",
       "15:13: /none.json: cannot be read"},
      {"sequence = 8", "12:8: [data] name=\"text\" needs path or sources"}};
  for (const auto& [data, begin] : cases) {
    EXPECT_THAT(error(data), testing::StartsWith(begin));
  }
  EXPECT_THAT(
      error(good + "holdout_path = \"/other.txt\""),
      HasSubstr("data] holdout_path"));
}

TEST_F(JobTest, WarnsOfWhatHasNoEffect) {
  const Job job = small("[optimizer]\nmomentum = 0.9\nbeta1 = 0.8\n");
  EXPECT_THAT(
      find_unused_settings(job),
      ElementsAre(write("").append(":5:12: [optimizer] momentum = 0.9: has no "
                                   "effect with optimizer \"adamw\"")));
}

TEST_F(JobTest, RegisteredBuffersAreForShardsOnGpus) {
  Job job;
  job.shard.registered_buffers = true;
  const auto warnings = [&] { return find_unused_settings(job); };
  const std::string none = "[shard] registered_buffers = true: has no effect ";
  EXPECT_THAT(
      warnings(), ElementsAre(HasSubstr(
                      none + "without sharded data parallelism (fsdp is 1)")));
  job.layout.dp_shard = 2;
  EXPECT_THAT(warnings(), IsEmpty());  // the ranks may find GPUs
  job.comm.device = DeviceKind::cpu;
  EXPECT_THAT(warnings(), ElementsAre(HasSubstr(none + "on CPUs")));
}

// Ranks of cp shard parameters in 16 bits.
TEST_F(JobTest, StagesOfShardingAreUsedWhereContextParallelRanksShard) {
  Job job;
  job.shard.stage = 2;
  const auto has_no_effect = [&](const char* why) {
    EXPECT_THAT(
        find_unused_settings(job),
        ElementsAre(
            HasSubstr("[shard] stage = 2: has no effect " + std::string(why))));
  };
  has_no_effect("without sharded data parallelism (fsdp is 1)");
  job.layout.cp = 2;
  has_no_effect("where parameters are not sharded (fsdp is 1)");
  job.precision.compute = ComputeDtype::bf16;
  EXPECT_THAT(find_unused_settings(job), IsEmpty());
}

// float64, a program's own layers and what 16 bits are not for keep their dtype
// where a configuration does not ask for another.
TEST_F(JobTest, ComputesInBf16OnGpusByDefault) {
  const auto chosen = [](const Job& job, bool gpus = true) {
    return with_compute_dtype(job, gpus).precision.compute;
  };
  Job job;
  EXPECT_EQ(chosen(job), ComputeDtype::bf16);
  EXPECT_EQ(chosen(job, false), ComputeDtype::same);
  Job other = job;
  other.model.dtype = ModelDtype::float64;
  EXPECT_EQ(chosen(other), ComputeDtype::same);
  other = job;
  other.model.name = kOwnModel;
  EXPECT_EQ(chosen(other), ComputeDtype::same);
  other = job;
  other.model.devices = {"cuda:0", "cuda:1"};
  EXPECT_EQ(chosen(other), ComputeDtype::same);
  other = job;
  other.train.compress = Compression::powersgd;
  EXPECT_EQ(chosen(other), ComputeDtype::same);
  for (const auto given :
       {ComputeDtype::same, ComputeDtype::tf32, ComputeDtype::fp16}) {
    job.precision.compute = given;
    EXPECT_EQ(chosen(job), given);
    EXPECT_EQ(chosen(job, false), given);
  }
  job.precision.compute = ComputeDtype::automatic;
  cluster::Device device;
  EXPECT_EQ(
      with_compute_dtype(job, device).precision.compute, ComputeDtype::same);
  device.peak_flops_per_second.fill(1e12);
  EXPECT_EQ(
      with_compute_dtype(job, device).precision.compute, ComputeDtype::bf16);
  device.processor = true;
  EXPECT_EQ(
      with_compute_dtype(job, device).precision.compute, ComputeDtype::same);
}

// A float32 model in float32 tensors: nothing is sharded for it.
TEST_F(JobTest, Tf32IsForFloat32OnGpus) {
  const Job job = small("[precision]\ncompute = \"tf32\"\n");
  EXPECT_FALSE(shards_parameters(job));
  EXPECT_THAT(check_job(job, 1).warnings, IsEmpty());
  cluster::Device processor;
  processor.processor = true;
  EXPECT_THAT(
      error_text([&] { with_compute_dtype(job, processor); }),
      HasSubstr("[precision] compute = \"tf32\": is for the matrix units of "
                "GPUs, and "
                "the ranks are on CPUs; set compute = \"same\""));
  Job made;  // by a program
  made.precision.compute = ComputeDtype::tf32;
  EXPECT_THAT(
      error_text([&] { check_compute_on_processor(made); }),
      HasSubstr("set compute = \"same\""));
  const Job wide =
      small("[model]\ndtype = \"float64\"\n[precision]\ncompute = \"tf32\"\n");
  EXPECT_THAT(
      error_text([&] { check_job(wide, 1); }),
      HasSubstr("would be rounded to it in each layer"));
}

// bf16 layers, whose parameters are sharded as those of bf16 are.
TEST_F(JobTest, Fp8IsForLanguageModelsOnGpus) {
  const std::string compute = "[precision]\ncompute = \"fp8\"\n";
  const Job image = small(compute);
  EXPECT_THAT(
      error_text([&] { check_job(image, 1); }),
      HasSubstr("[precision] compute = \"fp8\": is for the linear layers of "
                "language models; set compute = \"bf16\""));
  EXPECT_THAT(
      error_text([&] { check_compute_on_processor(image); }),
      HasSubstr("and the ranks are on CPUs; set compute = \"bf16\""));
  Job text;
  text.model = {.name = "gpt2"};
  text.precision.compute = ComputeDtype::fp8;
  EXPECT_THAT(
      error_text([&] { check_compute_on_gpu(text, 80); }),
      HasSubstr("[precision] compute = \"fp8\": needs a GPU of compute "
                "capability 8.9 or newer, and this one has 8.0; set compute = "
                "\"bf16\""));
  check_compute_on_gpu(text, 89);
  check_compute_on_gpu(text, 0);
  text.precision.compute = ComputeDtype::bf16;
  check_compute_on_gpu(text, 80);
  text.precision.compute = ComputeDtype::fp8;
  EXPECT_TRUE(shards_parameters(text));
}

TEST_F(JobTest, StepsAreCapturedWhereTheHostTakesNoPart) {
  const auto text = [] {
    Job job;
    job.model = {.name = "gpt2"};
    job.data.name = DataKind::dummy;
    return job;
  };
  const std::vector<std::pair<std::function<void(Job&)>, std::string>> cases = {
      {[](Job& job) { job.model.name = "mixtral"; }, "each expert gets"},
      {[](Job& job) {
         job.model.devices = {"cuda:0", "cuda:1"};
       },
       "[model] devices names several"},
      {[](Job& job) { job.memory.offload = Offload::optimizer; },
       "[memory] keeps"},
      {[](Job& job) { job.memory.activations = Activations::offload; },
       "[memory] keeps"},
      {[](Job& job) { job.train.compress = Compression::powersgd; },
       "powersgd has new tensors"},
      {[](Job& job) { job.train.find_unused_parameters = true; },
       "which parameters were used"},
      {[](Job& job) {
         job.layout.cp = 2;
         job.data.documents = Documents::respected;
       },
       "several documents"},
      {[](Job& job) {
         job.layout.tp = 2;
         job.tensor.sequence_parallel = true;
         job.data.documents = Documents::respected;
       },
       "several documents"},
      {[](Job& job) { job.train.rebalance_every = 20; }, "rebalance_every"},
      {[](Job& job) {
         job.layout.dp_replicate = 2;
         job.data.name = DataKind::images;
         job.data.bad_image = BadImage::skip;
       },
       "ranks skip broken images"},
      {[](Job& job) { job.comm.check_collectives = true; },
       "compares each call"}};
  for (const auto& [change, why] : cases) {
    Job job = text();
    change(job);
    EXPECT_THAT(why_not_captured(job), HasSubstr(why));
    EXPECT_FALSE(captures_steps(job)) << why;
    job.train.cuda_graphs = CudaGraphs::on;
    EXPECT_TRUE(captures_steps(job));  // or refused, which is not asked here
  }
  Job job = text();
  EXPECT_TRUE(captures_steps(job));
  job.layout.tp = 2;
  job.tensor.sequence_parallel = true;
  EXPECT_TRUE(captures_steps(job));
  job.layout.tp = 1;
  job.data.documents = Documents::respected;
  EXPECT_TRUE(captures_steps(job));
  job.train.cuda_graphs = CudaGraphs::off;
  EXPECT_FALSE(captures_steps(job));
  // Only its author knows what a program's own layers do.
  job.model.name = kOwnModel;
  job.train.cuda_graphs = CudaGraphs::automatic;
  EXPECT_FALSE(captures_steps(job));
  job.train.cuda_graphs = CudaGraphs::on;
  EXPECT_TRUE(captures_steps(job));

  const auto bad = load(
      "[train]\nsteps = 10\ncuda_graphs = \"on\"\n"
      "find_unused_parameters = true\n");
  EXPECT_THAT(
      error_text([&] { check_job(bad, 1); }),
      HasSubstr("cuda_graphs = \"on\": this job's steps cannot be "
                "captured: the host reads which parameters were used; set "
                "cuda_graphs = \"auto\""));
}

// Matmuls are reduced in chunks even where tokens are not sharded.
TEST_F(JobTest, PiecesAreForTensorParallelModelsWithProducts) {
  Job job;
  job.tensor.overlap_chunks = 2;
  EXPECT_THAT(
      find_unused_settings(job),
      ElementsAre(HasSubstr("without tensor parallelism")));
  job.layout.tp = 2;
  EXPECT_THAT(find_unused_settings(job), ElementsAre(HasSubstr("simple_cnn")));
  job.model.name = "mlp";
  EXPECT_THAT(find_unused_settings(job), IsEmpty());
}

TEST_F(JobTest, ARunThatSavesNothingUploadsNothing) {
  const auto warnings = [&](const std::string& more) {
    return find_unused_settings(
        small("[checkpoint]\nremote = \"s3://models/a\"\n" + more));
  };
  EXPECT_THAT(
      warnings("at_end = false\n"),
      ElementsAre(
          HasSubstr("[checkpoint] remote = \"s3://models/a\": nothing is "
                    "uploaded there")));
  EXPECT_THAT(warnings("at_end = false\nevery_steps = 5\n"), IsEmpty());
  EXPECT_THAT(warnings(""), IsEmpty());
}

TEST_F(JobTest, PrecisionThatHasNoEffect) {
  const auto warnings = [&](const std::string& more) {
    std::string all;
    for (const auto& line : find_unused_settings(small(more))) {
      all += line.substr(line.find("[precision]")) + "\n";
    }
    return all;
  };
  EXPECT_EQ(
      warnings("[precision]\ncompute = \"bf16\"\ninitial_loss_scale = 8\n"
               "loss_scale_growth = 9\nmax_overflows = 7\n"),
      "[precision] initial_loss_scale = 8.0: has no effect with compute "
      "\"bf16\"\n"
      "[precision] loss_scale_growth = 9: has no effect with compute \"bf16\"\n"
      "[precision] max_overflows = 7: has no effect with compute \"bf16\"\n");
  EXPECT_EQ(
      warnings("[precision]\ncompute = \"fp16\"\ninitial_loss_scale = 8\n"
               "loss_scale = 4\nmax_overflows = 7\n"),
      "[precision] initial_loss_scale = 8.0: has no effect with a loss_scale "
      "that is fixed\n");
  EXPECT_EQ(
      warnings("[precision]\ncompute = \"fp16\"\nmax_overflows = 7\n"), "");
  EXPECT_EQ(
      warnings("[precision]\nreduce = \"bf16\"\n"),
      "[precision] reduce = \"bf16\": has no effect with 1 data-parallel "
      "rank\n");
  EXPECT_EQ(warnings("[precision]\nreduce = \"bf16\"\n[layout]\ndp = 2\n"), "");
  EXPECT_EQ(
      warnings("[precision]\nreduce = \"float32\"\n[layout]\ndp = 2\n"),
      "[precision] reduce = \"float32\": has no effect where gradients are in "
      "float32 already\n");
  EXPECT_EQ(
      warnings("[precision]\ncompute = \"bf16\"\nreduce = \"float32\"\n"
               "[layout]\npp = 2\n"),
      "");
}

TEST_F(JobTest, DevicesThatRanksCannotHave) {
  const auto error = [&](const std::string& more, int64_t ranks = 1) {
    const Job job = small("batch = 64\n" + more);
    return error_text([&] { check_job(job, ranks); });
  };
  EXPECT_THAT(
      error(
          "[model]\ndevices = [\"cuda:0\", \"cuda:1\"]\n[layout]\ndp = 2\n", 2),
      HasAll(":6:11: [model] devices", "2 ranks of dp", "the same GPUs"));
  EXPECT_THAT(
      error("[comm]\ndevice = \"cpu\"\nbackend = \"nccl\"\n"),
      HasSubstr("[comm] backend = \"nccl\": is for GPUs"));
  EXPECT_THAT(
      error("[comm]\ndevice = \"cuda\"\nbackend = \"gloo\"\n"),
      HasSubstr("[comm] device = \"cuda\": GPUs need backend"));
  EXPECT_EQ(error("[comm]\ndevice = \"cpu\"\n"), "no error");
  // The device of Echelon's own tests is taken, and named nowhere.
  EXPECT_EQ(error("[comm]\ndevice = \"test\"\n"), "no error");
}

TEST_F(JobTest, PrecisionThatContradicts) {
  const auto error = [&](const std::string& more, int64_t ranks = 1) {
    const Job job = small("batch = 64\n" + more);
    return error_text([&] { check_job(job, ranks); });
  };
  EXPECT_THAT(
      error("[model]\ndtype = \"float64\"\n[precision]\ncompute = \"fp16\"\n"),
      HasAll(
          "job.toml:8:11: [precision] compute = \"fp16\": ",
          "dtype = \"float64\""));
  EXPECT_THAT(
      error("[model]\ndevices = [\"cpu\", \"cpu\"]\n[precision]\n"
            "compute = \"bf16\"\n"),
      HasSubstr("is for ranks that drive one device"));
  EXPECT_THAT(
      error(
          "compress = \"bf16\"\n[layout]\ndp = 2\n[precision]\n"
          "compute = \"bf16\"\n",
          2),
      HasAll(":5:12: [train] compress", "[precision] reduce"));
  EXPECT_EQ(
      error("[precision]\ncompute = \"fp16\"\nreduce = \"bf16\"\n"),
      "no error");
}

TEST_F(JobTest, AResolvedConfigurationDoesNotWarn) {
  EXPECT_THAT(find_unused_settings(load(to_toml(small()))), IsEmpty());
}

TEST_F(JobTest, ARunsNameMayHaveItsSettings) {
  const auto name = [&](const std::string& run, std::vector<std::string> set) {
    return load("[train]\nsteps = 1\nrun = \"" + run + "\"\n", {.set = set})
        .train.run;
  };
  EXPECT_EQ(name("runs/{name}", {}), "runs/job");
  EXPECT_EQ(name("runs/{name}-{set}", {}), "runs/job");
  EXPECT_EQ(
      name(
          "runs/{set}",
          {"optimizer.learning_rate=0.1", "train.seed=2", "data.path=a/b"}),
      "runs/learning_rate=0.1,seed=2,path=a-b");
  EXPECT_EQ(
      load(
          "[train]\nrun = \"runs/{name}-{set}\"\n",
          {.set = {"train.steps=3"}, .layout = "fsdp=2,tp=2,order=tp:fsdp"})
          .train.run,
      "runs/job-fsdp=2,tp=2,order=tp-fsdp,steps=3");
  EXPECT_EQ(name("runs/x", {"train.run=runs/{name}_{set}"}), "runs/job");
  EXPECT_THAT(name("{time}", {}), testing::MatchesRegex("20[0-9]{6}-[0-9]{6}"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { name("runs/{run}", {}); }),
      HasSubstr("\"{run}\" is none of {name}, {time} and {set}"));
  EXPECT_THAT(
      error_text<ConfigError>([&] { name("runs/{set}", {}); }),
      HasSubstr("put {name} in front of {set}"));
}

TEST_F(JobTest, ChangedSettingsHaveBothValues) {
  const auto changes = changed_settings(
      "[a]\nx = 1\ny = 2\n[b]\nx = 3\n", "[a]\nx = 1\n[b]\nx = 4\nz = 1\n");
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[0].table + "." + changes[0].key, "a.y");
  EXPECT_EQ(changes[0].before, "not set");
  EXPECT_EQ(changes[1].table + "." + changes[1].key, "b.x");
  EXPECT_EQ(changes[1].now, "3");
  EXPECT_EQ(changes[1].before, "4");
}

TEST_F(JobTest, RunFolderIsMadeOnce) {
  const Job job = small();
  const std::string path = make_run_folder(job).configuration;
  EXPECT_EQ(to_toml(load_job(path)), to_toml(job));
  std::ofstream(folder_ / "run" / "keep") << "x";
  const std::string never = "[checkpoint]\nresume = \"never\"\n";
  for (const auto& other :
       {small("", {.set = {"train.steps=11"}}), small(never),
        small("", {.layout = "dp=2"})}) {
    EXPECT_THAT(
        refused(other),
        HasSubstr("exists and has no checkpoints to resume from; --overwrite "
                  "replaces it"));
  }
  EXPECT_TRUE(fs::exists(folder_ / "run" / "keep"));
  EXPECT_EQ(to_toml(load_job(path)), to_toml(job));
}

TEST_F(JobTest, ARunThatWasKilledBeforeItsFirstCheckpointBeginsAgain) {
  make_run_folder(small());
  std::ofstream(folder_ / "run" / "keep") << "x";
  EXPECT_TRUE(check_run_folder(small()));
  make_run_folder(small());
  EXPECT_TRUE(fs::exists(folder_ / "run" / "keep"));
  // One that was to save nothing may have been done.
  const std::string none = "[checkpoint]\nat_end = false\n";
  make_run_folder(small(none, {.overwrite = true}));
  EXPECT_THAT(
      error_text([&] { check_run_folder(small(none)); }), HasSubstr("exists"));
}

TEST_F(JobTest, OverwriteReplacesARunAndNothingElse) {
  make_run_folder(small());
  const fs::path run = folder_ / "run";
  const std::vector<std::string> of_a_run = {
      "metrics.jsonl",
      "damaged-metrics.jsonl",
      "damaged-metrics.jsonl-2",
      "report.html",
      "timeline.json",
      "layers.json",
      "log/rank-0.log",
      "checkpoints/LATEST",
      "checkpoints/LOCK",
      "checkpoints/last.safetensors",
      "checkpoints/step-00000004/manifest.json",
      "checkpoints/step-00000002/rank-00000.safetensors",
      "checkpoints/.step-00000006.partial/rank-00000.safetensors",
      "checkpoints/damaged-step-00000001/manifest.json"};
  const std::vector<std::string> others = {
      "thesis.txt", "log/notes", "checkpoints/notes", "src/model.cpp"};
  for (const auto& names : {of_a_run, others}) {
    for (const auto& name : names) {
      fs::create_directories((run / name).parent_path());
      std::ofstream(run / name) << "x";
    }
  }
  const std::string path =
      make_run_folder(small("", {.overwrite = true})).configuration;
  for (const auto& name : of_a_run)
    EXPECT_FALSE(fs::exists(run / name)) << name;
  for (const auto& name : others) EXPECT_TRUE(fs::exists(run / name)) << name;
  EXPECT_FALSE(load_job(path).train.overwrite);
  EXPECT_TRUE(load_job(path).train.run == run);

  fs::remove(folder_ / "run" / "config.toml");
  std::ofstream(folder_ / "run" / "mine") << "x";
  EXPECT_THAT(
      refused(small("", {.overwrite = true})), HasSubstr("it is left alone"));
  EXPECT_TRUE(fs::exists(folder_ / "run" / "mine"));
}

// Any folder may hold a file called config.toml.
TEST_F(JobTest, OverwriteLeavesAConfigurationThatNoRunWrote) {
  const fs::path run = folder_ / "run";
  const std::string path = make_run_folder(small()).configuration;
  const std::string written = read_file(path);
  std::ofstream(path, std::ios::app) << "# mine\n";
  std::ofstream(run / "metrics.jsonl") << "x";
  for (const bool overwrite : {false, true}) {
    EXPECT_THAT(
        refused(small("", {.overwrite = overwrite})),
        HasAll(
            "a config.toml that this version's runs did not write",
            "name another one"));
  }
  // Also when it is what the job is started with.
  for (const bool overwrite : {false, true}) {
    EXPECT_THAT(
        refused(load_job(path, {.overwrite = overwrite})),
        HasSubstr("did not write"));
  }
  EXPECT_TRUE(fs::exists(run / "metrics.jsonl"));
  EXPECT_THAT(read_file(path), testing::EndsWith("# mine\n"));
  // The configuration of a run may start it again.
  std::ofstream(path) << written;
  make_run_folder(load_job(path, {.overwrite = true}));
  EXPECT_FALSE(fs::exists(run / "metrics.jsonl"));
}

// Writes a folder that readers take for a checkpoint, without a model.
void leave_checkpoint(const fs::path& run, const std::string& step) {
  fs::create_directories(run / "checkpoints" / step);
  std::ofstream(run / "checkpoints" / step / "manifest.json") << "{}";
}

TEST_F(JobTest, OneProcessHasARunsFolder) {
  // Also a run that saves no checkpoints.
  const std::string none = "[checkpoint]\nat_end = false\n";
  const fs::path run = folder_ / "run";
  RunFolder folder = make_run_folder(small(none));
  std::ofstream(run / "metrics.jsonl") << "x";
  EXPECT_THAT(
      error_text<CheckpointError>(
          [&] { make_run_folder(small(none, {.overwrite = true})); }),
      HasAll(
          run.string() + ": process " + std::to_string(::getpid()),
          "writes here"));
  EXPECT_TRUE(fs::exists(run / "metrics.jsonl"));
  folder.lock.reset();
  make_run_folder(small(none, {.overwrite = true}));
  EXPECT_FALSE(fs::exists(run / "metrics.jsonl"));
}

// Two runs start at the same time, and the first is done when the second gets
// the lock.
TEST_F(JobTest, WhatIsThereIsReadUnderTheLock) {
  const fs::path run = folder_ / "run";
  const Job job = small();
  const std::string first = to_toml(small("", {.set = {"train.steps=11"}}));
  { const CheckpointLock lock(run); }
  // Keeps others from the lock, but is no writer.
  const int file = ::open((run / "LOCK").c_str(), O_RDONLY);
  ASSERT_EQ(::flock(file, LOCK_SH), 0);
  std::string error;
  std::thread second([&] { error = refused(job); });
  // The second run looks and waits in this time, or finds the first one's files
  // later.
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  std::ofstream(run / "config.toml") << first;
  ::close(file);
  second.join();
  EXPECT_THAT(error, HasSubstr("exists and has no checkpoints"));
  EXPECT_EQ(read_file(run / "config.toml"), first);
}

TEST_F(JobTest, AnEditedConfigurationOfARunResumesIt) {
  const std::string path = make_run_folder(small()).configuration;
  leave_checkpoint(folder_ / "run", "step-00000004");
  std::ofstream(path, std::ios::app) << "# more steps\n";
  EXPECT_TRUE(check_run_folder(load_job(path)));
}

TEST_F(JobTest, ARunThatBeganWithAnothersCanBeQueuedAgain) {
  const fs::path run = folder_ / "run";
  const fs::path other = folder_ / "other";
  leave_checkpoint(other, "step-00000004");
  const Job job = small("", {.resume = other.string()});
  EXPECT_FALSE(check_run_folder(job));
  make_run_folder(job);
  leave_checkpoint(run, "step-00000006");
  std::ofstream(run / "old") << "x";
  EXPECT_TRUE(check_run_folder(job));
  fs::remove_all(other);
  EXPECT_TRUE(check_run_folder(job)) << "it has what it needs";
  make_run_folder(job);
  EXPECT_TRUE(fs::exists(run / "old"));
  EXPECT_TRUE(fs::exists(run / "checkpoints/step-00000006"));
  // Anew it needs the other one.
  EXPECT_THAT(
      refused(small("", {.overwrite = true, .resume = other.string()})),
      HasSubstr("there is no such folder"));
  EXPECT_TRUE(fs::exists(run / "old"));
}

TEST_F(JobTest, OneOfTheRunsOwnIsTheNewestOrRefused) {
  const fs::path run = folder_ / "run";
  make_run_folder(small());
  leave_checkpoint(run, "step-00000004");
  leave_checkpoint(run, "step-00000006");
  for (const fs::path& from :
       {run, run / "checkpoints", run / "checkpoints/step-00000006"}) {
    EXPECT_TRUE(check_run_folder(small("", {.resume = from.string()}))) << from;
  }
  const std::string older = (run / "checkpoints/step-00000004").string();
  EXPECT_THAT(
      error_text([&] { check_run_folder(small("", {.resume = older})); }),
      HasAll("that of step 6, but resume = \"" + older, "name another folder"));
}

TEST_F(JobTest, OverwriteDoesNotRemoveWhatItResumes) {
  const fs::path run = folder_ / "run";
  make_run_folder(small());
  leave_checkpoint(run, "step-00000004");
  fs::create_directory_symlink(run, folder_ / "link");
  fs::create_directory_symlink(
      run / "checkpoints/step-00000004", folder_ / "step-00000009");
  fs::create_directories(folder_ / "copied");
  fs::create_directory_symlink(
      run / "checkpoints", folder_ / "copied/checkpoints");
  for (const fs::path& from :
       {run, run / "", run / "checkpoints", run / "checkpoints/step-00000004",
        folder_ / "link", folder_ / "link/checkpoints/step-00000004/",
        folder_ / "step-00000009", folder_ / "copied",
        run / "../run/checkpoints"}) {
    const Overrides anew{.overwrite = true, .resume = from.string()};
    EXPECT_THAT(
        refused(small("", anew)),
        HasSubstr("overwrite would remove what checkpoint.resume = "))
        << from;
  }
  // A slash behind the run does not help, nor does another setting that reads
  // from inside of it.
  const auto error = [&](const std::string& set) {
    return refused(small("", {.set = {set}, .overwrite = true}));
  };
  EXPECT_THAT(
      refused(small(
          "", {.set = {"train.run=" + (run / "").string()},
               .overwrite = true,
               .resume = run.string()})),
      HasSubstr("would remove"));
  const std::string inside =
      "=" + (run / "checkpoints/last.safetensors").string();
  std::ofstream(run / "checkpoints/last.safetensors") << "x";
  EXPECT_THAT(error("model.weights" + inside), HasSubstr("would remove"));
  EXPECT_THAT(error("data.path" + inside), HasSubstr("data.path"));
  EXPECT_TRUE(fs::exists(run / "checkpoints/step-00000004/manifest.json"));
  // Another run's folder is not inside it, although its name begins alike.
  leave_checkpoint(folder_ / "run-2", "step-00000003");
  make_run_folder(
      small("", {.overwrite = true, .resume = (folder_ / "run-2").string()}));
  EXPECT_FALSE(fs::exists(run / "checkpoints"));
}

TEST_F(JobTest, AConfigurationThatCannotBeWrittenLeavesTheOneBefore) {
  const Job job = small();
  const fs::path path = make_run_folder(job).configuration;
  leave_checkpoint(folder_ / "run", "step-00000004");
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit small_files = before;
  small_files.rlim_cur = 300;
  std::signal(SIGXFSZ, SIG_IGN);
  Job longer = job;
  longer.train.steps = 20;
  setrlimit(RLIMIT_FSIZE, &small_files);
  const std::string error = refused(longer);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, SIG_DFL);
  EXPECT_THAT(error, HasSubstr("config.toml: "));
  EXPECT_EQ(to_toml(load_job(path)), to_toml(job));
}

// Killed while its first file was written.
TEST_F(JobTest, AFolderOfHalfAConfigurationIsTaken) {
  fs::create_directories(folder_ / "run");
  std::ofstream(folder_ / "run/config.toml.part-1-0") << "[tr";
  make_run_folder(small());
  EXPECT_FALSE(fs::exists(folder_ / "run/config.toml.part-1-0"));
}

TEST_F(JobTest, ARunFolderMayBeALink) {
  const fs::path run = folder_ / "run";
  const fs::path elsewhere = folder_ / "elsewhere";
  fs::create_directory_symlink(elsewhere, run);
  EXPECT_THAT(
      refused(small()),
      HasAll("is a link to " + elsewhere.string(), "is not there"));
  fs::create_directory(elsewhere);
  make_run_folder(small());
  EXPECT_TRUE(fs::exists(elsewhere / "config.toml"));
  std::ofstream(elsewhere / "metrics.jsonl") << "x";
  EXPECT_TRUE(check_run_folder(small()));
  make_run_folder(small("", {.overwrite = true}));
  EXPECT_FALSE(fs::exists(elsewhere / "metrics.jsonl"));
  EXPECT_TRUE(fs::is_symlink(run));
}

TEST_F(JobTest, RunFolderThatCannotBe) {
  std::ofstream(folder_ / "file") << "x";
  Job job = small();
  job.train.run = (folder_ / "file").string();
  EXPECT_THAT(
      error_text([&] { check_run_folder(job); }), HasSubstr("is not a folder"));
  job.train.run = (folder_ / "file" / "run").string();
  EXPECT_THAT(
      error_text([&] { check_run_folder(job); }), HasSubstr("is a file"));
  job.train.run = "/proc/run";
  EXPECT_NE(refused(job), "no error");
}

}  // namespace echelon::job_test
