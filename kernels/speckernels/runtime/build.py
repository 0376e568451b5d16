"""Compile the CUDA sources, for a GPU or for emulated threads on the host; cached by content.

No torch headers and no Python ABI: a source exports C functions over raw pointers, so it
compiles on a machine without a GPU, in seconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from filelock import FileLock

from speckernels.runtime.errors import Unavailable

ARCHITECTURES = ("80", "90a", "100")  # Ampere, Hopper, Blackwell: compiled in CI
NVCC_FLAGS = (
    *("-O3", "-std=c++17", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-Wall"),
    *("-lineinfo", "-Xfatbin", "-compress-all"),  # line information for profilers is larger than the code
)
STRICT = ("--Werror", "all-warnings")  # for tests only, since newer compilers have new warnings
HOST_FLAGS = (
    *("-O1", "-std=c++17", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi"),
    *("-ffp-contract=off", "-DSPECKERNELS_HOST"),
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def source_folder() -> Path:
    """Folder of the .cu files: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "csrc", package.parent / "csrc") if folder.is_dir())


def sources() -> list[str]:
    """Names of all CUDA sources, without suffix."""
    return sorted(path.stem for path in source_folder().glob("*.cu"))


@cache
def find_nvcc() -> str | None:
    """Path of the CUDA compiler: on PATH, under CUDA_HOME, or from the package nvidia-cuda-nvcc."""
    if on_path := shutil.which("nvcc"):
        return on_path
    homes = [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    homes += [Path("/usr/local/cuda")]
    homes += [home for entry in sys.path for home in Path(entry).glob("nvidia/cu[0-9]*")]
    return next((str(home / "bin/nvcc") for home in homes if (home / "bin/nvcc").is_file()), None)


def cache_folder() -> Path:
    """Folder of compiled sources: SPECKERNELS_CACHE, or a folder in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "speckernels"
    return Path(os.environ.get("SPECKERNELS_CACHE", default))


def build_device(source: str, architectures: Sequence[str], *, strict: bool = False) -> Path:
    """Compile a source for these architectures to a shared library, with the compiler's report next to it (.txt).

    Raises Unavailable with the compiler's message if it fails or, if strict, warns.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise Unavailable(
            "no nvcc found; put it on PATH, set CUDA_HOME, or "
            "`pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl`"
        )
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    return _build(source, [nvcc, "-shared", *NVCC_FLAGS, *(STRICT if strict else ()), *targets])


def build_host(source: str) -> Path:
    """Compile a source to a shared library whose threads are emulated on the CPU."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise Unavailable("no C++ compiler found; install g++ or set CXX")
    return _build(source, [compiler, "-shared", "-x", "c++", *HOST_FLAGS])


def build_all(architectures: Sequence[str] = ARCHITECTURES, *, strict: bool = False) -> dict[str, Path]:
    """Compile every source for these architectures, on all cores."""
    names = sources()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = pool.map(lambda source: build_device(source, architectures, strict=strict), names)
        return dict(zip(names, libraries, strict=True))


def _build(source: str, command: list[str]) -> Path:
    path = source_folder() / f"{source}.cu"
    digest = hashlib.sha256()
    for file in _with_includes(path):
        digest.update(file.read_bytes())
    # By the compiler's version, not its path: a cache can be carried to another machine.
    digest.update("\0".join([*command[1:], _version(command[0])]).encode())
    library = cache_folder() / f"{source}-{digest.hexdigest()[:20]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            temporary = library.with_suffix(f".{os.getpid()}.so")
            run = subprocess.run([*command, "-o", temporary, path], capture_output=True, text=True)
            if run.returncode:
                raise Unavailable(f"{source}.cu does not compile: {' '.join(command)}\n{run.stdout}{run.stderr}")
            library.with_suffix(".txt").write_text(run.stdout + run.stderr)
            temporary.replace(library)
    return library


def _with_includes(path: Path, seen: set[Path] | None = None) -> list[Path]:
    """Paths of a source and of the project's headers that it includes, directly or indirectly."""
    seen = set() if seen is None else seen
    if path in seen:
        return []
    seen.add(path)
    files = [path]
    for name in _INCLUDE.findall(path.read_text()):
        files += _with_includes((path.parent / name).resolve(), seen)
    return files


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


def architecture(major: int, minor: int) -> str:
    """Name of the architecture to compile for a GPU of this compute capability."""
    return f"{major}{minor}" + ("a" if major == 9 else "")


def load(source: str, device_index: int | None) -> ctypes.CDLL:
    """Load the library of a source for a GPU, or for the host if device_index is None.

    Raises Unavailable if it cannot be built; later calls do not try again.
    """
    library = _loaded(source, device_index)
    if isinstance(library, ctypes.CDLL):
        return library
    raise Unavailable(library)


@cache
def _loaded(source: str, device_index: int | None) -> ctypes.CDLL | str:
    try:
        if device_index is None:
            return ctypes.CDLL(str(build_host(source)))
        import torch

        capability = torch.cuda.get_device_capability(device_index)
        return ctypes.CDLL(str(build_device(source, (architecture(*capability),))))
    except (Unavailable, OSError) as error:
        return str(error)
