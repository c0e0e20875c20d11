#include "echelon/cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

namespace echelon::cli {

size_t terminal_columns(size_t otherwise) {
  winsize size{};
  if (::ioctl(1, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return otherwise;
  return size.ws_col;
}

}  // namespace echelon::cli
