// Mistakes that people make at the command line, each with what `echelon`
// answers: one to three lines that name the place, the cause and a way out.
#include <gmock/gmock.h>

#include "tests/cli/typed.h"

namespace echelon::mistakes_cli_test {

struct Mistake {
  std::string typed;
  int exit_code = 2;
  std::string answer;  // a part of it
};

const std::vector<Mistake>& mistakes() {
  static const std::vector<Mistake> all = {
      // Commands and flags.
      {"trian first.toml", 2, "did you mean \"train\"?"},
      {"fit first.toml", 2, "unknown command \"fit\"; did you mean \"train\"?"},
      {"launch -n 2 ./program", 2, "did you mean \"run\"?"},
      {"config print first.toml", 2, "did you mean \"show\"?"},
      {"checkpoint show runs/first --step 5", 2,
       "unknown flag --step; `echelon checkpoint show --help`"},
      {"train first.toml --nproc_per_node 2", 2,
       "--nproc_per_node; did you mean -n?"},
      {"train first.toml --gpus 2", 2, "--gpus; did you mean -n?"},
      {"train first.toml --epochs 5", 2, "did you mean --set train.epochs=…?"},
      {"train first.toml --learning-rate 0.1", 2,
       "did you mean --set optimizer.learning_rate=…?"},
      {"train first.toml --batch-size 8", 2,
       "did you mean --set train.batch=…?"},
      {"train first.toml --overwite", 2, "did you mean \"--overwrite\"?"},
      {"train first.toml second.toml", 2,
       "unexpected argument \"second.toml\""},
      {"train", 2, "CONFIG.toml is required"},
      {"train first.toml --set", 2,
       "--set: 1 required TABLE.KEY=VALUE missing"},
      {"train first.toml --json", 2, "give both"},
      {"config show", 2, "CONFIG.toml is required"},
      {"doctor --fix", 2, "unknown flag --fix; `echelon doctor --help`"},
      {"completion powershell", 2, "must be bash, zsh or fish"},
      {"help trian", 2, "did you mean \"train\"?"},
      // Files.
      {"train second.toml", 2,
       "No such file or directory; name a configuration file"},
      {"train empty", 2, "is a folder; name the configuration file in it"},
      {"train broken.toml", 2, "broken.toml:1:7: not TOML: table header"},
      {"train words.toml", 2, "a string needs quotes: \"adam\""},
      {"train first.toml --set train.run=first.toml", 2,
       "name a folder for the run"},
      {"train first.toml --resume runs/none", 3,
       "runs/none: there is no such folder"},
      {"train first.toml --set model.weights=junk.safetensors", 3,
       "a safetensors file has 8 or more"},
      {"train gpt.toml --set data.path=missing.txt", 3,
       "No such file or directory"},
      {"train gpt.toml --set data.path=missing/*.txt", 3,
       "the pattern matches no file"},
      {"train gpt.toml --set data.tokenizer=tokenizer.json", 3,
       "tokenizer.json: cannot be read: No such file or directory; [data] "
       "tokenizer must name a file"},
      {"train gpt.toml --set data.tokenizer=bad.json", 3,
       "bad.json: is not JSON: parse error at line 2"},
      // Ranks and layouts.
      {"train first.toml -n two", 2,
       "-n two: must be a whole number from 1 to 1024"},
      {"train first.toml -n 0", 2, "must be a whole number from 1 to 1024"},
      {"train first.toml -n 4 --layout dp=2", 2, "dp=4 fits, or start 2 ranks"},
      {"train first.toml --layout dp2", 2, "write for example dp=2,tp=4"},
      {"train first.toml --layout tensor=2", 2,
       "with an axis of dp, fsdp, tp, pp, cp or ep"},
      {"train first.toml --layout dp=0", 2,
       "must be a whole number, 1 or more"},
      {"train first.toml --layout dp=2,dp=4", 2, "axis dp is given twice"},
      {"train first.toml --layout dp=5", 2,
       "does not divide by 5 ranks; 10 or 15 does"},
      {"train first.toml --layout pp=9", 2,
       "simple_cnn has 3 layers; at most 3"},
      {"train first.toml --layout ddp=2", 2, "did you mean \"dp\"?"},
      {"train first.toml --layout ep=2", 2,
       "use dp or fsdp, whose ranks have samples of their own too"},
      {"train first.toml --layout cp=2", 2,
       "model \"simple_cnn\" has no sequence to cut"},
      {"train gpt.toml --layout cp=400", 2, "each rank needs one; cp may be"},
      {"train gpt.toml --layout cp=3 --set layout.context=ulysses", 2,
       "set context = \"ring\" or \"all_gather\""},
      {"train gpt.toml --layout cp=4 --set layout.context=ulysses_ring --set "
       "layout.context_ulysses=3",
       2, "it divides into groups of 1, 2, 4"},
      {"train gpt.toml --layout cp=2 --set layout.context=rings", 2,
       "did you mean \"ring\"?"},
      {"train gpt.toml --layout tp=3", 2, "tp may be 2 at most"},
      {"train first.toml --ranks thread", 2, "did you mean \"threads\"?"},
      // Keys and values.
      {"train first.toml --set train.steps", 2,
       "write for example --set train.steps=100"},
      {"train first.toml --set steps=5", 2, "did you mean train.steps?"},
      {"train first.toml --set train.stpes=5", 2, "did you mean \"steps\"?"},
      {"train first.toml --set train.steps=ten", 2, "must be a whole number"},
      {"train first.toml --set train.steps=-1", 2, "must be at least 0"},
      {"train first.toml --set train.epochs=2 --set train.steps=3", 2,
       "exactly one of the two"},
      {"train first.toml --set optimizer.name=adamw2", 2,
       "did you mean \"adamw\"?"},
      {"train first.toml --set optimizer.learning_rate=0", 2,
       "must be above 0"},
      {"train first.toml --set data.shape=[1,8", 2, "quote it for the shell"},
      {"train first.toml --set memory.limit_bytes=48gigs", 2,
       "must be a size such as \"48GiB\""},
      {"train first.toml --set comm.timeout=10min", 2,
       "must be a time such as"},
      {"train first.toml --set precision.compute=bfloat16", 2,
       "did you mean \"bf16\"?"},
      {"train first.toml --set precision.compute=tf32", 2,
       "the ranks are on CPUs; set compute = \"same\""},
      {"train first.toml --set precision.compute=tf32 --set comm.device=cpu", 2,
       "the ranks are on CPUs; set compute = \"same\""},
      {"train gpt.toml --set memory.recompute=full", 2,
       "did you mean \"all\"?"},
      {"train gpt.toml --set model.name=gpt5", 2, "did you mean \"gpt\"?"},
      {"train gpt.toml --set model.heads=3", 2, "15 or 18 does"},
      {"train gpt.toml --set data.sequence=256", 2,
       "set [data] sequence=64 or less"},
      {"train first.toml --set data.name=imagenet", 2,
       "did you mean \"images\"?"},
      // Names of other frameworks.
      {"train first.toml --set train.lr=0.1", 2,
       "did you mean optimizer.learning_rate?"},
      {"train first.toml --set training.max_steps=4", 2,
       "[training]: unknown table; did you mean [train]?"},
      {"train first.toml --set train.gradient_accumulation_steps=4", 2,
       "did you mean \"accumulate\"?"},
      {"train first.toml --set train.max_grad_norm=1", 2,
       "did you mean optimizer.clip_norm?"},
      {"train first.toml --set zero_stage=3", 2, "did you mean shard.stage?"},
      {"train first.toml --set train.bf16=true", 2,
       "did you mean precision.compute = \"bf16\"?"},
      {"train first.toml --set model.gradient_checkpointing=true", 2,
       "did you mean memory.recompute = \"all\" or \"selective\"?"},
      {"train gpt.toml --set train.save_steps=5", 2,
       "did you mean checkpoint.every_steps?"},
      // Other commands.
      {"verify first.toml --tolerance tiny", 2, "must be a number, at least 0"},
      {"run -n 2", 2, "put it last, as in `echelon run -n 4 -- ./program`"},
      {"run -n 2 ./nowhere", 2,
       "no program ./nowhere: No such file or directory"},
      {"export runs/nothing out.safetensors", 3,
       "runs/nothing: has no checkpoint"},
      {"export runs/none out.safetensors", 3,
       "runs/none: there is no such folder"},
      {"export runs/nothing out --format onnx", 2,
       "must be safetensors, huggingface or peft"},
      {"import theirs ours", 3,
       "known are GPT2LMHeadModel, LlamaForCausalLM, "},
      {"import empty ours", 3, "a Hugging Face folder has a config.json"},
      {"plan --model gpt5 --cluster h100-sxm:8 --batch 8", 2,
       "did you mean \"gpt2\"?"},
      {"plan --model gpt2 --cluster h200x:8 --batch 8", 2,
       "did you mean \"h200\"?"},
      {"plan --model gpt2", 2, "--cluster is missing"},
      {"plan --model gpt2 --cluster 8xh100 --batch 8", 2,
       "write DEVICE:DEVICES, as in h100-sxm:8; did you mean h100-sxm or "},
      {"plan --model gpt2 --cluster a100:8 --batch 8", 2,
       "did you mean a100-40gb or a100-80gb?"},
      {"plan --model meta-llama/llama3-8B --cluster h100-sxm:8 --batch 8", 2,
       "did you mean \"llama3-8b\"?"},
      {"simulate --model gpt2 --cluster h100-sxm:8 --layout tp=16 --batch 8", 2,
       "h100-sxm:8 has 8 devices"},
      {"simulate --model gpt2 --cluster h100-sxm:8 --schedule 1fb1 --layout "
       "pp=2 --batch 8",
       2, "did you mean \"1f1b\"?"},
      {"compare runs/none", 3,
       "runs/none: there is no such run; name a folder"},
      {"explain runs/nothing", 3, "name a folder that `echelon train` wrote"},
      {"checkpoint verify runs/none", 3, "runs/none: there is no such folder"},
      {"bench collectives --bytes 64x", 2, "must be a size from 4 to 64 GiB"},
      {"sample runs/none", 2, "--prompt is required"},
      {"sample runs/none --prompt x --temperature hot", 2,
       "--temperature = hot: must be a number"},
      {"explain first.toml", 3, "name a folder that `echelon train` wrote"},
  };
  return all;
}

TEST(Mistakes, AreAnsweredInThreeLinesWithAWayOut) {
  const TempFolder folder;
  folder.write(
      "first.toml",
      "[model]\nname = \"simple_cnn\"\n[train]\nsteps = 5\nbatch = 12\n"
      "run = \"runs/first\"\n");
  folder.write(
      "gpt.toml",
      "[model]\nname = \"gpt\"\nlayers = 2\nhidden_size = 16\nheads = 2\n"
      "max_positions = 64\n[data]\nname = \"text\"\npath = \"a.txt\"\n"
      "sequence = 32\n[train]\nsteps = 4\nbatch = 8\n");
  folder.write("broken.toml", "[train\nsteps = 3\n");
  folder.write("words.toml", "[optimizer]\nname = adam\n");
  folder.write("a.txt", std::string(9000, 'a'));
  folder.write("bad.json", "{\n");
  folder.write("junk.safetensors", "x\n");
  folder.write("theirs/config.json", "{\"architectures\": [\"BertModel\"]}");
  folder.make_folder("empty");
  folder.make_folder("runs/nothing");

  EXPECT_GE(mistakes().size(), 73u);
  // Spaces are no mistake.
  for (const std::string spaced :
       {"--set 'train.batch = 12'", "--layout 'dp = 2'"}) {
    const auto outcome = typed(folder, "train first.toml --check " + spaced);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  }
  for (const auto& mistake : mistakes()) {
    // Patterns and brackets are not for the shell.
    const auto outcome = typed(folder, mistake.typed, "set -f; ");
    EXPECT_EQ(outcome.exit_code, mistake.exit_code) << mistake.typed;
    EXPECT_THAT(outcome.err, testing::HasSubstr(mistake.answer))
        << mistake.typed;
    EXPECT_LE(lines_of(outcome.err).size(), 3u) << outcome.err;
    EXPECT_EQ(outcome.out, "") << mistake.typed;
  }
}

// What a file holds is shown as text, not as commands of the terminal.
TEST(Mistakes, SendNoCommandsToTheTerminal) {
  const TempFolder folder;
  folder.write("keys.toml", "[train]\n\"\\u001b[2J\\u009b2J\" = 3\n");
  const auto outcome = typed(folder, "train keys.toml --check");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_THAT(outcome.err, testing::HasSubstr("?[2J?2J"));
  EXPECT_THAT(outcome.err, testing::Not(testing::HasSubstr("\x1b")));
  EXPECT_THAT(outcome.err, testing::Not(testing::HasSubstr("\u009b")));
}

}  // namespace echelon::mistakes_cli_test
