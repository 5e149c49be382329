"""Images that cannot be read are counted: in the log, the rows, the status, `runs` and the report.

The data are 21 photographs and three that are cut behind their header, which look sound until they
are decoded: which ones are unreadable is known from how they are made.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from in_process import last_line

import tiny
from data.odd_files import encoded, make_photographs
from selftask.cli.main import main
from selftask.data.loading.bad_files import BadFiles
from selftask.errors import BadImage, UserError
from selftask.report.overview.run_line import read_line
from selftask.report.record import RunRecord
from selftask.report.verdict import verdict_of

SENTENCE = "3 of 24 images could not be read and were replaced: bad_files.txt lists them"
OF_VAL = "1 of 3 images of data.val could not be read and was left out: bad_files_val.txt lists it"


def words(folder: Path, out: str, *more: str) -> list[str]:
    """The words after ``selftask train`` for two epochs of six steps."""
    make_photographs(folder / "images/sound", 21)
    for number in range(3):
        content = encoded(1000 + number, size=(64, 64))
        (folder / f"images/cut_{number}.jpg").write_bytes(content[: len(content) * 6 // 10])
    make_photographs(folder / "val/sound", 1)
    (folder / "val/other").mkdir(exist_ok=True)
    (folder / "val/other/sound.jpg").write_bytes(encoded(5))
    (folder / "val/other/cut.jpg").write_bytes((folder / "images/cut_0.jpg").read_bytes())
    transforms = "[{name: random_resized_crop, size: 16}, normalize]"
    return [
        "simclr/images",
        "data=images",
        "data.num_workers=0",
        "data.max_unreadable=0.5",
        f"views={{main: {{count: 2, transforms: {transforms}}}}}",
        "backbone={name: small_resnet, width: 8}",
        "method={hidden_dim: 16, out_dim: 8}",
        "train={batch_size: 4, epochs: 2, log_every: 1, threads: 1, device: cpu}",
        f"out={out}",
        *more,
    ]


def column(out: Path) -> dict[int, float]:
    """Step -> ``unreadable_images``."""
    return {r["step"]: r["unreadable_images"] for r in tiny.rows(out) if "unreadable_images" in r}


def test_they_are_counted_once_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words(folder, "run")]) == 0
    end = last_line(capsys)
    assert end.startswith("RUN finished: 12 steps in ") and end.endswith(f", run; {SENTENCE}")
    log = (folder / "run/log.txt").read_text().splitlines()
    assert [line[20:] for line in log].count(SENTENCE) == 2, "at the end of each epoch"
    assert column(folder / "run") == {6: 3, 12: 3}
    assert tiny.status(folder / "run")["unreadable_images"] == [SENTENCE]
    assert main(["runs", "run"]) == 0
    assert capsys.readouterr().out.count(SENTENCE) == 1
    verdict = verdict_of(RunRecord.read(folder / "run"))
    assert [f.text for f in verdict.findings if "could not be read" in f.text] == [SENTENCE]
    assert (folder / "run/report.html").read_text().count(SENTENCE) == 1


def test_a_stopped_run_counts_like_one_that_was_not(folder: Path) -> None:
    """Its list is ahead of the checkpoint, as after a kill; and a new run starts from zero."""
    assert main(["train", *words(folder, "whole")]) == 0
    assert main(["train", *words(folder, "parts", "train.stop_at=4")]) == 75
    with (folder / "parts/bad_files.txt").open("a") as file:
        file.write("images/read_after_the_checkpoint.jpg\tcut\n")
    assert main(["train", *words(folder, "parts")]) == 0
    assert column(folder / "parts") == column(folder / "whole") == {6: 3, 12: 3}
    lists = [(folder / out / "bad_files.txt").read_text() for out in ("parts", "whole")]
    assert sorted(lists[0].splitlines()) == sorted(lists[1].splitlines())
    command = words(folder, "whole", "resume=never")
    for path in (folder / "images").glob("cut_*"):
        path.write_bytes(encoded(int(path.stem[-1])))
    assert main(["train", *command]) == 0
    assert column(folder / "whole") == {}
    assert "unreadable_images" not in tiny.status(folder / "whole")
    assert not (folder / "whole/bad_files.txt").exists()


def test_unreadable_images_of_data_val_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("data.val=val", "eval.evaluations={knn: {k: [1]}}", "train.epochs=1")
    command = words(folder, "run", *more)
    (folder / "images/other").mkdir()
    for path in (folder / "images").glob("cut_*"):
        path.rename(folder / "images/other" / path.name)
    (folder / "images/other/sound.jpg").write_bytes(encoded(77))
    assert main(["train", *command]) == 0
    assert last_line(capsys).endswith(OF_VAL)
    assert (folder / "run/log.txt").read_text().count(OF_VAL) == 2
    assert read_line(folder / "run").note.endswith(OF_VAL)
    assert main(["eval", "knn", "run", "k=[1]"]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if "not be read" in line]
    of_data = "warning: 3 of 25 images of data could not be read and were left out"
    assert warnings == [of_data, f"warning: {OF_VAL.partition(':')[0]}"]
    assert main(["features", "run", "out=features"]) == 0
    assert capsys.readouterr().out.splitlines()[-2] == of_data


def test_a_failed_run_keeps_its_last_line_and_reports_them(folder: Path) -> None:
    more = ("import=[trouble]", "hooks.trouble={kind: raise, step: 8}")
    assert main(["train", *words(folder, "run", *more)]) == 1
    line = read_line(folder / "run")
    assert line.state == "failed"
    assert line.note.startswith("RUN FAILED at step 8 on rank 0: trouble.py:")
    assert line.note.count(SENTENCE) == 1


def test_a_running_run_shows_them(folder: Path) -> None:
    """Between its epochs, as another process reads its folder."""
    (folder / "look.py").write_text(LOOK)
    assert main(["train", *words(folder, "run", "import=[look]", "hooks.look={}")]) == 0
    seen = json.loads((folder / "seen.json").read_text())
    assert [text for text, _ in seen] == ["running", "running"]
    assert [note.count(SENTENCE) for _, note in seen] == [1, 1]


LOOK = '''
import json
import sys
from dataclasses import dataclass, field
from selftask.hooks.base import Hook
from selftask.registry import register_hook
from selftask.report.overview.run_line import read_line

@register_hook("look")
@dataclass(eq=False, kw_only=True)
class Look(Hook):
    """Reads the run's own folder at the end of each epoch."""
    seen: list = field(default_factory=list)
    priority = 99

    def on_phase_end(self, task):
        line = read_line(task.out)
        self.seen.append((line.state, line.note))

    def on_end(self, task):
        with open("seen.json", "w") as file:
            json.dump(self.seen, file)
'''


def test_ranks_count_each_image_once(tmp_path: Path) -> None:
    """Two ranks without a common folder: each has read another part, with one image in both."""
    ranks = [BadFiles(tmp_path / f"{rank}.txt", 10, max_unreadable=0.3) for rank in range(2)]
    ranks[0].add([BadImage("a", "cut"), BadImage("b", "cut")])
    ranks[1].add([BadImage("b", "cut"), BadImage("c", "cut")])
    new = [dict(files.unshared) for files in ranks]
    assert [list(part) for part in new] == [["a", "b"], ["b", "c"]]
    for files in ranks:
        files.merge(new[0] | new[1])
        assert files.summary().startswith("3 of 10 images could not be read")
        assert not files.unshared
    with pytest.raises(UserError, match=r"4 of 10 images \(40.00%\) cannot be read, more than"):
        ranks[0].merge({"d": "cut"})


@pytest.mark.slow
def test_two_ranks_of_a_run(folder: Path) -> None:
    command = words(folder, "run", "launch.processes=2")
    done = tiny.run([sys.executable, "-m", "selftask", "train", *command], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(SENTENCE)
    assert column(folder / "run") == {6: 3, 12: 3}
