#include "echelon/text/format.h"

#ifndef FMT_HEADER_ONLY
#define FMT_HEADER_ONLY
#endif
#include <fmt/args.h>
#include <fmt/format.h>

#include "echelon/error.h"
#include "echelon/text/check.h"

namespace echelon {
namespace detail {

std::string format_arguments(
    std::string_view pattern, std::initializer_list<FormatArgument> arguments) {
  using Kind = FormatArgument::Kind;
  fmt::dynamic_format_arg_store<fmt::format_context> store;
  for (const auto& argument : arguments) {
    switch (argument.kind) {
      case Kind::boolean:
        store.push_back(argument.integer != 0);
        break;
      case Kind::character:
        store.push_back(static_cast<char>(argument.integer));
        break;
      case Kind::integer:
        store.push_back(argument.integer);
        break;
      case Kind::number:
        store.push_back(argument.number);
        break;
      case Kind::real:
        store.push_back(argument.real);
        break;
      case Kind::text:
        store.push_back(argument.text);
        break;
    }
  }
  return fmt::vformat(fmt::string_view(pattern.data(), pattern.size()), store);
}

void check_failed(
    std::string_view condition, std::string_view file, int line,
    const std::string& what) {
  throw InternalError(
      format("{} ({}:{}: {} does not hold)", what, file, line, condition));
}

}  // namespace detail

std::string json_reason(const std::exception& error) {
  const std::string text = error.what();
  const size_t end = text.find("] ");
  return text.starts_with("[json.") && end != std::string::npos
             ? text.substr(end + 2)
             : text;
}

}  // namespace echelon
