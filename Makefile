# `make demo` and `make test` need nothing but Python 3.11 or newer and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := $(HOME)/.cache/rollout/smollm2-135m-instruct
TRAINERS := $(HOME)/.cache/rollout/trainers
DEMO := runs/quickstart
# one process a core, each with one thread
PARALLEL := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal

.PHONY: help demo check test test-trainers lint fmt types unit bench model images install clean

help:
	@echo "make demo    collect 16 rollouts with a real model in this process, replay them, judge"
	@echo "make check   lint, types and unit tests with the tiny model (under 90 s)"
	@echo "make test    everything, with a real model and a real SGLang server"
	@echo "make test-trainers   exports read by the real TRL, verl and SkyRL (installs them, 6 GB)"
	@echo "make lint | fmt | types | unit | bench | model | images | clean"

# torch first and by version: the CPU build where the index has one, and the one that is tested
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[torch,dev,examples]'
	touch $@

install: $(VENV)/.ready

model: $(MODEL)/model.safetensors

$(MODEL)/model.safetensors: | $(VENV)/.ready
	$(BIN)/python examples/smollm2.py

demo: export HF_HUB_OFFLINE = 1
demo: install model
	rm -rf $(DEMO)
	$(BIN)/rollout collect configs/quickstart.yaml --out $(DEMO)
	$(BIN)/rollout replay $(DEMO) --model $(MODEL) --dtype float32

check: lint types unit

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check

fmt: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: install
	$(BIN)/mypy

unit: install
	$(PARALLEL) -q -m "not smollm2 and not sglang and not gpu and not stress and not browser and not trainers"

# what shares a server or measures time and memory runs alone
test: install model
	$(PARALLEL) -m "not sglang and not gpu and not stress and not browser and not trainers"
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m "(sglang or stress or browser) and not gpu"

# each in a venv of its own that is kept; warnings are those of other projects
test-trainers: install test-trainer-trl-1.16.0 test-trainer-verl-0.9.1 test-trainer-skyrl-0.4.0

test-trainer-%: install
	tests/trainers/install.sh $(firstword $(subst -, ,$*)) $(TRAINERS)/$* $(BIN)/python
	PYTHONPATH=. HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(TRAINERS)/$*/bin/python -m pytest \
		-m trainers -W default -p no:cacheprovider tests/trainers/test_$(firstword $(subst -, ,$*)).py

bench: install model
	HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/embedded.py --model $(MODEL)

# pictures in docs/images: of the page, how causes look, and the curves of docs/why.md
images: install model
	HF_HUB_OFFLINE=1 $(BIN)/python tests/draw_images.py $(MODEL)
	HF_HUB_OFFLINE=1 $(BIN)/python tests/draw_causes.py $(MODEL)
	$(BIN)/python benchmarks/grpo_curves.py docs/data/grpo docs/images/grpo.svg

clean:
	rm -rf $(VENV) runs .mypy_cache .pytest_cache .ruff_cache
