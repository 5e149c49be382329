"""Functions that build the parts of a task: network and method, optimizers, hooks, meters."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selftask import classy
from selftask.config.extensions.user_code import check_takes, construct, source_of
from selftask.config.keys import dotted
from selftask.config.schema import Component, OptimizerConfig
from selftask.distributed.collectives import world_size
from selftask.errors import UserError
from selftask.hooks.base import Task, function_hook
from selftask.hooks.failures.non_finite import NonFiniteGuard
from selftask.hooks.watching.loader_check import LoaderCheck
from selftask.logs import get_logger
from selftask.meters.accuracy import Accuracy
from selftask.models.build import build_backbone, check_offers, check_sizes, with_embed_dim
from selftask.models.depth import parameter_depths
from selftask.models.dropout import draw_per_sample
from selftask.models.precision.bfloat16 import attend_by_products
from selftask.models.teacher import Teacher
from selftask.models.weights.frozen import Frozen
from selftask.models.weights.lora import adapt
from selftask.models.weights.model_source import load_head, load_init
from selftask.optim.build import build_optimizer
from selftask.optim.loss_scaler import LossScaler, NoScaler
from selftask.optim.param_groups import divide, freeze_for_good, named_parameters
from selftask.parallel.blocks import find_blocks
from selftask.parallel.build import build_reduction, synchronize
from selftask.parallel.compiled import compile_blocks, compile_calls, compile_function
from selftask.parallel.initial_weights import InitialWeights
from selftask.parallel.reduction import Reduction
from selftask.registry import HOOKS, METERS, TRAIN_STEPS, Registry
from selftask.task.compile_report import CompileReport, RecordedGraphs
from selftask.task.initial_rules import initialize
from selftask.task.own_method import build_method, build_network
from selftask.task.unreadable_images import UnreadableImages

log = get_logger(__name__)


def train_step(component: Component) -> Callable[[Task], None]:
    """Return the train step: the registered function, or an instance of the registered class.

    Raises:
        UserError: If the name is unknown, the class requires arguments or has no ``__call__``, or
            the step cannot be called with the task.
    """
    subject, registered = f"train.step={component.name}", TRAIN_STEPS[component.name]
    step: Callable[[Task], None] = registered
    if isinstance(registered, type):
        step = construct(registered, component.args, subject)
    if not callable(step):
        raise UserError(f"train.step: the class {component.name!r} has no method __call__")
    check_takes(step, ["task"], subject)
    return step


def network(task: Task, initial: InitialWeights) -> tuple[Any, nn.Module]:
    """Build backbone, method and network, with the adapters and initial weights of the config.

    Args:
        task: The task, with its data.
        initial: Builder of equal weights on all ranks; see ``initial_weights``.

    Returns:
        The method and the network.
    """
    config = task.config
    with initial.building():
        backbone = _backbone(task)
        check_sizes(backbone, config)
        check_offers(backbone, config)
        load_init(backbone, config, task.init_weights)
        adapt(backbone, config.backbone.lora)
        loss = build_method(config.method)
        built = build_network(loss, backbone, task)
        load_head(built, config)
        initialize(built, config.init.rules, task.out)
    return loss, initial.to_device(built)


def _backbone(task: Task) -> nn.Module:
    config, channels = task.config.backbone, task.data_module.channels
    if task.backbone is None:
        return build_backbone(config, channels)
    return with_embed_dim(task.backbone, config.name, channels)


def set_up_method(task: Task, initial: InitialWeights) -> None:
    """Call ``setup`` of the method, and prepare method and network for training, in place.

    BatchNorm is synchronized, draws of dropout layers are keyed by sample, parameters are frozen
    for the whole run and modules are compiled, as configured.
    """
    config, modules = task.config, [task.base_model, task.loss]
    synchronize(config.parallel, modules)
    with initial.building():
        task.loss.setup(task)
    initial.to_device(task.loss)
    if task.low_precision is torch.bfloat16:
        attend_by_products(modules, task.device)
    draw_per_sample(modules, config.train.seed)
    initial.broadcast(modules)
    freeze_for_good(task.trained, config.optimizer.groups, task.loss.group_rules())
    for name, section in config.optimizers.items():
        freeze_for_good(task.trained, section.groups, key=f"optimizers.{name}")
    if config.train.uses_compiler:
        _compile_parts(task)


def _compile_parts(task: Task) -> None:
    """Compile teachers and frozen modules, and blocks of the trained network if necessary.

    Sets ``task.compiled_whole``: False if the trained network is sharded or compiled in blocks.
    """
    train, parallel = task.config.train, task.config.parallel
    is_sharded = parallel.reduce == "fsdp" and world_size() > 1
    for part in task.loss.modules():
        if isinstance(part, Teacher | Frozen):
            (compile_blocks if is_sharded else compile_calls)(part.network, train.compile_options)
    overlaps = world_size() > 1 and not train.compile_options.records_graphs
    in_blocks = train.compile and (overlaps or parallel.activation_checkpointing != "none")
    has_blocks = in_blocks and compile_blocks(task.base_model, train.compile_options)
    task.compiled_whole = not (has_blocks or is_sharded)
    if task.compiled_whole and world_size() > 1:
        log.info(
            "compile: one graph of the whole network, all of whose gradients come at its end: "
            "their exchange between ranks does not overlap with the backward pass"
        )


def reductions(task: Task, initial: InitialWeights) -> dict[str | None, Reduction]:
    """Build the gradient reduction of each optimizer, by its name in ``optimizers``.

    The reduction of ``optimizer``, whose name is None, may shard network, teachers and frozen
    modules.
    """
    parallel, low = task.config.parallel, task.low_precision
    reduction = build_reduction(parallel, low)
    frozen = [part.network for part in task.loss.modules() if isinstance(part, Frozen)]
    reduction.shard([*task.networks, *frozen], initial)
    initial.materialize(task.loss)  # the method's own parameters and buffers
    by_name: dict[str | None, Reduction] = {None: reduction}
    for name in task.config.optimizers:
        by_name[name] = build_reduction(parallel, low, overlap=False)
    return by_name


def called_network(task: Task) -> Any:
    """Return the network as train steps call it: compiled and wrapped, if requested."""
    config = task.config
    called: Any = task.base_model
    if config.train.compile and task.compiled_whole:
        called = compile_function(task.base_model, config.train.compile_options)
    return task.reduction.wrap(called)


def optimizers(task: Task) -> tuple[Any, dict[str, Any]]:
    """Build ``optimizer`` and, by name, ``optimizers``.

    The parameters of each are registered with the reduction of the same name.
    """
    config, modules = task.config, task.trained
    parts = divide(modules, {name: one.match for name, one in config.optimizers.items()})
    sections = zip(parts.items(), config.all_optimizers.items(), strict=True)
    named = named_parameters(modules)  # once each, also if the method has the network's modules
    built: dict[Any, Any] = {}
    for (name, parameters), (key, section) in sections:
        reduction = task.reductions[name]
        built[name] = build_optimizer(
            section,
            modules,
            task.length,
            batch=task.length.samples_per_step,
            depths=_depths(task, section),
            of_method=task.loss.group_rules(),
            regroup=reduction.regroup,
            only=parameters,
            key=dotted(key),
        )
        reduction.register([(one.name, one.value) for one in named if one.value in parameters])
    return built.pop(None), built


def _depths(task: Task, optimizer: OptimizerConfig) -> dict[str, int]:
    """Return the layer index of each backbone parameter by name; empty without ``layer_decay``."""
    if optimizer.layer_decay == 1.0:
        return {}
    backbone = task.base_model.backbone
    depths = parameter_depths(backbone, find_blocks(backbone))
    return {f"network.backbone.{name}": depth for name, depth in depths.items()}


def grad_scaler(task: Task) -> NoScaler:
    """Build the loss scaler; without ``train.grad_scaler.enabled``, it scales in float16 only."""
    config = task.config.train.grad_scaler
    scales = task.low_precision is torch.float16 if config.enabled is None else config.enabled
    return LossScaler(config, task.log) if scales else NoScaler()


def hooks(task: Task) -> dict[str, Any]:
    """Build the hooks of the config; return them and the hooks added to the task, by name.

    Each hook is added to ``task.named_hooks`` as soon as it is built, so that closing the task
    releases it even if a later hook cannot be built.

    Raises:
        UserError: If a registered class is not a hook, or a hook of Classy Vision cannot be built.
    """
    _add_required_hooks(task)
    task.named_hooks = {}
    for key, component in task.config.hooks.items():
        task.named_hooks[key] = hook = _build(HOOKS, f"hooks.{key}", component, task.out)
        if not isinstance(hook, classy.ClassyHook):
            raise UserError(
                f"{source_of(type(hook))}: hooks.{key}: {type(hook).__name__} must extend "
                "selftask.hooks.base.Hook"
            )
        if component.priority is not None:
            hook.priority = component.priority
    return task.named_hooks | task.added_hooks


def _add_required_hooks(task: Task) -> None:
    """Add to ``task.added_hooks`` the hooks that are always needed, or needed by the config."""
    train, added = task.config.train, task.added_hooks
    if train.on_nan == "skip":
        added.setdefault("non_finite", NonFiniteGuard("skip", budget=train.nan_budget))
    added.setdefault("unreadable_images", UnreadableImages())
    if LoaderCheck.applies(task):
        added.setdefault("loader_check", LoaderCheck())
    if train.uses_compiler:
        added["compile_report"] = CompileReport()  # counts from here on
        if train.compile_options.records_graphs:
            added["recorded_graphs"] = RecordedGraphs()
    if task.config.parallel.sync_buffers == "step" and world_size() > 1:
        added["sync_buffers"] = function_hook(priority=0, on_step=_sync_after_training)


def _sync_after_training(task: Task) -> None:
    if task.train:  # a test phase changes none
        task.sync_buffers()


def check_added_hook(hook: Any, name: str, names: Container[str]) -> None:
    """Raise UserError if an object is not a hook or its name is taken.

    Args:
        hook: The object passed to ``Task.add_hook``.
        name: Name for the hook.
        names: Names of the other hooks.
    """
    if not isinstance(hook, classy.ClassyHook):
        raise UserError(f"add_hook: {hook!r} is no hook; see function_hook for functions")
    if name in names:
        raise UserError(f"add_hook: there is a hook {name!r} already; give another name")


def meters(task: Task) -> list[Any]:
    """Build the meters of the config.

    Raises:
        UserError: If a registered class is not a meter or has another ``update``, the method gives
            no class scores, or the test set has fewer images than there are ranks.
    """
    built = [
        _build(METERS, f"meters.{key}", component, task.out)
        for key, component in task.config.meters.items()
    ]
    source = task.data_module.val_source
    for key, meter in zip(task.config.meters, built, strict=True):
        if not isinstance(meter, classy.ClassyMeter):
            raise UserError(
                f"{source_of(type(meter))}: meters.{key}: {type(meter).__name__} must extend "
                "selftask.classy.ClassyMeter"
            )
        check_takes(meter.update, ["model_output", "target"], f"update of meters.{key}")
        if isinstance(meter, Accuracy) and source is not None and source.labels is not None:
            meter.set_test_labels(source.labels)
    if built and not task.loss.has_meter_input:
        raise UserError(
            f"meters ({', '.join(task.config.meters)}) look at class scores, and "
            f"method.name={task.config.method.name} gives none; see eval.evaluations, and "
            "Method.meter_input for a method of your own"
        )
    images, ranks = len(source or ()), task.world.size
    if built and task.data_module.has_test and images < ranks:
        raise UserError(f"meters: data.val has {images} images, on {ranks} ranks; give each one")
    return built


def _build(registry: Registry, key: str, component: Component, out: Path) -> Any:
    """Build the hook or meter of a component, from selftask's registry or Classy Vision's."""
    if component.name in registry:
        return construct(registry[component.name], component.args, f"{key}={component.name}")
    return classy.build(registry.kind, component.name, component.args, out)
