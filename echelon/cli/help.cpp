#include "echelon/cli/help.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "echelon/error.h"
#include "echelon/text/build_info.h"
#include "echelon/text/format.h"
#include "echelon/text/table.h"

namespace echelon::cli {
namespace {

// A name and what it means, under a heading.
using HelpRow = std::pair<std::string, std::string>;
struct HelpSection {
  std::string heading;
  std::vector<HelpRow> rows;
};

std::string spelled(const CLI::Option& option) {
  std::string text;
  for (const auto& name : option.get_snames()) text += "-" + name + ", ";
  for (const auto& name : option.get_lnames()) text += "--" + name + ", ";
  if (text.size() >= 2) text.resize(text.size() - 2);
  const std::string type = option.get_type_name();
  if (option.get_items_expected_max() > 0 && !type.empty()) text += " " + type;
  return text;
}

std::string usage(const CLI::App& app) {
  std::string text = full_name(app);
  if (!subcommands(app).empty()) return text + " COMMAND";
  for (const auto* option : app.get_options()) {
    if (!option->get_positional()) continue;
    text += option->get_required() ? " " + option->get_name(true)
                                   : " [" + option->get_name(true) + "]";
  }
  text += " [options]";
  return app.get_name() == "run" ? text + " -- PROGRAM [arguments]" : text;
}

std::vector<HelpSection> sections(const CLI::App& app) {
  std::vector<HelpSection> all;
  for (const auto* sub : subcommands(app)) {
    const std::string& group = sub->get_group();
    if (all.empty() || all.back().heading != group) all.push_back({group, {}});
    all.back().rows.emplace_back(sub->get_name(), sub->get_description());
  }
  HelpSection positionals{"Arguments", {}}, options{"Options", {}};
  for (const auto* option : app.get_options()) {
    if (option->get_group().empty()) continue;
    const bool positional = option->get_positional();
    (positional ? positionals : options)
        .rows.emplace_back(
            positional ? option->get_name(true) : spelled(*option),
            option->get_description());
  }
  all.push_back(std::move(positionals));
  all.push_back(std::move(options));
  std::erase_if(all, [](const auto& section) { return section.rows.empty(); });
  return all;
}

// The widest name that has its meaning beside it, of all sections.
size_t names_width(const std::vector<HelpSection>& all, size_t most) {
  size_t width = 0;
  for (const auto& section : all) {
    for (const auto& [name, help] : section.rows) {
      if (columns(name) <= most) width = std::max(width, columns(name));
    }
  }
  return width;
}

void print_section(
    std::ostream& out, const HelpSection& section, const Style& style,
    size_t width) {
  out << "\n" << style.bold(section.heading) << "\n";
  for (const auto& [name, help] : section.rows) {
    out << "  " << name;
    size_t column = columns(name);
    if (column > width) {
      out << "\n  ";
      column = 0;
    }
    out << std::string(width - column + 2, ' ')
        << wrapped(help, width + 4, style.columns) << "\n";
  }
}

// Text for roff, where \ escapes, and . or ' at the start of a line is a macro.
std::string roff(const std::string& text) {
  std::string out;
  bool begins = true;
  for (const char c : text) {
    if (begins && (c == '.' || c == '\'')) out += "\\&";
    begins = c == '\n';
    if (c == '-') {
      out += "\\-";
    } else if (c == '\\') {
      out += "\\e";
    } else {
      out += c;
    }
  }
  return out;
}

std::string in_capitals(std::string text) {
  for (char& c : text) {
    c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return text;
}

// "echelon config show" -> "echelon-config-show"
std::string page_name(const CLI::App& app) {
  std::string name = full_name(app);
  std::ranges::replace(name, ' ', '-');
  return name;
}

constexpr const char* kExitStatus = R"(.SH EXIT STATUS
.TP
0
Success.
.TP
1
A failure, or a comparison that found a difference.
.TP
2
A mistake in the command line or in a configuration.
.TP
3
A mistake in a file of data or in a checkpoint.
.TP
4
Training stopped because a number was not finite.
)";

}  // namespace

std::string full_name(const CLI::App& app) {
  const auto* parent = app.get_parent();
  return parent == nullptr ? app.get_name()
                           : full_name(*parent) + " " + app.get_name();
}

std::vector<const CLI::App*> subcommands(const CLI::App& app) {
  return app.get_subcommands([](const auto*) { return true; });
}

std::string help_text(const CLI::App& app, const Style& terminal) {
  constexpr size_t kWidest = 80, kNarrowest = 30;
  Style style = terminal;
  style.columns = std::clamp(style.columns, kNarrowest, kWidest);
  std::ostringstream out;
  out << style.bold("Examples") << "\n";
  for (const auto& line : split(app.get_footer())) out << "  " << line << "\n";
  out << "\n" << style.bold(usage(app)) << "\n";
  out << wrapped(app.get_description(), 0, style.columns) << "\n";
  const auto all = sections(app);
  const size_t width = names_width(all, style.columns * 3 / 8);
  for (const auto& section : all) print_section(out, section, style, width);
  if (app.get_parent() == nullptr) {
    out << "\n"
        << wrapped(
               "`echelon help COMMAND` shows a command's examples and options.",
               0, style.columns)
        << "\n";
  }
  return out.str();
}

std::string manual_page(const CLI::App& app) {
  const std::string name = page_name(app);
  std::string page = format(
      ".TH {} 1 \"\" \"Echelon {}\" \"Echelon\"\n.SH NAME\n{} \\- {}\n"
      ".SH SYNOPSIS\n.B {}\n",
      roff(in_capitals(name)), build_info::kVersion, roff(name),
      roff(app.get_description()), roff(usage(app)));
  for (const auto& section : sections(app)) {
    page += format(".SH {}\n", roff(in_capitals(section.heading)));
    for (const auto& [row, help] : section.rows) {
      page += format(".TP\n\\fB{}\\fR\n{}\n", roff(row), roff(help));
    }
  }
  page += format(".SH EXAMPLES\n.nf\n{}\n.fi\n", roff(app.get_footer()));
  page += kExitStatus;
  std::vector<std::string> others;
  if (app.get_parent() != nullptr)
    others.push_back(page_name(*app.get_parent()));
  for (const auto* sub : subcommands(app)) others.push_back(page_name(*sub));
  const auto reference = [](const std::string& other) {
    return format("\\fB{}\\fR(1)", roff(other));
  };
  return page + ".SH SEE ALSO\n" + join(others, ", ", reference) + "\n";
}

size_t write_manual(const CLI::App& root, const std::string& folder) {
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  const std::string path = folder + "/" + page_name(root) + ".1";
  std::ofstream file(path, std::ios::binary);
  file << manual_page(root);
  file.close();
  if (!file) {
    throw ConfigError(format(
        "--man {}: {} cannot be written: {}; name a folder", folder, path,
        std::strerror(errno)));
  }
  size_t pages = 1;
  for (const auto* sub : subcommands(root)) pages += write_manual(*sub, folder);
  return pages;
}

}  // namespace echelon::cli
