#include "tests/support/test_slurm.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>

namespace echelon::testing_support {
namespace {

constexpr int kCores = 8;  // of a node, whatever the machine has

std::string node_name(int node) {
  return "n" + std::to_string(node);
}

bool is_installed(const std::string& daemon) {
  return Command({"sh", "-c", "PATH=$PATH:/usr/sbin command -v " + daemon})
             .wait() == 0;
}

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// cred_expire is also how long a job that is queued again waits. srun and
// slurmctld listen on the address of their node alone.
std::string
configuration(const std::string& folder, const SlurmOptions& options) {
  std::string text =
      "ClusterName=test\n"
      "SlurmctldHost=host0(" +
      TestHosts::address(0) +
      ")\n"
      "SlurmUser=root\n"
      "SlurmdUser=root\n"
      "AuthType=auth/munge\n"
      "AuthInfo=socket=" +
      folder +
      "/munge.socket,cred_expire=5\n"
      "CredType=cred/munge\n"
      "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny\n"
      "StateSaveLocation=" +
      folder +
      "/state\n"
      "SlurmdSpoolDir=" +
      folder +
      "/spool.%n\n"
      "SlurmctldPidFile=" +
      folder +
      "/slurmctld.pid\n"
      "SlurmdPidFile=" +
      folder +
      "/slurmd.%n.pid\n"
      "MpiDefault=none\n"
      "ProctrackType=proctrack/linuxproc\n"
      "TaskPlugin=task/none\n"
      "JobAcctGatherType=jobacct_gather/none\n"
      "ReturnToService=2\n"
      "SlurmdParameters=config_overrides\n"
      "SelectType=select/cons_tres\n"
      "SelectTypeParameters=CR_Core\n"
      "SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,"
      "batch_sched_delay=0,preempt_youngest_first\n"
      "SlurmdTimeout=60\n"
      "KillWait=60\n"
      "MessageTimeout=30\n"
      "RequeueExit=75\n"
      "RequeueExitHold=93\n";
  text += options.gpus > 0 ? "GresTypes=gpu\n" : "";
  text += options.accounting
              ? "AccountingStorageType=accounting_storage/slurmdbd\n"
                "AccountingStorageHost=" +
                    TestHosts::address(0) +
                    "\nAccountingStoragePass=" + folder +
                    "/munge.socket\n"
                    "AccountingStorageEnforce=associations,limits,qos,safe\n"
                    "AccountingStorageTRES=gres/gpu\n"
                    "PriorityType=priority/multifactor\n"
                    "PriorityWeightQOS=100000\n"
                    "PreemptType=preempt/qos\n"
                    "PreemptMode=REQUEUE\n"
              : "AccountingStorageType=accounting_storage/none\n";
  for (int node = 0; node < options.nodes; ++node) {
    text +=
        "NodeName=" + node_name(node) + " NodeHostname=host" +
        std::to_string(node) + " NodeAddr=" + TestHosts::address(node) +
        " CPUs=" + std::to_string(kCores) +
        " Boards=1 SocketsPerBoard=1 CoresPerSocket=" + std::to_string(kCores) +
        " ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN" +
        (options.gpus > 0 ? " Gres=gpu:" + std::to_string(options.gpus) : "") +
        "\n";
  }
  return text +
         "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n";
}

// Character devices, as gres.conf needs them. False: they may not be made.
bool make_gpus(const std::string& folder, const SlurmOptions& options) {
  const std::string name = folder + "/gpu";
  for (int gpu = 0; gpu < options.gpus; ++gpu) {
    const std::string file = name + std::to_string(gpu);
    if (mknod(file.c_str(), S_IFCHR | 0600, makedev(1, 3)) != 0) return false;
  }
  if (options.gpus > 0) {
    write(
        folder + "/gres.conf", "AutoDetect=off\nNodeName=n[0-" +
                                   std::to_string(options.nodes - 1) +
                                   "] Name=gpu File=" + name + "[0-" +
                                   std::to_string(options.gpus - 1) + "]\n");
  }
  return true;
}

// The nodes' names, for what runs on them.
std::string host_table(int nodes) {
  std::string text = "127.0.0.1 localhost\n";
  for (int node = 0; node < nodes; ++node) {
    text += TestHosts::address(node) + " " + node_name(node) + " host" +
            std::to_string(node) + "\n";
  }
  return text;
}

}  // namespace

TestSlurm::TestSlurm(const SlurmOptions& options)
    : options_(options), hosts_(options.nodes), reason_(start()) {}

TestSlurm::~TestSlurm() {
  for (size_t node = 0; node < nodes_.size(); ++node) {
    hosts_.kill_all(static_cast<int>(node));
  }
}

std::string TestSlurm::start() {
  const int nodes = options_.nodes;
  std::vector<std::string> needed = {"munged", "slurmctld", "slurmd"};
  if (options_.accounting) {
    needed.insert(needed.end(), {"slurmdbd", "mariadbd"});
  }
  for (const auto& daemon : needed) {
    if (!is_installed(daemon)) {
      return "needs Slurm (Debian packages slurm-wlm, munge, slurmdbd and "
             "mariadb-server-core): run `make extras` once";
    }
  }
  if (!hosts_.reason().empty()) return hosts_.reason();
  if (!make_gpus(folder(), options_)) {
    return "this system lets nobody make device files";
  }
  std::filesystem::create_directory(folder() + "/state");
  write(folder() + "/slurm.conf", configuration(folder(), options_));
  write(folder() + "/hosts", host_table(nodes));
  // A key of its own, and a socket: the machine's munge is left alone.
  const std::string key = folder() + "/munge.key";
  std::string secret;
  std::random_device random;
  while (secret.size() < 128) secret += static_cast<char>(random());
  write(key, secret);
  chmod(key.c_str(), 0600);
  daemons_.push_back(std::make_unique<Command>(std::vector<std::string>{
      "sh", "-c",
      "PATH=$PATH:/usr/sbin exec munged --foreground --force --key-file=" +
          key + " --socket=" + folder() + "/munge.socket --pid-file=" +
          folder() + "/munged.pid --log-file=" + folder() +
          "/munged.log --seed-file=" + folder() + "/munged.seed"}));
  if (!Command::until([&] {
        return std::filesystem::exists(folder() + "/munge.socket");
      })) {
    throw std::runtime_error("munged: " + daemons_.back()->err());
  }
  if (options_.accounting) start_accounting();
  daemons_.push_back(
      std::make_unique<Command>(on(0, {"slurmctld", "-D", "-c"})));
  nodes_.resize(static_cast<size_t>(nodes));
  for (int node = 0; node < nodes; ++node) start_node(node);
  const std::string all = std::to_string(nodes);
  if (!Command::until([&] {
        Command idle(on_first(
            {"timeout", "2", "sinfo", "--noheader", "--states=idle",
             "--format=%D"}));
        return idle.wait() == 0 && idle.out() == all + "\n";
      })) {
    throw std::runtime_error(
        "Slurm does not start: " + daemons_.back()->err() + nodes_[0]->err());
  }
  return "";
}

void TestSlurm::start_accounting() {
  const std::string data = folder() + "/database";
  std::filesystem::create_directory(data);
  const auto mariadb = [&](const std::string& options) {
    return "exec mariadbd --no-defaults --user=root --datadir=" + data +
           " --innodb-log-file-size=8M " + options;
  };
  // What mariadb-install-db does, without the packages that it needs.
  write(
      folder() + "/system.sql",
      "create database mysql;\nuse mysql;\n" +
          read_file("/usr/share/mysql/mysql_system_tables.sql") +
          "\ncreate database slurm;\n");
  output_of(
      {"sh", "-c", mariadb("--bootstrap <" + folder() + "/system.sql 2>&1")});
  // It is seen on its node alone, so that nobody needs a password.
  daemons_.push_back(std::make_unique<Command>(on_first(
      {"sh", "-c",
       mariadb(
           "--skip-grant-tables --bind-address=127.0.0.1 --socket=" + data +
           "/socket --innodb-flush-log-at-trx-commit=0 "
           "--innodb-lock-wait-timeout=900")})));
  if (!Command::until(
          [&] { return std::filesystem::exists(data + "/socket"); })) {
    throw std::runtime_error("mariadbd: " + daemons_.back()->err());
  }
  const std::string file = folder() + "/slurmdbd.conf";
  write(
      file,
      "AuthType=auth/munge\nAuthInfo=socket=" + folder() +
          "/munge.socket\nDbdHost=host0\nDbdAddr=" + TestHosts::address(0) +
          "\nSlurmUser=root\nStorageType=accounting_storage/mysql\n"
          "StorageHost=127.0.0.1\nStorageUser=root\nStorageLoc=slurm\n"
          "CommunicationParameters=NoInAddrAny\nPidFile=" +
          folder() + "/slurmdbd.pid\n");
  chmod(file.c_str(), 0600);
  daemons_.push_back(std::make_unique<Command>(on_first({"slurmdbd", "-D"})));
  if (!Command::until([&] {
        Command add(on_first(
            {"timeout", "5", "sacctmgr", "-i", "-Q", "add", "cluster",
             "test"}));
        return add.wait() == 0;
      })) {
    throw std::runtime_error("slurmdbd: " + daemons_.back()->err());
  }
  output_of(
      {"sacctmgr", "-i", "-Q", "add", "qos", "overquota", "Priority=1",
       "PreemptMode=requeue"});
}

void TestSlurm::add_project(const std::string& name, int64_t gpus) const {
  const std::string qos = name + "-guaranteed";
  output_of(
      {"sacctmgr", "-i", "-Q", "add", "qos", qos, "Priority=100",
       "Preempt=overquota", "GrpTRES=gres/gpu=" + std::to_string(gpus)});
  output_of(
      {"sacctmgr", "-i", "-Q", "add", "account", name, "Description=test",
       "Organization=test"});
  output_of(
      {"sacctmgr", "-i", "-Q", "add", "user", "root", "account=" + name,
       "QOS=" + qos + ",overquota", "DefaultQOS=overquota"});
}

void TestSlurm::start_node(int node) {
  nodes_[static_cast<size_t>(node)] = std::make_unique<Command>(
      on(node, {"slurmd", "-D", "-N", node_name(node)}));
}

std::vector<std::string>
TestSlurm::on(int node, const std::vector<std::string>& words) const {
  // Entering a network namespace mounts another /sys, where slurmd finds no
  // control groups: it looks at this process's, with names of its own.
  std::vector<std::string> all = {
      "nsenter",
      "--mount=/proc/" + std::to_string(getpid()) + "/ns/mnt",
      "unshare",
      "--mount",
      "sh",
      "-c",
      "mount --bind " + folder() + "/hosts /etc/hosts && cd " + folder() +
          " && export SLURM_CONF=" + folder() +
          "/slurm.conf PATH=$PATH:/usr/sbin && exec \"$@\"",
      "sh"};
  all.insert(all.end(), words.begin(), words.end());
  return hosts_.on(node, all);
}

std::vector<std::string>
TestSlurm::on_first(const std::vector<std::string>& words) const {
  return on(0, words);
}

std::string TestSlurm::output_of(const std::vector<std::string>& words) const {
  Command command(on_first(words));
  if (command.wait() != 0) {
    throw std::runtime_error(words[0] + ": " + command.err());
  }
  std::string text = command.out();
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

std::string TestSlurm::submit(
    const std::string& script, const std::vector<std::string>& options) const {
  const std::string file = folder_.script("job", "#!/bin/bash\n" + script);
  std::vector<std::string> words = {
      "sbatch", "--parsable", "--requeue", "--open-mode=append",
      "--output=" + folder() + "/out"};
  words.insert(words.end(), options.begin(), options.end());
  words.push_back(file);
  return output_of(words);
}

std::string TestSlurm::state_of(const std::string& job) const {
  const std::string text = output_of({"scontrol", "show", "job", job});
  const std::string name = "JobState=";
  const size_t begin = text.find(name) + name.size();
  return text.substr(begin, text.find(' ', begin) - begin);
}

bool TestSlurm::until_state(
    const std::string& job, const std::string& state) const {
  return Command::until([&] { return state_of(job) == state; });
}

void TestSlurm::lose_node(int node) {
  hosts_.kill_all(node);
  output_of(
      {"scontrol", "update", "nodename=" + node_name(node), "state=down",
       "reason=test"});
}

}  // namespace echelon::testing_support
