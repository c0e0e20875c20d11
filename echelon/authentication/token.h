// The secret that the launchers of a job's hosts share. It is kept in a file
// that its owner alone can read, and is never an argument of a program.
#pragma once

#include <string>

#include "echelon/authentication/key.h"

namespace echelon::authentication {

inline constexpr const char* kTokenVariable = "ECHELON_TOKEN";

struct Token {
  Key key;
  std::string source;  // where it was: "the file /home/ann/…", "ECHELON_TOKEN"
  bool made = false;   // there was none, and the file was made
};

/// The token in `file`; when that is empty, the one in the variable
/// ECHELON_TOKEN; when that is not set, the user's own, in
/// $XDG_CONFIG_HOME/echelon/token (~/.config/echelon/token where that is not
/// set). The user's own file is made, with a random token, when there is none.
/// A token is 64 hexadecimal digits, in a file with or without the end of a
/// line.
///
/// Throws ConfigError when the file is missing or unreadable, when somebody
/// else owns it or may read or write it, and when it has no token in it.
/// Messages never show what is in the file or the variable.
Token read_token(const std::string& file);

/// Whether read_token() has a token to read, and would not make one.
bool have_token(const std::string& file);

}  // namespace echelon::authentication
