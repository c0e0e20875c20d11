// Timelines as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing.
//
// A rank is a process, a track is a thread, a span is a complete event ("X").
// Times are microseconds with the nanoseconds as fraction, the category is the
// span's kind, and args hold step and bytes. Viewers need the events of one
// thread nested or apart: spans of a track that overlap in other ways continue
// on threads named "comm (2)", "comm (3)". Memory is a counter ("C") of each
// process, in bytes by kind. The otherData of a simulation has
// "simulated": true.
#pragma once

#include <filesystem>
#include <string>

#include "echelon/timeline/timeline.h"

namespace echelon::timeline {

std::string to_chrome_trace(const Timeline& timeline);

/// Replaces the file at `path`. Throws Error when it cannot be written.
void write_chrome_trace(
    const std::filesystem::path& path, const Timeline& timeline);

/// Reads what write_chrome_trace wrote; spans come sorted by rank, then begin.
/// Throws DataError when the file is missing or is not such a trace.
Timeline read_chrome_trace(const std::filesystem::path& path);

/// As read_chrome_trace, from text; `place` names it in errors.
Timeline parse_chrome_trace(const std::string& text, const std::string& place);

}  // namespace echelon::timeline
