// Figures with units as in cluster files: "400 Gbit/s", "80 GiB", "5 us".
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace echelon::cluster {

enum class Unit {
  bytes,             // B, KB, MB, GB, TB, KiB, MiB, GiB, TiB
  bytes_per_second,  // B/s … TB/s, GiB/s, bit/s … Gbit/s, Tbit/s
  seconds,           // ns, us, ms, s
  flops_per_second,  // FLOP/s … PFLOP/s
};

/// In bytes, bytes per second, seconds or FLOP/s; nullopt when the text is not
/// a number with such a unit. Case matters: "Gbit/s" is not "GB/s".
std::optional<double> parse_quantity(std::string_view text, Unit unit);

/// The text in the most readable unit from which parse_quantity reads the
/// identical value.
std::string quantity_text(double value, Unit unit);

/// An example for errors: "400 Gbit/s or 50 GB/s".
std::string_view quantity_example(Unit unit);

}  // namespace echelon::cluster
