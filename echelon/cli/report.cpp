#include <filesystem>
#include <iostream>

#include "echelon/cli/command_line.h"
#include "echelon/error.h"
#include "echelon/text/format.h"
#include "echelon/watch/run_report.h"

namespace echelon::cli {
namespace {

struct ReportArguments {
  std::string run;
  std::string output;
};

int report_run(const ReportArguments& arguments) {
  namespace fs = std::filesystem;
  const fs::path run = arguments.run;
  std::error_code error;
  if (!fs::is_directory(run, error)) {
    throw DataError(format(
        "{}: is no folder; name a run's folder that `echelon train` wrote",
        arguments.run));
  }
  const fs::path path = arguments.output.empty() ? run / "report.html"
                                                 : fs::path(arguments.output);
  // The trainer's own has more: what each rank held, and a prediction.
  if (arguments.output.empty() && report::has_final_report(run)) {
    throw ConfigError(format(
        "{}: the run has written its own report, which has more; `-o FILE` "
        "writes another one beside it",
        path.string()));
  }
  report::write_report(path, watch::report_of(run));
  std::cout << format("wrote {}\n", path.string());
  return 0;
}

}  // namespace

void add_report(Command& root) {
  auto [command, arguments] = root.add(
      "report", "write the page of a run that died, or that still trains",
      "echelon report runs/digits -o now.html\n"
      "echelon report runs/killed",
      report_run);
  command.positional("RUN", arguments.run, "a run's folder");
  command.option(
      "-o,--output", arguments.output, "FILE",
      "the page (default: RUN/report.html)");
}

}  // namespace echelon::cli
