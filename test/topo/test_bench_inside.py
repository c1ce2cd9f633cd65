"""bench/inside: its formulas and Tally's forecast agree, in the shape of figures 13 and 14 of BytePS."""

import importlib.util
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "cli"))
from programs import TALLY  # noqa: E402


@pytest.fixture(scope="module")
def inside():
    spec = importlib.util.spec_from_file_location("inside", ROOT / "bench" / "inside" / "inside.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tally(inside):
    return inside.Tally(TALLY, HERE / "machines")


def test_figure_13(inside, tally):
    rows = inside.figure_13(tally)
    assert len(rows) == 18
    for row in rows:
        assert row["time_s"] == pytest.approx(row["formula_s"], rel=1e-6)
        assert row["network_s"] <= row["time_s"] * (1 + 1e-9) and row["time_s"] < row["all_reduce_s"]
    by = {(row["machine"], row["k"]): row for row in rows}
    assert by["nvlink", 0]["time_s"] / by["nvlink", 8]["time_s"] > by["pcie", 0]["time_s"] / by["pcie", 8]["time_s"] > 1
    assert all(by["nvlink", k]["time_s"] == pytest.approx(by["nvlink", k]["network_s"]) for k in range(9))


def test_figure_14(inside, tally):
    rows = {(row["machine"], row["strategy"]): row for row in inside.figure_14(tally)}
    for row in rows.values():
        if row["time_s"] is not None:
            assert row["time_s"] == pytest.approx(row["formula_s"], rel=1e-6)
    assert sum(row["time_s"] is not None for row in rows.values()) == 5
    nvlink = [rows["nvlink", f"root = {root}"]["formula_s"] for root in ("2", "2, 3", "all", "0")]
    assert nvlink[0] == nvlink[1] < nvlink[2] < nvlink[3]
    assert rows["pcie", "CPU-assisted"]["formula_s"] < rows["pcie", "all GPUs in a ring"]["formula_s"]


def test_no_machine_is_slower_than_an_all_reduce(inside, tally):
    rows = inside.every_machine(tally)
    assert len(rows) == 11 and all(row["time_s"] <= row["all_reduce_s"] * (1 + 1e-9) for row in rows)


def test_what_the_readme_says(inside, tally, capsys):
    text = (ROOT / "bench" / "inside" / "README.md").read_text(encoding="utf-8")
    rows = inside.figure_13(tally) + inside.figure_14(tally)
    for row in rows:
        if row["figure"] == 14 or row["k"] in (0, 1, 2, 4, 8):
            assert f" {1e3 * row['formula_s']:.1f} " in text
    inside.print_tables(rows)
    assert "root = all" in capsys.readouterr().out


def test_pieces_come_near_the_forecast(inside, tally, capsys):
    rows, of_one = inside.flows(tally), inside.flows_of_one(tally)
    by = {(r["machine"], r["piece"], r["steps"], r["delay_s"]): r["forecast_s"] / r["time_s"] for r in rows}
    assert len(by) == 11 * len(inside.FLOWS) and max(by.values()) <= 1 + 1e-9
    assert all(by[machine, 256 << 10, 4, 0] >= 0.95 for machine in ("pcie", "nvlink", "hgx"))
    shares = {(r["machine"], r["piece"], round(1e6 * r["delay_s"])): r["forecast_s"] / r["time_s"] for r in of_one}
    assert all(shares[name, 512 << 10, 2] >= 0.88 and shares[name, 8 << 20, 0] <= 0.8 for name in inside.ALONE)
    inside.print_flow_tables(rows + of_one)
    text = (ROOT / "bench" / "inside" / "README.md").read_text(encoding="utf-8")
    for line in capsys.readouterr().out.splitlines()[3:]:
        assert line in text


def test_the_plot(inside, tally, tmp_path):
    pytest.importorskip("matplotlib")
    inside.draw(inside.figure_13(tally) + inside.figure_14(tally), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10000
