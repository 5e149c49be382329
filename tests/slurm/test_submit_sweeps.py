"""``selftask submit`` of lists of values: the runs of a sweep, and one array of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from submit_words import CLUSTER, Fake, words

from selftask.config.compose.sweep import expand_sweep
from selftask.errors import ConfigError, UserError
from selftask.logs import write_json
from selftask.slurm.plan import plan

pytestmark = pytest.mark.usefixtures("small_words")


def test_sweep_is_the_product_of_its_lists() -> None:
    points = expand_sweep(["train.seed=1,2", "optimizer.lr=0.1,0.2", "views.a.sizes=[1,2]"])
    assert [point.name for point in points] == [
        "seed_1_lr_0.1",
        "seed_1_lr_0.2",
        "seed_2_lr_0.1",
        "seed_2_lr_0.2",
    ]
    assert points[1].overrides == ["train.seed=1", "optimizer.lr=0.2", "views.a.sizes=[1,2]"]
    assert [point.name for point in expand_sweep(["train.seed=1"])] == [""]


def test_sweep_names_are_folders_and_differ() -> None:
    assert expand_sweep(["a.x=1,2", "b.x=3,4"])[0].name == "a.x_1_b.x_3"
    names = [p.name for p in expand_sweep(["data=/a/b,'/a b'"])]
    assert len(set(names)) == 2
    assert not any(set(name) & set("/ ,'=") for name in names)


def test_commas_in_the_braces_of_a_pattern_separate_no_runs() -> None:
    points = expand_sweep(["data=/x/{a,b}/*.jpg,y-{0,1}.tar"])
    assert [p.overrides for p in points] == [["data=/x/{a,b}/*.jpg"], ["data=y-{0,1}.tar"]]


@pytest.mark.parametrize("word", ["out=a,b", "launch.nodes=1,2"])
def test_sweep_refuses_what_all_share(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        expand_sweep([word])


def test_a_value_given_twice_is_refused() -> None:
    """Both runs would be the same, in folders of different names."""
    with pytest.raises(ConfigError, match=r"^command line: train\.seed=1 is given twice$"):
        expand_sweep(["optimizer.lr=0.1,0.2", "train.seed=1,2,1"])


def test_sweep_is_one_array(tmp_path: Path, fake: Fake) -> None:
    given = words(tmp_path, "sweep", *CLUSTER, "train.seed=1,2,3")
    planned = plan("simclr/digits", given)
    assert "#SBATCH --array=0-2%3" in planned.script()
    assert [Path(s.out) for s in planned.submissions] == [
        tmp_path / "sweep" / f"seed_{seed}" for seed in (1, 2, 3)
    ]
    assert [s.config["train"]["seed"] for s in planned.submissions] == [1, 2, 3]
    assert "3 runs" in planned.describe()
    fake("sbatch", f"echo >> {tmp_path}/calls; echo Submitted batch job 77")
    for name in ("squeue", "srun"):
        fake(name, "exit 0")
    assert [job.job_id for job in planned.submit()] == ["77_0", "77_1", "77_2"]
    assert (tmp_path / "calls").read_text() == "\n", "one call of sbatch"
    done = tmp_path / "sweep" / "seed_2"
    done.mkdir(parents=True)
    write_json(done / "status.json", {"state": "finished", "length": [3, None]})
    assert plan("simclr/digits", given).notes[-2:-1] == [
        f"{done} is complete: its job will only say so"
    ]


def test_mistakes_of_all_runs_of_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        plan("simclr/digits", words(tmp_path, "s", "train.batch_size=0,16,-3"))
    assert len(raised.value.problems) == 2


def test_each_run_of_a_sweep_is_built(tmp_path: Path) -> None:
    swept = words(tmp_path, "s", "optimizer.schedule={name: wsd, cooldown: 80%}")
    with pytest.raises(UserError, match=r"a warm-up of 53% and a cooldown of 80%"):
        plan("simclr/digits", [*swept, "optimizer.warmup=0,50%"])
