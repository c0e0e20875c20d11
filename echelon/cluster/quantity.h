// Figures with units, as cluster files write them: "400 Gbit/s", "80 GiB", "5
// us".
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace echelon {

enum class Unit {
  bytes,             // B, KB, MB, GB, TB, KiB, MiB, GiB, TiB
  bytes_per_second,  // B/s … TB/s, GiB/s, bit/s … Gbit/s, Tbit/s
  seconds,           // ns, us, ms, s
  flops_per_second,  // FLOP/s … PFLOP/s
};

/// In bytes, bytes per second, seconds or FLOP/s; nullopt when the text is no
/// number with such a unit. Upper and lower case count: "Gbit/s" is not "GB/s".
std::optional<double> parse_quantity(std::string_view text, Unit unit);

/// What parse_quantity reads back to the identical value, in the unit that
/// reads best.
std::string quantity_text(double value, Unit unit);

/// An example for errors: "400 Gbit/s or 50 GB/s".
std::string_view quantity_example(Unit unit);

}  // namespace echelon
