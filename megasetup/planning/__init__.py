"""What a run will hold on each GPU and each node, and how long a sync takes, told before any GPU is taken."""

from megasetup.planning.memory import Item, OptimizerMemory
from megasetup.planning.plan import plan_run
from megasetup.planning.policy import plan_policy
from megasetup.planning.result import Limits, NodePlan, RankPlan, RunPlan
from megasetup.planning.sync_time import Rates, SyncTime, sync_time
from megasetup.planning.world import ParallelSizes, Place, PlanningError, places, pretended_world

__all__ = [
    "Item",
    "Limits",
    "NodePlan",
    "OptimizerMemory",
    "ParallelSizes",
    "Place",
    "PlanningError",
    "RankPlan",
    "Rates",
    "RunPlan",
    "SyncTime",
    "places",
    "plan_policy",
    "plan_run",
    "pretended_world",
    "sync_time",
]
