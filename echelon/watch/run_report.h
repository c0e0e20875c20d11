// The report of a run that has not written its own: one that trains, or that
// died.
#pragma once

#include <chrono>
#include <filesystem>

#include "echelon/report/report.h"

namespace echelon::watch {

/// What the run's folder has, for its report: figures, curves, the recorded
/// steps where there are any, and findings. A sentence says how the run is, and
/// notes say what is missing. Throws DataError where the folder has neither
/// metrics nor a timeline.
report::ReportInput report_of(const std::filesystem::path& run);

/// Writes RUN/report.html while the run trains, unless its trainer has written
/// timeline.json since `began`, and so its own report. Throws nothing; returns
/// whether it was written.
bool write_interim_report(
    const std::filesystem::path& run,
    std::filesystem::file_time_type began) noexcept;

}  // namespace echelon::watch
