"""The passes, and their order."""

from __future__ import annotations

from fxpipe.options import Options
from fxpipe.passes._graph import copy_graph as copy_graph
from fxpipe.passes.assign_stages import AssignStages as AssignStages
from fxpipe.passes.build_schedule import BuildSchedule as BuildSchedule
from fxpipe.passes.defer_batchnorm import DeferBatchnorm as DeferBatchnorm
from fxpipe.passes.expose_randomness import ExposeRandomness as ExposeRandomness
from fxpipe.passes.insert_communication import InsertCommunication as InsertCommunication
from fxpipe.passes.make_cuts_dense import MakeCutsDense as MakeCutsDense
from fxpipe.passes.merge_pairs import MergePairs as MergePairs
from fxpipe.passes.normalize import Normalize as Normalize
from fxpipe.passes.partial_gradients import PartialGradients as PartialGradients
from fxpipe.passes.plan_last_uses import PlanLastUses as PlanLastUses
from fxpipe.passes.recompute import Recompute as Recompute
from fxpipe.passes.seed_randomness import SeedRandomness as SeedRandomness
from fxpipe.passes.split_loss import SplitLoss as SplitLoss
from fxpipe.passes.split_tasks import SplitTasks as SplitTasks
from fxpipe.passes.split_weight_grads import SplitWeightGrads as SplitWeightGrads
from fxpipe.passes.sync_gradients import SyncGradients as SyncGradients
from fxpipe.passes.trace_joint import TraceJoint as TraceJoint
from fxpipe.pipeline import Pipeline


def default_pipeline(options: Options) -> Pipeline:
    """Every pass in order, with the user's among them.

    `options.passes` switches an optional one off by its name, `options.extra_passes` adds some.
    """
    split = options.passes.get("split_weight_grads", True)
    return Pipeline.with_extra(
        (
            SplitLoss(),
            ExposeRandomness(),
            TraceJoint(),
            Normalize(),
            DeferBatchnorm(),
            SeedRandomness(),
            AssignStages(),
            PartialGradients(),
            Recompute(),
            BuildSchedule(merge_backward=not split),
            MakeCutsDense(),
            SplitWeightGrads(),
            SplitTasks(),
            MergePairs(),
            InsertCommunication(),
            SyncGradients(),
            PlanLastUses(),
        ),
        optional=frozenset(
            {"normalize", "recompute", "split_weight_grads", "merge_pairs", "plan_last_uses"}
        ),
        options=options,
    )
