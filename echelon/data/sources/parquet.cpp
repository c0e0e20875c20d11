#include "echelon/data/sources/parquet.h"

#include <dlfcn.h>

#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon {
namespace {

constexpr const char* kParquetLibrary = "libechelon_parquet.so";

detail::ReadParquet parquet_library() {
  void* opened = ::dlopen(kParquetLibrary, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    const char* reason = ::dlerror();
    throw ConfigError(format(
        "[data] Parquet is read by Apache Arrow's C++ library, and {} cannot "
        "be loaded ({}); build Echelon where libarrow-dev and libparquet-dev "
        "are installed, or write the rows to a .csv or .jsonl file",
        kParquetLibrary, reason != nullptr ? reason : "no reason given"));
  }
  return reinterpret_cast<detail::ReadParquet>(
      ::dlsym(opened, "echelon_parquet_read"));
}

}  // namespace

bool is_parquet(std::string_view content) {
  return content.starts_with("PAR1");
}

void read_parquet(
    const std::string& path, ParquetRows form,
    const std::vector<std::string>& columns,
    const std::function<void(std::string_view)>& row) {
  // Where it throws, the next call tries it again.
  static const detail::ReadParquet read = parquet_library();
  const std::string problem = read(path, form, columns, row);
  if (!problem.empty()) throw DataError(format("{}: {}", path, problem));
}

}  // namespace echelon
