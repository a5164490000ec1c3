"""Prepares the Python environment that `make` uses; does nothing, quickly, when it is there already.

    python3 .ci/setup_env.py VENV TORCH EXTRAS    e.g. .venv "torch>=2.11" test,demo

VENV is the folder of a virtual environment, or "none" for the Python that runs this file, whose torch is then kept.
TORCH is what pip shall install, options included ("torch --index-url URL"). EXTRAS are extras of pyproject.toml.
Runs before anything is installed, also under an old Python, hence no newer syntax than that of Python 3.7.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 11)
BUILD_TOOLS = ["setuptools>=77.0.3", "wheel", "ninja", "pybind11>=2.13"]
CUTLASS = "nvidia-cutlass==4.2.0.0"  # headers of the Hopper kernels; as in build_decisions.py
OPTIONAL = {"matplotlib", "rich", "pytest-timeout"}  # everything runs without them, with less comfort
START = time.time()


def say(text):
    """Prints one line of progress with the seconds since the start."""
    print(f"[{time.time() - START:4.0f} s] {text}", flush=True)


def fail(sentence):
    """Ends the program with a sentence that says what is wrong and how to mend it."""
    raise SystemExit("tpkernels: " + sentence)


def check_python(version, executable):
    """A sentence if this Python is too old, else ""."""
    if tuple(version[:2]) >= MIN_PYTHON:
        return ""
    return f"{executable} is Python {version[0]}.{version[1]}, and 3.10 or newer is needed: make PYTHON=python3.11"


def check_venv(has_venv, has_ensurepip, version):
    """A sentence if this Python cannot make virtual environments, else ""."""
    if has_venv and has_ensurepip:
        return ""
    return (
        "this Python cannot make a virtual environment (no {} module): apt-get install python{}.{}-venv, "
        "or use a Python with torch as it is: make VENV=none".format(
            "ensurepip" if has_venv else "venv", version[0], version[1]
        )
    )


def check_torch(version, executable):
    """A sentence if the torch of VENV=none (None: there is none) does not serve, else ""."""
    if version is None:
        return (
            f"VENV=none, but {executable} has no torch: make without VENV=none, or pip install 'torch>=2.11'"
        )
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers >= MIN_TORCH:
        return ""
    return f"VENV=none, but {executable} has torch {version}, and 2.11 or newer is needed: make without VENV=none"


def string_lists(text, table):
    """The lists of strings in one table of a TOML file, by key: Python 3.10 has no parser, nor need it have pip."""
    body = re.search(r"^\[" + re.escape(table) + r"\][^\n]*\n(.*?)(?=^\[|\Z)", text, re.M | re.S)
    found = (
        re.findall(r'^([\w-]+)\s*=\s*\[((?:"[^"]*"|#[^\n]*|[^"\]#])*)\]', body.group(1), re.M) if body else []
    )
    return {key: [s for s in re.findall(r'#[^\n]*|"([^"]*)"', items) if s] for key, items in found}


def requirements(text, extras):
    """The requirement strings of `extras` in the text of a pyproject.toml."""
    optional = string_lists(text, "project.optional-dependencies")
    wanted = [r for r in string_lists(text, "project")["dependencies"] if not r.startswith("torch")]
    for extra in extras:
        if extra not in optional:
            fail("pyproject.toml has no extra '{}': use {}".format(extra, ", ".join(optional)))
        wanted += optional[extra]
    return sorted(set(wanted) | set(BUILD_TOOLS))


def name_of(requirement):
    """The distribution name in a requirement: "pytest>=8" -> "pytest"."""
    return re.match(r"[A-Za-z0-9._-]+", requirement).group(0)


def is_installed(requirement):
    """Whether this Python has a distribution that satisfies "name" or "name>=version"; asks no network."""
    from importlib import metadata

    try:
        have = metadata.version(name_of(requirement))
    except metadata.PackageNotFoundError:
        return False
    least = requirement.partition(">=")[2]
    return [int(n) for n in re.findall(r"\d+", have)][:3] >= [int(n) for n in re.findall(r"\d+", least)][:3]


def torch_version(python):
    """The version of torch that `python` imports, or None."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    result = subprocess.run([python, "-c", code], stdout=-1, stderr=-3, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


def torch_cuda(python):
    """The CUDA version that the torch of `python` was built with, or "" (a CPU-only torch, or none)."""
    code = "import torch; print(torch.version.cuda or '')"
    result = subprocess.run([python, "-c", code], stdout=-1, stderr=-3, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def pip_install(python, arguments, needed=True):
    """Runs pip; on failure ends with a sentence if `needed`, else returns False."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    if subprocess.run(command).returncode == 0:
        return True
    if needed:
        fail(
            "pip could not install the packages above; check the network, then run: "
            + " ".join(map(shlex.quote, command))
        )
    return False


def add_headers(python, own):
    """Installs the headers that the Hopper kernels are compiled with, where torch has CUDA; the build can do without.

    Without their dependencies: those are of the Python code beside the headers, which nothing here runs. A Python
    that is not `own` keeps a newer version.
    """
    if not torch_cuda(python) or (not own and is_installed(CUTLASS.replace("==", ">="))):
        return
    say("installing " + CUTLASS)
    options = ["--quiet", "--no-deps", "--retries", "1", "--timeout", "30"]
    if not pip_install(python, [*options, CUTLASS], needed=False):
        say("going on without " + name_of(CUTLASS) + ": the Hopper kernels are not built")


def main():
    """Makes the environment, installs what is missing, and writes the stamp if anything changed."""
    venv, torch, extras = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
    sentence = check_python(sys.version_info, sys.executable)
    if sentence:
        fail(sentence)
    own = venv != "none"
    folder = (ROOT / venv) if own else ROOT / "build" / "env"
    stamp = folder / (".tpk-" + "-".join(extras))
    wanted = requirements((ROOT / "pyproject.toml").read_text(), extras)
    state = json.dumps(
        {
            "python": sys.version,
            "executable": sys.executable,
            "torch": torch if own else "",
            "want": [*wanted, CUTLASS],
        }
    )
    if stamp.exists() and stamp.read_text() == state:
        return

    python = str(folder / "bin" / "python") if own else sys.executable
    if own and not os.path.exists(python):
        has = [importlib.util.find_spec(m) is not None for m in ("venv", "ensurepip")]
        sentence = check_venv(has[0], has[1], sys.version_info)
        if sentence:
            fail(sentence)
        say(f"making the virtual environment {venv} with Python {sys.version.split()[0]}")
        if subprocess.run([sys.executable, "-m", "venv", str(folder)]).returncode != 0:
            fail(
                f"the virtual environment could not be made: remove {folder} and check the disk with df -h ."
            )
    if own:
        say(f"installing {torch} (the first time this downloads up to 3 GB)")
        pip_install(python, shlex.split(torch))
        say("installing " + ", ".join(map(name_of, wanted)))
        pip_install(python, ["--quiet", *wanted])
    else:
        sentence = check_torch(torch_version(python), python)
        if sentence:
            fail(sentence)
        for requirement in wanted:  # one at a time: what cannot be had must not keep the rest away
            if is_installed(requirement):
                continue
            say(f"installing {requirement} for {python}")
            optional = name_of(requirement) in OPTIONAL
            if not pip_install(python, ["--quiet", requirement], needed=not optional):
                say(f"going on without {name_of(requirement)}")
    if extras != ["lint"]:
        add_headers(python, own)
    folder.mkdir(parents=True, exist_ok=True)
    stamp.write_text(state)
    say(f"the environment is ready: {python} with torch {torch_version(python)}")


if __name__ == "__main__":
    main()
