#include "echelon/cli/command_line.h"

int main(int argc, char** argv) {
  return echelon::cli::run_command_line({argv + 1, argv + argc});
}
