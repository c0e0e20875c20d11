// Any bytes are a schedule file that is refused with a ConfigError, or a
// schedule that can be run, and that is written and read again as the same.
#include <cstdlib>
#include <sstream>

#include "echelon/error.h"
#include "echelon/schedule/check.h"
#include "echelon/schedule/csv.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace echelon;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const Schedule schedule = parse_schedule_csv(text, "fuzz");
    check(schedule);
    std::ostringstream out;
    write_schedule_csv(schedule, out);
    if (parse_schedule_csv(out.str(), "fuzz") != schedule) std::abort();
  } catch (const ConfigError&) {
  }
  return 0;
}
