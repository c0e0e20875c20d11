// Completion scripts, made from the tree of commands: they contain every
// command, flag and fixed value, and never call echelon.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "echelon/cli/command_line.h"
#include "echelon/cli/terminal.h"
#include "echelon/error.h"
#include "echelon/text/format.h"

namespace echelon::cli {
namespace {

struct Node {
  std::string path;  // " config show"
  std::vector<std::string> words;
  bool files = false;
};

struct Choice {
  std::string place;  // " train --ranks"
  std::vector<std::string> words;
};

struct Tree {
  std::vector<Node> nodes;
  std::vector<Choice> choices;
};

/// "processes|threads" -> its parts; none for a type such as "RANKS".
std::vector<std::string> fixed_values(const std::string& type) {
  if (type.find('|') == std::string::npos) return {};
  return split(type, '|');
}

void walk(const CLI::App& app, const std::string& path, Tree& tree) {
  Node node{path, {}, app.get_name() == "run"};
  for (const auto* sub :
       app.get_subcommands([](const auto*) { return true; })) {
    node.words.push_back(sub->get_name());
    walk(*sub, path + " " + sub->get_name(), tree);
  }
  for (const auto* option : app.get_options()) {
    if (option->get_group().empty()) continue;
    const auto values = fixed_values(option->get_type_name());
    if (option->get_positional()) {
      node.words.insert(node.words.end(), values.begin(), values.end());
      node.files = node.files || values.empty();
      continue;
    }
    for (const auto& name : option->get_lnames()) {
      node.words.push_back("--" + name);
      if (values.empty()) continue;
      tree.choices.push_back({path + " --" + name, values});
    }
    for (const auto& name : option->get_snames()) {
      node.words.push_back("-" + name);
    }
  }
  tree.nodes.push_back(std::move(node));
}

std::string paths(const Tree& tree) {
  std::vector<std::string> quoted;
  for (const auto& node : tree.nodes) {
    if (!node.path.empty()) quoted.push_back("\"" + node.path + "\"");
  }
  return join(quoted, " | ");
}

/// The part that both shells share: sets the variables `files` and `words`. In
/// zsh, where `words` is the command line, it has another name.
std::string cases(const Tree& tree, const char* words) {
  std::string text =
      format("  local {}=\"\" files=\"\"\n  case \"$place\" in\n", words);
  for (const auto& node : tree.nodes) {
    text += format(
        "    \"{}\") {}=\"{}\"{} ;;\n", node.path, words, join(node.words, " "),
        node.files ? "; files=yes" : "");
  }
  text += "  esac\n  case \"$place $previous\" in\n";
  for (const auto& choice : tree.choices) {
    text += format(
        "    \"{}\") {}=\"{}\"; files=\"\" ;;\n", choice.place, words,
        join(choice.words, " "));
  }
  return text + "  esac\n";
}

std::string bash(const Tree& tree) {
  return R"sh(# bash completion for echelon: source this file, or put it into
# ~/.local/share/bash-completion/completions/echelon
_echelon() {
  local word="${COMP_WORDS[COMP_CWORD]}" place="" previous="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    previous="${COMP_WORDS[i]}"
    case "$place $previous" in
      )sh" +
         paths(tree) + R"sh() place="$place $previous" ;;
      " run --") return ;;
    esac
  done
)sh" + cases(tree, "words") +
         R"sh(  COMPREPLY=()
  if [[ -z $files || $word == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  fi
}
# Without an answer from here the shell completes file names.
complete -o default -F _echelon echelon
)sh";
}

std::string zsh(const Tree& tree) {
  return R"sh(#compdef echelon
# zsh completion for echelon: put this file as _echelon into a folder
# of $fpath, or source it after compinit
_echelon() {
  local place="" previous="" i
  for ((i = 2; i < CURRENT; i++)); do
    previous="${words[i]}"
    case "$place $previous" in
      )sh" +
         paths(tree) + R"sh() place="$place $previous" ;;
      " run --") _files; return ;;
    esac
  done
)sh" + cases(tree, "answers") +
         R"sh(  if [[ -z $files || $PREFIX == -* ]]; then
    compadd -- ${=answers}
  else
    _files
  fi
}
if [[ $funcstack[1] == _echelon ]]; then
  _echelon "$@"
else
  compdef _echelon echelon
fi
)sh";
}

struct CompletionArguments {
  std::string shell;
  const CLI::App* root = nullptr;
};

int print_completion(const CompletionArguments& arguments) {
  const bool for_bash = arguments.shell == "bash";
  if (!for_bash && arguments.shell != "zsh") {
    throw ConfigError(
        "echelon completion " + arguments.shell + ": must be bash or zsh");
  }
  Tree tree;
  walk(*arguments.root, "", tree);
  std::cout << (for_bash ? bash(tree) : zsh(tree));
  return 0;
}

}  // namespace

void add_completion(Command& root) {
  auto [command, arguments] = root.add(
      "completion", "print a completion script for a shell",
      "source <(echelon completion bash)\n"
      "echelon completion zsh > ~/.zfunc/_echelon",
      print_completion);
  arguments.root = &command.root();
  command.positional("SHELL", arguments.shell, "which shell", "bash|zsh");
}

}  // namespace echelon::cli
