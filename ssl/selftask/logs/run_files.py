"""Files of a run folder and their contents. Does not import torch."""

from __future__ import annotations

RUN_FILES = {
    "config.yaml": "The config with all values set; itself a recipe.",
    "environment.json": "Versions, machine, git commit and command.",
    "git.diff": "Changes of the checkout that were not committed, if there were any.",
    "log.txt": "The lines of the console; `log_rankN.txt` are those of other ranks.",
    "metrics.jsonl": "A row of columns every `train.log_every` steps and for each evaluation.",
    "events.jsonl": "What happened: starts, resumes, checkpoints, warnings, failures.",
    "status.json": "The state now: running, finished, interrupted, requeued or failed.",
    "groups.txt": "The parameter groups with their learning rates and decay.",
    "initial.txt": "What initialized each parameter, with `init.rules`.",
    "checkpoints/step_N/": "States to resume from, each with a checksum.",
    "export/backbone.pt": "The backbone's tensors under the names of torchvision or timm; also as "
    "`.safetensors`.",
    "export/backbone.json": "How to build the backbone and to normalize its images.",
    "report.html": "The run as one page that needs no network.",
    "evaluations.jsonl": "Results of `selftask eval`, a line for each.",
    "evaluations/step_N.jsonl": "Results of `selftask eval suite` for one checkpoint; the logs of "
    "its jobs are in `slurm/`, in the same folder.",
    "bad_files.txt": "Images that could not be read, each with the reason; `bad_files_val.txt` are "
    "those of `data.val`.",
    "errors/rankN.txt": "The traceback of a rank that failed.",
    "failures/step_N/": "State and batch of a step that gave NaN, for `selftask replay`.",
    "code/": "A copy of the modules of `import:` as they were at the start.",
    "slurm/": "Job ids, and logs of all ranks of submitted runs.",
    "profile/": "Traces of `hooks.profiler` and `hooks.memory_snapshot`.",
    "metrics.csv": "The rows as a table, by `hooks.csv`.",
    "tensorboard/": "Event files of `hooks.tensorboard`.",
    "tracking/": "Ids of the runs of `hooks.wandb` and `hooks.mlflow`.",
}
