"""PyTorch's side of checkpoint.py: run by torchrun, rank 0 writes JSON to --out.

--mode dp      DistributedDataParallel, the whole state on each rank
--mode fsdp    FSDP2, each rank has half
--best         each save's plan is kept for the next one, two threads a rank write,
               and an asynchronous save copies beside the following forward and
               backward; the update waits until it has
"""
import argparse
import json
import os
import shutil
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

from file_cache import drop_cached, folder_bytes, synchronise
from torch_gpt import Gpt, Shape, load, make_optimizer, shard
from torch_gpt_step import memory_of


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# Steps that a save is beside, at least: a longer save gets more.
STEPS_BESIDE = 3


class Training:
    def __init__(self, options, shape, rank, size):
        model = Gpt(shape)
        load(model, options.weights, shape)
        if options.mode == "fsdp":
            mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
            self.model = shard(model, mesh, keep=False)
        else:
            self.model = torch.nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=True, static_graph=True
            )
        self.optimizer = make_optimizer(self.model, options.learning_rate)
        tokens = load_file(options.data)["tokens"]  # [steps, batch, length + 1]
        self.tokens = tokens.chunk(size, dim=1)[rank]
        self.steps = 0

    def step(self, before_update=lambda: None):
        batch = self.tokens[self.steps % len(self.tokens)].contiguous()
        self.steps += 1
        self.optimizer.zero_grad()
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten()
        )
        loss.backward()
        before_update()
        self.optimizer.step()
        self.loss = loss.detach()
        dist.all_reduce(self.loss)
        self.loss /= dist.get_world_size()

    def state(self):
        """Parameters, and AdamW's state; the words, which the head shares, once.
        Its tensors are the live ones."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        model.pop("lm_head.weight", None)
        return {"model": model, "optimizer": optimizer}

    def load_state(self, state):
        model = {**state["model"], "lm_head.weight": state["model"]["wte.weight"]}
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=model,
            optim_state_dict=state["optimizer"],
        )

    def tensors(self):
        """This rank's own, which training goes on with."""
        own = [local(p.data) for p in self.model.parameters()]
        for values in self.optimizer.state.values():
            own += [local(v) for v in values.values() if torch.is_tensor(v)]
        return own


class Measurement:
    def __init__(self, options, training, rank):
        self.options = options
        self.training = training
        self.rank = rank
        self.folder = Path(options.folder)
        # A save's own collectives must not mix with those of the steps beside it.
        self.group = dist.new_group(backend="gloo")
        self.result = {}

    def writer(self, path):
        """Writes one file a rank; synchronises files, as the default is."""
        return dcp.FileSystemWriter(
            path, thread_count=2 if self.options.best else 1, sync_files=True
        )

    def stager(self):
        """A new one each time: after its first use it has closed itself."""
        if not self.options.best:
            return None
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )

    def planner(self):
        return DefaultSavePlanner(enable_plan_caching=self.options.best)

    def add(self, name, value):
        self.result.setdefault(name, []).append(value)

    def clock(self, action):
        """Seconds that all ranks take together."""
        dist.barrier()
        begin = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - begin

    def clear(self, path):
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)
            synchronise(self.folder)
        dist.barrier()

    def plain_steps(self):
        for index in range(self.options.steps + 1):
            seconds = self.clock(self.training.step)
            self.add("losses", self.training.loss.item())
            if index > 0:  # the first one warms up
                self.add("step_seconds", seconds)

    def save(self, path):
        dcp.save(
            self.training.state(),
            storage_writer=self.writer(path),
            planner=self.planner(),
            process_group=self.group,
        )

    def saves(self):
        for index in range(self.options.saves + 1):
            path = self.folder / f"save-{index}"
            seconds = self.clock(lambda: self.save(path))
            if index > 0:  # the first one warms up
                self.add("save_seconds", seconds)
                self.result["bytes"] = [folder_bytes(path)]
            if index < self.options.saves:
                self.clear(path)
        return path

    def async_saves(self):
        for index in range(self.options.saves + 1):
            path = self.folder / f"async-{index}"
            figures = self.async_save(path)
            if index > 0:
                for name, value in figures.items():
                    self.add(name, value)
            self.clear(path)

    def async_save(self, path):
        dist.barrier()
        begin = time.perf_counter()
        stager = self.stager()
        answer = dcp.async_save(
            self.training.state(),
            storage_writer=self.writer(path),
            planner=self.planner(),
            process_group=self.group,
            async_stager=stager,
        )
        stopped = time.perf_counter() - begin
        waited = 0.0
        staged = getattr(answer, "staging_completion", None)
        written = getattr(answer, "upload_completion", answer)

        def wait():
            nonlocal waited
            if staged is None:
                return
            before = time.perf_counter()
            staged.result()
            waited = max(waited, time.perf_counter() - before)

        # All ranks go on until all have written.
        under_way = torch.ones(1)
        steps = 0
        while steps < STEPS_BESIDE or under_way.item() > 0:
            self.training.step(wait if steps == 0 else lambda: None)
            steps += 1
            under_way = torch.tensor([0.0 if written.done() else 1.0])
            dist.all_reduce(under_way)
        took = time.perf_counter() - begin
        written.result()
        if stager is not None:
            stager.close()
        slowest = torch.tensor([stopped, waited])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return {
            "stopped_seconds": slowest.sum().item(),
            "beside_seconds": took,
            "beside_steps": steps,
        }

    def loads(self, path):
        expected = [t.double().sum().item() for t in self.training.tensors()]
        for index in range(self.options.loads + 1):
            for tensor in self.training.tensors():
                tensor.fill_(-1)
            dist.barrier()
            drop_cached(path)
            loaded = {}

            def read():
                loaded["state"] = self.training.state()
                dcp.load(
                    loaded["state"], storage_reader=dcp.FileSystemReader(path)
                )

            seconds = self.clock(read)
            more = self.clock(lambda: self.training.load_state(loaded["state"]))
            if index > 0:
                self.add("load_seconds", seconds + more)
                self.add("read_seconds", seconds)
            found = [t.double().sum().item() for t in self.training.tensors()]
            if found != expected:
                raise ValueError("the state that was loaded is not the saved one")


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("dp", "fsdp"), required=True)
    parser.add_argument("--best", action="store_true")
    for name in ("layers", "hidden", "heads", "vocabulary", "positions"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("steps", "saves", "loads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    for name in ("weights", "data", "folder", "out"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    shape = Shape(
        options.layers, options.hidden, options.heads, options.vocabulary,
        options.positions,
    )

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    training = Training(options, shape, rank, size)
    measurement = Measurement(options, training, rank)
    measurement.plain_steps()
    memory = {"own_bytes": sum(t.nbytes for t in training.tensors())}
    memory["training_peak_bytes"] = memory_of("VmHWM")
    forget_peak()
    measurement.async_saves()
    memory["async_peak_bytes"] = memory_of("VmHWM")
    path = measurement.saves()
    memory["rest_bytes"] = memory_of("VmRSS")
    forget_peak()
    measurement.loads(path)
    memory["load_peak_bytes"] = memory_of("VmHWM")

    result = measurement.result
    for key, value in memory.items():
        every = [None] * size
        dist.all_gather_object(every, value)
        result[key] = every
    if rank == 0:
        Path(options.out).write_text(json.dumps(result))
    measurement.clear(path)
    dist.destroy_process_group()
    # Gloo's threads now and then abort the interpreter's own end.
    os._exit(0)


if __name__ == "__main__":
    main()
