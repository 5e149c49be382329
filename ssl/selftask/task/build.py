"""Build the parts of a task: network and method, optimizer, hooks and meters."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from selftask import classy
from selftask.config.schema import Component, Config
from selftask.distributed.collectives import world_size
from selftask.errors import UserError
from selftask.hooks.base import POINTS, defines, function_hook
from selftask.hooks.failures.non_finite import NonFiniteGuard
from selftask.logs import get_logger
from selftask.meters.accuracy import Accuracy
from selftask.models.build import build_backbone, check_offers, check_sizes, with_embed_dim
from selftask.models.depth import parameter_depths
from selftask.models.dropout import draw_per_sample
from selftask.models.teacher import Teacher
from selftask.models.weights.frozen import Frozen
from selftask.models.weights.model_source import load_head, load_init
from selftask.optim.build import build_optimizer
from selftask.optim.loss_scaler import LossScaler, NoScaler
from selftask.optim.param_groups import freeze_for_good
from selftask.parallel.blocks import find_blocks
from selftask.parallel.build import build_reduction, save_activations, synchronize
from selftask.parallel.compiled import compile_blocks, compile_whole
from selftask.parallel.initial_weights import InitialWeights, initial_weights
from selftask.registry import HOOKS, METERS, METHODS, TRAIN_STEPS, Registry
from selftask.task.compile_report import CompileReport
from selftask.task.frozen import FrozenParameters
from selftask.task.unreadable_images import UnreadableImages
from selftask.task.update_check import UpdateCheck

if TYPE_CHECKING:
    from selftask.task import Task

log = get_logger(__name__)


def train_step(component: Component) -> Callable[[Task], None]:
    """Return the train step: the registered function, or an instance of the registered class."""
    registered = TRAIN_STEPS[component.name]
    step: Callable[[Task], None]
    step = registered(**component.args) if isinstance(registered, type) else registered
    return step


def model(task: Task) -> None:
    """Build backbone, initial weights, method and network; distribute and compile them."""
    config = task.config
    initial = initial_weights(config.parallel, task.device)
    with initial.building():
        network = _network(task)
    task.base_model = initial.to_device(network)
    synchronize(config.parallel, [task.base_model, task.loss])
    with initial.building():
        task.loss.setup(task)
    initial.to_device(task.loss)
    draw_per_sample([task.base_model, task.loss], config.train.seed)
    initial.broadcast([task.base_model, task.loss])
    task.trained = [("network", task.base_model), ("loss", task.loss)]
    freeze_for_good(task.trained, config.optimizer.groups, task.loss.group_rules())
    if config.train.compile and _in_blocks(config):
        compile_blocks(task.base_model, config.train.compile_options)
    task.activations = save_activations(config.parallel, task.base_model)
    _distribute(task, initial)


def _network(task: Task) -> nn.Module:
    """Build backbone, method and network; load the weights of ``init``."""
    config = task.config
    backbone = _backbone(task)
    check_sizes(backbone, config)
    check_offers(backbone, config)
    load_init(backbone, config, task.init_weights)
    task.init_weights = None
    method = METHODS[config.method.name]
    task.loss = method(method.Config(**config.method.args))
    network: nn.Module = task.loss.build_network(backbone, task)
    load_head(network, config)
    return network


def _backbone(task: Task) -> nn.Module:
    config, channels = task.config.backbone, task.data_module.channels
    if task.backbone is None:
        return build_backbone(config, channels)
    return with_embed_dim(task.backbone, config.name, channels)


def _distribute(task: Task, initial: InitialWeights) -> None:
    """Shard or wrap the network as ``parallel`` requests; compile it if requested."""
    config = task.config
    task.reduction = build_reduction(config.parallel, task.low_precision)
    teachers = [part for part in task.loss.modules() if isinstance(part, Teacher)]
    frozen = [part.network for part in task.loss.modules() if isinstance(part, Frozen)]
    task.networks = [task.base_model, *(part.network for part in teachers)]
    task.reduction.shard([*task.networks, *frozen], initial)
    initial.materialize(task.loss)  # the method's own parameters and buffers
    called: Any = task.base_model
    if config.train.compile and not _in_blocks(config):
        called = compile_whole(task.base_model, config.train.compile_options)
    task.model = task.reduction.wrap(called)


def _in_blocks(config: Config) -> bool:
    """Return True if the network is compiled block by block, as FSDP and checkpointing require."""
    parallel = config.parallel
    return parallel.reduce == "fsdp" or parallel.activation_checkpointing != "none"


def optimizer(task: Task) -> None:
    """Build the optimizer and the gradient scaler; register the parameters to reduce."""
    train = task.config.train
    task.optimizer = build_optimizer(
        task.config.optimizer,
        task.trained,
        task.length,
        batch=train.batch_size * train.accumulate,
        depths=_depths(task),
        of_method=task.loss.group_rules(),
        regroup=task.reduction.regroup,
    )
    settings = task.optimizer.settings
    task.frozen = FrozenParameters((one.frozen_steps, one.parameter.value) for one in settings)
    task.update_check = UpdateCheck(task.optimizer, train.step.name)
    enabled = train.grad_scaler.enabled
    scales = train.precision == "float16" if enabled is None else enabled
    task.grad_scaler = LossScaler(train.grad_scaler, task.log) if scales else NoScaler()
    trained = {p for group in task.optimizer.param_groups for p in group["params"]}
    named = chain.from_iterable(module.named_parameters(name) for name, module in task.trained)
    task.reduction.register([(name, p) for name, p in named if p in trained])


def _depths(task: Task) -> dict[str, int]:
    """Return the layer index of each backbone parameter, if ``optimizer.layer_decay`` is used."""
    if task.config.optimizer.layer_decay == 1.0:
        return {}
    backbone = task.base_model.backbone
    depths = parameter_depths(backbone, find_blocks(backbone))
    return {f"network.backbone.{name}": depth for name, depth in depths.items()}


def hooks(task: Task) -> None:
    """Build hooks and meters, and list the calls of each hook point in order of priority."""
    chosen, train = task.config.hooks, task.config.train
    if train.on_nan == "skip":
        guard = NonFiniteGuard("skip", budget=train.nan_budget)
        task.added_hooks.setdefault("non_finite", guard)
    task.added_hooks.setdefault("unreadable_images", UnreadableImages())
    if train.uses_compiler:
        task.added_hooks["compile_report"] = CompileReport()
    if task.config.parallel.sync_buffers == "step" and world_size() > 1:
        task.added_hooks["sync_buffers"] = function_hook(priority=0, on_step=_sync_after_training)
    task.named_hooks = {k: _build(HOOKS, c, task.out) for k, c in chosen.items()} | task.added_hooks
    task.meters = [_build(METERS, c, task.out) for c in task.config.meters.values()]
    source = task.data_module.val_source
    for meter in task.meters:
        if isinstance(meter, Accuracy) and source is not None and source.labels is not None:
            meter.set_test_labels(source.labels)
    if task.meters and not task.loss.has_meter_input:
        raise UserError(
            f"meters ({', '.join(task.config.meters)}) look at class scores, and "
            f"method.name={task.config.method.name} gives none; see eval.evaluations, and "
            "Method.meter_input for a method of your own"
        )
    _check_test_set(task)
    for key, component in chosen.items():
        if component.priority is not None:
            task.named_hooks[key].priority = component.priority
    ranked = sorted(task.named_hooks.values(), key=lambda hook: getattr(hook, "priority", 50))
    task.hooks = [task.loss, *ranked]
    task.calls = {
        point: [getattr(hook, point) for hook in task.hooks if defines(hook, point)]
        for point in POINTS
    }


def _sync_after_training(task: Task) -> None:
    if task.train:  # ranks may have different numbers of test batches
        task.sync_buffers()


def _check_test_set(task: Task) -> None:
    """Raise UserError if a rank would have no images in a test phase."""
    images, ranks = len(task.data_module.val_source or ()), task.world.size
    if task.has_test_phases and images < ranks:
        raise UserError(f"meters: data.val has {images} images, on {ranks} ranks; give each one")


def _build(registry: Registry, component: Component, out: Path) -> Any:
    """Return the hook or meter of that name, from our registry or Classy Vision's."""
    if component.name in registry:
        return registry[component.name](**component.args)
    return classy.build(registry.kind, component.name, component.args, out)
