# Two commands do everything: `make demo` and `make test`. Both build .venv on their first run.

VENV := .venv
BIN := $(VENV)/bin
# Without a GPU torch comes from PyTorch's own index of CPU builds, or, where that does not answer, under the
# pinned release below from whatever index pip is set up for.
export TORCH_RELEASE ?= torch==2.13.0
export TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: help demo test test-parity test-vllm test-vllm-smoke lint format types results notebook clean

help:
	@echo "make demo      the embedded verifier with every drafter: acceptance, speed, identity with plain decoding"
	@echo "make test      the test suite"
	@echo "make test-parity  the same values as the public speculators library, which gets a venv of its own"
	@echo "make test-vllm    drafters in real vLLM on the CPU, in a venv of its own;  make test-vllm-smoke  one case a method"
	@echo "make lint      ruff, check and format;  make format  applies it"
	@echo "make types     mypy --strict on an installed copy"
	@echo "make results   rebuild docs/results.md from the committed raw results"
	@echo "make notebook  execute the notebooks into build/notebooks"
	@echo "make clean     remove .venv, build and caches"

demo: $(VENV)/.installed-demo
	@$(BIN)/speculators demo

test: $(VENV)/.installed-dev
	@$(BIN)/pytest -n 2 --dist loadfile

test-parity: $(VENV)/.installed-dev .venv-parity/.installed
	@PEER_PYTHON=$(CURDIR)/.venv-parity/bin/python $(BIN)/pytest tests/parity

# The folder on the path is a Triton backend that interprets kernels, for vLLM's V2 runner.
VLLM_PYTEST := PYTHONPATH=$(CURDIR)/tests/vllm/triton_cpu .venv-vllm/bin/python -m pytest -q

test-vllm: .venv-vllm/.installed
	@$(VLLM_PYTEST) tests/vllm

test-vllm-smoke: .venv-vllm/.installed
	@$(VLLM_PYTEST) tests/vllm/test_methods.py

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(VENV)/.installed-dev
	@tools/typecheck.sh $(BIN)/python

results: $(VENV)/.installed-dev
	@$(BIN)/python -m speculators.evaluation.results

notebook: $(VENV)/.installed-dev
	@mkdir -p build/notebooks
	@for notebook in notebooks/*.ipynb; do \
		[ -e "$$notebook" ] || continue; \
		echo "executing $$notebook"; \
		$(BIN)/jupyter execute --output="$(CURDIR)/build/$$notebook" "$$notebook" || exit 1; \
	done

clean:
	rm -rf $(VENV) .venv-parity .venv-vllm build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A stamp a set of extras, so that an install happens once and again only when pyproject.toml changes.
$(VENV)/.installed-demo: pyproject.toml tools/install.sh
	@tools/install.sh $(VENV) demo
	@touch $@

$(VENV)/.installed-dev: pyproject.toml tools/install.sh
	@tools/install.sh $(VENV) demo,dev,notebooks
	@touch $@ $(VENV)/.installed-demo

.venv-parity/.installed: tools/install_peer.sh tools/install.sh
	@tools/install_peer.sh .venv-parity
	@touch $@

.venv-vllm/.installed: pyproject.toml tools/install.sh tools/install_vllm.sh
	@tools/install_vllm.sh .venv-vllm
	@touch $@
