// The rules for names of Kubernetes and Slurm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace echelon::deploy {

/// Throws ConfigError unless `text` is a label of DNS (RFC 1035) of at most
/// `longest` characters. `flag` says who gave it; `because` why it may not be
/// longer: "its pods are called NAME-hosts-0-1-abcde".
void check_dns_label(
    const std::string& flag, const std::string& text, size_t longest = 63,
    const std::string& because = "");

/// The name of an object that may begin with a digit (RFC 1123): labels of DNS
/// with dots between them, or a single one when `dots` is false.
void check_object_name(
    const std::string& flag, const std::string& text, bool dots);

/// The value of a label: letters, digits and -_. between letters or digits.
void check_label_value(const std::string& flag, const std::string& text);

/// The key of a label: a name, or a domain, "/" and a name.
void check_label_key(const std::string& flag, const std::string& text);

/// A word without spaces and control characters, for a line of #SBATCH.
void check_word(const std::string& flag, const std::string& text);

/// A time limit as Slurm writes it: "90", "1:30:00", "2-12". Returns seconds.
int64_t parse_time_limit(const std::string& flag, const std::string& text);

}  // namespace echelon::deploy
