# make demo and make test do everything they need: environment, dependencies, build. Run again, they are quick.
#
#   PYTHON=python3.12        the Python that makes the virtual environment
#   VENV=.venv               its folder; VENV=none uses $(PYTHON) and the torch in it
#   TORCH="torch>=2.11"      what pip installs as torch, options of pip included
#   ARGS="..."               options for the demo or for pytest
#   MAX_JOBS, TPK_WITH_CUDA, TPK_WITH_SM90A, TPK_WITH_NVSHMEM, TPK_CUDA_ARCHS, CUDA_HOME, CXX: see setup.py

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch>=2.11
ARGS   ?=

ifeq ($(VENV),none)
  PY  := $(PYTHON)
  ENV := build/env
else
  PY  := $(VENV)/bin/python
  ENV := $(VENV)
endif

BUILT := tpkernels/_build_info.json
# The folders are in it too: a deleted source changes nothing else.
CODE  := $(shell find csrc 2>/dev/null) setup.py .ci/build_decisions.py tpkernels/_version.py
CLANG_FORMAT = $(PY) -c 'from clang_format import clang_format as f; f()'
CXX_FILES = $(shell find csrc cmake tests bench -type f \( -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \))

.DEFAULT_GOAL := help
.PHONY: help demo test build rebuild lint format clean env FORCE

help:  ## this list
	@echo "tpkernels:"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile
	@sed -n 's/^#   \(.*\)/    \1/p' Makefile

demo: $(BUILT)  ## train a tensor-parallel language model on this machine and check it against the unsharded one
	$(PY) -m tpkernels.demo $(ARGS)

test: $(BUILT)  ## every test this machine can run (tests for GPUs are skipped with a reason where there are none)
	$(PY) -m pytest $(ARGS)

build: $(BUILT)  ## environment and extensions

rebuild:  ## build although no source changed (after setting TPK_WITH_CUDA or TPK_CUDA_ARCHS, say)
	@rm -f $(BUILT)
	@$(MAKE) --no-print-directory build

env: $(ENV)/.tpk-test-demo-bench  ## only the environment

# Written only when something was installed, so that the build below follows changes and nothing else.
$(ENV)/.tpk-test-demo-bench: FORCE
	@command -v "$(PYTHON)" >/dev/null || { echo "tpkernels: there is no $(PYTHON): apt-get install python3, or make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) .ci/setup_env.py "$(VENV)" "$(TORCH)" test,demo,bench

$(ENV)/.tpk-lint: $(ENV)/.tpk-test-demo-bench FORCE
	@$(PYTHON) .ci/setup_env.py "$(VENV)" "$(TORCH)" lint

$(BUILT): $(ENV)/.tpk-test-demo-bench $(CODE)
	@$(PY) .ci/build.py

lint: $(ENV)/.tpk-lint  ## ruff, mypy, clang-format
	@status=0; \
	$(PY) -m ruff check --output-format concise || status=1; \
	$(PY) -m ruff format --check || status=1; \
	$(PY) -m mypy || status=1; \
	$(if $(CXX_FILES),$(CLANG_FORMAT) --dry-run -Werror $(CXX_FILES) || status=1;) \
	exit $$status

format: $(ENV)/.tpk-lint  ## rewrite the files as lint wants them
	$(PY) -m ruff check --fix --exit-zero
	$(PY) -m ruff format
	$(if $(CXX_FILES),$(CLANG_FORMAT) -i $(CXX_FILES))

clean:  ## remove what was built (not the virtual environment)
	rm -rf build dist *.egg-info tpkernels/*.so $(BUILT)
