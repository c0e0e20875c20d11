#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "echelon/cli/arguments.h"
#include "echelon/cli/command_line.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/local_machine.h"
#include "echelon/config/section.h"
#include "echelon/error.h"
#include "echelon/pool/client.h"
#include "echelon/pool/daemon.h"
#include "echelon/pool/page.h"
#include "echelon/pool/remote.h"
#include "echelon/text/format.h"
#include "echelon/text/text_file.h"
#include "echelon/text/units.h"

extern char** environ;

namespace echelon::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostDevices = 1 << 20;

struct PoolArguments {
  std::string folder;
  std::string at;
  std::string token_file;
  bool json = false;
  std::string job;
};

struct PoolStart : PoolArguments {
  std::string file;
  std::string devices;
  std::string page, commands;
};

struct PoolSubmit : PoolArguments {
  std::string project;
  std::string devices = "1";
  bool preemptible = false;
  std::string min_guaranteed;
  int64_t priority = 0;
  std::vector<std::string> program;
};

struct PoolList : PoolArguments {
  bool all = false;
};

struct PoolResize : PoolArguments {
  std::string devices;
};

struct PoolDrain : PoolArguments {
  std::string device;
  bool undo = false;
};

struct PoolHistory : PoolArguments {
  std::string since = "7d";
};

struct PoolPage : PoolHistory {
  std::string file;
};

std::filesystem::path folder_of(const PoolArguments& arguments) {
  return arguments.folder.empty() ? pool::default_folder()
                                  : std::filesystem::path(arguments.folder);
}

Json ask(const PoolArguments& arguments, Json request) {
  if (!arguments.at.empty()) {
    return pool::ask_remote_pool(
        arguments.at, arguments.token_file, std::move(request));
  }
  return pool::ask_pool(folder_of(arguments), std::move(request));
}

// Prints the answer as JSON, or as `print` does.
template <class Print>
int ask_and_print(
    const PoolArguments& arguments, Json request, const Print& print) {
  const Json answer = ask(arguments, std::move(request));
  if (arguments.json) {
    print_json(answer, std::cout);
  } else {
    print(answer);
  }
  return 0;
}

Json about_job(const char* command, const PoolArguments& arguments) {
  return {
      {"command", command},
      {"job", parse_count("JOB", arguments.job, 1, int64_t{1} << 50)}};
}

// "4", or "2..8".
std::pair<int64_t, int64_t>
parse_devices(const std::string& flag, const std::string& text) {
  const size_t dots = text.find("..");
  const auto number = [&](const std::string& part) {
    return parse_count(flag, part, 1, kMostDevices);
  };
  if (dots == std::string::npos) return {number(text), number(text)};
  const std::pair range(
      number(text.substr(0, dots)), number(text.substr(dots + 2)));
  if (range.first > range.second) {
    throw ConfigError(
        format("{} {}: must be LEAST..MOST, as in 2..8", flag, text));
  }
  return range;
}

// "7d", "12h", "30m": seconds.
double parse_age(const std::string& text) {
  constexpr std::pair<char, double> kUnits[] = {
      {'d', 86400}, {'h', 3600}, {'m', 60}, {'s', 1}};
  for (const auto& [unit, seconds] : kUnits) {
    if (text.size() > 1 && text.back() == unit) {
      return seconds *
             static_cast<double>(parse_count(
                 "--since", text.substr(0, text.size() - 1), 1, 1 << 20));
    }
  }
  throw ConfigError(
      format("--since {}: must be a time such as 7d, 12h or 30m", text));
}

double seconds_now() {
  return std::chrono::duration<double>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string random_key() {
  std::random_device random;
  std::string key;
  for (int i = 0; i < 4; ++i) key += format("{:x}-", random());
  return key + std::to_string(::getpid());
}

int start(const PoolStart& arguments) {
  const pool::Settings settings = pool::read_settings(arguments.file);
  int64_t slots = settings.devices;
  if (!arguments.devices.empty()) {
    slots = parse_count("--devices", arguments.devices, 1, kMostDevices);
  }
  const auto devices = pool::find_devices(
      cluster::look_at_machine(), slots, settings.neighbours);
  return pool::serve(
      folder_of(arguments), settings, arguments.file, devices,
      {.page = arguments.page,
       .commands = arguments.commands,
       .token_file = arguments.token_file});
}

int submit(const PoolSubmit& arguments) {
  auto [least, most] = parse_devices("-n", arguments.devices);
  auto kept = arguments.preemptible ? pool::Kept::none : pool::Kept::all;
  if (!arguments.min_guaranteed.empty()) {
    const int64_t guaranteed =
        parse_count("--min-guaranteed", arguments.min_guaranteed, 1, most);
    if (guaranteed < least) {
      throw ConfigError(format(
          "--min-guaranteed {}: -n {} needs at least {}; guarantee that many, "
          "or ask for fewer",
          guaranteed, arguments.devices, least));
    }
    least = guaranteed;
    kept = pool::Kept::least;
  }
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    environment.emplace_back(*entry);
  }
  return ask_and_print(
      arguments,
      {{"command", "submit"},
       {"key", random_key()},
       {"project", arguments.project},
       {"words", arguments.program},
       {"environment", environment},
       {"folder", std::filesystem::current_path().string()},
       {"least", least},
       {"most", most},
       {"kept", static_cast<int>(kept)},
       {"priority", arguments.priority}},
      [](const Json& answer) {
        std::cout << format("job {}\n", answer["job"].get<int64_t>());
      });
}

std::string age_text(double since) {
  return since <= 0
             ? ""
             : format_seconds(std::round(std::max(0.0, seconds_now() - since)));
}

std::string size_of(const Json& job) {
  const auto least = job["least"].get<int64_t>();
  const auto most = job["most"].get<int64_t>();
  return least == most ? std::to_string(least) : format("{}..{}", least, most);
}

void print_jobs(const Json& answer) {
  Rows rows = {
      {"job", "project", "user", "state", "devices", "asked", "for",
       "command"}};
  for (const Json& job : answer["jobs"]) {
    const auto state = job["state"].get<std::string>();
    const bool runs = job["devices"].get<int64_t>() > 0;
    const double ended = job["ended"].get<double>();
    rows.push_back(
        {std::to_string(job["job"].get<int64_t>()),
         job["project"].get<std::string>(), job["user"].get<std::string>(),
         state, std::to_string(job["devices"].get<int64_t>()), size_of(job),
         ended > 0
             ? ""
             : age_text(job[runs ? "started" : "submitted"].get<double>()),
         job["command"].get<std::string>().substr(0, 60)});
  }
  if (rows.size() == 1) {
    std::cout << "no job waits or runs\n";
  } else {
    print_table(rows, terminal_style(), std::cout);
  }
}

int list(const PoolList& arguments) {
  return ask_and_print(
      arguments, {{"command", "list"}, {"ended", arguments.all ? 100 : 0}},
      print_jobs);
}

void print_job(const Json& job) {
  Rows rows;
  for (const auto& [key, value] : job.items()) {
    if (key == "submitted" || key == "waiting_since" || key == "started" ||
        key == "ended") {
      const std::string age = age_text(value.get<double>());
      if (!age.empty()) rows.push_back({key, age + " ago"});
    } else {
      rows.push_back(
          {key, value.is_string() ? value.get<std::string>() : value.dump()});
    }
  }
  std::cout << fitted(rows, terminal_style().columns, false);
}

void print_projects(const Json& pool) {
  std::cout << format(
      "{}, {} idle{}\n",
      counted(
          pool["devices"].get<int64_t>(),
          pool["gpus"].get<bool>() ? "GPU" : "slot"),
      pool["idle"].get<int64_t>(),
      pool["drained"].get<bool>() ? ", drained: no job starts" : "");
  for (const Json& device : pool["drained_devices"]) {
    std::cout << format("drained: {}\n", device.get<std::string>());
  }
  Rows rows = {
      {"project", "guaranteed", "in use", "fair share", "limit", "waiting"}};
  for (const Json& project : pool["projects"]) {
    const auto number = [&](const char* key) {
      return project.contains(key) ? std::to_string(project[key].get<int64_t>())
                                   : std::string("-");
    };
    rows.push_back(
        {(project.contains("parent") ? "  " : "") +
             project["project"].get<std::string>(),
         number("guaranteed"), number("in_use"), number("fair_share"),
         number("limit"), number("waiting")});
  }
  print_table(rows, terminal_style(), std::cout);
}

int status(const PoolArguments& arguments) {
  if (!arguments.job.empty()) {
    return ask_and_print(arguments, about_job("status", arguments), print_job);
  }
  return ask_and_print(arguments, {{"command", "status"}}, print_projects);
}

int cancel(const PoolArguments& arguments) {
  return ask_and_print(
      arguments, about_job("cancel", arguments), [&](const Json& answer) {
        std::cout << format(
            "job {}: {}\n", arguments.job, answer["state"].get<std::string>());
      });
}

int resize(const PoolResize& arguments) {
  const auto [least, most] = parse_devices("-n", arguments.devices);
  Json request = about_job("resize", arguments);
  request["least"] = least;
  request["most"] = most;
  return ask_and_print(arguments, request, [&](const Json& answer) {
    std::cout << format(
        "job {}: asks for {}\n", arguments.job, size_of(answer));
  });
}

int why(const PoolArguments& arguments) {
  return ask_and_print(
      arguments, about_job("why", arguments), [&](const Json& answer) {
        std::cout << format(
            "job {}: {}\n", arguments.job, answer["why"].get<std::string>());
      });
}

int drain(const PoolDrain& arguments) {
  const Json request = {
      {"command", "drain"},
      {"device", arguments.device},
      {"undo", arguments.undo}};
  return ask_and_print(arguments, request, [&](const Json&) {
    if (!arguments.device.empty()) {
      std::cout << format(
          "{}: {}\n", arguments.device,
          arguments.undo ? "jobs may have it" : "jobs leave it");
    } else {
      std::cout
          << (arguments.undo ? "jobs start\n"
                             : "no job starts; those that run go on\n");
    }
  });
}

Json about_past(const char* command, const PoolHistory& arguments) {
  return {
      {"command", command},
      {"since", seconds_now() - parse_age(arguments.since)}};
}

int history(const PoolHistory& arguments) {
  return ask_and_print(
      arguments, about_past("history", arguments), [](const Json& answer) {
        const double used = answer["used_hours"].get<double>();
        const double idle = answer["idle_hours"].get<double>();
        const auto hours = [](double value) { return format("{:.2f}", value); };
        const auto share = [&](double value) {
          return used + idle > 0 ? format_percent(value / (used + idle)) : "-";
        };
        Rows rows = {{"project", "device-hours", "of all", "borrowed"}};
        for (const Json& project : answer["projects"]) {
          if (project["is_parent"].get<bool>()) continue;
          const double own = project["device_hours"].get<double>();
          rows.push_back(
              {project["project"].get<std::string>(), hours(own), share(own),
               hours(project["borrowed_hours"].get<double>())});
        }
        rows.push_back({"(idle)", hours(idle), share(idle), ""});
        print_table(rows, terminal_style(), std::cout);
      });
}

int page(const PoolPage& arguments) {
  if (arguments.file.empty()) {
    return ask_and_print(
        arguments, {{"command", "page_url"}}, [](const Json& answer) {
          std::cout << answer["url"].get<std::string>() << "\n";
        });
  }
  write_file_atomically(
      arguments.file,
      pool::to_html(ask(arguments, about_past("page", arguments))));
  std::cout << format("wrote {}\n", arguments.file);
  return 0;
}

void add_common(Command& command, PoolArguments& arguments) {
  command.option(
      "--folder", arguments.folder, "FOLDER",
      "of the pool (default: $ECHELON_POOL, or one of this host or user)");
  command.option(
      "--at", arguments.at, "HOST:PORT",
      "a pool on another host, which listens there (start --commands)");
  command.option(
      "--token-file", arguments.token_file, "FILE",
      "with --at: the token of who started it (default: the user's own)");
  command.flag("--json", arguments.json, "print it as JSON");
}

void add_pool_submit(Command& pool) {
  Command command = pool.add(
      "submit", "queue a command for some devices",
      "echelon pool submit --project vision -n 4 -- echelon train first.toml\n"
      "echelon pool submit --project vision -n 2..8 --preemptible -- echelon "
      "train first.toml\n"
      "echelon pool submit --project vision -n 2..8 --min-guaranteed 2 -- "
      "./program --ranks {devices}");
  auto arguments = std::make_shared<PoolSubmit>();
  command.required_option(
      "--project", arguments->project, "NAME", "whose devices it uses");
  command.option(
      "-n", arguments->devices, "N|LEAST..MOST",
      "devices; in the command, {devices} is their number (default: 1)");
  command.flag(
      "--preemptible", arguments->preemptible,
      "it may borrow what others do not use, and gives it back");
  command.option(
      "--min-guaranteed", arguments->min_guaranteed, "N",
      "so many are within the guarantee and kept; the rest is borrowed");
  command.option(
      "--priority", arguments->priority, "N",
      "the higher goes first, inside the project (default: 0)");
  add_common(command, *arguments);
  command.exclude("--preemptible", "--min-guaranteed");
  command.act_on_program(
      arguments->program, [arguments] { return submit(*arguments); });
}

}  // namespace

void add_pool(Command& root) {
  Command command = root.add(
      "pool", "share the devices of this server between projects",
      "echelon pool start pool.toml --devices 8\n"
      "echelon pool submit --project vision -n 2..8 --preemptible -- echelon "
      "train first.toml\n"
      "echelon pool list                  who waits and who runs\n"
      "echelon pool why 7                 why job 7 waits");
  command.require_subcommand();

  auto [begin, started] = command.add(
      "start", "run the daemon of a pool",
      "echelon pool start pool.toml\n"
      "echelon pool start pool.toml --devices 8   plain slots\n"
      "echelon pool start pool.toml --page 9465   with a page for browsers",
      start);
  begin.positional("POOL.toml", started.file, "its projects");
  begin.option(
      "--devices", started.devices, "N",
      "so many plain slots (default: the GPUs of this machine, or its cores)");
  begin.option(
      "--folder", started.folder, "FOLDER",
      "of the pool (default: $ECHELON_POOL, or one of this host or user)");
  begin.option(
      "--page", started.page, "[HOST:]PORT",
      "show a page and metrics there, for those who have its token");
  begin.option(
      "--commands", started.commands, "[HOST:]PORT",
      "take commands there, of those who have the token");
  begin.option(
      "--token-file", started.token_file, "FILE",
      "the token (default: $ECHELON_TOKEN, or the user's own)");

  add_pool_submit(command);

  auto [show, shown] = command.add(
      "list", "print the jobs that wait and run",
      "echelon pool list\nechelon pool list --all", list);
  show.flag("--all", shown.all, "and those that have ended lately");
  add_common(show, shown);

  auto [state, of] = command.add(
      "status", "print who may have how much, or all about a job",
      "echelon pool status\nechelon pool status 7", status);
  state.optional_positional("JOB", of.job, "a job's number");
  add_common(state, of);

  auto [end, ended] = command.add(
      "cancel", "take a job out of the queue, or end it",
      "echelon pool cancel 7", cancel);
  end.positional("JOB", ended.job, "a job's number");
  add_common(end, ended);

  auto [change, changed] = command.add(
      "resize", "ask for another number of devices",
      "echelon pool resize 7 -n 4\nechelon pool resize 7 -n 2..8", resize);
  change.positional("JOB", changed.job, "a job's number");
  change.required_option("-n", changed.devices, "N|LEAST..MOST", "devices");
  add_common(change, changed);

  auto [reason, asked] = command.add(
      "why", "say in one line why a job waits", "echelon pool why 7", why);
  reason.positional("JOB", asked.job, "a job's number");
  add_common(reason, asked);

  auto [close, drained] = command.add(
      "drain", "start no more jobs, or take a device out of use",
      "echelon pool drain\nechelon pool drain --undo\n"
      "echelon pool drain GPU-3f2c41aa   jobs leave this device",
      drain);
  close.optional_positional("DEVICE", drained.device, "a device's name");
  close.flag("--undo", drained.undo, "take it into use again");
  add_common(close, drained);

  auto [past, of_past] = command.add(
      "history", "print the device-hours of each project",
      "echelon pool history --since 7d\nechelon pool history --json", history);
  past.option("--since", of_past.since, "AGE", "7d, 12h, 30m … (default: 7d)");
  add_common(past, of_past);

  auto [show_page, shown_page] = command.add(
      "page", "print the address of the pool's page, or write the page",
      "echelon pool page\nechelon pool page pool.html --since 30d", page);
  show_page.optional_positional("FILE.html", shown_page.file, "write it there");
  show_page.option(
      "--since", shown_page.since, "AGE",
      "of the past in it: 7d, 12h, 30m … (default: 7d)");
  add_common(show_page, shown_page);
}

}  // namespace echelon::cli
