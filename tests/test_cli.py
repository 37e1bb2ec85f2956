"""The command line: published numbers come out, pictures are drawn, errors are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from fxpipe.cli import run
from fxpipe.schedules import build, families
from fxpipe.simulator import simulate

# F = B = W = 1, no transfer: flush ratio and peak for 4 ranks, 8 microbatches and for 8 ranks, 32
# microbatches; weights. Own ratio where it differs is 0.
GOLDEN = [
    ("gpipe", 1, 0.2727, (8, 8), 0.1795, (32, 32), 1),
    ("1f1b", 1, 0.2727, (1, 4), 0.1795, (1, 8), 1),
    ("interleaved-1f1b", 2, 0.1579, (2.5, 5.5), 0.0986, (4.5, 11.5), 1),
    ("interleaved-1f1b", 4, 0.0857, (3.25, 4.75), 0.0519, (6.25, 9.75), 1),
    ("looped-bfs", 2, 0.1579, (8, 8), 0.0986, (32, 32), 1),
    ("zb-h1", 1, 0.1111, (4, 4), 0.0680, (8, 8), 1),
    ("interleaved-zb", 2, 0.0588, (4, 4), 0.0352, (8, 8), 1),
    ("interleaved-zb", 4, 0.0303, (4, 4), 0.0179, (8, 8), 1),
    ("zb-h2", 1, 0.1111, (7, 7), 0.0680, (15, 15), 1),
    ("zb-v", 2, 0.0588, (4, 4), 0.0352, (8, 8), 1),
    ("v-half", 2, 0.0943, (3, 3), 0.0813, (5, 5), 1),
    ("v-min", 2, 0.1864, (2, 2), 0.1233, (3, 4), 1),
    ("chimera", 1, 0.2000, (3, 4), 0.2381, (5, 8), 2),
    ("bitpipe", 2, 0.1111, (3.5, 4), 0.1351, (6.5, 8), 2),
    ("dualpipe", 1, 0.0769, (5, 5), 0.0588, (9, 9), 2),
    ("dualpipev", 2, 0.1111, (4.5, 4.5), 0.0680, (8.5, 8.5), 1),
    ("chimera-zb", 1, 0.0400, (4, 4), 0.0303, (8, 8), 2),
]
WITHOUT_OWN_BUBBLE = {"zb-h2", "zb-v"}


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row[0]}-v{row[1]}")
def test_golden_values_come_out(row: tuple[Any, ...], capsys: pytest.CaptureFixture[str]) -> None:
    name, chunks, *values, weights = row
    sizes = ((4, 8, *values[:2]), (8, 32, *values[2:]))
    for ranks, microbatches, bubble, peak in sizes:
        shown = as_json(
            capsys, "schedule", name, "--ranks", str(ranks), "--microbatches", str(microbatches),
            "--chunks", str(chunks), "--times", "1,1,1,0",
        )  # fmt: skip
        assert round(shown["bubble_flush"], 4) == bubble
        own = 0 if name in WITHOUT_OWN_BUBBLE else bubble
        assert round(shown["bubble_own"], 4) == own
        assert (min(shown["peak_activations"]), max(shown["peak_activations"])) == peak
        assert shown["weights"] == [weights] * ranks


def test_published_times_give_the_published_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    shown = as_json(
        capsys, "schedule", "zb-h1", "--ranks", "16", "--microbatches", "48",
        "--times", "11.347,11.248,8.132,.377",
    )  # fmt: skip
    assert round(shown["bubble_own"], 4) == 0.1397


def test_json_holds_the_schedule_and_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = as_json(capsys, "schedule", "1f1b", "-p", "2", "-m", "2", "--times", "1,2,3,.5")
    assert shown["name"] == "1f1b"
    assert (shown["ranks"], shown["microbatches"], shown["chunks"], shown["stages"]) == (2, 2, 1, 2)
    assert shown["makespan"] == 1 + 0.5 + 2 * (1 + 5) + 0.5 + 5
    assert shown["actions"] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert shown["messages"] == [2, 2]
    assert shown["links"][0] == {"from": 0, "to": 1, "messages": 2}


def test_a_chunk_takes_its_part_of_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    for chunks in ("1", "2", "4"):
        shown = as_json(capsys, "schedule", "interleaved-1f1b", "--chunks", chunks)
        assert shown["work"] == pytest.approx(8 * 3)
        assert shown["chunks"] == int(chunks)


def test_pair_time_makes_a_paired_schedule_faster(capsys: pytest.CaptureFixture[str]) -> None:
    plain = as_json(capsys, "schedule", "dualpipev")
    paired = as_json(capsys, "schedule", "dualpipev", "--pair", "2")
    assert paired["makespan"] < plain["makespan"]


def test_summary_shows_bubble_memory_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "zb-h1", "--times", "1,1,1,.1"]) == 0
    shown = capsys.readouterr().out
    assert "flush bubble   14.89 %   time 4.2 of 28.2\n" in shown
    assert "messages       48" in shown
    assert shown.count("85.11 %") == 4


# Arguments, which bubble, its line, and the formula's own number where that is another.
FORMULAS = [
    ("1f1b", "flush", "time 9 of 33   (p - 1)*(F + B + W)", None),
    ("1f1b --times 1,1,1,.1", "flush", "time 10.6 of 34.6", "9"),
    ("hanayo", "flush", "time 8.5 of 32.5", "4.5"),
    ("hanayo --times 2,1,1", "flush", "time 6 of 38   (p - 1)*(F + B + W)/v", None),
    ("hanayo --times 2,1,1 --memory-limit 2", "flush", "time 22 of 54", "6"),
    ("zb-h1", "flush", "time 3 of 27   (p - 1)*(F + B - W)", None),
    ("zb-h1 --microbatches 2", "flush", "time 5 of 11", "3"),
    ("zb-h2", "own", "time 0   (p - 1)*(F + B - 2*W)", None),
    ("zb-h2 --microbatches 4", "own", "time 3", "0"),
    ("dualpipe --pair 2", "flush", "time 1 of 22", "2"),
    ("chimera:f=2 -p 8", "flush", "(p - 2*f)/f*((B + W) + (m/p - 1)*(B + W - F))", None),
]


@pytest.mark.parametrize(("arguments", "which", "line", "value"), FORMULAS)
def test_a_formula_stands_beside_its_own_number_only(
    arguments: str, which: str, line: str, value: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["schedule", *arguments.split()]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert next(text for text in shown if text.startswith(f"  {which} bubble")).endswith(line)
    (elsewhere, *_) = [text for text in shown if text.startswith(f"the {which} bubble")] or [""]
    assert bool(elsewhere) == (value is not None)
    assert elsewhere.endswith(f"; that would be {value} here" if value else "")


@pytest.mark.parametrize("name", sorted(families()))
def test_equal_times_have_the_bubble_of_the_formula(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = "2,1,1" if name == "hanayo" else "1,1,1"
    assert run(["schedule", name, "--times", times]) == 0
    assert families()[name].flush in capsys.readouterr().out.splitlines()[1]


def test_rows_end_without_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["schedule", "hanayo"], ["compare", "--memory-limit", "3"]):
        assert run(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line != line.rstrip()] == []


def test_what_is_over_the_memory_limit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "1f1b", "v-half", "hanayo"]
    assert run([*arguments, "--memory-limit", "3"]) == 0
    marked = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert marked["schedule"].endswith("limit 3")
    assert marked["1f1b"].endswith("over the limit")
    assert "over" not in marked["v-half"] + marked["hanayo"]
    assert run(arguments) == 0
    assert "limit" not in capsys.readouterr().out
    assert run(["schedule", "1f1b", "--memory-limit", "2"]) == 0
    sentence = "over the limit: --memory-limit is 2, but ranks 0, 1 hold up to 4 activations"
    assert sentence in capsys.readouterr().out
    shown = as_json(capsys, "schedule", "1f1b", "--memory-limit", "3")
    assert (shown["memory_limit"], shown["ranks_over_limit"]) == (3, [0])


def test_auto_says_what_it_considered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "auto", "-p", "3", "-m", "6", "--memory-limit", "3"]) == 0
    shown = capsys.readouterr().out
    assert "refused: needs memory 6, more than memory_limit=3" in shown
    assert "slower by" in shown


def test_grid_has_a_row_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "1f1b", "-p", "2", "-m", "1", "--grid"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == [
        ["0", "0F0", "."],
        ["1", ".", "1F0"],
        ["2", ".", "1B0"],
        ["3", "0B0", "."],
    ]


def test_csv_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["schedule", "zb-v", "-p", "2", "-m", "4", "--csv"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("0F0,0F1,0F2,3F0,3I0,3W0,")
    file = tmp_path / "mine.csv"
    file.write_text(text)
    again = as_json(capsys, "schedule", str(file))
    assert again["actions"] == as_json(capsys, "schedule", "zb-v", "-p", "2", "-m", "4")["actions"]


def test_families_are_listed_with_formula_memory_and_constraint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = {entry["name"]: entry for entry in as_json(capsys, "schedules")}
    assert set(listed) == set(families())
    assert listed["1f1b"]["flush_bubble"] == "(p - 1)*(F + B + W)"
    assert listed["1f1b"]["peak_activations"] == "Min(m, p - r)"
    assert "p even" in listed["chimera"]["constraint"]
    assert run(["schedules"]) == 0
    shown = capsys.readouterr().out
    assert "(p - 1)*(F + B + W)" in shown
    assert "Formulas are for equal stages, messages without delay and enough micro" in shown


def test_comparison_has_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    shown = as_json(capsys, "compare", "1f1b", "zb-h1", "interleaved-zb", "-p", "8", "-m", "32")
    assert [entry["name"] for entry in shown] == ["interleaved-zb", "zb-h1", "1f1b"]
    assert run(["compare", "-p", "3", "-m", "6"]) == 0
    table = capsys.readouterr().out
    assert "left out: schedule 'chimera': ranks=3 is odd" in table
    assert any(line.split()[:3] == ["1f1b", "3", "24"] for line in table.splitlines())


def test_picture_is_drawn_and_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("one.svg", "two.svg")]
    for file in files:
        assert run(["compare", "1f1b", "dualpipev", "--picture", str(file)]) == 0
    one, two = (file.read_bytes() for file in files)
    assert one == two
    for needed in (b"<svg", b"weight gradient", b"#56b4e9", b"1f1b: 4 ranks"):
        assert needed in one
    png = tmp_path / "one.png"
    assert run(["schedule", "zb-h1", "--picture", str(png)]) == 0
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_the_legend_speaks_of_numbers_where_some_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    from fxpipe.views.pictures import figure_of

    def notes(ranks: int, microbatches: int) -> list[str]:
        schedule = build("zb-v", stages=2 * ranks, microbatches=microbatches, ranks=ranks)
        return [text.get_text() for text in figure_of([("zb-v", simulate(schedule))]).texts]

    assert notes(2, 4) == ["numbers are microbatches; a paler shade is a later chunk of the rank"]
    assert notes(8, 64) == ["a paler shade is a later chunk of the rank"]


def test_without_matplotlib_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = error_of(capsys, "schedule", "1f1b", "--picture", str(tmp_path / "a.svg"))
    assert "pip install 'fxpipe[viz]', or in a clone pip install -e '.[viz]'" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schedule", "zb-h9"], "there is no schedule 'zb-h9'; did you mean"),
        (["schedule", "chimera", "-p", "3"], "ranks=3 is odd"),
        (["schedule", "1f1b", "--times", "1,2"], "times='1,2' is not F,B,W,c"),
        (["schedule", "1f1b", "--times", "1,2,x"], "times='1,2,x' is not F,B,W,c"),
        (["schedule", "1f1b", "--ranks", "many"], "--ranks"),
        (["schedule", "1f1b", "--ranks", "0"], "--ranks"),
        (["schedule", "1f1b", "--json", "--csv"], "exclude each other"),
        (["schedule"], "name"),
        (["schedul", "1f1b"], "schedul"),
        (["compare", "1f1b", "zb-h9"], "there is no schedule 'zb-h9'"),
        (["schedule", "none/such.csv"], "none/such.csv: No such file"),
        (["schedule", "1f1b", "--picture", "a.gif"], "suffix '.gif'; expected one of .svg"),
        (["schedule", "auto", "--memory-limit", ".1"], "keeps memory_limit=0.1; the least is"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, *arguments)
    assert error.startswith("fxpipe: error: ")
    assert message in error


def test_a_file_that_deadlocks_is_one_line_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bad.txt"
    file.write_text("0F0 0B0\n1B0 1F0\n")
    assert "deadlock" in error_of(capsys, "schedule", str(file))


def test_a_file_that_cannot_be_read_names_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bad.txt"
    file.write_text("# by hand\n0F0 0B0\n1F0 1X0\n")
    error = error_of(capsys, "schedule", str(file))
    assert "error: bad.txt: line 3 (rank 1): '1X0' is no action" in error


def test_a_file_of_directives_is_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("stages 2\nmicrobatches 2\nplace stage=0 rank=0\nplace stage=1 rank=1\n")
    shown = as_json(capsys, "schedule", str(file))
    assert shown["actions"] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    file.write_text("stages 2\nmicrobatches 2\nplace stage=0\n")
    assert "mine.txt: line 3, 'place stage=0'" in error_of(capsys, "schedule", str(file))


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("fxpipe")
    shown = subprocess.run([command, "schedule", "1f1b", "--ranks", "x"], capture_output=True)
    assert shown.returncode == 2
    assert shown.stderr.count(b"\n") == 1
    assert b"Traceback" not in shown.stderr


def test_report_of_a_folder_with_nothing_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("jinja2")
    assert "holds neither a trace nor a dump" in error_of(capsys, "report", str(tmp_path))


def test_a_letter_or_a_name_means_the_same_in_every_command() -> None:
    from typer.main import get_command

    from fxpipe.view_commands import app

    meanings: dict[str, set[tuple[str, ...]]] = {}
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        for parameter in command.params:
            for flag in parameter.opts:
                if flag.startswith("-"):
                    meanings.setdefault(flag, set()).add(tuple(sorted(parameter.opts)))
    assert {flag for flag, found in meanings.items() if len(found) > 1} == set()
    assert meanings["-o"] == {("--option", "-o")} and meanings["-p"] == {("--ranks", "-p")}
    assert meanings["--output"] == {("--output",)}


def test_report_of_a_broken_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("jinja2")
    (tmp_path / "timelines.json").write_text('{"planned": {"name": "pla')
    said = error_of(capsys, "report", str(tmp_path))
    assert "timelines.json' is no whole JSON, from character 21 of 25 on; remove" in said
