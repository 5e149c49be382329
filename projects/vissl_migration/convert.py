"""Convert a VISSL config to a selftask recipe, and list what was not converted.

    python convert.py train_config.yaml [--out recipe.yaml]

The file is a VISSL yaml with ``config:`` at the top, or the ``train_config.yaml`` that VISSL wrote
to the folder of a run. Known methods are SimCLR, MoCo, SwAV and Barlow Twins; other losses are
reported. Every key is converted, has no effect here, or is printed with a reason. The exit code is
0 if the recipe is complete, and 1 if keys that change the training were not converted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from views import to_views
from vissl_keys import Keys, Unconvertible


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, help="default: beside the config, NAME_selftask.yaml")
    options = parser.parse_args(argv)
    out = options.out or options.config.with_name(f"{options.config.stem}_selftask.yaml")
    try:
        content = yaml.safe_load(options.config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        sys.exit(f"error: {options.config}: {error}")
    content = content.get("config", content) if isinstance(content, dict) else None
    if not isinstance(content, dict) or not {"DATA", "MODEL", "OPTIMIZER"} <= content.keys():
        sys.exit(f"error: {options.config}: no VISSL config: DATA, MODEL and OPTIMIZER are missing")
    keys = Keys(content)
    recipe = convert(keys)
    header = f"# Converted from VISSL's {options.config.name}; not run.\n"
    usage = f"#   selftask train {out.name}\n"
    text = yaml.dump(recipe, Dumper=_Plain, sort_keys=False, default_flow_style=None, width=100)
    out.write_text(header + usage + text, encoding="utf-8")
    left = keys.not_converted()
    for line in left:
        print(f"not converted: {line}")
    for line in keys.notes:
        print(f"note: {line}")
    if keys.num_off:
        print(f"note: {keys.num_off} more keys are unknown here, and off: False, None, -1 or empty")
    print(f"{out}: {keys.num_taken} keys converted, {len(left)} not")
    print(f"check it: selftask config {out}")
    return 1 if left else 0


class _Plain(yaml.SafeDumper):
    """YAML dumper that repeats repeated values instead of writing an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def convert(keys: Keys) -> dict[str, Any]:
    """Return the recipe; what cannot be converted is recorded in ``keys``."""
    recipe: dict[str, Any] = {"data": _data(keys)}
    if (views := keys.attempt("DATA.TRAIN.TRANSFORMS", to_views)) is not None:
        recipe["views"] = views
    if (backbone := keys.attempt("MODEL.TRUNK", _backbone)) is not None:
        recipe["backbone"] = backbone
    if (method := _method(keys)) is not None:
        recipe["method"] = method
    nodes, processes = keys.take("DISTRIBUTED.NUM_NODES", 1), keys.processes
    per_process = keys.take("DATA.TRAIN.BATCHSIZE_PER_REPLICA", 256)
    recipe["train"] = _train(keys, per_process * nodes * processes)
    recipe["optimizer"] = _optimizer(keys, per_process * processes, nodes)
    if keys.take("MODEL.SYNC_BN_CONFIG.CONVERT_BN_TO_SYNC_BN", False):
        group = keys.take("MODEL.SYNC_BN_CONFIG.GROUP_SIZE", 0)
        recipe["parallel"] = {"sync_batch_norm": group if group > 0 else "all"}
    recipe["launch"] = {"nodes": nodes, "processes": processes}
    if keys.take("TENSORBOARD_SETUP.USE_TENSORBOARD", False):
        recipe["hooks"] = {"tensorboard": {}}
    if path := keys.take("MODEL.WEIGHTS_INIT.PARAMS_FILE", ""):
        recipe["init"] = {"backbone": path}
    if folder := keys.take("CHECKPOINT.DIR", None):
        recipe["out"] = folder
    if not keys.take("CHECKPOINT.AUTO_RESUME", True):
        recipe["resume"] = "never"
    return recipe


def _data(keys: Keys) -> dict[str, Any]:
    paths = keys.take("DATA.TRAIN.DATA_PATHS", [])
    names = keys.take("DATA.TRAIN.DATASET_NAMES", [])
    if len(paths) > 1:
        keys.refuse("DATA.TRAIN.DATA_PATHS", "several sources: see data.name=concat")
    path = paths[0] if paths else f"data/{names[0]}" if names else "data"
    if not paths:
        keys.notes.append(f"data.path={path}: VISSL's catalog named the folder; set yours")
    source = keys.take("DATA.TRAIN.DATA_SOURCES", ["disk_folder"])[0]
    if source not in ("disk_folder", "disk_filelist"):
        keys.refuse("DATA.TRAIN.DATA_SOURCES", f"{source}: see docs/data.md")
    data: dict[str, Any] = {"name": "folder", "path": path}
    if (limit := keys.take("DATA.TRAIN.DATA_LIMIT", -1)) > 0:
        data["subset"] = limit
    workers = keys.take("DATA.NUM_DATALOADER_WORKERS", None)
    before = keys.take("MACHINE.NUM_DATALOADER_WORKERS", None)  # its location in older versions
    if (workers := before if workers is None else workers) is not None:
        data["num_workers"] = workers
    destination = keys.take("DATA.TRAIN.COPY_DESTINATION_DIR", None)
    if keys.take("DATA.TRAIN.COPY_TO_LOCAL_DISK", False):
        data["stage_to"] = destination
    return data


def _backbone(trunk: dict[str, Any]) -> Any:
    name = trunk.get("NAME")
    params = trunk.get("TRUNK_PARAMS", {})
    if name == "resnet":
        args = dict(params.get("RESNETS", {}))
        backbone: dict[str, Any] = {"name": f"resnet{args.pop('DEPTH', 50)}"}
        if args.pop("ZERO_INIT_RESIDUAL", False):
            backbone["zero_init_residual"] = True
        default = {"WIDTH_MULTIPLIER": 1, "NORM": "BatchNorm", "GROUPS": 1, "WIDTH_PER_GROUP": 64}
        default |= {"STANDARDIZE_CONVOLUTIONS": False, "GROUPNORM_GROUPS": 32, "LAYER4_STRIDE": 2}
        if odd := {key: v for key, v in args.items() if default.get(key, v) != v}:
            raise Unconvertible(f"no such ResNet here: {odd}")
        return backbone
    raise Unconvertible(f"{name}: write the backbone of timm or torchvision, backbone=timm:NAME")


def _method(keys: Keys) -> dict[str, Any] | None:
    section = "LOSS" if keys.has("LOSS") else "CRITERION"  # its name in older versions
    name = keys.take(f"{section}.name", None)
    # the arguments of the other losses, which VISSL writes to train_config.yaml, have no effect
    inner = next((k for k in keys.names(section) if k.lower() == str(name).lower()), name)
    arguments = {k.lower(): v for k, v in (keys.take(f"{section}.{inner}", None) or {}).items()}
    keys.drop(section)
    if name not in METHODS:
        known = ", ".join(METHODS)
        keys.refuse(f"{section}.name", f"{name}; known: {known}. See `selftask list methods`")
        return None
    method = METHODS[name](keys, arguments)
    for key, value in arguments.items():
        keys.refuse(f"{section}.{inner}.{key}", str(value))
    return method


def _mlp_head(keys: Keys) -> dict[str, Any]:
    """Return the widths of a head of one or two ``mlp`` entries, as in VISSL's projectors."""
    layers = keys.take("MODEL.HEAD.PARAMS", [])
    if not layers or any(kind != "mlp" for kind, _ in layers):
        keys.refuse("MODEL.HEAD.PARAMS", f"{layers}: set method.hidden_dim and method.out_dim")
        return {}
    dims = [layers[0][1]["dims"][0], *(d for _, args in layers for d in args["dims"][1:])]
    return {"out_dim": dims[-1], **({"hidden_dim": dims[1]} if len(dims) > 2 else {})}


def _simclr(keys: Keys, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments.pop("buffer_params", None)  # derived by VISSL
    head = _mlp_head(keys)  # without BatchNorm, unlike ours
    return {
        "name": "simclr",
        **head,
        "norm": False,
        "temperature": arguments.pop("temperature", 0.1),
    }


def _moco(keys: Keys, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments.pop("embedding_dim", None)  # the head's
    names = {"queue_size": 65536, "momentum": 0.999, "temperature": 0.2}
    values = {name: arguments.pop(name, default) for name, default in names.items()}
    return {"name": "moco", **_mlp_head(keys), **values}


def _swav(keys: Keys, arguments: dict[str, Any]) -> dict[str, Any]:
    for derived in ("num_crops", "num_prototypes", "embedding_dim", "output_dir"):
        arguments.pop(derived, None)
    arguments.pop("use_double_precision", None)  # assignments are computed in float32 here
    method: dict[str, Any] = {"name": "swav"}
    if arguments.pop("normalize_last_layer", True) is not True:
        keys.refuse("LOSS.swav_loss.normalize_last_layer", "prototypes are normalized here")
    if (crops := arguments.pop("crops_for_assign", [0, 1])) != [0, 1]:
        keys.refuse("LOSS.swav_loss.crops_for_assign", f"{crops}: those of the first group")
    method["temperature"] = arguments.pop("temperature", 0.1)
    method["epsilon"] = arguments.pop("epsilon", 0.05)
    method["sinkhorn_iterations"] = arguments.pop("num_iters", 3)
    queue = arguments.pop("queue", {})
    if queue.get("queue_length", 0):
        method["queue_size"] = queue["queue_length"]
        method["queue_start"] = f"{queue.get('start_iter', 0)} steps"
    if (hard := arguments.pop("temp_hard_assignment_iters", 0)) > 0:
        method["hard_assignments"] = f"{hard} steps"
    heads = keys.take("MODEL.HEAD.PARAMS", [])
    if len(heads) == 1 and heads[0][0] == "swav_head" and len(heads[0][1]["num_clusters"]) == 1:
        args = heads[0][1]
        method |= {"out_dim": args["dims"][-1], "num_prototypes": args["num_clusters"][0]}
        method |= {"hidden_dim": args["dims"][1], "norm": args.get("use_bn", True)}
    else:
        keys.refuse("MODEL.HEAD.PARAMS", f"{heads}: one swav_head with one number of clusters")
    frozen = keys.take("MODEL.TEMP_FROZEN_PARAMS_ITER_MAP", [])
    for pattern, steps in frozen:
        if "prototypes" in pattern:
            method["freeze_prototypes"] = f"{steps} steps"
        else:
            keys.refuse("MODEL.TEMP_FROZEN_PARAMS_ITER_MAP", f"{pattern}: optimizer.groups")
    return method


def _barlow(keys: Keys, arguments: dict[str, Any]) -> dict[str, Any]:
    arguments.pop("embedding_dim", None)
    return {
        "name": "barlow",
        **_mlp_head(keys),
        "redundancy_weight": arguments.pop("lambda_", 0.0051),
        "scale": arguments.pop("scale_loss", 0.024),
    }


METHODS: dict[str, Callable[[Keys, dict[str, Any]], dict[str, Any]]] = {
    "simclr_info_nce_loss": _simclr,
    "moco_loss": _moco,
    "swav_loss": _swav,
    "barlow_twins_loss": _barlow,
}


def _train(keys: Keys, batch_size: int) -> dict[str, Any]:
    train: dict[str, Any] = {
        "epochs": keys.take("OPTIMIZER.num_epochs", 1),
        "batch_size": batch_size,
        "seed": keys.take("SEED_VALUE", 0),
        "log_every": keys.take("LOG_FREQUENCY", 10),
    }
    step = keys.take("TRAINER.TRAIN_STEP_NAME", "standard_train_step")
    if step not in ("standard", "standard_train_step"):
        keys.refuse("TRAINER.TRAIN_STEP_NAME", f"{step}: see `selftask list train_steps`")
    if keys.take("MODEL.AMP_PARAMS.USE_AMP", False):
        train["precision"] = "float16"
    epochs = keys.take("CHECKPOINT.CHECKPOINT_FREQUENCY", 1)
    steps = keys.take("CHECKPOINT.CHECKPOINT_ITER_FREQUENCY", -1)
    train["checkpoint_every"] = f"{steps} steps" if steps > 0 else f"{epochs} epochs"
    return train


def _optimizer(keys: Keys, node_batch: int, nodes: int) -> dict[str, Any]:
    name = keys.take("OPTIMIZER.name", "sgd")
    use_larc = keys.take("OPTIMIZER.use_larc", False)
    optimizer: dict[str, Any] = {"name": "larc" if use_larc else name}
    if name != "sgd":
        keys.refuse("OPTIMIZER.name", f"{name}: its arguments, see docs/optimizers.md")
    optimizer["sgd_momentum"] = keys.take("OPTIMIZER.momentum", 0.9)
    nesterov = keys.take("OPTIMIZER.nesterov", False)
    if use_larc:
        larc = keys.take("OPTIMIZER.larc_config", {})
        optimizer |= {k: float(larc[k]) for k in ("trust_coefficient", "eps") if k in larc}
        if larc.get("clip"):
            keys.refuse("OPTIMIZER.larc_config.clip", "True: optimizer.name=lars with clip_lr")
        if nesterov:
            keys.refuse("OPTIMIZER.nesterov", "True: larc has none")
    else:
        optimizer["nesterov"] = nesterov
    optimizer["weight_decay"] = float(keys.take("OPTIMIZER.weight_decay", 0))
    norm, bias = (keys.take(f"OPTIMIZER.regularize_{k}", d) for k, d in (("bn", 0), ("bias", 1)))
    optimizer["decay_1d"] = bool(norm and bias)
    if bool(norm) != bool(bias):
        keys.refuse("OPTIMIZER.regularize_bn", "differs from regularize_bias: optimizer.groups")
    schedule = keys.attempt(
        "OPTIMIZER.param_schedulers.lr", lambda lr: _schedule(lr, node_batch, nodes)
    )
    return optimizer | (schedule or {"lr": 0.1})


def _schedule(lr: dict[str, Any], node_batch: int, nodes: int) -> dict[str, Any]:
    """Return lr, schedule and warm-up. VISSL's auto scaling replaces the values in the yaml."""
    scaling = lr.get("auto_lr_scaling", {})
    auto = scaling.get("auto_scale", False)
    peak: Any = None
    if auto:
        rule = scaling.get("scaling_type", "linear")
        peak = {"base": scaling["base_value"], "per": scaling["base_lr_batch_size"], "rule": rule}
    parts = lr["schedulers"] if lr["name"] == "composite" else [lr]
    made: dict[str, Any] = {}
    if len(parts) == 2 and parts[0]["name"] == "linear":
        share = lr["lengths"][0]
        made["warmup"] = f"{100 * share:g}%"
        start = float(parts[0]["start_value"])
        if auto and nodes > 1:  # the values are for the batch of one node
            start = scaling["base_value"] * node_batch / scaling["base_lr_batch_size"]
        made["start_lr"] = start
        parts = parts[1:]
    if len(parts) != 1:
        raise Unconvertible("a composite other than linear warm-up and one more: schedules.md")
    (main,) = parts
    if main["name"] == "cosine":
        start, end = float(main["start_value"]), float(main["end_value"])
        total = node_batch * nodes
        ratio = total / scaling["base_lr_batch_size"] if auto else 1.0
        factor = ratio**0.5 if scaling.get("scaling_type") == "sqrt" else ratio
        reached = scaling["base_value"] * factor if auto else start
        return {"lr": peak or start, "schedule": "cosine", **made, "end_lr": end / start * reached}
    if main["name"] == "multistep":
        values = [float(value) for value in main["values"]]
        factor = values[1] / values[0]
        steps = [f"{milestone} epochs" for milestone in main["milestones"]]
        schedule = {"name": "multistep", "milestones": steps, "factor": factor}
        return {"lr": peak or values[0], "schedule": schedule, **made}
    raise Unconvertible(f"the schedule {main['name']}: see docs/schedules.md")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
