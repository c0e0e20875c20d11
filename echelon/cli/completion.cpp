// Completion scripts, made from the tree of commands: they contain every
// command, flag and fixed value, and never call echelon. bash and zsh share
// their case statements: `place` is the path of commands on the line so far,
// and picks the words that may follow; the word before picks the values of a
// flag. fish takes a line for each command and flag instead.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>

#include "echelon/cli/command_line.h"
#include "echelon/cli/help.h"
#include "echelon/cli/terminal.h"
#include "echelon/cluster/catalogue.h"
#include "echelon/cost/framework.h"
#include "echelon/cost/model_catalogue.h"
#include "echelon/error.h"
#include "echelon/job/job.h"
#include "echelon/schedule/options.h"
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

/// An option as fish describes it.
struct Flag {
  std::string place;  // " train"
  const CLI::Option* option;
  std::vector<std::string> values;
};

struct Tree {
  std::vector<Node> nodes;
  std::vector<Choice> choices;
  std::vector<Flag> flags;
  std::vector<std::pair<std::string, const CLI::App*>> commands;
  std::vector<Choice> keys;  // of --set: "train.ranks" and its values
};

/// The values of an option: "processes|threads" has them in its type, others
/// take names of a catalogue. None for a type such as "RANKS".
std::vector<std::string> fixed_values(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  if (type.find('|') != std::string::npos) return split(type, '|');
  const std::string name = option.get_name(false, true);
  const auto is = [&](const char* flag) {
    return name.find(flag) != std::string::npos;
  };
  if (is("--model")) return cost::catalogue_names();
  if (is("--stack")) return cost::framework_names();
  if (is("--schedule") || type == "KIND") return schedule_names();
  if (is("--dtype")) return {"float32", "bfloat16", "float16", "float64"};
  if (is("--backend")) return {"local", "gloo", "nccl"};
  std::vector<std::string> started;
  if (is("--cluster") || type == "CLUSTER") {
    for (const auto& device : cluster::device_names()) {
      started.push_back(device + ":");
    }
  }
  if (is("--layout")) {
    for (const Axis axis : kAxes) {
      started.push_back(std::string(short_name(axis)) + "=");
    }
  }
  return started;
}

void walk(const CLI::App& app, const std::string& path, Tree& tree) {
  Node node{path, {}, app.get_name() == "run"};
  for (const auto* sub : subcommands(app)) {
    node.words.push_back(sub->get_name());
    tree.commands.emplace_back(path, sub);
    walk(*sub, path + " " + sub->get_name(), tree);
  }
  for (const auto* option : app.get_options()) {
    if (option->get_group().empty()) continue;
    auto values = fixed_values(*option);
    if (app.get_name() == "help" && option->get_positional()) {
      for (const auto* other : subcommands(*app.get_parent())) {
        values.push_back(other->get_name());
      }
    }
    tree.flags.push_back({path, option, values});
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

std::vector<Choice> keys_of_set() {
  std::vector<Choice> keys;
  const auto document = describe(Job{});
  for (const auto& entry : document.entries()) {
    Choice key{entry.table + "." + entry.key, {}};
    for (const auto& choice : entry.choices) {
      key.words.push_back(choice.substr(1, choice.size() - 2));  // no quotes
    }
    if (entry.type == "true or false") key.words = {"true", "false"};
    keys.push_back(std::move(key));
  }
  return keys;
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

/// Sets `answers` to the values of the key of --set in `key`.
std::string values_of_keys(const Tree& tree, const char* answers) {
  std::string text = "  case \"$key\" in\n";
  for (const auto& key : tree.keys) {
    if (key.words.empty()) continue;
    text += format(
        "    {}) {}=\"{}\" ;;\n", key.place, answers, join(key.words, " "));
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
         R"sh(  # --set TABLE.KEY=VALUE, which the shell may have split at the =.
  local key="" start=""
  [[ $word == "=" ]] && word="" && ((i = COMP_CWORD + 1)) || i=$COMP_CWORD
  if [[ ${COMP_WORDS[i-1]} == "=" && ${COMP_WORDS[i-3]} == "--set" ]]; then
    key="${COMP_WORDS[i-2]}"
  elif [[ $previous == "--set" && $word == *=* ]]; then
    key="${word%%=*}" start="${word%%=*}="
  elif [[ $previous == "--set" ]]; then
    words=")sh" +
         join(tree.keys, " ", [](const auto& key) { return key.place + "="; }) +
         R"sh(" files=""
  fi
  if [[ -n $key ]]; then
    words="" files=""
  )sh" + values_of_keys(tree, "words") +
         R"sh(    words="${words:+$start}${words// / $start}"
  fi
  COMPREPLY=()
  if [[ -z $files || $word == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    # No space behind what goes on: train.steps=, h100-sxm:
    [[ ${COMPREPLY[0]} == *[=:] ]] && compopt -o nospace 2>/dev/null
  fi
  return 0
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
         R"sh(  local key=""
  if [[ $previous == "--set" && $PREFIX == *=* ]]; then
    key="${PREFIX%%=*}" files=""
    compset -P '*='
    answers=""
  )sh" + values_of_keys(tree, "answers") +
         R"sh(  elif [[ $previous == "--set" ]]; then
    compadd -S "" -- )sh" +
         join(tree.keys, " ", [](const auto& key) { return key.place + "="; }) +
         R"sh(
    return
  fi
  if [[ -z $files || $PREFIX == -* ]]; then
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

/// In single quotes for fish.
std::string fish_text(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "'";
}

std::string fish(const Tree& tree) {
  std::string text = R"sh(# fish completion for echelon: put this file into
# ~/.config/fish/completions/echelon.fish
function __echelon_at
  set -l place ""
  for word in (commandline -opc)[2..-1]
    switch "$place $word"
      case )sh";
  std::vector<std::string> places;
  for (const auto& node : tree.nodes) {
    if (!node.path.empty()) places.push_back(fish_text(node.path));
  }
  text += join(places, " ") + R"sh(
        set place "$place $word"
    end
  end
  test "$place" = "$argv[1]"
end
complete -c echelon -n '__echelon_at ""' -f
)sh";
  const auto line = [&](const std::string& place) {
    text += format(
        "complete -c echelon -n {}",
        fish_text("__echelon_at \"" + place + "\""));
  };
  for (const auto& [place, command] : tree.commands) {
    line(place);
    text += format(
        " -f -a {} -d {}\n", command->get_name(),
        fish_text(command->get_description()));
  }
  std::vector<std::string> assignments;
  for (const auto& key : tree.keys) {
    if (key.words.empty()) assignments.push_back(key.place + "=");
    for (const auto& word : key.words) {
      assignments.push_back(key.place + "=" + word);
    }
  }
  text += "set -g __echelon_keys " + join(assignments, " ") + "\n";
  for (const auto& [place, option, values] : tree.flags) {
    line(place);
    if (option->get_positional()) {
      text += values.empty() ? "" : " -f";
    }
    for (const auto& name : option->get_snames()) text += " -s " + name;
    for (const auto& name : option->get_lnames()) text += " -l " + name;
    const bool set = option->get_name(false, true).find("--set") == 0;
    if (set) {
      text += " -x -a '$__echelon_keys'";
    } else if (!values.empty()) {
      const bool positional = option->get_positional();
      text += (positional ? " -a " : " -x -a ") + fish_text(join(values, " "));
    } else if (
        !option->get_positional() && option->get_items_expected_max() > 0) {
      text += " -r";
    }
    text += " -d " + fish_text(option->get_description()) + "\n";
  }
  return text;
}

struct CompletionArguments {
  std::string shell;
  const CLI::App* root = nullptr;
};

int print_completion(const CompletionArguments& arguments) {
  using Writer = std::string (*)(const Tree&);
  const std::map<std::string, Writer> writers = {
      {"bash", bash}, {"fish", fish}, {"zsh", zsh}};
  const auto writer = writers.find(arguments.shell);
  if (writer == writers.end()) {
    throw ConfigError(
        "echelon completion " + arguments.shell +
        ": must be bash, zsh or fish");
  }
  Tree tree;
  walk(*arguments.root, "", tree);
  tree.keys = keys_of_set();
  std::cout << writer->second(tree);
  return 0;
}

}  // namespace

void add_completion(Command& root) {
  auto [command, arguments] = root.add(
      "completion", "print a completion script for a shell",
      "source <(echelon completion bash)\n"
      "echelon completion zsh > ~/.zfunc/_echelon\n"
      "echelon completion fish > ~/.config/fish/completions/echelon.fish",
      print_completion);
  arguments.root = &command.root();
  command.positional("SHELL", arguments.shell, "which shell", "bash|zsh|fish");
}

}  // namespace echelon::cli
