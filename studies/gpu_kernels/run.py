"""The kernels on a GPU beside what torch offers: `python -m studies gpu_kernels`.

Runs the main cases of `kernels/benchmarks`, and tree attention once more by the tensor memory accelerator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import torch

from speckernels.ops.tree_attention import TMA_ENVIRONMENT
from specsim.io.errors import InputError
from specsim.report.table import Column, plain
from studies.common import Config, Document
from studies.figures import line_panels, point
from studies.report import Report

RIVALS = ("sdpa_packed", "sdpa_cudnn", "prefix_merge")  # torch's attention, with a mask and by parts
OWN = ("cuda", "triton", "tma")
GRAPH, STATISTICS, ATTENTION = "graph", "draft_statistics", "tree_attention"
TENTH_IF_MEASURED = plain(lambda value: "" if value is None else f"{value:.1f}")

ALL, TMA = "kernels.json", "tma.json"
RECORDED = (ALL, TMA)


def main(out: Path, config: Config) -> None:
    """Measure what is missing, and write the report."""
    missing = [name for name in RECORDED if not (out / name).is_file()]
    if missing and not torch.cuda.is_available():
        raise InputError("the study gpu_kernels times kernels on a GPU, and this machine has none; run it on a GPU")
    if ALL in missing:
        measure(out / ALL, " or ".join(config["backends"]), config["minutes"], tma="0")
    if TMA in missing:
        measure(out / TMA, "tree_attention and cuda", config["tma_minutes"], tma="1")
    report(*(json.loads((out / name).read_text()) for name in RECORDED)).write(out)


def measure(file: Path, selected: str, minutes: float, *, tma: str) -> None:
    """Run the benchmark's main cases of these contenders."""
    command = [sys.executable, "-m", "pytest", "kernels/benchmarks", "--benchmark-only"]
    command += [f"--benchmark-json={file.resolve()}", "-m", "headline and not slow", "-k", selected]
    environment = os.environ | {TMA_ENVIRONMENT: tma, "SPECKERNELS_BENCH_MINUTES": str(minutes)}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment)
    if not file.is_file():
        raise InputError(f"pytest kernels/benchmarks wrote no {file}; see its output above")


def report(document: Document, tma: Document) -> Report:
    """Return the report. tma : tree attention by the tensor memory accelerator"""
    rows = case_rows(document, tma)
    attention = [row for row in rows if row["operation"] == ATTENTION]
    statistics = [row for row in rows if row["operation"] == STATISTICS]
    by_batch = {
        batch: sorted((row for row in attention if row["batch"] == batch and row["context"] == 8192), key=nodes)
        for batch in (1, 8)
    }
    gains = [row["library_over_best"] for row in attention]
    reached, versions = document["ceilings"], document["versions"]
    mhz = sorted({conditions["sm_mhz"] for source in (document, tma) for conditions in source["conditions"]})
    return Report(
        question="How fast are the kernels on a GPU?",
        answer=f"Tree attention takes {min(row['best_over_floor'] for row in attention):.1f} to "
        f"{max(row['best_over_floor'] for row in attention):.1f} times the smallest possible time, and torch's fastest "
        f"attention {min(gains):.1f} to {max(gains):.1f} times as long as it (median {median(gains):.1f}). Draft "
        f"statistics over 131,072 tokens take {min(row['best_over_floor'] for row in statistics):.1f} to "
        f"{max(row['best_over_floor'] for row in statistics):.1f} times the smallest possible time.",
        figure=line_panels(
            {
                f"{batch} sequence{'s' * (batch > 1)}, context 8,192": {
                    name: ([row["nodes"] for row in of_batch], [point(row[key]) for row in of_batch])
                    for name, key in (
                        ("CUDA", "cuda_us"),
                        ("Triton", "triton_us"),
                        ("CUDA with TMA", "tma_us"),
                        ("torch's fastest", "library_us"),
                        ("smallest possible", "floor_us"),
                    )
                }
                for batch, of_batch in by_batch.items()
            },
            ("nodes of the tree", "time, microseconds"),
            "attention",
            log_x=True,
        ),
        figure_name="attention",
        caption="Time of tree attention by the size of the tree, in CUDA graphs",
        columns=[
            Column("case", "case"),
            Column("smallest possible, us", "floor_us", TENTH_IF_MEASURED),
            Column("CUDA, us", "cuda_us", TENTH_IF_MEASURED),
            Column("Triton, us", "triton_us", TENTH_IF_MEASURED),
            Column("CUDA with TMA, us", "tma_us", TENTH_IF_MEASURED),
            Column("torch's fastest, us", "library_us", TENTH_IF_MEASURED),
            Column("torch over the fastest kernel", "library_over_best", TENTH_IF_MEASURED),
        ],
        shown=[*by_batch[1], *by_batch[8]],
        table=rows,
        trust=[
            f"Machine: {document['device']}, torch {versions['torch']}, Triton {versions['triton']}, "
            f"{document['date'][:10]}, one run; clocks {mhz[0]:.0f} to {mhz[-1]:.0f} MHz. No prompts play a part.",
            "Load: none, the GPU was this run's alone. Noise floor: half the distance between the 20 and 80 % "
            f"quantiles of a case's times is {spread_percent(document):.1f} % (median over cases). Every result is "
            "checked against the reference before it is timed, and caches are cold.",
            f"Smallest possible: the longer of moving the bytes at the bandwidth of a copy measured here, "
            f"{reached['copy_gb_s']:,.0f} GB/s, of the products at {reached['matmul_tflop_s']:.0f} TFLOP/s, and a node "
            f"of a graph, {reached['graph_node_us']:.1f} us. Reading alone is faster than copying, so a kernel that "
            "reads can take less.",
            "All times are of CUDA graphs. Called one by one from Python, an operation takes "
            f"{host_us(document, ATTENTION, 'cuda'):.0f} us of the host's time (tree attention in CUDA; torch's "
            f"{min(host_us(document, ATTENTION, name) for name in RIVALS):.0f} us), which hides the kernel at small "
            "sizes.",
            "torch's fastest: attention with a mask (queries packed by head, or by cuDNN), or without one over the "
            "context, merged with the tree. FlashInfer was not there.",
        ],
    )


def nodes(row: Document) -> int:
    """Return the size of a case's tree."""
    return int(row["nodes"])


def rows_of(document: Document, mode: str) -> list[Document]:
    """Return the timed rows in a mode, of pytest-benchmark's file, or of the recorded run's older format."""
    rows = document["rows"] if "rows" in document else [row["extra_info"] for row in document["benchmarks"]]
    return [row for row in rows if row["mode"] == mode and row["median_us"] is not None]


def case_rows(document: Document, tma: Document) -> list[Document]:
    """Return a row for each case: times in graphs by backend, and ratios."""
    timed: dict[tuple[str, str, str], dict[str, Document]] = {}
    for source, rename in ((document, {}), (tma, {"cuda": "tma"})):
        for row in rows_of(source, GRAPH):
            case, backend = (row["op"], row["label"], row["dtype"]), row["backend"]
            timed.setdefault(case, {})[rename.get(backend, backend)] = row
    return [case_row(*case, by_backend) for case, by_backend in timed.items()]


def case_row(operation: str, label: str, dtype: str, by_backend: Mapping[str, Document]) -> Document:
    """Return a case's row."""
    times = {name: row["median_us"] for name, row in by_backend.items()}
    shape, floor = by_backend["cuda"]["shape"], by_backend["cuda"]["floor_us"]
    best = min(times[name] for name in OWN if name in times)
    library = min((times[name] for name in RIVALS if name in times), default=None)
    if operation == ATTENTION:
        case = (
            f"{shape['nodes']} node{'s' * (shape['nodes'] > 1)}, context {shape['context']:,}, batch {shape['batch']}"
        )
    else:
        case = f"{shape['rows']} rows of {shape['vocab']:,}, top {shape['top_k']}, {dtype}"
    return {
        "operation": operation,
        "case": case,
        **{key: shape.get(key) for key in ("nodes", "context", "batch")},
        "dtype": dtype,
        "floor_us": floor,
        **{f"{name}_us": times.get(name) for name in (*OWN, "torch", *RIVALS)},
        "library_us": library,
        "best_over_floor": best / floor,
        "library_over_best": None if library is None else library / best,
    }


def spread_percent(document: Document) -> float:
    """Compute half the distance of the quantiles in percent of the median, the median over the cases in graphs."""
    return median(50 * (row["p80_us"] - row["p20_us"]) / row["median_us"] for row in rows_of(document, GRAPH))


def host_us(document: Document, operation: str, backend: str) -> float:
    """Compute what a call takes of the host's time, the median over cases."""
    return median(
        row["median_us"] for row in rows_of(document, "host") if (row["op"], row["backend"]) == (operation, backend)
    )
