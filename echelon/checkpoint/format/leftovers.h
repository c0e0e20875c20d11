// What processes that were killed left beside the file or folder they wrote.
#pragma once

#include <filesystem>

namespace echelon {

/// Says, until `file` (a file or a folder) is closed, that it is being written.
/// Some file systems have no locks: then the process's number alone says it.
void claim_part(int file) noexcept;

/// Removes every file and folder called `parts` and a process's number, with or
/// without "-" and another number behind it ("out.safetensors.part-4711-0"),
/// whose process is no more and which nobody claims: so one of another machine
/// or container, whose processes are not seen here, stays. Never throws:
/// leftovers do no harm.
void remove_leftovers(const std::filesystem::path& parts) noexcept;

}  // namespace echelon
