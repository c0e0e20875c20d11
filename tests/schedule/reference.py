"""Schedules of torch.distributed.pipelining, written as CSV; ours, loaded there.

reference.py export FOLDER  writes FOLDER/NAME.pP.mM.vV.csv for each of theirs
reference.py load FOLDER    loads each FOLDER/*.csv; prints how many
"""

import glob
import os
import re
import sys

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase


class Stage(_PipelineStageBase):
    """A stage that computes nothing and needs no process group."""

    def __init__(self, ranks, stages):
        self.group_size = ranks
        self.num_stages = stages
        self.group_rank = 0
        self.group = None
        self.stage_index = 0
        self.submod = None
        self.has_backward = True

    def _create_grad_recv_info(self, act_send_info):
        raise NotImplementedError

    def _prepare_forward_infra(self, *args):
        raise NotImplementedError


def stages(ranks, per_rank):
    return [Stage(ranks, ranks * per_rank) for _ in range(per_rank)]


def loss(output, target):
    return output


# Without 1F1B: the list that describes it leaves out the last rank's first
# forward, though it runs it.
KINDS = {
    "GPipe": [1],
    "Interleaved1F1B": [2, 3],
    "LoopedBFS": [1, 2, 3],
    "InterleavedZeroBubble": [1],
    "ZBVZeroBubble": [2],
    "DualPipeV": [2],
}


def order(name, ranks, microbatches, per_rank):
    """Per rank its actions, with None for idle; nothing if not defined."""
    kind = schedules.get_schedule_class(name)
    own = stages(ranks, per_rank)
    if issubclass(kind, schedules.PipelineScheduleSingle):
        schedule = object.__new__(kind)
        schedule._num_stages = ranks
        schedule._n_microbatches = microbatches
        rows = schedule._get_pipeline_order()
    else:
        try:
            schedule = kind(own, microbatches, loss_fn=loss)
        except ValueError:
            return None
        rows = schedule.pipeline_order
    gone = schedules._ComputationType.REDUCE_GRAD
    return [
        ["" if a is None else str(a) for a in rows[rank]
         if a is None or a.computation_type != gone]
        for rank in range(ranks)
    ]


def export(folder):
    for name, per_ranks in KINDS.items():
        for ranks in (1, 2, 3, 4):
            for microbatches in range(1, 14):
                for per_rank in per_ranks:
                    rows = order(name, ranks, microbatches, per_rank)
                    if rows is None:
                        continue
                    path = f"{name}.p{ranks}.m{microbatches}.v{per_rank}.csv"
                    with open(os.path.join(folder, path), "w") as out:
                        for row in rows:
                            out.write(",".join(row) + "\r\n")


def load(folder):
    loaded = 0
    for path in sorted(glob.glob(os.path.join(folder, "*.csv"))):
        found = re.search(r"\.p(\d+)\.m(\d+)\.v(\d+)\.csv$", path)
        ranks, microbatches, per_rank = map(int, found.groups())
        schedule = schedules._PipelineScheduleRuntime(
            stages(ranks, per_rank), microbatches, loss_fn=loss)
        schedule.pipeline_order = {}
        schedule._load_csv(path, format="compute_only")
        # With transfers put in, it has to run to its end.
        gone = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        rows = {
            rank: [a for a in row if a.computation_type.value not in gone]
            for rank, row in schedule.pipeline_order_with_comms.items()
        }
        schedules._simulate_comms_compute(
            rows,
            lambda s: schedule.stage_index_to_group_rank[s],
            ranks * per_rank)
        loaded += 1
    print(loaded)


if __name__ == "__main__":
    {"export": export, "load": load}[sys.argv[1]](sys.argv[2])
