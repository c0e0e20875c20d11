// Parquet files, read by Apache Arrow's C++ library. What needs Arrow is in a
// library of its own, libechelon_parquet.so, which is made where Arrow was
// found and is loaded at the first Parquet file.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

/// True for the content of a Parquet file, by its first bytes.
bool is_parquet(std::string_view content);

/// How rows are given.
enum class ParquetRows {
  json,  // {"text":"…","meta":{"id":3}}: structs are objects, lists are lists
  csv    // the names of the columns first, then numbers and quoted texts
};

/// Calls `row` with each row of the file as a line without its end. `columns`:
/// those that a row has, as far as the file has them; empty: all. What `row`
/// throws ends the reading.
///
/// Throws DataError for a file that is not read, and for columns of other types
/// than numbers, texts, booleans, and lists and structs of them (csv: without
/// lists and structs). Throws ConfigError where Arrow or the library is absent.
void read_parquet(
    const std::string& path, ParquetRows form,
    const std::vector<std::string>& columns,
    const std::function<void(std::string_view)>& row);

namespace detail {

/// What the library exports as `echelon_parquet_read`. Returns what is wrong
/// with the file, or nothing; what `row` throws passes through.
using ReadParquet = std::string (*)(
    const std::string& path, ParquetRows form,
    const std::vector<std::string>& columns,
    const std::function<void(std::string_view)>& row);

}  // namespace detail
}  // namespace echelon
