"""Rows of figures, the conditions they were measured under, the file and the table."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dejavu_ds.resume import replace_file

KEYS = (
    "benchmark",
    "shape",
    "system",
    "tp",
    "batch",
    "context",
    "dtype",
    "quantize",
    "mlp_density",
    "head_density",
    "ms_median",
    "ms_p20",
    "ms_p80",
    "gb_per_s",
    "share_of_limit",
    "peak_bytes",
)
_PACKAGES = ("torch", "triton", "transformers", "deepspeed", "bitsandbytes")


def make_row(**values: Any) -> dict[str, Any]:
    """A flat row with all of `KEYS`, in their order, and what else is given after them; absent ones are None."""
    return {**{key: values.pop(key, None) for key in KEYS}, **values}


def one_line(error: Exception) -> str:
    """What a row says of what went wrong."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def conditions(command: str, commit: str | None = None) -> dict[str, Any]:
    """{gpu, driver, versions, command, commit}; on a CPU `gpu` names the processor and its cores.

    Args:
        command: the command line.
        commit: for a copy of the code without its git history; None asks git.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    driver = None
    if torch.cuda.is_available():
        versions["cuda"] = torch.version.cuda
        driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
    return {
        "gpu": device_name(),
        "driver": driver,
        "versions": versions,
        "command": command,
        "commit": commit or _commit(),
    }


def device_name() -> str:
    """Of the GPU; without one, the processor and the threads used."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"none; {_processor()}, {torch.get_num_threads()} thread(s)"


def command_line(program: str, arguments: Iterable[str]) -> str:
    """The command without the launcher's additions and without folders of this machine."""
    shown = [arg for arg in arguments if "local_rank" not in arg and "local-rank" not in arg]
    return " ".join([program, *(Path(arg).name if arg.startswith(("/", "~")) else arg for arg in shown)])


def write_results(path: str | os.PathLike, results: dict[str, Any]) -> None:
    """{"conditions", "rows"} as JSON, whole or not at all."""
    replace_file(Path(path), (json.dumps(results, indent=1) + "\n").encode())


def read_results(path: str | os.PathLike) -> dict[str, Any]:
    """What `write_results` has written. Raises ValueError for a file that is not there or something else."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"no results in {path}: {error}") from error
    rows = results.get("rows") if isinstance(results, dict) else None
    if not isinstance(rows, list) or not isinstance(results.get("conditions"), dict):
        raise ValueError(f'no results in {path}: expected {{"conditions": {{...}}, "rows": [...]}}')
    if not all(isinstance(row, dict) and row.keys() >= set(KEYS) for row in rows) or "gpu" not in results["conditions"]:
        raise ValueError(f"{path} is no results file of the benchmark: its rows lack some of {', '.join(KEYS)}")
    return results


def ratios(row: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[float | None, float | None]:
    """How many times as long `row` takes as our sparse and as our dense row of the same setting; None without one."""

    def of(system: str) -> float | None:
        same = ["benchmark", "shape", "kernel", "tp", "batch", "context"]
        if row["benchmark"] == "kernels":
            same.append("quantize")  # a kernel is run both ways; elsewhere 4 bits are our engine's alone
        for other in rows:
            alike = other["system"] == system and all(other.get(key) == row.get(key) for key in same)
            if alike and row["ms_median"] and other["ms_median"]:
                return row["ms_median"] / other["ms_median"]
        return None

    return of("sparse"), of("dense")


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows, for reading, with their ratios, steps and kernels apart; under them what failed and why."""
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width of its own, and rich's default for it cuts the columns short.
    console = Console(width=None if sys.stdout.isatty() else 170)
    for kernels in (False, True):
        shown = [row for row in rows if ("kernel" in row) == kernels]
        columns = ["shape", "kernel" if kernels else "tp", "batch", "context", "system", "MLP", "heads"]
        columns += ["us" if kernels else "ms", "20 % .. 80 %", *(() if kernels else ("tokens/s",)), "GB/s", "of limit"]
        table = Table(*columns, "over sparse", "over dense")
        for row in shown:
            cells = _cells(row, rows, kernels)
            table.add_row(*(cells[column.header] for column in table.columns))
        if shown:
            console.print(table)
    for row in rows:
        if row.get("error"):
            where = f"batch {row['batch']}, context {row['context']}"
            console.print(f"{row['shape']}, {_system(row)}, {where}: failed: {row['error']}", markup=False)


def _cells(row: dict[str, Any], rows: list[dict[str, Any]], kernels: bool) -> dict[str, str]:
    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    unit = 1e3 if kernels else 1.0
    low, middle, high = (None if row[key] is None else row[key] * unit for key in ("ms_p20", "ms_median", "ms_p80"))
    over_sparse, over_dense = ratios(row, rows)
    return {
        "shape": row["shape"] if row["tp"] == 1 or not kernels else f"{row['shape']}/{row['tp']}",
        "kernel": row.get("kernel") or "-",
        "tp": str(row["tp"]),
        "batch": str(row["batch"]),
        "context": number(row["context"], "d"),
        "system": _system(row),
        "MLP": number(row["mlp_density"]),
        "heads": number(row["head_density"]),
        "us" if kernels else "ms": "failed" if row.get("error") else number(middle),
        "20 % .. 80 %": f"{number(low)} .. {number(high)}",
        "tokens/s": number(row.get("tokens_per_s"), ".1f"),
        "GB/s": number(row["gb_per_s"], ".0f"),
        "of limit": number(row["share_of_limit"], ".0%"),
        "over sparse": number(over_sparse, ".2f"),
        "over dense": number(over_dense, ".2f"),
    }


def _system(row: dict[str, Any]) -> str:
    return row["system"] if row.get("variant") is None else f"{row['system']} ({row['variant']})"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    """Of the checkout this runs from; "+" marks changes that are not committed."""
    here = Path(__file__).parent
    commit = _output(["git", "-C", str(here), "rev-parse", "HEAD"])
    if commit is None:
        return None
    return commit + ("+" if _output(["git", "-C", str(here), "status", "--porcelain", "-uno"]) else "")


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
