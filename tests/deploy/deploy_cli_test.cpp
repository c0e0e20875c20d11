// The command `echelon deploy`: golden files, mistakes, and that the scripts do
// what they say, with stand-ins for the programs of the engines.
#include <gmock/gmock.h>

#include <filesystem>

#include "tests/cli/typed.h"
#include "tests/deploy/cases.h"

namespace echelon::deploy_cli_test {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::Not;
using testing::StartsWith;

const std::string kImage = "--image registry.example/echelon:0.1 ";

class DeployCommand : public testing::Test {
 protected:
  DeployCommand() {
    for (const char* name : {"first.toml", "pool.toml"}) {
      folder_.write(name, read_file(source_path("tests/deploy/") + name));
    }
    folder_.write("upper.toml", "[project.A]\n");
    folder_.write("typo.toml", "[project.a]\nguarantee = 3\n");
    std::string words;
    for (int i = 0; i < 4000; ++i) words += "word ";
    folder_.write("words.txt", words);
    fs::create_directory(folder_.path("bin"));
  }

  // With the stand-ins of program() first in PATH.
  Outcome
  run(const std::string& arguments, const std::string& command = "deploy") {
    return typed(
        folder_, command + " first.toml " + arguments,
        "PATH=\"$PWD/bin:$PATH\" ");
  }
  // PATH of the stand-ins alone.
  Outcome run_bare(const std::string& arguments) {
    return typed(
        folder_, "deploy first.toml " + arguments, "PATH=\"$PWD/bin\" ");
  }
  // Runs what a command writes.
  Outcome
  run_script(const std::string& arguments, const std::string& before = "") {
    const Outcome made = run(arguments + " --output job.sh");
    EXPECT_EQ(made.exit_code, 0) << made.err;
    return shell(folder_, "PATH=\"$PWD/bin:$PATH\" " + before + " bash job.sh");
  }
  // A program that the engine would have: a script of bash.
  void program_is(const std::string& name, const std::string& script) {
    const std::string path =
        folder_.write("bin/" + name, "#!/bin/bash\n" + script);
    fs::permissions(path, fs::perms::owner_all);
  }
  std::string read(const std::string& name) {
    return read_file(folder_.path(name));
  }

  TempFolder folder_;
};

class Golden : public DeployCommand,
               public testing::WithParamInterface<size_t> {};

TEST_P(Golden, IsWritten) {
  const auto& [name, options] = golden_cases()[GetParam()];
  const Outcome outcome = run(options);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const fs::path golden = source_path("tests/deploy/golden/" + name);
  if (std::getenv("ECHELON_UPDATE_EXPECTED") != nullptr) {
    std::ofstream(golden, std::ios::binary) << outcome.out;
  }
  ASSERT_TRUE(fs::exists(golden)) << golden;
  EXPECT_EQ(outcome.out, read_file(golden))
      << "If that is meant, read the difference that this makes: "
         "ECHELON_UPDATE_EXPECTED=1 build/tests/deploy_tests "
         "--gtest_filter='*Golden*'";
}

INSTANTIATE_TEST_SUITE_P(
    Files, Golden, testing::Range<size_t>(0, golden_cases().size()),
    [](const auto& info) {
      std::string name = golden_cases()[info.param].first;
      return name.substr(0, name.find('.'));
    });

TEST_F(DeployCommand, RefusesWhatTheEngineDoesNotHave) {
  const std::pair<std::string, const char*> cases[] = {
      {"--to slrum", "did you mean \"slurm\""},
      {"--to jobset", "--image is missing"},
      {"--to slurm --queue vision",
       "--queue: --to slurm has nothing for it; "
       "--to kueue, kai do"},
      {"--to jobset --account a " + kImage, "--to slurm does"},
      {"--to jobset --nnodes 2:4 -n 2 --volume v " + kImage,
       "--nnodes MIN:MAX: --to jobset has nothing for it"},
      {"--to jobset --nnodes 2 -n 2 " + kImage, "--volume is missing"},
      {"--to kueue " + kImage, "--queue is missing"},
      {"--to kueue --queue vison --pool pool.toml " + kImage,
       "did you mean \"vision\""},
      {"--to kueue --queue research --pool pool.toml " + kImage,
       "is no project of --pool that takes jobs, which are language, vision"},
      {"--to kueue --queue A --pool upper.toml " + kImage,
       "--pool: [project.A]"},
      {"--to kueue --queue a --pool typo.toml " + kImage, "typo.toml:2:1: "},
      {"--to kueue --queue a --nnodes 2:4 -n 2 --volume v --topology rack " +
           kImage,
       "does not place jobs by topology whose hosts come and go"},
      {"--to slurm --time 1h", "write it as Slurm does"},
      {"--to slurm --time 1 --save-seconds 30",
       "told to save 60 s before the time is up: 30 s for a checkpoint"},
      {"--to slurm --upload-seconds 30",
       "--upload-seconds: checkpoints are not uploaded; set checkpoint.remote"},
      {"--to slurm --account 'a b'", "is one word"},
      {"--to jobset --name First " + kImage, "begins with a letter"},
      {"--to jobset --namespace a.b " + kImage, "--namespace a.b: a name in"},
      {"--to ssh", "--hosts is missing"},
      {"--to ssh --hosts a,b --nnodes 4 -n 2", "--hosts names 2"},
      {"--to slurm -n 2 --gpus-per-node 4", "each rank has one GPU"},
      {"--to slurm -n 5 --nnodes 3 --layout dp=4", "but there are 15"},
      {"--to slurm --set 'train.run=runs/{time}'", "leave {time} out"},
      {"--to slurm -n 8 --nnodes 2 --cluster h100-sxm:8",
       "--cluster: has 8 devices"},
      {"--to slurm --set train.stepz=3", "did you mean \"steps\""}};
  for (const auto& [options, message] : cases) {
    const Outcome outcome = run(options);
    EXPECT_EQ(outcome.exit_code, 2) << options << "\n" << outcome.out;
    EXPECT_THAT(outcome.err, HasSubstr(message)) << options;
    EXPECT_LE(lines_of(outcome.err).size(), 5u) << outcome.err;
  }
}

TEST_F(DeployCommand, SaysTheLongestNameThatFits) {
  const Outcome outcome =
      run("--to jobset -n 1 --nnodes 16 --volume v --name " +
          std::string(50, 'a') + " " + kImage);
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(
      outcome.err, AllOf(
                       HasSubstr("at most 46 are possible"),
                       HasSubstr("its pods are called NAME-hosts-0-15-abcde")));
  const Outcome fits =
      run("--to jobset -n 1 --nnodes 16 --volume v --name " +
          std::string(46, 'a') + " " + kImage);
  EXPECT_EQ(fits.exit_code, 0) << fits.err;
}

TEST_F(DeployCommand, WritesASecretOnlyWhenAsked) {
  const std::string pods =
      "--to jobset -n 1 --nnodes 2 --volume v --output job.yaml " + kImage;
  const Outcome without = run(pods);
  EXPECT_THAT(read("job.yaml"), Not(HasSubstr("kind: Secret")));
  EXPECT_THAT(
      without.out, AllOf(
                       HasSubstr("openssl rand -hex 32"),
                       HasSubstr("secret generic first-token"),
                       HasSubstr("kubectl create -f job.yaml")));
  const Outcome with = run(pods + "--new-token");
  EXPECT_THAT(with.out, Not(HasSubstr("openssl")));
  const auto token = [&] {
    const std::string text = read("job.yaml");
    const size_t at = text.find("  token: ");
    std::string value = text.substr(at == std::string::npos ? 0 : at + 9, 66);
    std::erase_if(value, [](char c) { return c == '"' || c == '\n'; });
    return value.substr(0, 64);
  };
  const std::string first = token();
  EXPECT_THAT(first, MatchesRegex("[0-9a-f]{64}"));
  EXPECT_EQ(
      fs::status(folder_.path("job.yaml")).permissions(),
      fs::perms::owner_read | fs::perms::owner_write);
  run(pods + "--new-token");
  EXPECT_NE(token(), first);
  // One host needs none.
  EXPECT_THAT(
      run("--to jobset " + kImage).out, Not(HasSubstr("ECHELON_TOKEN")));
}

TEST_F(DeployCommand, AStepAndTheSmallestLayoutComeFromTheCluster) {
  const std::string options =
      "--to kai -n 4 --nnodes 1:4 --queue q --volume v " + kImage;
  EXPECT_THAT(run(options).out, Not(HasSubstr("for a step")));
  EXPECT_THAT(
      run(options + "--cluster h100-sxm:4x4").out, HasSubstr("for a step"));
  // Seven ranks cannot share a batch of 64, nor the five layers.
  EXPECT_THAT(
      run("--to kai -n 1 --nnodes 7:8 --layout dp=8 --queue q --volume v "
          "--set model.layers=1 " +
          kImage)
          .out,
      HasSubstr("kai.scheduler/batch-min-member: \"8\""));
}

// The server refuses more failed indexes than completions, which Kueue's Job
// has the fewest of.
TEST_F(DeployCommand, AnElasticJobMayLoseNoMoreHostsThanItStartsWith) {
  const std::string options =
      "-n 4 --nnodes 1:4 --queue q --volume v " + kImage;
  EXPECT_THAT(
      run("--to kueue " + options).out,
      AllOf(
          HasSubstr("  completions: 1\n"), HasSubstr("maxFailedIndexes: 1\n")));
  EXPECT_THAT(
      run("--to kai " + options).out,
      AllOf(
          HasSubstr("  completions: 4\n"), HasSubstr("maxFailedIndexes: 3\n")));
}

TEST_F(DeployCommand, SlurmSignalsAtMost65535SecondsBefore) {
  EXPECT_THAT(
      run("--to slurm --time 2-0 --save-seconds 80000").out,
      HasSubstr("--signal=TERM@65535\n"));
  EXPECT_THAT(
      run("--to slurm --time 0:61 --save-seconds 30").out,
      HasSubstr("--signal=TERM@60\n"));
}

// --- What --check asks -------------------------------------------------------

TEST_F(DeployCommand, CheckSaysWhatWasNotChecked) {
  const Outcome outcome = run_bare("--to slurm --check");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(
      outcome.out,
      AllOf(
          StartsWith("checked: options, names and sizes"),
          HasSubstr("not checked: whether this cluster takes it: there is no "
                    "sbatch on PATH")));
}

TEST_F(DeployCommand, CheckAlwaysAsksTheSchemas) {
  for (const auto& [name, options] : golden_cases()) {
    const Outcome outcome = run_bare(options + " --check");
    EXPECT_EQ(outcome.exit_code, 0) << outcome.out << outcome.err;
    const bool manifests = name.ends_with(".yaml");
    EXPECT_EQ(
        outcome.out.find("checked: the fields of each object, by the schemas "
                         "of ") != std::string::npos,
        manifests)
        << outcome.out;
    EXPECT_EQ(
        outcome.out.find("kubernetes/kubernetes v1.37.0") != std::string::npos,
        manifests);
  }
}

TEST_F(DeployCommand, CheckAsksTheEngine) {
  program_is("sbatch", "cat \"${@: -1}\" > sent; echo \"$@\" > words\n");
  const Outcome fine = run("--to slurm --check");
  EXPECT_EQ(fine.exit_code, 0) << fine.err;
  EXPECT_THAT(fine.out, HasSubstr("checked: sbatch --test-only"));
  EXPECT_THAT(read("words"), StartsWith("--test-only "));
  EXPECT_THAT(read("sent"), StartsWith("#!/bin/bash\n"));

  program_is(
      "kubectl",
      "[ $1 = version ] && exit $UNREACHABLE\n"
      "echo \"$@\" > words; echo 'no such CRD' >&2; exit 1\n");
  const Outcome refused =
      run("--to jobset --namespace vision --check " + kImage);
  EXPECT_EQ(refused.exit_code, 2);
  // What needs no cluster: the Job and the pod are Kubernetes' own.
  EXPECT_THAT(
      refused.out,
      HasSubstr("checked: the fields of each object, by the schemas of "
                "kubernetes-sigs/jobset v0.12.0, kubernetes/kubernetes "
                "v1.37.0\n"));
  EXPECT_THAT(
      refused.out, HasSubstr("refused: kubectl create --dry-run=server -n "
                             "vision -f\n  no such CRD"));
  EXPECT_THAT(
      read("words"), StartsWith("create --dry-run=server -n vision -f "));
  // A cluster that does not answer has refused nothing.
  const Outcome away = typed(
      folder_, "deploy first.toml --to jobset --check " + kImage,
      "UNREACHABLE=1 PATH=\"$PWD/bin:$PATH\" ");
  EXPECT_EQ(away.exit_code, 0) << away.out;
  EXPECT_THAT(
      away.out, HasSubstr("not checked: whether this cluster takes it: "
                          "it cannot be reached by `kubectl create"));
}

// --- That scripts do what they say -------------------------------------------

class SlurmScript : public DeployCommand {
 protected:
  SlurmScript() {
    // Runs the words behind srun's own options on "node 1" of the step.
    program_is("srun", R"(
while [[ $1 == --* ]]; do echo "$1" >> options; shift; done
SLURM_NODEID=1 exec "$@"
)");
    program_is("scontrol", R"(
if [ "$1" = show ]; then echo node-a; echo node-b; exit; fi
echo "$@" >> orders
)");
    program_is(
        "echelon", "echo \"$@ ${#ECHELON_TOKEN}\" >> started; exit $CODE\n");
  }
  static std::string slurm(int code) {
    return "SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=2 "
           "SLURM_JOB_NODELIST='node-[a-b]' "
           "CODE=" +
           std::to_string(code);
  }
};

TEST_F(SlurmScript, StartsALauncherOnEachNode) {
  const Outcome outcome =
      run_script("--to slurm -n 4 --nnodes 2 --set train.steps=9", slurm(0));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(
      read("started"),
      "train first.toml --set train.steps=9 -n 4 --nnodes 2 --master-addr "
      "node-a --node-rank 1 64\n");
  EXPECT_THAT(
      read("options"), AllOf(
                           HasSubstr("--nodes=2\n--ntasks=2\n"),
                           HasSubstr("--kill-on-bad-exit=0\n")));
  EXPECT_FALSE(fs::exists(folder_.path("orders")));
}

TEST_F(SlurmScript, QueuesAgainAfter75AndHoldsAfter93) {
  for (const auto& [code, order] : std::vector<std::pair<int, std::string>>{
           {75, "requeue 7\n"}, {93, "requeuehold 7\n"}, {2, ""}}) {
    fs::remove(folder_.path("orders"));
    for (const char* nodes : {"", "--nnodes 2"}) {
      const Outcome outcome =
          run_script(std::string("--to slurm -n 4 ") + nodes, slurm(code));
      EXPECT_EQ(outcome.exit_code, code) << outcome.err;
      EXPECT_EQ(
          order.empty() ? fs::exists(folder_.path("orders"))
                        : read("orders") != order,
          false)
          << code;
      fs::remove(folder_.path("orders"));
    }
  }
}

TEST_F(SlurmScript, AnElasticJobGoesOnOnTheNodesThatAreLeft) {
  // Each step loses a node of four.
  program_is("squeue", R"(
steps=$(wc -l < started 2>/dev/null || echo 0)
case "$*" in *%N*) echo 'node-[a-d]' ;; *) echo $((4 - steps)) ;; esac
)");
  program_is("echelon", "echo \"$@\" >> started; exit 137\n");
  const Outcome outcome =
      run_script("--to slurm -n 1 --nnodes 2:4", slurm(137));
  EXPECT_EQ(lines_of(read("started")).size(), 3u);
  EXPECT_THAT(
      read("options"),
      AllOf(HasSubstr("--nodes=2\n"), Not(HasSubstr("--no-kill"))));
  // One node is fewer than two: the job queues for more.
  EXPECT_EQ(outcome.exit_code, 75) << outcome.err;
  EXPECT_EQ(read("orders"), "requeue 7\n");
}

class SshScript : public DeployCommand {
 protected:
  SshScript() {
    // The host's name takes the place of its shell.
    program_is("ssh", R"(
while [[ $1 == -* ]]; do shift 2; done
host=$1; shift
export HOST=$host
exec bash -c "$*"
)");
  }
  std::string options_ = "--to ssh -n 2 --hosts node-a,node-b ";
};

TEST_F(SshScript, StartsEveryHostWithOneSecret) {
  program_is("echelon", "echo \"$@ $ECHELON_TOKEN\" > started-$HOST; exit 0\n");
  const Outcome outcome =
      run_script(options_ + "--set 'data.sources=[\"words.txt\"]'");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  const std::string a = read("started-node-a"), b = read("started-node-b");
  EXPECT_THAT(
      a, StartsWith("train first.toml --set data.sources=[\"words.txt\"] -n 2 "
                    "--nnodes 2 --node-rank 0 --master-addr node-a "));
  EXPECT_THAT(b, HasSubstr("--node-rank 1 --master-addr node-a "));
  EXPECT_EQ(a.substr(a.rfind(' ')), b.substr(b.rfind(' ')));
  EXPECT_EQ(a.substr(a.rfind(' ')).size(), 66u);
}

TEST_F(SshScript, EndsWithTheCodeOfTheJob) {
  program_is("echelon", "[ $HOST = node-a ] && exit 0; exit 4\n");
  EXPECT_EQ(run_script(options_).exit_code, 4);
}

TEST_F(SshScript, ASignalSavesAndEndsTheJob) {
  program_is("echelon", R"(
if [ "$1" = job ]; then echo "$@" > asked; exit; fi
touch "up-$HOST"
while [ ! -e asked ]; do sleep 0.02; done
exit 75
)");
  run(options_ + "--output job.sh");
  const Outcome outcome = shell(
      folder_,
      "PATH=\"$PWD/bin:$PATH\" bash job.sh & job=$!\n"
      "while [ ! -e up-node-a ] || [ ! -e up-node-b ]; do sleep 0.02; done\n"
      "kill -TERM $job; wait $job");
  EXPECT_EQ(outcome.exit_code, 75) << outcome.err;
  EXPECT_EQ(read("asked"), "job stop runs/first\n");
}

// --- echelon submit ----------------------------------------------------------

TEST_F(DeployCommand, SubmitFollowsAJobOfSlurm) {
  program_is(
      "sbatch", "echo \"$@\" > words; cp \"${@: -1}\" sent; echo '42;c'\n");
  // A state for each question.
  program_is("scontrol", R"(
echo "$@" >> asked
case $(wc -l < asked) in
  1) echo "JobId=42 JobState=PENDING Reason=Priority ExitCode=0:0" ;;
  2|4) echo "JobId=42 JobState=RUNNING Reason=None ExitCode=0:0" ;;
  3) echo "Unable to contact slurm controller" >&2; exit 1 ;;
  *) [ "$LAST" ] || exit 1
     echo "JobId=42 JobState=$LAST ExitCode=$CODE:0" ;;
esac
)");
  const auto submit = [&](const std::string& last, int code) {
    fs::remove(folder_.path("asked"));
    return typed(
        folder_, "submit --to slurm first.toml --every 0",
        "LAST='" + last + "' CODE=" + std::to_string(code) +
            " PATH=\"$PWD/bin:$PATH\" ");
  };
  const Outcome done = submit("COMPLETED Reason=None", 0);
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(
      done.out,
      "job 42\nwhile it runs: echelon job status runs/first\n"
      "job 42: PENDING (Priority)\njob 42: RUNNING\n"
      "job 42: no answer, is asked again (scontrol: Unable to contact slurm "
      "controller)\n"
      "job 42: RUNNING\njob 42: COMPLETED\n");
  EXPECT_THAT(read("words"), StartsWith("--parsable "));
  EXPECT_THAT(read("sent"), StartsWith("#!/bin/bash\n"));
  EXPECT_THAT(read("asked"), StartsWith("show job -o 42\n"));
  EXPECT_EQ(submit("FAILED Reason=NonZeroExitCode", 3).exit_code, 3);
  EXPECT_EQ(submit("TIMEOUT Reason=TimeLimit", 0).exit_code, 1);
  // Held after 93.
  EXPECT_EQ(
      submit("PENDING Reason=job_requeued_in_held_state", 0).exit_code, 93);

  // Slurm has forgotten the job, or is gone.
  EXPECT_EQ(submit("", 0).exit_code, 2);
  EXPECT_EQ(lines_of(read("asked")).size(), 4u + 12u);

  program_is("sbatch", "echo 'Invalid account' >&2; exit 1\n");
  const Outcome refused = submit("", 0);
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_EQ(refused.err, "sbatch: Invalid account\n");
}

TEST_F(DeployCommand, SubmitFollowsAJobOfKubernetes) {
  program_is("kubectl", R"(
echo "$@" >> asked
case "$*" in
  "get secret"*) exit $NO_SECRET ;;
  create*) echo configmap/first-config; echo jobset.jobset.x-k8s.io/first ;;
  get*) case $(grep -c "o json" asked) in
    1) echo '{"status":{"conditions":[{"type":"Suspended","status":"True"}]}}' ;;
    2) echo '{"status":{"replicatedJobsStatus":[{"active":1}],"conditions":[]}}' ;;
    *) echo "{\"status\":{\"conditions\":[{\"type\":\"$LAST\",\"status\":\"True\",\"message\":\"m\"}]}}" ;;
  esac ;;
esac
)");
  const auto submit = [&](const std::string& variables) {
    fs::remove(folder_.path("asked"));
    return typed(
        folder_,
        "submit --to jobset first.toml -n 1 --nnodes 2 --namespace vision "
        "--volume v --every 0 " +
            kImage,
        variables + " PATH=\"$PWD/bin:$PATH\" ");
  };
  const Outcome done = submit("LAST=Completed NO_SECRET=0");
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(
      done.out,
      "configmap/first-config\njobset.jobset.x-k8s.io/first\n"
      "while it runs: echelon job status runs/first --pod job/first-hosts-0 "
      "--namespace vision\n"
      "jobset.jobset.x-k8s.io/first: Suspended: it waits in its queue\n"
      "jobset.jobset.x-k8s.io/first: runs\n"
      "jobset.jobset.x-k8s.io/first: Completed\n");
  EXPECT_THAT(
      read("asked"), AllOf(
                         HasSubstr("create -o name -n vision -f "),
                         HasSubstr("get jobset.jobset.x-k8s.io/first -o json "
                                   "-n vision\n")));
  EXPECT_THAT(read("asked"), Not(HasSubstr("first-storage")));
  const Outcome failed = submit("LAST=Failed NO_SECRET=0");
  EXPECT_EQ(failed.exit_code, 1);
  EXPECT_THAT(failed.out, HasSubstr("Failed: m\n"));
  // Without its secret the pods would never start.
  const Outcome bare = submit("LAST=Completed NO_SECRET=1");
  EXPECT_EQ(bare.exit_code, 2);
  EXPECT_THAT(bare.err, HasSubstr("--new-token, or make it: openssl"));
  EXPECT_THAT(read("asked"), Not(HasSubstr("create")));
  // So it is without the keys of the storage.
  const Outcome without_keys = typed(
      folder_,
      "submit --to jobset first.toml -n 1 --set "
      "checkpoint.remote=s3://models/a "
      "--layout dp=1 " +
          kImage,
      "NO_SECRET=1 PATH=\"$PWD/bin:$PATH\" ");
  EXPECT_EQ(without_keys.exit_code, 2);
  EXPECT_THAT(
      without_keys.err,
      HasSubstr("first-storage is not there; make it: env | grep ^AWS_"));
}

// The names are those of the pods and Jobs that the golden files lead to.
TEST_F(DeployCommand, SubmitSaysInWhichPodAJobIsAsked) {
  program_is("kubectl", "[ $1 != create ] || echo made/first\n");
  for (const auto& [options, pod] :
       {std::pair("--to kueue --queue q", "job/first-hosts-0"),
        std::pair("--to kueue --queue q --nnodes 1:2", "job/first"),
        std::pair("--to kai --queue q --nnodes 1:2", "job/first"),
        std::pair("--to trainer", "job/first-node-0"),
        std::pair("--to lws", "first-0")}) {
    const Outcome outcome =
        run(std::string(options) + " -n 2 --volume v --no-follow " + kImage,
            "submit");
    EXPECT_EQ(
        outcome.out,
        std::string("made/first\nwhile it runs: echelon job status "
                    "runs/first --pod ") +
            pod + "\n")
        << outcome.err;
  }
}

TEST_F(DeployCommand, SubmitNeedsAProgramAndAQueue) {
  const Outcome bare =
      typed(folder_, "submit --to slurm first.toml", "PATH=\"$PWD/bin\" ");
  EXPECT_EQ(bare.exit_code, 2);
  EXPECT_THAT(bare.err, HasSubstr("there is no sbatch on PATH"));
  const Outcome ssh = run("--to ssh --hosts a", "submit");
  EXPECT_EQ(ssh.exit_code, 2);
  EXPECT_THAT(ssh.err, HasSubstr("--to ssh has no queue to send to"));
}

TEST_F(DeployCommand, TheDriverOfRayStartsALauncherInEachBundle) {
  if (shell(folder_, "python3 --version").exit_code != 0) {
    GTEST_SKIP() << "needs Python";
  }
  // A stand-in for Ray, on one host.
  folder_.write("ray/__init__.py", R"(
class Remote:
    def __init__(self, function): self.function = function
    def options(self, scheduling_strategy, **resources):
        print("place", scheduling_strategy.index, sorted(resources.items()))
        return self
    def remote(self, *arguments): return self.function(*arguments)
def remote(**options): return Remote
def init(address): pass
def get(value): return value
)");
  folder_.write(
      "ray/util/__init__.py", "def get_node_ip_address(): return '10.0.0.1'\n");
  folder_.write("ray/util/placement_group.py", R"(
class Group:
    def ready(self): return True
def placement_group(bundles, strategy):
    print("group", len(bundles), bundles[0]["GPU"], strategy)
    return Group()
)");
  folder_.write("ray/util/scheduling_strategies.py", R"(
class PlacementGroupSchedulingStrategy:
    def __init__(self, group, placement_group_bundle_index):
        self.index = placement_group_bundle_index
)");
  program_is(
      "echelon",
      "echo \"$@ ${#ECHELON_TOKEN}\" >> started; exit $((${10} * 75))\n");
  run("--to ray -n 2 --nnodes 2 --set 'data.sources=[\n\"words.txt\"]' "
      "--output job.py");
  const Outcome outcome =
      shell(folder_, "PATH=\"$PWD/bin:$PATH\" python3 job.py");
  EXPECT_THAT(outcome.out, HasSubstr("group 2 2 STRICT_SPREAD\n"))
      << outcome.err;
  EXPECT_THAT(
      outcome.out, HasSubstr("place 1 [('num_cpus', 8), ('num_gpus', 2)]"));
  EXPECT_THAT(
      read("started"),
      HasSubstr("train first.toml --set data.sources=[\n\"words.txt\"] -n 2 "
                "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 64\n"));
  // The launcher of host 1 ends with it.
  EXPECT_EQ(outcome.exit_code, 75) << outcome.err;
}

TEST_F(DeployCommand, APodOfALeaderWorkerSetWaitsWhenItsJobIsOver) {
  run("--to lws --output job.yaml " + kImage);
  // The shell's text, from the manifest.
  const std::string text = read("job.yaml");
  const size_t begin = text.find("- |\n");
  ASSERT_NE(begin, std::string::npos);
  const size_t end = text.find("- launcher\n", begin);
  std::string script;
  for (const auto& line : lines_of(text.substr(begin + 4, end - begin - 4))) {
    script +=
        line.substr(std::min(line.find_first_not_of(' '), line.size())) + "\n";
  }
  folder_.write("pod.sh", script);
  // A failure ends the pod, so that it starts again.
  EXPECT_EQ(shell(folder_, "bash pod.sh bash -c 'exit 1'").exit_code, 1);
  // The end of the job does not, until the pod is deleted.
  const Outcome over = shell(
      folder_,
      "bash pod.sh bash -c 'exit 0' > said & pod=$!\n"
      "while ! grep -q delete said; do sleep 0.02; done\n"
      "kill -0 $pod && kill -TERM $pod; wait $pod");
  EXPECT_EQ(over.exit_code, 0) << over.err;
  // The order to stop reaches the launcher.
  const Outcome stopped = shell(
      folder_,
      "bash pod.sh bash -c 'trap \"exit 75\" TERM; touch up; while true; do "
      "sleep 0.02; done' & pod=$!\n"
      "while [ ! -e up ]; do sleep 0.02; done\n"
      "kill -TERM $pod; wait $pod");
  EXPECT_EQ(stopped.exit_code, 75) << stopped.err;
}

}  // namespace echelon::deploy_cli_test
