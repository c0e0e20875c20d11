// Removal of what killed processes left next to the files that they wrote.
#pragma once

#include <filesystem>

namespace echelon {

/// Marks `file` (a file or a folder) as being written until it is closed. Some
/// file systems have no locks: there the process's number alone marks it.
void claim_part(int file) noexcept;

/// Removes every file and folder named `parts` + process number, optionally
/// followed by "-" and another number ("out.safetensors.part-4711-0"), whose
/// process has ended and which nobody claims; so those of another machine or
/// container, whose processes are not visible here, stay. Never throws:
/// leftovers do no harm.
void remove_leftovers(const std::filesystem::path& parts) noexcept;

}  // namespace echelon
