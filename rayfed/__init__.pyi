from rayfed.data.partition_config import Partition as Partition
from rayfed.experiment.compare_and_sweep import compare as compare
from rayfed.experiment.compare_and_sweep import grid as grid
from rayfed.experiment.experiment import Experiment as Experiment
from rayfed.experiment.experiment import simulate as simulate
from rayfed.experiment.finished_run import Run as Run
from rayfed.experiment.load import load as load
from rayfed.experiment.study.cells import Study as Study
from rayfed.experiment.study.search import sweep as sweep
from rayfed.experiment.tuned import tuned as tuned
from rayfed.federation.client import Client as Client
from rayfed.federation.cohort import Cohort as Cohort
from rayfed.federation.knob import Knob as Knob
from rayfed.federation.local import Local as Local
from rayfed.federation.method_registry import Method as Method
from rayfed.federation.server import Server as Server
from rayfed.models.user_model import Model as Model
from rayfed.objective import Task as Task
from rayfed.tuning.lora import LoRA as LoRA
from rayfed.types import Broadcast as Broadcast
from rayfed.types import ServerState as ServerState
from rayfed.types import Update as Update
from rayfed.types import is_statistic as is_statistic

__version__: str
